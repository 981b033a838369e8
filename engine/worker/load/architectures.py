"""Decides from a model's config alone whether its architecture is served.

Rule 1: an architecture is in `SERVED` only if the parity suite tests it. Rule 2: a model is refused
with a `Refusal` of one sentence that names the obstacle. Nothing that could change the output is
ignored silently.

A config does not show the keywords that a layer passes to its attention; `engine.worker.load.probe`
checks them on the loaded model. This file imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.worker.load.recurrent import KEYLESS_TYPES, RECURRENT
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Architecture:
    """A served model class of transformers: its name, its module, a name for people, and its config
    class."""

    name: str
    module: str
    label: str
    config: str


SERVED: dict[str, Architecture] = {
    entry.name: entry
    for entry in (
        Architecture("LlamaForCausalLM", "llama", "Llama", "LlamaConfig"),
        Architecture("Qwen2ForCausalLM", "qwen2", "Qwen2", "Qwen2Config"),
        Architecture("Qwen3ForCausalLM", "qwen3", "Qwen3", "Qwen3Config"),
        Architecture("Qwen3MoeForCausalLM", "qwen3_moe", "Qwen3-MoE", "Qwen3MoeConfig"),
        Architecture("MistralForCausalLM", "mistral", "Mistral", "MistralConfig"),
        Architecture("Phi3ForCausalLM", "phi3", "Phi-3", "Phi3Config"),
        Architecture("GemmaForCausalLM", "gemma", "Gemma", "GemmaConfig"),
        Architecture("Gemma2ForCausalLM", "gemma2", "Gemma 2", "Gemma2Config"),
        Architecture("Gemma3ForCausalLM", "gemma3", "Gemma 3 (text)", "Gemma3TextConfig"),
        Architecture("Olmo2ForCausalLM", "olmo2", "OLMo 2", "Olmo2Config"),
        Architecture("GPT2LMHeadModel", "gpt2", "GPT-2", "GPT2Config"),
        Architecture("OPTForCausalLM", "opt", "OPT", "OPTConfig"),
        Architecture("GraniteForCausalLM", "granite", "Granite", "GraniteConfig"),
        Architecture("Starcoder2ForCausalLM", "starcoder2", "StarCoder2", "Starcoder2Config"),
        Architecture("SmolLM3ForCausalLM", "smollm3", "SmolLM3", "SmolLM3Config"),
        Architecture("MinistralForCausalLM", "ministral", "Ministral", "MinistralConfig"),
        Architecture("Ministral3ForCausalLM", "ministral3", "Ministral 3", "Ministral3Config"),
        Architecture("MixtralForCausalLM", "mixtral", "Mixtral", "MixtralConfig"),
        Architecture("Qwen2MoeForCausalLM", "qwen2_moe", "Qwen2-MoE", "Qwen2MoeConfig"),
        Architecture("OlmoForCausalLM", "olmo", "OLMo", "OlmoConfig"),
        Architecture("Olmo3ForCausalLM", "olmo3", "OLMo 3", "Olmo3Config"),
        Architecture("CohereForCausalLM", "cohere", "Cohere", "CohereConfig"),
        Architecture("Cohere2ForCausalLM", "cohere2", "Cohere 2", "Cohere2Config"),
        Architecture("GlmForCausalLM", "glm", "GLM", "GlmConfig"),
        Architecture("Glm4ForCausalLM", "glm4", "GLM-4", "Glm4Config"),
        Architecture("PhiForCausalLM", "phi", "Phi", "PhiConfig"),
        Architecture("GPTNeoXForCausalLM", "gpt_neox", "GPT-NeoX", "GPTNeoXConfig"),
        Architecture("Exaone4ForCausalLM", "exaone4", "EXAONE 4", "Exaone4Config"),
        Architecture(
            "HunYuanDenseV1ForCausalLM",
            "hunyuan_v1_dense",
            "Hunyuan (dense)",
            "HunYuanDenseV1Config",
        ),
        Architecture("Ernie4_5ForCausalLM", "ernie4_5", "ERNIE 4.5 (dense)", "Ernie4_5Config"),
        Architecture("SeedOssForCausalLM", "seed_oss", "Seed-OSS", "SeedOssConfig"),
        Architecture("GptOssForCausalLM", "gpt_oss", "GPT-OSS", "GptOssConfig"),
        Architecture("Lfm2ForCausalLM", "lfm2", "LFM2", "Lfm2Config"),
        Architecture("Qwen3NextForCausalLM", "qwen3_next", "Qwen3-Next", "Qwen3NextConfig"),
        Architecture("Qwen3_5ForCausalLM", "qwen3_5", "Qwen3.5 (text)", "Qwen3_5TextConfig"),
        Architecture(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            "Granite 4 (hybrid)",
            "GraniteMoeHybridConfig",
        ),
        Architecture("BambaForCausalLM", "bamba", "Bamba", "BambaConfig"),
        Architecture("FalconH1ForCausalLM", "falcon_h1", "Falcon-H1", "FalconH1Config"),
    )
}

# Parts of the names of model types with recurrent layers. Only those in `RECURRENT` are served.
RECURRENT_TYPES = (
    "mamba", "rwkv", "recurrent_gemma", "jamba", "bamba", "zamba", "xlstm", "falcon_h1", "lfm2",
    "qwen3_next", "granitemoehybrid", "nemotron_h", "plamo2", "minimax", "kimi_linear",
)  # fmt: skip
RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "hybrid")
# Model types whose modules in transformers cannot be given our attention (D11), and why.
UNPAGED_TYPES = {
    "bloom": "computes its attention without transformers' attention interface",
    "falcon": "computes its attention without transformers' attention interface",
    "nemotron": "does not pass keywords on to its attention",
    "stablelm": "does not pass keywords on to its attention",
}
INSTEAD = "docs/features.md lists the models that are served"
# The quantised formats that packed_checkpoint.py and mxfp4_checkpoint.py read.
QUANTISED_METHODS = ("gptq", "awq", "compressed-tensors", "mxfp4")
MULTIMODAL_KEYS = ("vision_config", "audio_config", "text_config", "image_token_id")
# Rotary embeddings whose frequencies depend on the config alone. The type "dynamic" computes them
# from the longest position of the batch, so that one request would change another's output.
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
# Rotary types with which max_position_embeddings may be the length before stretching, and model
# types whose configs name the length after it. Source: vLLM's _get_and_verify_max_len.
UNSTRETCHED = frozenset({"linear", "yarn"})
STRETCHED_TYPES = frozenset({"gemma3", "gemma3_text"})
LONGROPE = "longrope"  # A rotary type, whose models are served up to their original length.
OLD_LONGROPE = "su"  # Longrope's name in the first configs of Phi-3; transformers renames it.


def find(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a parsed config.json.

    Raises:
        Refusal: The architecture is not served.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    model_type = str(config.get("model_type", ""))
    _refuse_kinds(config, name or model_type or "unnamed", model_type)
    if not name:
        raise Refusal("its config.json names no architecture (the field 'architectures')")
    if name not in SERVED:
        raise Refusal(
            f"the architecture {name} is not served; docs/features.md lists those that are"
        )
    _refuse_fields(config, name)
    return SERVED[name]


def _refuse_kinds(config: Mapping[str, Any], name: str, model_type: str) -> None:
    """Refuse whole families of models, each with its own reason."""
    if config.get("is_encoder_decoder"):
        raise Refusal(
            f"{name} is an encoder-decoder model, and only decoder-only ones are served; {INSTEAD}"
        )
    if any(config.get(key) is not None for key in MULTIMODAL_KEYS):
        raise Refusal(f"{name} is a multimodal model of a kind that is not served; {INSTEAD}")
    layer_types = config.get("layer_types") or config.get("layers_block_type") or ()
    layers = [kind for kind in layer_types if any(w in str(kind) for w in RECURRENT_LAYERS)]
    if name not in RECURRENT and (layers or any(w in model_type for w in RECURRENT_TYPES)):
        what = f" ({layers[0]})" if layers else ""
        raise Refusal(f"{name} has recurrent layers{what} of a kind that is not served; {INSTEAD}")
    if model_type in UNPAGED_TYPES:
        raise Refusal(
            f"{name} cannot have a paged cache, because its module in transformers "
            f"{UNPAGED_TYPES[model_type]}; {INSTEAD}"
        )


def _refuse_fields(config: Mapping[str, Any], name: str) -> None:
    """Refuse config fields that would change a served architecture's computation."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if quantization is not None and method not in QUANTISED_METHODS:
        raise Refusal(
            f"the checkpoint is quantised ({method or 'unknown method'}); it needs plain float "
            f"weights, or those of {', '.join(QUANTISED_METHODS)}"
        )
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise Refusal(
            f"this {name} attends in both directions, and only causal ones are served; {INSTEAD}"
        )
    if config.get("add_cross_attention"):
        raise Refusal(
            f"this {name} has cross-attention, and only decoder-only ones are served; {INSTEAD}"
        )
    for field in ("rope_parameters", "rope_scaling"):
        for rope in _rotary_settings(config.get(field)):
            kind = str(rope.get("rope_type") or rope.get("type") or "default")
            if kind != OLD_LONGROPE and not _has_fixed_stretch(rope, config.get("model_type")):
                _refuse_rotary(kind)


