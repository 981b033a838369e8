"""Lists the architectures that have a compiled form, and how each of them differs from Llama.

Rule: a class is listed only if tests compare it with transformers: its compiled form with the stock
module (`tests/conformance/test_rewrites.py`), and its fields, names and numbers with transformers'
classes (`tests/conformance/test_skeleton.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.worker.skeleton.usual_values import (
    ANY,
    GELU_TANH,
    OPTIONAL_COUNT,
    SILU,
    Check,
    is_count,
    is_flag,
    is_hybrid_types,
    is_id,
    is_ids,
    is_index,
    is_indices,
    is_number,
    is_off,
    is_real,
    is_rope,
    is_share,
    is_switches,
    is_types,
    is_unwindowed,
    one_of,
    or_none,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

REQUIRED = object()  # the default of a field that the file must have


@dataclass(frozen=True, slots=True)
class Norms:
    """The names of a layer's norms; None where the architecture has no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The names of a model's modules that differ between architectures."""

    output: str = "o_proj"  # the output projection of the attention
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    final_norm: str = "norm"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of config.json: its default, and a check of whether a value is usual (`Unusual`)."""

    default: Any
    is_usual: Check


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from Llama.

    ``fields`` are the fields of its config that decide its form. ``epsilon`` names the field of its
    norms' epsilon; a norm multiplies by its weight plus ``norm_offset``. ``head_norm``: queries and
    keys are normed over one head ("head"), over all heads ("all"), or not ("").
    """

    model_type: str
    fields: Mapping[str, Field]
    norms: Norms = Norms()
    names: ModuleNames = ModuleNames()
    epsilon: str = "rms_norm_eps"
    norm_offset: float = 0.0
    head_norm: str = ""
    is_fused: bool = False  # Queries, keys and values are one matrix, and so are gates and ups.
    has_query_bias: bool = False  # Queries, keys and values have biases, whatever the config says.
    scales_embedding: bool = False  # Embeddings are multiplied by the square root of their width.
    activation: str = "hidden_act"  # The field that names the activation; "": clamped SwiGLU.
    window: str = ""  # Which layers have sliding windows: none, "all", "typed" (by layer_types).
    caps_scores: bool = False  # Attention scores are capped by attn_logit_softcapping.
    has_experts: bool = False  # Layers for which `is_mixture` is true have experts.
    # The weights of the chosen experts add up to 1, whatever the config says; the router's module
    # comes before the experts'.
    shares_are_normed: bool = False
    router: str = "gate"  # The name of the router's module.
    has_expert_biases: bool = False  # Experts and routers have biases.
    has_shared_expert: bool = False  # An expert computes every row, with a share of its own.
    has_sinks: bool = False  # Each head of the attention has a sink.
    theta: float = 10_000.0  # The default base of the rotary embedding.
    # Without layer types in the config, layers full_each, 2 * full_each … have no window; 0: none.
    full_each: int = 2
    has_convolutions: bool = False  # Layers of the type "conv" have a short convolution.
    scales_queries: bool = False  # Queries grow with their positions, by Ministral 3's formula.
    unrotated: str = ""  # Layers without rotary embedding: none, the config's list, or "full" ones.

    @property
    def norm_names(self) -> tuple[str, ...]:
        """The names of a layer's norms, in the order in which a layer applies them."""
        norms = self.norms
        names = (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp)
        return tuple(name for name in names if name is not None)


def is_mixture(config: Any, layer: int) -> bool:
    """Return whether a layer of a model with experts has experts."""
    is_dense = layer in (config.mlp_only_layers or ())
    return not is_dense and (layer + 1) % config.decoder_sparse_step == 0


def is_rotated(config: Any, family: Family, layer: int) -> bool:
    """Return whether a layer's queries and keys have a rotary embedding."""
    if family.unrotated == "listed":
        return bool(config.no_rope_layers[layer])
    if family.unrotated == "full":
        return config.sliding_window is None or config.layer_types[layer] == "sliding_attention"
    return True


