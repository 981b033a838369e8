"""Takes models apart for the decoder in C++: skeletons (`engine.worker.skeleton`) and transformers'
modules.

Rule 1: only the classes in `LISTED` are compiled. Other models run as they are. Rule 2: a loaded
module that differs from the usual form of its class (another activation, a norm of another kind)
also runs as it is; nothing is assumed silently.

A layer's attention parameters (scaling, window, soft cap) are not read here:
`engine.worker.load.probe` records them in a trial forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine.worker.skeleton.families import LISTED, is_convolution, is_rotated
from engine.worker.skeleton.modules import Linear, Skeleton

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.worker.forward.attention import AttentionCall
    from engine.worker.skeleton.families import Family, ModuleNames

# The numbers in the kernels of activations, by the class of their modules. transformers' experts of
# GPT-OSS and MLPs of LFM2 have no module for the activation, so their own class stands for it.
ACTIVATIONS = {
    "SiLUActivation": 0, "SiLU": 0, "Lfm2MLP": 0, "GELUTanh": 1, "ClampedSwiGLU": 2,
    "GptOssExperts": 2,
}  # fmt: skip
WIDTH_MOST = 256  # numbers in a head, at most; WIDTH_MOST in engine/kernels/paged_cache.h
WIDTH_STEP = 16  # a head's width is a multiple of it; LANES in engine/kernels/simd.h


class NotRewritten(Exception):
    """The module cannot be compiled and runs as it is; the message says why."""


@dataclass(frozen=True, slots=True)
class MlpParts:
    """The linear modules of a layer's MLP, or of one expert."""

    gate_up: tuple[torch.nn.Linear, ...]  # gates, ups; or one module for both
    down: torch.nn.Linear


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The modules of a layer's mixture of experts. ``chosen`` of the experts compute a row.
    ``shared`` computes every row, multiplied by the sigmoid of what ``shared_gate`` computes."""

    router: Any  # has a weight [experts, hidden]
    experts: tuple[MlpParts, ...]
    chosen: int
    is_normalised: bool  # Whether the weights of a row's experts are divided by their sum.
    shared: MlpParts | None = None
    shared_gate: Any = None
    stock: Any = None  # The stock module that holds the weights of all experts in two tensors.


@dataclass(frozen=True, slots=True)
class ConvolutionParts:
    """The weight of a layer's short convolution, [hidden, length], and its bias [hidden]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The linear modules and the norms of one layer. In a layer with a convolution, ``qkv`` is the
    module that computes the convolution's gates and inputs, and ``call`` is None."""

    qkv: tuple[torch.nn.Linear, ...]  # queries, keys, values; or one module for all three
    output: torch.nn.Linear
    mlp: MlpParts | ExpertParts
    norms: tuple[torch.Tensor | None, ...]  # in the order of `Norms`
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    is_norm_of_heads: bool = False
    query_rotary: int = 0  # index into `DecoderParts.rotaries`
    key_rotary: int = 0
    call: AttentionCall | None = None
    convolution: ConvolutionParts | None = None


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation of a model's MLPs: its number in the kernels, and the parameters of the
    clamped SwiGLU."""

    kind: int
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The parts of a stock model. Their tensors still belong to the module."""

    layers: tuple[LayerParts, ...]
    embedding: torch.nn.Embedding
    head: torch.nn.Linear
    final_norm: torch.Tensor
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    activation: Activation
    eps: float
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    logits_softcap: float
    # For each kind of rotary embedding: a function from positions [1, num_tokens] to cosines and
    # sines, [1, num_tokens, rotary_dim] float32.
    rotaries: tuple[Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], ...]


def take_apart(module: Any, calls: Sequence[AttentionCall]) -> DecoderParts:
    """Return the parts of a listed model, stock or skeleton, without changing it.

    Raises:
        NotRewritten: The model is not listed, or differs from the usual form of its class.
    """
    name = type(module).__name__
    if isinstance(module, Skeleton):
        name = module.config.architecture
    if name not in LISTED:
        raise NotRewritten(f"{name} has no compiled form")
    family, config, base = LISTED[name], module.config, module.model
    kinds, rotaries = _rotaries(base, config, family)
    of_layer = {call.layer: call for call in calls}
    layers = tuple(
        _take_convolution(layer, family)
        if is_convolution(config, family, index)
        else _take_layer(layer, family, of_layer[index], kinds[index])
        for index, layer in enumerate(base.layers)
    )
    head_dim = int(base.layers[calls[0].layer].self_attn.head_dim)
    if head_dim % WIDTH_STEP or head_dim > WIDTH_MOST:
        raise NotRewritten(f"its heads are {head_dim} wide, and the kernels need a multiple of "
                           f"{WIDTH_STEP} up to {WIDTH_MOST}")  # fmt: skip
    heads = int(config.num_attention_heads)
    return DecoderParts(
        layers=layers,
        embedding=base.embed_tokens,
        head=module.lm_head,
        final_norm=_norm(getattr(base, family.names.final_norm), family),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        mlp=_width_of_mlps(layers),
        activation=_activation(getattr(base.layers[0], family.names.mlp)),
        eps=_epsilon(base),
        embedding_scale=_embedding_scale(base),
        residual_scale=float(getattr(base.layers[0], "residual_multiplier", 1.0)),
        logits_scale=1.0 / float(getattr(config, "logits_scaling", 1.0)),
        logits_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        rotaries=rotaries,
    )