def _has_fixed_stretch(rope: Mapping[str, Any], model_type: Any) -> bool:
    """Return whether a rotary embedding is that of Hunyuan: its type is "dynamic", but its
    ``alpha`` fixes its frequencies."""
    return model_type == "hunyuan_v1_dense" and bool(rope.get("alpha"))


def _refuse_rotary(kind: str) -> None:
    if kind != LONGROPE and kind not in STATIC_ROPE_TYPES:
        raise Refusal(
            f"its rotary embedding is of type {kind!r}, which is untested or whose frequencies "
            f"depend on the other sequences of the batch; {INSTEAD}"
        )


def context_limit(config: Any, requested: int | None) -> int:
    """Return the most tokens that a sequence may have, prompt and output together.

    ``config`` is transformers' config object. The limit is ``requested``, or else the model's own.

    Raises:
        Refusal: The rotary embedding is not served, or ``requested`` exceeds the model's limit.
    """
    limit, why = _own_limit(config)
    if requested is None:
        return limit
    if requested > limit:
        raise Refusal(
            f"max_model_len {requested} is more than {why}, {limit}; give --max-model-len {limit} "
            "or less, or leave it out"
        )
    return requested


def context_note(config: Any, requested: int | None, served: int) -> str:
    """Return why a model is served with ``served`` tokens and not with all of its positions; empty
    if it is served with all, or if the operator ``requested`` a length."""
    limit, _ = _own_limit(config)
    positions = max(limit, int(config.max_position_embeddings))
    if requested is not None or served == positions:
        return ""
    if served < limit:
        return f"of {limit}, because its KV pool holds no more (--kv-cache-memory)"
    return (
        f"of {positions}, because beyond {limit} its longrope embedding would change every "
        "sequence of a batch"
    )


