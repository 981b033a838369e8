"""Paged attention behind transformers' attention interface (D11, D12).

Rule 1: the list of keywords is closed. A layer may pass its attention the parameters of
`paged_attention` and the keywords in `HARMLESS`. Any other keyword that is not None raises
`UnsupportedAttention`, because a keyword that is ignored silently gives a wrong model (the first
prototype ignored sliding windows).
Rule 2: a layer's window is that of the mask that the model makes for the layer, as in transformers'
own eager attention. Not every layer passes ``sliding_window`` on to its attention (Qwen2-MoE's do
not); if a layer does, it must be the window of its mask.
Rule 3: a backend sees one packed row of tokens and a `PreparedStep`. What depends on the step but
not on the layer is computed once, in `AttentionBackend.prepare`.

The batch is one row of tokens, [1, num_tokens]. The keyword `KEYWORD` carries the step through the
model's forward to each layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from engine.worker.forward.kv_cache import KvCache
    from engine.worker.forward.packing import PackedRows

NAME = "triolet_paged"
KEYWORD = "triolet_step"

# Keywords that do not change the result of an attention layer, with the values for which this
# holds (None: any). Positions are already in the rotary embedding, the cache is the engine's, and
# what a layer would return besides (a mixture's router logits, for example) is not read.
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
    """A layer passes an argument that `paged_attention` does not support; the message names it."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The attention parameters of one layer. A query at position p sees the keys
    p - ``sliding_window`` + 1 … p (None: all up to p). A ``softcap`` c turns each score s into
    c · tanh(s / c). ``sinks`` [num_heads] are scores of one more key of each head, which every
    query sees whatever its window, and whose value is zero: sinks take their share of the weights,
    and are neither scaled nor capped."""

    layer: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)  # tensors have no truth value


@dataclass(frozen=True, slots=True)
class Mask:
    """The value that a model gives its layers in place of a mask tensor: the window of keys that a
    query sees, as in `AttentionCall`. The backend applies it."""

    sliding_window: int | None = None


class PreparedStep(Protocol):
    """A backend's data for one step, which the keyword `KEYWORD` carries to every layer."""

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write ``key`` and ``value`` [num_tokens, num_kv_heads, head_dim] into the cache and
        return the attention of ``query``, both [num_tokens, num_heads, head_dim]."""


class AttentionBackend(Protocol):
    """A way to compute attention over the paged cache (D12). ``label`` names it in the log."""

    label: str

    def prepare(self, rows: PackedRows, cache: KvCache) -> PreparedStep:
        """Compute what all layers of a step share: slots, gather indices, masks."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    attention_mask: Mask | torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # transformers' name of the sinks, [num_heads]
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention, called by transformers.

    Returns:
        The result, [1, num_tokens, num_heads, head_dim], and None in place of attention weights.

    Raises:
        UnsupportedAttention: The layer needs something that this attention does not support.
    """
    step: PreparedStep | None = keywords.pop(KEYWORD, None)
    if step is None:
        raise UnsupportedAttention("it does not pass keywords on to its attention")
    if not isinstance(attention_mask, Mask):
        raise UnsupportedAttention("it builds an attention mask of its own, or none")
    if not getattr(module, "is_causal", True):
        raise UnsupportedAttention("it attends in both directions")
    window = attention_mask.sliding_window
    if window is not None and window <= 0:
        raise UnsupportedAttention(f"its layers have a sliding window of {window} keys")
    if sliding_window not in (None, window):
        raise UnsupportedAttention(
            f"its layers ask for a sliding window of {sliding_window}, and their masks for {window}"
        )
    check_keywords(keywords)
    if query.shape[1] % key.shape[1]:
        raise UnsupportedAttention(
            f"its {query.shape[1]} heads cannot share {key.shape[1]} keys and values evenly"
        )
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttention("its attention layers carry no layer_idx")
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    call = AttentionCall(layer, scale, window, softcap, s_aux)
    out = step.attend(
        call, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    return out[None], None


def check_keywords(keywords: dict[str, Any]) -> None:
    """Check Rule 1.

    Raises:
        UnsupportedAttention: A keyword could change the result; the message names the first one.
    """
    for name, value in keywords.items():
        if value is None:
            continue
        if name not in HARMLESS:
            raise UnsupportedAttention(f"it needs the attention keyword {name!r}")
        allowed = HARMLESS[name]
        if allowed is not None and value not in allowed:
            raise UnsupportedAttention(f"it needs the attention keyword {name!r} as {value!r}")


def make_mask(*_arguments: object, local_size: int | None = None, **_keywords: object) -> Mask:
    """Return the mask of layers with a window of ``local_size``, called by transformers."""
    return Mask(local_size)


def register() -> None:
    """Register ``attn_implementation="triolet_paged"`` with transformers. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, make_mask)