# Fields of every family.
_COMMON = {
    **{
        name: Field(REQUIRED, is_count)
        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "max_position_embeddings"),
        )
    },
    "num_key_value_heads": Field(None, OPTIONAL_COUNT),
    "head_dim": Field(None, is_count),
    "rms_norm_eps": Field(REQUIRED, is_real),
    "hidden_act": Field("silu", one_of(*SILU)),
    "tie_word_embeddings": Field(False, is_flag),
    "eos_token_id": Field(None, is_ids),
    "pad_token_id": Field(None, is_id),
    "rope_parameters": Field(None, is_rope),
    "rope_scaling": Field(None, is_rope),
    "rope_theta": Field(None, is_number),
}
# Fields that do not change a model's outputs as long as their values are usual.
WITHOUT_EFFECT: Mapping[str, Check] = {
    **dict.fromkeys(("architectures", "model_type", "transformers_version"), ANY),
    **dict.fromkeys(("_name_or_path", "transformers.js_config", "cache_implementation"), ANY),
    "sliding_window_size": ANY,
    **dict.fromkeys(("is_llama_config", "rope_interleaved", "use_mrope"), ANY),
    **dict.fromkeys(("unsloth_fixed", "unsloth_version", "_attn_implementation_autoset"), ANY),
    **dict.fromkeys(
        ("dtype", "torch_dtype"), one_of(None, "float32", "float16", "bfloat16", "float64")
    ),
    **dict.fromkeys(
        ("attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout"), is_share
    ),
    **dict.fromkeys(
        ("is_encoder_decoder", "is_decoder", "add_cross_attention", "use_bidirectional_attention"),
        is_off,
    ),
    "quantization_config": is_off,
    "initializer_range": is_share,
    "use_cache": is_flag,
    "bos_token_id": is_id,
    "pretraining_tp": or_none(is_count),
    "_sliding_window_pattern": is_count,
}


def is_convolution(config: Any, family: Family, layer: int) -> bool:
    """Return whether a layer has a short convolution in place of attention."""
    return family.has_convolutions and config.layer_types[layer] == "conv"


def _fields(**own: Field) -> Mapping[str, Field]:
    return {**_COMMON, **own}


_BIASES = {"attention_bias": Field(False, is_flag), "mlp_bias": Field(False, is_flag)}
_TYPED_WINDOWS = {
    "layer_types": Field(None, is_types),
    "sliding_window": Field(4096, OPTIONAL_COUNT),
}
_QWEN = {
    **_TYPED_WINDOWS,
    "num_key_value_heads": Field(32, OPTIONAL_COUNT),
    "use_sliding_window": Field(False, is_flag),
    "max_window_layers": Field(28, is_index),
}
_GEMMA = {
    "head_dim": Field(256, is_count),
    "tie_word_embeddings": Field(True, is_flag),
    "eos_token_id": Field(1, is_ids),
    "pad_token_id": Field(0, is_id),
    "attention_bias": Field(False, is_flag),
}
_GEMMA_2 = {
    **_GEMMA,
    **_TYPED_WINDOWS,
    "num_key_value_heads": Field(4, is_count),
    "hidden_act": Field(None, ANY),  # not used
    "hidden_activation": Field(GELU_TANH, one_of(GELU_TANH)),
    "query_pre_attn_scalar": Field(256, is_count),
    "final_logit_softcapping": Field(30.0, or_none(is_real)),
    "attn_logit_softcapping": Field(50.0, or_none(is_real)),
}
_SANDWICH = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_NO_CAP = Field(None, or_none(is_real))
_OLMO_2 = {
    "eos_token_id": Field(50279, is_ids),
    "pad_token_id": Field(1, is_id),
    "attention_bias": Field(False, is_flag),
}
_LFM_2 = {
    **{name: field for name, field in _COMMON.items() if name != "rms_norm_eps"},
    "norm_eps": Field(1e-5, is_real),
    "intermediate_size": Field(12288, is_count),
    "num_key_value_heads": Field(8, OPTIONAL_COUNT),
    "head_dim": Field(None, OPTIONAL_COUNT),
    "tie_word_embeddings": Field(True, is_flag),
    "eos_token_id": Field(2, is_ids),
    "pad_token_id": Field(0, is_id),
    "conv_bias": Field(False, is_flag),
    "conv_L_cache": Field(3, is_count),
    "layer_types": Field(None, is_hybrid_types),
    "full_attn_idxs": Field(None, is_indices),
    "block_auto_adjust_ff_dim": Field(True, is_flag),
    "block_ffn_dim_multiplier": Field(1.0, or_none(is_number)),
    "block_multiple_of": Field(256, is_count),
    "block_ff_dim": Field(None, OPTIONAL_COUNT),  # older name of intermediate_size
    "tie_embedding": Field(None, or_none(is_flag)),
    **dict.fromkeys(  # not read
        (
            *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
            *("block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out"),
            *("conv_use_xavier_init", "num_heads", "theta", "use_pos_enc"),
        ),
        Field(None, ANY),
    ),
}