def _own_limit(config: Any) -> tuple[int, str]:
    """Return the most tokens that the model itself allows, and the reason in words: the config's
    positions or, if it is more, the length to which its rotary embedding is stretched. For a
    longrope model it is the original length, because a longer sequence would change the frequencies
    of all sequences in the batch.

    Raises:
        Refusal: The rotary embedding is not served.
    """
    positions = limit = int(config.max_position_embeddings)
    why, model_type = "the model's max_position_embeddings", getattr(config, "model_type", None)
    for rope in _rotary_settings(getattr(config, "rope_parameters", None)):
        kind = str(rope.get("rope_type", "default"))
        if not _has_fixed_stretch(rope, model_type):
            _refuse_rotary(kind)
        original = int(rope.get("original_max_position_embeddings") or positions)
        if kind == LONGROPE and original < limit:
            limit, why = original, "the original length of its longrope embedding"
        if kind not in UNSTRETCHED or model_type in STRETCHED_TYPES:
            continue
        length = int((original if kind == "yarn" else positions) * (rope.get("factor") or 1))
        if length > limit:
            limit, why = length, f"the length to which its {kind} embedding is stretched"
    return limit, why


def _rotary_settings(rope: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the settings in ``rope_parameters``: none, one, or (Gemma 3) one per layer type."""
    if not isinstance(rope, dict):
        return
    if {"rope_type", "type", "rope_theta"} & rope.keys():
        yield rope
        return
    for value in rope.values():
        if isinstance(value, dict):
            yield value


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one layer's cache entry for one token: ``num_kv_heads`` keys and as many values,
    each of ``head_dim`` numbers."""

    num_kv_heads: int
    head_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Keys and values of one token together, counted in numbers."""
        return 2 * self.num_kv_heads * self.head_dim


NO_KEYS = LayerShape(0, 0)  # the shape of a recurrent layer, which keeps no keys and values


def layer_shapes(config: Any) -> tuple[LayerShape, ...]:
    """Return the shape of each layer by the config. `probe` compares the shapes with the
    model's."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    count, own = int(config.num_hidden_layers), LayerShape(kv_heads, head_dim)
    kinds = getattr(config, "layer_types", None) or ("full_attention",) * count
    return tuple(NO_KEYS if kind in KEYLESS_TYPES else own for kind in kinds[:count])
