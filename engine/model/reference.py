"""The CPU reference backend: gather the context, then SDPA. The oracle of the faster ones.

Rule 1: correct on every device torch has, before fast. Rule 2: a row reads slots of its own
sequence only, even where masked: a masked place reads the row's first visible slot, so that no
number of another sequence, finite or not, is ever multiplied.

Rows of one token (decodes) are gathered together, in groups whose contexts differ by less than a
factor of two; a row of several tokens (a prompt's chunk) is a group of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from engine.model.attention import AttentionCall
    from engine.model.kv_cache import KvCache
    from engine.model.packing import PackedRows

    Ints = NDArray[np.int64]


class ReferenceBackend:
    """`engine.model.attention.AttentionBackend` by gather and SDPA."""

    def prepare(self, rows: PackedRows, cache: KvCache) -> ReferenceStep:
        """Group the rows; the gather indices and masks follow at the first layer that needs
        them, once for each window in use."""
        device = cache.keys[0].device
        groups = tuple(_Group(rows, members, device) for members in _group_rows(rows))
        return ReferenceStep(cache, torch.from_numpy(rows.slots).to(device), groups)


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """One step's indices; see `engine.model.attention.PreparedStep`."""

    cache: KvCache
    slots: torch.Tensor  # [num_tokens] int64
    groups: tuple[_Group, ...]

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.cache.write(call.layer, self.slots, key, value)
        out = torch.empty_like(query)  # [num_tokens, num_heads, head_dim]
        for group in self.groups:
            context = group.context(call.sliding_window)
            keys, values = self.cache.read(call.layer, context.slots)
            out[group.tokens] = attend_group(call, query[group.tokens], keys, values, context)
        return out


@dataclass(frozen=True, slots=True)
class Context:
    """What the rows of a group see: ``slots`` [num_rows, length] int64, and ``visible``
    [num_rows, num_queries, length] bool, None where every query sees all of it."""

    slots: torch.Tensor
    visible: torch.Tensor | None


@dataclass(slots=True)
class _Group:
    """Rows with equally many tokens, computed together."""

    rows: PackedRows
    members: Ints  # [num_rows] which rows
    device: torch.device
    tokens: torch.Tensor = field(init=False)  # [num_rows, num_queries] int64
    contexts: dict[int | None, Context] = field(default_factory=dict)

    def __post_init__(self) -> None:
        offsets = self.rows.offsets
        queries = offsets[self.members[0] + 1] - offsets[self.members[0]]
        tokens = offsets[self.members][:, None] + np.arange(queries)
        self.tokens = torch.from_numpy(tokens).to(self.device)

    def context(self, window: int | None) -> Context:
        """The group's context under a window; computed once for a step."""
        if window not in self.contexts:
            self.contexts[window] = self._make_context(window)
        return self.contexts[window]

    def _make_context(self, window: int | None) -> Context:
        starts, ends = self.rows.starts[self.members], self.rows.ends[self.members]
        first = first_visible(starts, window)  # [num_rows]
        places = first[:, None] + np.arange(int((ends - first).max()))  # [num_rows, length]
        queries = starts[:, None] + np.arange(self.tokens.shape[1])  # [num_rows, num_queries]
        seen = places[:, None, :] <= queries[:, :, None]
        seen &= places[:, None, :] >= first_visible(queries, window)[:, :, None]
        own = np.where(places < ends[:, None], places, first[:, None])
        slots = torch.from_numpy(self.rows.slots_at(self.members, own)).to(self.device)
        visible = None if seen.all() else torch.from_numpy(seen).to(self.device)
        return Context(slots, visible)


def first_visible(positions: Ints, window: int | None) -> Ints:
    """The first position that a query at each of ``positions`` sees: itself and the window - 1
    before it. Source: transformers, `sliding_window_overlay` (kv > q - window)."""
    if window is None:
        return np.zeros_like(positions)
    return np.maximum(positions - window + 1, 0)


def _group_rows(rows: PackedRows) -> Iterator[Ints]:
    """Decodes by the power of two of their context's length (at most twice the work of the
    shortest in a group); every longer row alone."""
    counts = np.diff(rows.offsets)
    decodes = np.flatnonzero(counts == 1)
    sizes = np.ceil(np.log2(rows.ends[decodes]))
    for size in np.unique(sizes):
        yield decodes[sizes == size]
    for row in np.flatnonzero(counts > 1):
        yield np.array([row])


def attend_group(
    call: AttentionCall,
    query: torch.Tensor,  # [num_rows, num_queries, num_heads, head_dim]
    keys: torch.Tensor,  # [num_rows, length, num_kv_heads, head_dim]
    values: torch.Tensor,  # as keys
    context: Context,
) -> torch.Tensor:
    """Attention of a group: [num_rows, num_queries, num_heads, head_dim]."""
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if call.softcap is not None:
        return _capped_attention(call, query, keys, values, context.visible)
    visible = None if context.visible is None else context.visible[:, None]
    if query.shape[1] == 1:
        # One query: the heads that share a key head stand in as its queries, and no key is copied.
        packed = query.view(query.shape[0], keys.shape[1], -1, query.shape[3])
        out = scaled_dot_product_attention(packed, keys, values, visible, scale=call.scaling)
        return out.reshape(query.shape)
    out = scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, visible, scale=call.scaling, enable_gqa=True
    )
    return out.transpose(1, 2)


def _capped_attention(
    call: AttentionCall,
    query: torch.Tensor,  # [num_rows, num_queries, num_heads, head_dim]
    keys: torch.Tensor,  # [num_rows, num_kv_heads, length, head_dim]
    values: torch.Tensor,  # as keys
    visible: torch.Tensor | None,  # [num_rows, num_queries, length] bool
) -> torch.Tensor:
    """The same with capped scores, which SDPA does not have: softmax in float32, the rest in the
    model's dtype, as transformers' eager attention does."""
    num_rows, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    # [num_rows, num_kv_heads, heads per kv head, num_queries, head_dim]
    grouped = query.view(num_rows, num_queries, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(grouped, keys[:, :, None].transpose(-1, -2)) * call.scaling
    assert call.softcap is not None
    scores = call.softcap * torch.tanh(scores / call.softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    out = torch.matmul(weights, values[:, :, None])
    return out.permute(0, 3, 1, 2, 4).reshape(num_rows, num_queries, num_heads, head_dim)
