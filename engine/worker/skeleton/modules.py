"""Builds the modules of a listed architecture without transformers and without a forward.

Rule: modules and parameters have the names, the order and the shapes of transformers'
(`tests/conformance/test_skeleton.py`), so that a checkpoint is loaded into them by the same checks,
and the compiled decoder takes them apart in the same way. They are on torch's meta device. Only the
experts of a mixture are separate modules, named as in checkpoints; transformers' modules join them.

`engine.worker.load.probe` runs a stock module to see the arguments of its layers' attention. A
skeleton cannot run; `Skeleton.calls` computes them from its config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.worker.forward.attention import AttentionCall
from engine.worker.skeleton.families import LISTED, is_convolution, is_mixture
from engine.worker.skeleton.rotary import Rotary
from engine.worker.skeleton.usual_values import SILU

if TYPE_CHECKING:
    from engine.worker.skeleton.config import SkeletonConfig
    from engine.worker.skeleton.families import Family

META = torch.device("meta")


class GELUTanh(torch.nn.Module):
    """Marks an MLP whose activation is GELU's tanh approximation."""


class SiLU(torch.nn.Module):
    """Marks an MLP whose activation is the sigmoid linear unit."""


class ClampedSwiGLU(torch.nn.Module):
    """Marks GPT-OSS' activation: (up + 1) * gate * sigmoid(alpha * gate), where gates are at most
    ``limit`` and ups from -``limit`` to ``limit``."""

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.limit = limit


class RMSNorm(torch.nn.Module):
    """A norm's weight and epsilon."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width, device=META))
        self.eps = eps


class Linear(torch.nn.Linear):
    """A linear layer on the meta device. It has no initial values: computing them would import
    torch's compiler, which takes as long as torch itself."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias, device=META)

    def reset_parameters(self) -> None:
        """Do nothing."""


class Embedding(torch.nn.Embedding):
    """An embedding on the meta device. Like `Linear`, it has no initial values."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__(count, width, device=META)

    def reset_parameters(self) -> None:
        """Do nothing."""


class Attention(torch.nn.Module):
    """The projections and norms of one layer's attention."""

    def __init__(self, config: SkeletonConfig, family: Family) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim
        hidden = config.hidden_size
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        has_bias = getattr(config, "attention_bias", False)
        if family.is_fused:
            self.add_module(family.names.output, Linear(queries, hidden))
            self.qkv_proj = Linear(hidden, queries + 2 * keys)
        else:
            has_own = has_bias or family.has_query_bias
            self.q_proj = Linear(hidden, queries, bias=has_own)
            self.k_proj = Linear(hidden, keys, bias=has_own)
            self.v_proj = Linear(hidden, keys, bias=has_own)
            has_out_bias = getattr(config, "attention_out_bias", has_bias)
            self.add_module(family.names.output, Linear(queries, hidden, bias=has_out_bias))
        if family.has_sinks:
            sinks = torch.empty(config.num_attention_heads, device=META)
            self.sinks = torch.nn.Parameter(sinks)
        if family.head_norm:
            is_per_head = family.head_norm == "head"
            eps = getattr(config, family.epsilon)
            for name, width in ((family.names.query_norm, queries), (family.names.key_norm, keys)):
                self.add_module(name, RMSNorm(self.head_dim if is_per_head else width, eps))


class ShortConvolution(torch.nn.Module):
    """The projections and the weights of one layer's short convolution."""

    def __init__(self, config: SkeletonConfig) -> None:
        super().__init__()
        hidden, has_bias = config.hidden_size, config.conv_bias
        self.conv = Taps(hidden, config.conv_L_cache, bias=has_bias)
        self.in_proj = Linear(hidden, 3 * hidden, bias=has_bias)
        self.out_proj = Linear(hidden, hidden, bias=has_bias)


class Taps(torch.nn.Module):
    """The weight of a convolution along each channel, [channels, 1, length], and its bias."""

    def __init__(self, channels: int, length: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty((channels, 1, length), device=META))
        own = torch.nn.Parameter(torch.empty(channels, device=META)) if bias else None
        self.register_parameter("bias", own)


class Mlp(torch.nn.Module):
    """The projections and the activation of one layer's MLP, or of one expert."""

    def __init__(self, config: SkeletonConfig, family: Family, width: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        has_bias = family.has_expert_biases or getattr(config, "mlp_bias", False)
        if family.is_fused:
            self.gate_up_proj = Linear(hidden, 2 * width)
        else:
            for name in (family.names.gate, family.names.up):
                self.add_module(name, Linear(hidden, width, bias=has_bias))
        self.add_module(family.names.down, Linear(width, hidden, bias=has_bias))
        self.act_fn = _activation(config, family)


def _activation(config: SkeletonConfig, family: Family) -> torch.nn.Module:
    if not family.activation:
        return ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit)
    return SiLU() if getattr(config, family.activation) in SILU else GELUTanh()


