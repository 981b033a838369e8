"""Reads the config of a listed architecture as transformers does, without importing transformers.

Rule: only usual configs are read here. A config with a field or a value that `LISTED` does not
name, or for which transformers raises an error or logs a warning, is left to transformers. But
YaRN's factor may be any: transformers warns if it is not the ratio of both context lengths.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from engine.worker.skeleton.families import LISTED, REQUIRED, WITHOUT_EFFECT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.worker.skeleton.families import Family

# The fields of a rotary embedding by its type: required fields, and optional fields.
ROPE_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": (
        {"short_factor", "long_factor", "original_max_position_embeddings"},
        {"factor", "attention_factor"},
    ),
}
ROPE_ALWAYS = {"rope_type", "rope_theta", "type"}
SIZES = "its sizes do not fit each other"
ROTARY = "its rotary settings are unusual"
GLOBAL_THETA = 1_000_000.0  # Gemma 3's rotary base in layers without a window


class Unusual(Exception):
    """Transformers must read the config. The message is the reason, as a part of a sentence."""


class SkeletonConfig(SimpleNamespace):
    """The config of a listed architecture. It has those fields of transformers' config object that
    decide the model's form, with the same names and values."""


def read_skeleton(raw: Mapping[str, Any], name: str) -> SkeletonConfig:
    """Return the config of the architecture ``name`` from a parsed config.json.

    Raises:
        Unusual: Transformers must read it.
    """
    family = LISTED.get(name)
    if family is None:
        raise Unusual("its architecture has no compiled form")
    _require(
        raw.get("model_type") == family.model_type, f"its model_type is not {family.model_type}"
    )
    fields = _usual_fields(raw, family)
    _complete(fields, family)
    try:
        fields["rope_parameters"] = _rope_parameters(fields, family)
    except Unusual:
        raise Unusual(ROTARY) from None
    return SkeletonConfig(architecture=name, **fields)


def _require(is_usual: bool, why: str = SIZES) -> None:
    if not is_usual:
        raise Unusual(why)


