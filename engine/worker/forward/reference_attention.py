"""Gathers each context and calls SDPA: the reference with which tests compare faster backends.

Rule 1: this backend runs on every device of torch; correctness goes before speed. Rule 2: a row
reads only slots of its own sequence, even where masked: a masked position reads the row's first
visible slot, so that no number of another sequence, finite or not, is ever multiplied.

Rows of one token (decodes) are computed in groups whose contexts differ by less than a factor of
two. A row of several tokens (a prompt's chunk) is a group of its own.
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

    from engine.worker.forward.attention import AttentionCall
    from engine.worker.forward.kv_cache import KvCache
    from engine.worker.forward.packing import PackedRows

    Ints = NDArray[np.int64]


class ReferenceBackend:
    """An `engine.worker.forward.attention.AttentionBackend` that gathers and calls SDPA."""

    label = "reference"

    def prepare(self, rows: PackedRows, cache: KvCache) -> ReferenceStep:
        """Group the rows. The first layer of each window computes the gather indices and masks,
        which later layers reuse."""
        device = cache.keys[0].device
        groups = tuple(_Group(rows, members, device) for members in _group_rows(rows))
        return ReferenceStep(cache, torch.from_numpy(rows.slots).to(device), groups)


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """An `engine.worker.forward.attention.PreparedStep` with the slots and groups of a step."""

    cache: KvCache
    slots: torch.Tensor  # [num_tokens] int64
    groups: tuple[_Group, ...]

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write keys and values into the cache and compute the attention of all groups."""
        self.cache.write(call.layer, self.slots, key, value)
        out = torch.empty_like(query)  # [num_tokens, num_heads, head_dim]
        for group in self.groups:
            context = group.context(call.sliding_window)
            keys, values = self.cache.read(call.layer, context.slots, query.dtype)
            out[group.tokens] = attend_group(call, query[group.tokens], keys, values, context)
        return out


@dataclass(frozen=True, slots=True)
class Context:
    """The context of a group's rows: ``slots`` [num_rows, length] int64, and ``visible``
    [num_rows, num_queries, length] bool, or None if every query sees every slot."""

    slots: torch.Tensor
    visible: torch.Tensor | None


@dataclass(slots=True)
class _Group:
    """Rows with equal numbers of tokens, which are computed together."""

    rows: PackedRows
    members: Ints  # [num_rows] indices into ``rows``
    device: torch.device
    tokens: torch.Tensor = field(init=False)  # [num_rows, num_queries] int64
    contexts: dict[int | None, Context] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = torch.from_numpy(self._tokens()).to(self.device)

    def _tokens(self) -> Ints:
        offsets = self.rows.offsets
        queries = offsets[self.members[0] + 1] - offsets[self.members[0]]
        return offsets[self.members][:, None] + np.arange(queries)

    def context(self, window: int | None) -> Context:
        """Return the group's context for layers with this window, computed once per step."""
        if window not in self.contexts:
            self.contexts[window] = self._make_context(window)
        return self.contexts[window]

    def _make_context(self, window: int | None) -> Context:
        starts, ends = self.rows.starts[self.members], self.rows.ends[self.members]
        first = first_visible(starts, window)  # [num_rows]
        places = first[:, None] + np.arange(int((ends - first).max()))  # [num_rows, length]
        tokens = self._tokens()  # [num_rows, num_queries]
        queries, untils = self.rows.positions[tokens], self.rows.untils[tokens]
        seen = places[:, None, :] < untils[:, :, None]
        seen &= places[:, None, :] >= first_visible(queries, window)[:, :, None]
        own = np.where(places < ends[:, None], places, first[:, None])
        slots = torch.from_numpy(self.rows.slots_at(self.members, own)).to(self.device)
        visible = None if seen.all() else torch.from_numpy(seen).to(self.device)
        return Context(slots, visible)


def first_visible(positions: Ints, window: int | None) -> Ints:
    """Return the first position that a query at each of ``positions`` sees. A query sees its own
    position and the window - 1 before it. Source: transformers, `sliding_window_overlay`
    (kv > q - window)."""
    if window is None:
        return np.zeros_like(positions)
    return np.maximum(positions - window + 1, 0)


def _group_rows(rows: PackedRows) -> Iterator[Ints]:
    """Yield groups of row indices: decodes by the power of two of their context's length, so that
    no group pads a context to more than twice its length; every longer row alone."""
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
    """Compute a group's attention, [num_rows, num_queries, num_heads, head_dim]."""
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if call.softcap is not None or call.sinks is not None:
        return _explicit_attention(call, query, keys, values, context.visible)
    visible = None if context.visible is None else context.visible[:, None]
    if query.shape[1] == 1:
        # Of a row of one token, SDPA gets the heads of a key head as queries: no key is copied.
        packed = query.view(query.shape[0], keys.shape[1], -1, query.shape[3])
        out = scaled_dot_product_attention(packed, keys, values, visible, scale=call.scaling)
        return out.reshape(query.shape)
    out = scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, visible, scale=call.scaling, enable_gqa=True
    )
    return out.transpose(1, 2)


def _explicit_attention(
    call: AttentionCall,
    query: torch.Tensor,  # [num_rows, num_queries, num_heads, head_dim]
    keys: torch.Tensor,  # [num_rows, num_kv_heads, length, head_dim]
    values: torch.Tensor,  # as keys
    visible: torch.Tensor | None,  # [num_rows, num_queries, length] bool
) -> torch.Tensor:
    """Compute a group's attention with capped scores or sinks, which SDPA does not support. The
    softmax is in float32 and the rest in the model's dtype, as in transformers' eager attention."""
    num_rows, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    # [num_rows, num_kv_heads, heads per kv head, num_queries, head_dim]
    grouped = query.view(num_rows, num_queries, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(grouped, keys[:, :, None].transpose(-1, -2)) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype).view(num_kv_heads, -1, 1, 1)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = weights[..., : keys.shape[2]]  # without the weights of the sinks
    out = torch.matmul(weights, values[:, :, None])
    return out.permute(0, 3, 1, 2, 4).reshape(num_rows, num_queries, num_heads, head_dim)
