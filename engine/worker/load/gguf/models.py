"""Translates a GGUF file's metadata to transformers' config, names of tensors and order of rows.

Rule: an architecture, a tensor or a rotary embedding that is not understood here is a `Refusal`.
Metadata fields that are not listed here are not read.
Source: llama.cpp's convert_hf_to_gguf.py and its gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import pi
from typing import TYPE_CHECKING, Any

import torch

from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

LAYER = re.compile(r"blk\.(\d+)\.([a-z_.]+)\.(weight|bias)")
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
TEXTS = ("rope.scaling.type",)  # The fields of an architecture that are texts, not numbers.
ROPE_FACTORS = "rope_freqs.weight"  # A tensor with the divisors of Llama 3's rotary frequencies.
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
CONVOLUTION = "conv.conv"  # GGUF files store its weight without the middle dimension of 1
SHARED_GATE = "mlp.shared_expert_gate"  # GGUF files may store its weight without the dimension of 1
SINKS = "self_attn.sinks"  # a parameter of the attention itself, which GGUF files call a weight
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
YARN_FIELDS = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_down.bias"}
# Settings of Llama 3's rotary embedding, which GGUF files lack. Source: Llama 3.1's config.json.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """How the files of one of llama.cpp's architectures differ from a checkpoint's."""

    class_name: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)  # Modules' names that IN_LAYER lacks.
    is_interleaved: bool = False  # Rotary pairs are neighbouring rows of queries and keys.
    norm_offset: float = 0.0  # The weights of norms in a GGUF file are larger by this.
    # Fields of the config that say that there are biases, each with a tensor that files then have.
    biases: Mapping[str, str] = field(default_factory=lambda: BIASES)
    outside: Mapping[str, str] = field(default_factory=dict)  # Further tensors outside the layers.
    # Further settings of the rotary embedding, if it is scaled: those that files lack, and by name
    # the metadata fields of the others.
    rope: Mapping[str, Any] = field(default_factory=dict)
    rope_fields: Mapping[str, str] = field(default_factory=dict)
    epsilon: str = "rms_norm_eps"  # The config's field with the norms' epsilon.
    has_convolutions: bool = False  # Layers without key heads have convolutions.
    # Further fields of the config: each one's name, and the name of the metadata field.
    fields: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}

MODELS = {
    "llama": GgufModel("LlamaForCausalLM", "llama", is_interleaved=True),
    "qwen2": GgufModel("Qwen2ForCausalLM", "qwen2", biases={}),
    "qwen3": GgufModel("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": GgufModel(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        fields=_EXPERTS,
        extra={"norm_topk_prob": True},  # as llama.cpp assumes
    ),
    "qwen2moe": GgufModel(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {
            "ffn_gate_inp_shexp": SHARED_GATE,
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        biases={},
        fields=_EXPERTS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        extra={"norm_topk_prob": False},  # as llama.cpp assumes
    ),
    "gpt-oss": GgufModel(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": SINKS,
            "ffn_gate_inp": "mlp.router",
        },
        biases={},  # always
        rope={"truncate": False},
        fields={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "sliding_window": "attention.sliding_window",
        },
    ),
    "smollm3": GgufModel(
        "SmolLM3ForCausalLM", "smollm3", is_interleaved=True, extra={"pad_token_id": None}
    ),
    "mistral3": GgufModel(
        "Ministral3ForCausalLM",
        "ministral3",
        is_interleaved=True,
        rope={"mscale": 1.0},
        rope_fields={
            "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            "llama_4_scaling_beta": "attention.temperature_scale",
        },
        extra={"pad_token_id": None},
    ),
    "phi3": GgufModel(
        "Phi3ForCausalLM",
        "phi3",
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        fields={"sliding_window": "attention.sliding_window"},
        extra={"pad_token_id": None},
    ),
    "gemma": GgufModel("GemmaForCausalLM", "gemma", norm_offset=1.0),
    "gemma2": GgufModel(
        "Gemma2ForCausalLM",
        "gemma2",
        _SANDWICH,
        norm_offset=1.0,
        fields={
            "sliding_window": "attention.sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3": GgufModel(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _SANDWICH,
        norm_offset=1.0,
        fields={"sliding_window": "attention.sliding_window"},
    ),
    "olmo2": GgufModel(
        "Olmo2ForCausalLM",
        "olmo2",
        {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "granite": GgufModel(
        "GraniteForCausalLM",
        "granite",
        is_interleaved=True,
        fields={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "lfm2": GgufModel(
        "Lfm2ForCausalLM",
        "lfm2",
        {
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "attn_output": "self_attn.out_proj",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": CONVOLUTION,
            "shortconv.out_proj": "conv.out_proj",
        },
        outside={"token_embd_norm.weight": "model.embedding_norm.weight"},
        epsilon="norm_eps",
        has_convolutions=True,
        biases={"conv_bias": "blk.0.shortconv.in_proj.bias"},
        fields={"conv_L_cache": "shortconv.l_cache"},
        extra={"block_auto_adjust_ff_dim": False},  # GGUF files have the final width of MLPs
    ),
}
# Models with these numbers of layers (Gemma 2 27B, Gemma 3 27B) scale attention scores by the
# hidden size / heads, and not by the width of a head. Source: llama.cpp.
SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}
# The rotary base of Gemma 3's sliding-window layers, which GGUF files lack. From its config.json.
GEMMA3_LOCAL_THETA = 10000.0


def find_model(metadata: Mapping[str, Any]) -> GgufModel:
    """Return the description of a file's architecture.

    Raises:
        Refusal: Files of the architecture are not supported.
    """
    name = str(metadata.get("general.architecture"))
    if name not in MODELS:
        raise Refusal(
            f"GGUF files of the architecture {name!r} are not read, only those of "
            f"{', '.join(MODELS)}; serve the checkpoint that it was made from"
        )
    return MODELS[name]


def name_in_checkpoint(model: GgufModel, name: str) -> str | None:
    """Return transformers' name of a tensor, or None if transformers has no such tensor. The name
    of a tensor with all experts has ``{expert}`` in place of an expert's number."""
    match = LAYER.fullmatch(name)
    if match is None:
        return model.outside.get(name) or OUTSIDE.get(name)
    module = model.names.get(match[2]) or IN_LAYER.get(match[2])
    if module is None:
        return None
    return f"model.layers.{match[1]}.{module}{'' if module == SINKS else f'.{match[3]}'}"