def _width_of_mlps(layers: Sequence[LayerParts]) -> int:
    """Return the width that the MLPs and shared experts of all layers have; 0 if there are none."""
    mlps = (x.mlp if isinstance(x.mlp, MlpParts) else x.mlp.shared for x in layers)
    widths = {int(mlp.down.in_features) for mlp in mlps if mlp is not None}
    if len(widths) > 1:
        raise NotRewritten(f"its layers' MLPs are {sorted(widths)} wide")
    return max(widths, default=0)


def _take_layer(
    layer: Any, family: Family, call: AttentionCall, rotaries: tuple[int, int]
) -> LayerParts:
    """Return the parts of one layer."""
    attention, names = layer.self_attn, family.names
    query_norm, key_norm = (
        getattr(attention, name, None) for name in (names.query_norm, names.key_norm)
    )
    is_of_heads = query_norm is not None and query_norm.weight.numel() == attention.head_dim
    qkv: tuple[Any, ...] = (
        (attention.qkv_proj,)
        if hasattr(attention, "qkv_proj")
        else (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    output = getattr(attention, names.output)
    _check_linear(*qkv, output)
    mlp = getattr(layer, names.mlp)
    return LayerParts(
        qkv=qkv,
        output=output,
        mlp=_take_experts(mlp, family) if hasattr(mlp, "experts") else _take_mlp(mlp, names),
        norms=_norms(layer, family),
        query_norm=None if query_norm is None else _norm(query_norm, family),
        key_norm=None if key_norm is None else _norm(key_norm, family),
        is_norm_of_heads=is_of_heads,
        query_rotary=rotaries[0],
        key_rotary=rotaries[1],
        call=call,
    )


def _take_convolution(layer: Any, family: Family) -> LayerParts:
    """Return the parts of a layer with a short convolution."""
    mixer, hidden = layer.conv, int(layer.conv.out_proj.out_features)
    _check_linear(mixer.in_proj, mixer.out_proj)
    if hidden % WIDTH_STEP:
        raise NotRewritten(
            f"its convolutions have {hidden} channels, and the kernels need a multiple of "
            f"{WIDTH_STEP}"
        )
    taps = mixer.conv
    return LayerParts(
        qkv=(mixer.in_proj,),
        output=mixer.out_proj,
        mlp=_take_mlp(getattr(layer, family.names.mlp), family.names),
        norms=_norms(layer, family),
        convolution=ConvolutionParts(taps.weight.detach()[:, 0], taps.bias),
    )


def _norms(layer: Any, family: Family) -> tuple[torch.Tensor | None, ...]:
    own = family.norms
    names = (own.before_attention, own.after_attention, own.before_mlp, own.after_mlp)
    return tuple(None if name is None else _norm(getattr(layer, name), family) for name in names)


def _take_mlp(mlp: Any, names: ModuleNames) -> MlpParts:
    joined, down = getattr(mlp, "gate_up_proj", None), getattr(mlp, names.down)
    each = (names.gate, names.up)
    gate_up = tuple(getattr(mlp, name) for name in each) if joined is None else (joined,)
    _check_linear(*gate_up, down)
    return MlpParts(gate_up, down)


def _take_experts(mixture: Any, family: Family) -> ExpertParts:
    """Return the parts of a mixture. In a stock mixture, experts are views of its two tensors."""
    experts, router = mixture.experts, getattr(mixture, family.router)
    if not family.has_expert_biases:
        router.register_parameter("bias", None)
    chosen = int(router.top_k)
    is_normalised = family.shares_are_normed or bool(router.norm_topk_prob)
    shared: tuple[Any, Any] = (None, None)
    if family.has_shared_expert:
        shared = _take_mlp(mixture.shared_expert, family.names), mixture.shared_expert_gate
        mixture.shared_expert_gate.register_parameter("bias", None)
    if isinstance(experts, torch.nn.ModuleList):
        parts = tuple(_take_mlp(expert, family.names) for expert in experts)
        return ExpertParts(router, parts, chosen, is_normalised, *shared)
    expert_at = _alternating_expert if family.has_expert_biases else _joined_expert
    parts = tuple(expert_at(experts, index) for index in range(len(experts.down_proj)))
    return ExpertParts(router, parts, chosen, is_normalised, *shared, experts)


def _joined_expert(experts: Any, index: int) -> MlpParts:
    gate_up, down = experts.gate_up_proj[index], experts.down_proj[index]
    return MlpParts((_linear_of(gate_up),), _linear_of(down))


def _alternating_expert(experts: Any, index: int) -> MlpParts:
    """Return an expert of GPT-OSS: weights are [inputs, outputs], and gates and ups alternate."""
    weight, bias = experts.gate_up_proj[index].T, experts.gate_up_proj_bias[index]
    gate, up = (_linear_of(weight[first::2], bias[first::2]) for first in (0, 1))
    return MlpParts(
        (gate, up), _linear_of(experts.down_proj[index].T, experts.down_proj_bias[index])
    )


def _linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.nn.Linear:
    """Return a linear layer with this weight [outputs, inputs]."""
    linear = Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def _check_linear(*layers: Any) -> None:
    for linear in layers:
        if type(linear) not in (torch.nn.Linear, Linear):
            raise NotRewritten(f"one of its linear layers is a {type(linear).__name__}")


def _norm(module: Any, family: Family) -> torch.Tensor:
    """Return the numbers that a norm multiplies by, in float32."""
    if not type(module).__name__.endswith("RMSNorm"):
        raise NotRewritten(f"one of its norms is a {type(module).__name__}")
    return module.weight.detach().to(torch.float32) + family.norm_offset


def _activation(mlp: Any) -> Activation:
    """Return the activation of an MLP, or of a mixture's experts."""
    experts = getattr(mlp, "experts", None)
    if experts is not None:
        mlp = experts[0] if isinstance(experts, torch.nn.ModuleList) else experts
    function = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None) or mlp
    name = type(function).__name__
    if name not in ACTIVATIONS:
        raise NotRewritten(f"its activation is {name}")
    numbers = (float(getattr(function, number, 0.0)) for number in ("alpha", "limit"))
    return Activation(ACTIVATIONS[name], *numbers)


def _epsilon(base: Any) -> float:
    """Return the epsilon that all norms share."""
    norms = [m for m in base.modules() if type(m).__name__.endswith("RMSNorm")]
    epsilons = {float(getattr(m, "variance_epsilon", getattr(m, "eps", 0.0))) for m in norms}
    if len(epsilons) != 1:
        raise NotRewritten(f"its norms have different epsilons: {sorted(epsilons)}")
    return epsilons.pop()


def _embedding_scale(base: Any) -> float:
    """Return the embeddings' factor: Granite's multiplier, or the square root of Gemma's width."""
    scale = float(getattr(base, "embedding_multiplier", 1.0))
    return scale * float(getattr(base.embed_tokens, "scalar_embed_scale", 1.0))


def _rotaries(
    base: Any, config: Any, family: Family
) -> tuple[list[tuple[int, int]], tuple[Any, ...]]:
    """Return the indices of the rotary embeddings of each layer's queries and keys, and the rotary
    embeddings. A layer without rotary embedding gets one whose angles are zero."""
    rotary, count = base.rotary_emb, len(base.layers)
    example = torch.zeros(1)  # cosines and sines get its dtype and device
    if not isinstance(rotary.rope_type, dict):
        own = partial(_both_halves, rotary)
        if family.scales_queries:
            return [(1, 0)] * count, (own, partial(_scaled, own, config.rope_parameters))
        still = [int(not is_rotated(config, family, layer)) for layer in range(count)]
        pairs = [(index, index) for index in still]
        if not any(still):
            return pairs, (own,)
        width = rotary(example, position_ids=torch.zeros((1, 1), dtype=torch.int64))[0].shape[-1]
        return pairs, (own, partial(_unturned, width))
    kinds = sorted(set(config.layer_types))
    functions = tuple(
        (lambda positions, kind=kind: rotary(example, positions, kind)) for kind in kinds
    )
    return [(kinds.index(kind),) * 2 for kind in config.layer_types], functions


def _scaled(
    rotary: Any, settings: Any, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of a rotary embedding, by which queries are multiplied, times
    the factor of queries: it grows with the logarithm of the position."""
    turns = torch.floor(positions / settings["original_max_position_embeddings"])
    factor = (1 + settings["llama_4_scaling_beta"] * torch.log(1 + turns))[..., None]
    cosines, sines = rotary(positions)
    return cosines * factor, sines * factor


def _both_halves(rotary: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of both halves of a head. GPT-OSS' module computes the cosines
    and sines of one half only."""
    cosines, sines = rotary(torch.zeros(1), position_ids=positions)
    inv_freq = getattr(rotary, "inv_freq", None)
    if inv_freq is None or cosines.shape[-1] != inv_freq.numel():
        return cosines, sines
    return torch.cat((cosines, cosines), dim=-1), torch.cat((sines, sines), dim=-1)


def _unturned(width: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of angles of zero, [1, num_tokens, width] float32."""
    shape = (*positions.shape, width)
    return torch.ones(shape), torch.zeros(shape)