LISTED: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        _fields(
            **_BIASES,
            head_dim=Field(None, OPTIONAL_COUNT),
            eos_token_id=Field(2, is_ids),
        ),
    ),
    "Qwen2ForCausalLM": Family("qwen2", _fields(**_QWEN), has_query_bias=True, window="typed"),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        _fields(**_QWEN, head_dim=Field(128, is_count), attention_bias=Field(False, is_flag)),
        head_norm="head",
        window="typed",
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        _fields(
            num_key_value_heads=Field(4, is_count),
            attention_bias=Field(False, is_flag),
            use_sliding_window=Field(False, is_flag),
            sliding_window=Field(4096, OPTIONAL_COUNT),
            max_window_layers=Field(28, ANY),  # not read
            num_experts=Field(128, is_count),
            num_local_experts=Field(None, is_count),  # as transformers 5 writes it
            num_experts_per_tok=Field(8, is_count),
            moe_intermediate_size=Field(768, is_count),
            norm_topk_prob=Field(False, is_flag),
            decoder_sparse_step=Field(1, is_count),
            mlp_only_layers=Field(None, is_indices),
            output_router_logits=Field(False, is_off),
            router_aux_loss_coef=Field(0.001, ANY),  # of training
        ),
        head_norm="head",
        window="all",
        has_experts=True,
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        _fields(
            num_key_value_heads=Field(16, OPTIONAL_COUNT),
            head_dim=Field(None, OPTIONAL_COUNT),
            qkv_bias=Field(True, one_of(True)),
            use_sliding_window=Field(False, is_off),
            sliding_window=Field(4096, ANY),  # this field and the next are not read
            max_window_layers=Field(28, ANY),
            layer_types=Field(None, is_unwindowed),
            num_experts=Field(60, is_count),
            num_local_experts=Field(None, is_count),
            num_experts_per_tok=Field(4, is_count),
            moe_intermediate_size=Field(1408, is_count),
            shared_expert_intermediate_size=Field(5632, is_count),
            norm_topk_prob=Field(False, is_flag),
            decoder_sparse_step=Field(1, is_count),
            mlp_only_layers=Field(None, is_indices),
            output_router_logits=Field(False, is_off),
            router_aux_loss_coef=Field(0.001, ANY),  # of training
        ),
        has_query_bias=True,
        has_experts=True,
        has_shared_expert=True,
    ),
    "MistralForCausalLM": Family(
        "mistral",
        _fields(
            head_dim=Field(None, OPTIONAL_COUNT),
            num_key_value_heads=Field(8, is_count),
            eos_token_id=Field(2, is_ids),
            sliding_window=Field(4096, OPTIONAL_COUNT),
        ),
        window="all",
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        _fields(
            eos_token_id=Field(32000, is_ids),
            pad_token_id=Field(32000, is_id),
            sliding_window=Field(None, OPTIONAL_COUNT),
            original_max_position_embeddings=Field(4096, is_count),
            partial_rotary_factor=Field(1.0, is_share),
            attention_bias=Field(False, ANY),  # this field and those below have no effect
            mlp_bias=Field(False, ANY),
            lm_head_bias=Field(False, ANY),
            full_attn_mod=Field(1, ANY),
            interpolate_factor=Field(1, ANY),
        ),
        is_fused=True,
        window="all",
    ),
    "GraniteForCausalLM": Family(
        "granite",
        _fields(
            **_BIASES,
            eos_token_id=Field(2, is_ids),
            embedding_multiplier=Field(1.0, is_number),
            logits_scaling=Field(1.0, is_number),
            residual_multiplier=Field(1.0, is_number),
            attention_multiplier=Field(1.0, is_number),
        ),
    ),
    "GemmaForCausalLM": Family(
        "gemma",
        _fields(
            **_GEMMA,
            num_key_value_heads=Field(16, is_count),
            hidden_act=Field(GELU_TANH, one_of(GELU_TANH, "gelu")),  # both mean the former
            hidden_activation=Field(None, ANY),  # not read
        ),
        norm_offset=1.0,
        scales_embedding=True,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _fields(**_GEMMA_2),
        _SANDWICH,
        norm_offset=1.0,
        scales_embedding=True,
        activation="hidden_activation",
        window="typed",
        caps_scores=True,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        _fields(
            **_GEMMA_2 | {"final_logit_softcapping": _NO_CAP, "attn_logit_softcapping": _NO_CAP},
            sliding_window_pattern=Field(6, is_count),
            rope_local_base_freq=Field(None, is_number),
        ),
        _SANDWICH,
        norm_offset=1.0,
        head_norm="head",
        scales_embedding=True,
        activation="hidden_activation",
        window="typed",
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        _fields(**_OLMO_2),
        _AFTER,
        head_norm="all",
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        _fields(**_OLMO_2, **_TYPED_WINDOWS),
        _AFTER,
        head_norm="all",
        window="typed",
        theta=500_000.0,
        full_each=4,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        _fields(
            **_BIASES,
            num_key_value_heads=Field(4, OPTIONAL_COUNT),
            eos_token_id=Field(128001, is_ids),
            pad_token_id=Field(128004, is_id),
            tie_word_embeddings=Field(True, is_flag),
            no_rope_layers=Field(None, is_switches),
            no_rope_layer_interval=Field(4, is_count),
            use_sliding_window=Field(False, is_off),
            sliding_window=Field(None, OPTIONAL_COUNT),
            layer_types=Field(None, is_types),  # this field and the next have no effect
            max_window_layers=Field(28, ANY),
        ),
        theta=2_000_000.0,
        unrotated="listed",
    ),
    "MinistralForCausalLM": Family(
        "ministral",
        _fields(
            **_TYPED_WINDOWS,
            num_key_value_heads=Field(8, is_count),
            eos_token_id=Field(2, is_ids),
        ),
        window="typed",
        full_each=0,
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        _fields(
            head_dim=Field(128, OPTIONAL_COUNT),
            num_key_value_heads=Field(8, OPTIONAL_COUNT),
            eos_token_id=Field(2, is_ids),
            pad_token_id=Field(11, is_id),
            sliding_window=Field(None, OPTIONAL_COUNT),
        ),
        window="all",
        scales_queries=True,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        _fields(
            head_dim=Field(None, OPTIONAL_COUNT),
            num_key_value_heads=Field(8, is_count),
            eos_token_id=Field(2, is_ids),
            sliding_window=Field(None, OPTIONAL_COUNT),
            num_local_experts=Field(8, is_count),
            num_experts_per_tok=Field(2, is_count),
            output_router_logits=Field(False, is_off),
            router_aux_loss_coef=Field(0.001, ANY),  # this and the next are of training
            router_jitter_noise=Field(0.0, ANY),
        ),
        window="all",
        has_experts=True,
        shares_are_normed=True,
        theta=1_000_000.0,
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        _fields(
            **_TYPED_WINDOWS,
            num_key_value_heads=Field(32, is_count),
            eos_token_id=Field(2, is_ids),
            sliding_window_pattern=Field(4, ANY),
        ),
        _AFTER,
        head_norm="head",
        window="typed",
        unrotated="full",
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        _fields(
            head_dim=Field(64, is_count),
            num_key_value_heads=Field(8, OPTIONAL_COUNT),
            attention_bias=Field(True, is_flag),
            sliding_window=Field(128, OPTIONAL_COUNT),
            layer_types=Field(None, is_types),
            num_local_experts=Field(128, is_count),
            num_experts_per_tok=Field(4, is_count),
            swiglu_alpha=Field(1.702, is_real),
            swiglu_limit=Field(7.0, is_real),
            output_router_logits=Field(False, is_off),
            router_aux_loss_coef=Field(0.001, ANY),  # only for training
            experts_per_token=Field(None, ANY),  # this field and the next have no effect
            initial_context_length=Field(None, ANY),
        ),
        activation="",
        window="typed",
        has_experts=True,
        shares_are_normed=True,
        router="router",
        has_expert_biases=True,
        has_sinks=True,
        theta=150_000.0,
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        _fields(
            head_dim=Field(128, OPTIONAL_COUNT),
            num_key_value_heads=Field(8, OPTIONAL_COUNT),
            eos_token_id=Field(2, is_ids),
            pad_token_id=Field(1, is_id),
            attention_bias=Field(True, is_flag),
            attention_out_bias=Field(False, is_flag),
            mlp_bias=Field(False, is_flag),
        ),
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2",
        _LFM_2,
        Norms("operator_norm", None, "ffn_norm", None),
        ModuleNames(
            "out_proj",
            "q_layernorm",
            "k_layernorm",
            "feed_forward",
            "w1",
            "w3",
            "w2",
            "embedding_norm",
        ),
        epsilon="norm_eps",
        head_norm="head",
        has_convolutions=True,
        theta=1_000_000.0,
    ),
}