def row_order(model: GgufModel, metadata: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """Return the indices of a tensor's rows in transformers' order; None: the order is the same.
    llama.cpp's Llama rotates neighbours, and transformers' rotates halves."""
    match = LAYER.fullmatch(name)
    if not model.is_interleaved or match is None or match[2] not in ("attn_q", "attn_k"):
        return None
    heads, kv_heads, width = _heads(metadata)
    count = heads if match[2] == "attn_q" else kv_heads
    return torch.arange(count * width).view(count, width // 2, 2).transpose(1, 2).reshape(-1)


def make_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: torch.Tensor | None
) -> dict[str, Any]:
    """Return the content that config.json would have. ``shapes`` are the shapes of the file's
    tensors by name, and ``factors`` the content of the tensor `ROPE_FACTORS`.

    Raises:
        Refusal: The file lacks a field, or its rotary embedding is not supported.
    """
    model = find_model(metadata)
    heads, kv_heads, width = _heads(metadata)
    hidden, layers = _need(metadata, "embedding_length"), _need(metadata, "block_count")
    config: dict[str, Any] = {
        "architectures": [model.class_name],
        "model_type": model.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": _need(metadata, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "max_position_embeddings": _need(metadata, "context_length"),
        model.epsilon: _need(metadata, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "rope_parameters": _rope(metadata, width, factors),
        **model.extra,
    }
    for name, tensor in model.biases.items():
        if tensor in shapes:
            config[name] = True
    for name, key in model.fields.items():
        value = _of_model(metadata, key)
        if value is not None:
            config[name] = value
    kind = str(metadata["general.architecture"])
    if model.has_convolutions:
        kinds = ("conv", "full_attention")
        config["layer_types"] = [kinds[bool(key_head)] for key_head in _key_heads(metadata)]
    if kind in SCALED_BY_HIDDEN:
        is_large = layers == SCALED_BY_HIDDEN[kind]
        config["query_pre_attn_scalar"] = hidden // heads if is_large else width
    if kind == "gemma3":
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": GEMMA3_LOCAL_THETA},
        }
    return config


def _rope(metadata: Mapping[str, Any], width: int, factors: torch.Tensor | None) -> dict[str, Any]:
    """Return the settings of the rotary embedding."""
    theta = float(_of_model(metadata, "rope.freq_base") or 10000.0)
    kind = str(_of_model(metadata, "rope.scaling.type") or "none")
    rotated = _of_model(metadata, "rope.dimension_count")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if rotated is not None and rotated != width:
        raise Refusal(f"its rotary embedding turns {rotated} of {width} numbers of a head")
    if factors is not None:
        return _llama3_rope(theta, width, factors)
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise Refusal(
            f"its rotary embedding is of type {kind!r}, which is not read from GGUF files"
        )
    rope |= {"rope_type": kind, "factor": float(_need(metadata, "rope.scaling.factor"))}
    original = _of_model(metadata, "rope.scaling.original_context_length")
    if kind != "yarn":
        return rope
    model = find_model(metadata)
    rope |= model.rope
    for name, key in {**YARN_FIELDS, **model.rope_fields}.items():
        value = _of_model(metadata, key)
        if value is not None:
            rope[name] = float(value)
    if original:
        rope["original_max_position_embeddings"] = int(original)
    return rope


def _llama3_rope(theta: float, width: int, factors: torch.Tensor) -> dict[str, Any]:
    """Return the settings of Llama 3's rotary embedding, after comparing the file's factors."""
    factor = float(factors.max())
    waves = 2 * pi * theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    turns = LLAMA3_ROPE["original_max_position_embeddings"] / waves
    share = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1.0 / ((1 - share) / factor + share)
    if expected.shape != factors.shape or not torch.allclose(
        expected, factors.double(), rtol=1e-3, atol=0
    ):
        raise Refusal(f"its rotary factors ({ROPE_FACTORS}) are not those of Llama 3")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3_ROPE}