def _usual_fields(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    for name, value in raw.items():
        field = family.fields.get(name)
        is_usual = field.is_usual if field else WITHOUT_EFFECT.get(name)
        _require(is_usual is not None and is_usual(value), f"its field {name} is unusual")
    fields = {name: raw.get(name, field.default) for name, field in family.fields.items()}
    for name, value in fields.items():
        _require(value is not REQUIRED, f"it has no {name}")
    return copy.deepcopy(fields)


def _complete(fields: dict[str, Any], family: Family) -> None:
    """Compute fields that the config leaves to others, such as the width of a head."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    _require(hidden % heads == 0)
    if fields["head_dim"] is None:
        fields["head_dim"] = hidden // heads
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = heads
    _require(heads % fields["num_key_value_heads"] == 0 and fields["head_dim"] % 2 == 0)
    _require(fields["pad_token_id"] is None or 0 <= fields["pad_token_id"] < fields["vocab_size"])
    if family.has_experts:
        fields["num_experts"] = fields.pop("num_local_experts") or fields["num_experts"]
        if family.shares_are_normed:  # Mixtral and GPT-OSS: all their layers have experts
            fields["norm_topk_prob"] = True
            fields["moe_intermediate_size"] = fields["intermediate_size"]
            fields |= {"mlp_only_layers": None, "decoder_sparse_step": 1}
        _require(fields["num_experts_per_tok"] <= fields["num_experts"])
    if not fields.get("use_sliding_window", True):
        fields["sliding_window"] = None
    if family.has_shared_expert:
        del fields["sliding_window"], fields["layer_types"]  # no layer has a window
        fields["mlp_only_layers"] = fields["mlp_only_layers"] or []
    layers = fields["num_hidden_layers"]
    if family.window == "typed":
        if fields["layer_types"] is None:
            fields["layer_types"] = [_layer_type(fields, family, layer) for layer in range(layers)]
        _require(len(fields["layer_types"]) == layers)
    if family.has_convolutions:
        _complete_hybrid(fields)
    if family.unrotated == "full":
        fields.pop("sliding_window_pattern")  # `layer_types`, which follow from it, are used
    if family.unrotated == "listed":
        fields.pop("layer_types")  # no layer has a sliding window
        each = fields["no_rope_layer_interval"]
        if fields["no_rope_layers"] is None:
            fields["no_rope_layers"] = [int((layer + 1) % each != 0) for layer in range(layers)]
        _require(len(fields["no_rope_layers"]) == layers)


def _complete_hybrid(fields: dict[str, Any]) -> None:
    """Compute LFM2's layer types, and give fields of its first configs their current names."""
    layers, attending = fields["num_hidden_layers"], fields.pop("full_attn_idxs")
    if fields["layer_types"] is None:
        indices = range(layers) if attending is None else attending
        kinds = ("conv", "full_attention")
        fields["layer_types"] = [kinds[layer in indices] for layer in range(layers)]
    _require(len(fields["layer_types"]) == layers)
    for older, name in (
        ("block_ff_dim", "intermediate_size"),
        ("tie_embedding", "tie_word_embeddings"),
    ):
        value = fields.pop(older)
        if value is not None:
            fields[name] = value


def _layer_type(fields: Mapping[str, Any], family: Family, index: int) -> str:
    """Return the type of a layer in a config that does not list the types. With sliding windows are
    in Qwen the layers from max_window_layers on, in Ministral all layers, and in other families all
    but each second, fourth or sixth layer."""
    if "max_window_layers" in fields:
        slides = fields["sliding_window"] is not None and index >= fields["max_window_layers"]
    elif family.full_each == 0:
        slides = fields["sliding_window"] is not None
    else:
        each = fields.get("sliding_window_pattern", family.full_each)
        _require(type(each) is int and each > 0)
        slides = (index + 1) % each != 0
    return "sliding_attention" if slides else "full_attention"


def _rope_parameters(fields: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the rotary embedding's settings; of Gemma 3 and OLMo 3, those by layer type."""
    older, theta = fields.pop("rope_scaling"), fields.pop("rope_theta")
    model_type = family.model_type
    if model_type == "gemma3_text":
        local = fields.pop("rope_local_base_freq")
        bases = (GLOBAL_THETA if theta is None else theta, family.theta if local is None else local)
        return _rope_by_type(fields, older, bases, ("default", "linear"))
    if model_type == "olmo3":  # rope_theta is for the layers without a window only
        bases = (family.theta if theta is None else theta, family.theta)
        return _rope_by_type(fields, older, bases, ("default", "linear", "yarn"))
    settings = older or fields["rope_parameters"] or {}
    _require(not settings.keys() & {"full_attention", "sliding_attention"})
    _require(bool(settings) or model_type != "gpt_oss")
    settings.setdefault("rope_theta", family.theta if theta is None else theta)
    own = set()
    if model_type == "phi3":
        settings.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
        own = {"partial_rotary_factor"}
    if family.scales_queries:
        _require(settings.get("rope_type", settings.get("type")) == "yarn")
        _require("llama_4_scaling_beta" in settings)
        own = {"llama_4_scaling_beta", "max_position_embeddings"}
    _standardise(settings, fields, own)
    if model_type == "phi3":
        _require(settings["rope_type"] in ("default", "longrope"))
    return settings


def _rope_by_type(
    fields: dict[str, Any],
    older: dict[str, Any] | None,
    bases: tuple[float, float],
    usual: tuple[str, ...],
) -> dict[str, Any]:
    """Return the rotary settings by layer type. ``bases`` are the default bases of layers with full
    and with sliding attention, and ``usual`` the supported types of rotary embeddings."""
    settings = fields["rope_parameters"] or {
        "sliding_attention": {"rope_type": "default"},
        "full_attention": {"rope_type": "default"},
    }
    _require(settings.keys() == {"full_attention", "sliding_attention"})
    _require(all(isinstance(setting, dict) for setting in settings.values()))
    settings["full_attention"].update(older or {})
    for kind, default in zip(("full_attention", "sliding_attention"), bases, strict=True):
        settings[kind].setdefault("rope_theta", default)
        _standardise(settings[kind], fields, set())
        _require(settings[kind]["rope_type"] in usual)
    return settings


def _standardise(settings: dict[str, Any], fields: Mapping[str, Any], own: set[str]) -> None:
    """Complete the settings of one rotary embedding, and check that they are usual. ``own`` are
    further fields that the architecture allows."""
    kind = settings.setdefault("rope_type", settings.get("type", "default"))
    _require(isinstance(kind, str) and kind in ROPE_FIELDS)
    if kind in ("llama3", "yarn", "longrope"):
        whole = fields["max_position_embeddings"]
        if "original_max_position_embeddings" in fields:
            settings["original_max_position_embeddings"] = fields[
                "original_max_position_embeddings"
            ]
        else:
            settings.setdefault("original_max_position_embeddings", whole)
    needed, possible = ROPE_FIELDS[kind]
    _require(needed <= settings.keys() <= needed | possible | own | ROPE_ALWAYS)
    for name, value in settings.items():
        _require(_is_usual_setting(name, value))
    if kind == "llama3":
        _require(settings["high_freq_factor"] > settings["low_freq_factor"])
        _require(
            settings["original_max_position_embeddings"] < fields["max_position_embeddings"], ROTARY
        )
    if kind == "yarn":
        _require(settings.get("beta_fast", 32) >= settings.get("beta_slow", 1))
    rotated = int(fields["head_dim"] * settings.get("partial_rotary_factor", 1.0))
    _require(rotated > 0 and rotated % 2 == 0)
    if kind == "longrope":
        _require(
            fields["head_dim"] * fields["num_attention_heads"] == fields["hidden_size"], ROTARY
        )
        for name in ("short_factor", "long_factor"):
            _require(len(settings[name]) == rotated // 2)


def _is_usual_setting(name: str, value: Any) -> bool:
    if name in ("rope_type", "type"):
        return isinstance(value, str)
    if name == "truncate":
        return isinstance(value, bool)
    if name in ("short_factor", "long_factor"):
        return isinstance(value, list) and all(_is_positive(item) for item in value)
    if name == "original_max_position_embeddings":
        return type(value) is int and value > 1
    if name == "rope_theta":
        return _is_positive(value) and value > 1
    if name == "factor":
        return _is_positive(value) and value >= 1
    if name == "partial_rotary_factor":
        return _is_positive(value) and value <= 1
    return _is_positive(value)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")
