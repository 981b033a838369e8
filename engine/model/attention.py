"""Paged attention behind transformers' attention interface (D11, D12).

Rule 1: the keyword list is closed. A layer may hand its attention what is in `HONOURED` and
`HARMLESS`; any other keyword that is not None raises `UnsupportedAttention`, because a keyword
ignored in silence is a wrong model (sliding windows were, in the first prototype).
Rule 2: a backend sees one packed row of tokens and a `PreparedStep`; what depends on the step
but not on the layer is computed once, in `prepare`.

The batch is one row of tokens, ``[1, num_tokens]``; the keyword `KEYWORD` carries the step
through the model's forward to each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from transformers import AttentionInterface, AttentionMaskInterface

if TYPE_CHECKING:
    import torch

    from engine.model.kv_cache import KvCache
    from engine.model.packing import PackedRows

NAME = "triolet_paged"
KEYWORD = "triolet_step"

HONOURED = frozenset({KEYWORD, "scaling", "sliding_window", "softcap"})
# Keywords that say nothing about the maths of an attention layer, with the values that do not:
# positions are in the rotary already, the cache is ours, and nothing is recorded (a mixture's
# router logits would be, beside the result).
HARMLESS: dict[str, tuple[object, ...] | None] = {
    "dropout": (0.0,),
    "position_ids": None,
    "use_cache": (False, True),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": None,
    "is_causal": (True,),
}


class UnsupportedAttention(Exception):
    """A layer asks its attention for something that ours does not do; the sentence names it."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks for. A query at position p sees the keys p - ``sliding_window`` + 1 … p
    (None: all up to p); ``softcap`` c turns each score s into c · tanh(s / c)."""

    layer: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None


class PreparedStep(Protocol):
    """What a backend computed once for a step; it carries itself through the forward."""

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write ``key`` and ``value`` [num_tokens, num_kv_heads, head_dim] into the cache and
        return [num_tokens, num_heads, head_dim] for ``query`` of that shape."""
        ...


class AttentionBackend(Protocol):
    """One way to compute attention over the paged cache (D12)."""

    def prepare(self, rows: PackedRows, cache: KvCache) -> PreparedStep:
        """What the step needs and no layer changes: slots, gather indices, masks."""
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,  # as key
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: one layer's part of the step.

    Returns:
        [1, num_tokens, num_heads, head_dim], and None for the weights nobody records.
    """
    step: PreparedStep | None = keywords.pop(KEYWORD, None)
    if step is None:
        raise UnsupportedAttention("it does not pass keywords on to its attention")
    if attention_mask is not None:
        raise UnsupportedAttention("it builds an attention mask of its own")
    if not getattr(module, "is_causal", True):
        raise UnsupportedAttention("it attends in both directions")
    check_keywords(keywords)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttention("its attention layers carry no layer_idx")
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    call = AttentionCall(layer, scale, sliding_window, softcap)
    out = step.attend(
        call, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    return out[None], None


def check_keywords(keywords: dict[str, Any]) -> None:
    """Rule 1 of this file.

    Raises:
        UnsupportedAttention: the first keyword that could change the maths, by name.
    """
    for name, value in keywords.items():
        if value is None:
            continue
        if name not in HARMLESS:
            raise UnsupportedAttention(f"it needs the attention keyword {name!r}")
        allowed = HARMLESS[name]
        if allowed is not None and value not in allowed:
            raise UnsupportedAttention(f"it needs the attention keyword {name!r} as {value!r}")


def _no_mask(*_arguments: object, **_keywords: object) -> None:
    """The mask interface's entry: causality and windows are the backend's."""


def register() -> None:
    """Make ``attn_implementation="triolet_paged"`` known to transformers. Idempotent."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