class Router(torch.nn.Module):
    """The weight that computes each expert's score. It stays in the model's dtype even if linear
    layers have quantized weights."""

    def __init__(self, config: SkeletonConfig, family: Family) -> None:
        super().__init__()
        shape = (config.num_experts, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, device=META))
        if family.has_expert_biases:
            self.bias = torch.nn.Parameter(torch.empty(shape[0], device=META))
        self.top_k: int = config.num_experts_per_tok
        self.norm_topk_prob: bool = config.norm_topk_prob


class SharedGate(torch.nn.Module):
    """The weight that computes the share of an expert that computes every row. Like a `Router`'s,
    it stays in the model's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty((1, width), device=META))


class Mixture(torch.nn.Module):
    """The experts of one layer."""

    def __init__(self, config: SkeletonConfig, family: Family) -> None:
        super().__init__()
        is_router_first = family.shares_are_normed or family.has_shared_expert
        if is_router_first:
            self.add_module(family.router, Router(config, family))
        self.experts = torch.nn.ModuleList(
            Mlp(config, family, config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        if not is_router_first:
            self.add_module(family.router, Router(config, family))
        if family.has_shared_expert:
            self.shared_expert = Mlp(config, family, config.shared_expert_intermediate_size)
            self.shared_expert_gate = SharedGate(config.hidden_size)


class Layer(torch.nn.Module):
    """One decoder layer."""

    def __init__(self, config: SkeletonConfig, family: Family, index: int) -> None:
        super().__init__()
        if is_convolution(config, family, index):
            self.conv = ShortConvolution(config)
        else:
            self.self_attn = Attention(config, family)
        if family.has_experts and is_mixture(config, index):
            self.add_module(family.names.mlp, Mixture(config, family))
        else:
            self.add_module(family.names.mlp, Mlp(config, family, _mlp_width(config)))
        for name in family.norm_names:
            self.add_module(name, RMSNorm(config.hidden_size, getattr(config, family.epsilon)))
        self.residual_multiplier = getattr(config, "residual_multiplier", 1.0)


def _mlp_width(config: SkeletonConfig) -> int:
    """Return the width of an MLP: intermediate_size or, if an LFM2 config says so, two thirds of it
    times block_ffn_dim_multiplier, rounded up to a multiple of block_multiple_of."""
    width: int = config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        factor, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
        width = int(2 * width / 3)
        if factor is not None:
            width = -(-int(factor * width) // multiple) * multiple
    return width


class Base(torch.nn.Module):
    """The model without its head."""

    def __init__(self, config: SkeletonConfig, family: Family) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, hidden)
        self.layers = torch.nn.ModuleList(
            Layer(config, family, index) for index in range(config.num_hidden_layers)
        )
        final = RMSNorm(hidden, getattr(config, family.epsilon))
        self.add_module(family.names.final_norm, final)
        self.rotary_emb = Rotary(config)
        own = hidden**0.5 if family.scales_embedding else 1.0
        self.embedding_multiplier = getattr(config, "embedding_multiplier", own)


class Skeleton(torch.nn.Module):
    """A causal language model without a forward, for
    `engine.worker.forward.rewrites.take_apart`."""

    base_model_prefix = "model"

    def __init__(self, config: SkeletonConfig) -> None:
        super().__init__()
        family = LISTED[config.architecture]
        self.config = config
        self.model = Base(config, family)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
        self.all_tied_weights_keys = tied if config.tie_word_embeddings else {}

    @property
    def calls(self) -> tuple[AttentionCall, ...]:
        """The attention parameters of each layer with attention, its sinks included."""
        config, family = self.config, LISTED[self.config.architecture]
        return tuple(
            AttentionCall(
                index,
                _scaling(config),
                _window(config, family, index),
                getattr(config, "attn_logit_softcapping", None) if family.caps_scores else None,
                getattr(layer.self_attn, "sinks", None),
            )
            for index, layer in enumerate(self.model.layers)
            if not is_convolution(config, family, index)
        )

    def get_output_embeddings(self) -> Linear:
        """Return the head, as transformers' models do."""
        return self.lm_head


def _scaling(config: SkeletonConfig) -> float:
    """Return the factor of attention scores: Granite's own, or the inverse square root of Gemma's
    query_pre_attn_scalar or of the heads' width."""
    own = getattr(config, "attention_multiplier", None)
    if own is not None:
        return float(own)
    return float(getattr(config, "query_pre_attn_scalar", config.head_dim) ** -0.5)


def _window(config: SkeletonConfig, family: Family, index: int) -> int | None:
    is_windowed = family.window == "all" or (
        family.window == "typed" and config.layer_types[index] == "sliding_attention"
    )
    return config.sliding_window if is_windowed else None