def _heads(metadata: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the numbers of heads and of key heads, and the width of a head."""
    heads = int(_need(metadata, "attention.head_count"))
    if find_model(metadata).has_convolutions:
        kv_heads = max(_key_heads(metadata))
    else:
        kv_heads = int(_of_model(metadata, "attention.head_count_kv") or heads)
    width = _of_model(metadata, "attention.key_length")
    return heads, kv_heads, int(width or _need(metadata, "embedding_length") // heads)


def _key_heads(metadata: Mapping[str, Any]) -> list[int]:
    """Return the number of key heads of each layer: 0 for a layer with a convolution.

    Raises:
        Refusal: The file does not list them, or layers with attention differ.
    """
    heads = metadata.get(f"{metadata['general.architecture']}.attention.head_count_kv")
    counts = [int(count) for count in heads] if isinstance(heads, list) else []
    if len(counts) != _need(metadata, "block_count") or len({*counts} - {0}) != 1:
        raise Refusal("its metadata do not say which of its layers have attention "
                      "(attention.head_count_kv)")  # fmt: skip
    return counts


def _of_model(metadata: Mapping[str, Any], key: str) -> Any:
    """Return a field of the architecture; None if the file lacks it. A list, which has a number for
    each layer, must have the same number for all.

    Raises:
        Refusal: The layers differ, or the field is not a number.
    """
    name = f"{metadata['general.architecture']}.{key}"
    value = metadata.get(name)
    values = value if isinstance(value, list) else [value]
    if key not in TEXTS and not all(isinstance(value, float | int | None) for value in values):
        raise Refusal(f"its {name} is {str(value)[:200]!r}, and must be a number")
    if len(set(values)) != 1:
        raise Refusal(f"its layers differ in {key}")
    return values[0]


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    value = _of_model(metadata, key)
    if value is None:
        raise Refusal(f"its metadata lack the field {metadata['general.architecture']}.{key}")
    return value
