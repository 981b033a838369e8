"""The attention for CUDA: torch's `varlen_attn`, one call for all rows of a step (D12).

Rule 1: a step's indices are computed once, in `VarlenBackend.prepare`, and sent in one copy. A
layer neither waits for the device nor sends data to it. Rule 2: a row reads only slots of its own
sequence that are written.

A layer's keys and values are first gathered into packed rows. `varlen_attn` could take a block
table instead, but the kernel that torch ships does not: with FlashAttention 2 a block table is an
error (torch's pull request 175924), and FlashAttention's own check requires blocks of a multiple of
256 tokens, where ours hold 16 by default. FlashAttention 3, which takes one, is a separate package.

Causality is aligned to the lower right: the last query of a row is at its last key. A window
(left, right) counts the keys beside the query's own, so a window of w tokens is (w - 1, 0). The
kernel has no sinks, but returns the log-sum-exp of each query's scores, from which follows the
share of the weights that a sink leaves to the keys. The reference backend computes steps in which
image tokens see later tokens of their image, because one call has one window for all its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from engine.worker.forward.reference_attention import ReferenceBackend
from engine.worker.forward.transfer import send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.worker.forward.attention import AttentionCall
    from engine.worker.forward.kv_cache import KvCache
    from engine.worker.forward.packing import Ints, PackedRows
    from engine.worker.forward.reference_attention import ReferenceStep
    from engine.worker.load.architectures import LayerShape

# The limits of FlashAttention 2. Source: torch's flash_attn/flash_api.cpp, `mha_varlen_fwd`.
DTYPES = (torch.float16, torch.bfloat16)
WIDTH_STEP, WIDTH_MOST = 8, 256
CAPABILITY_LEAST = (8, 0)


def objection(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[LayerShape],
    calls: Sequence[AttentionCall],
) -> str:
    """Return why the kernel cannot compute these layers on a CUDA device, or "" if it can."""
    if dtype not in DTYPES:
        return f"CUDA's kernel does not compute in {dtype}"
    widths = sorted({shape.head_dim for shape in shapes})
    if any(width % WIDTH_STEP or width > WIDTH_MOST for width in widths):
        return (
            f"its heads are {widths[-1]} wide, and CUDA's kernel needs a multiple of {WIDTH_STEP} "
            f"up to {WIDTH_MOST}"
        )
    if any(call.softcap is not None for call in calls):
        return "CUDA's kernel does not cap scores"
    have = torch.cuda.get_device_capability(device)
    if have < CAPABILITY_LEAST:
        least, own = (".".join(map(str, version)) for version in (CAPABILITY_LEAST, have))
        return f"CUDA's kernel needs compute capability {least}, and {device} has {own}"
    return ""


class VarlenBackend:
    """An `engine.worker.forward.attention.AttentionBackend` that calls `varlen_attn`."""

    label = "CUDA's variable-length"

    def prepare(self, rows: PackedRows, cache: KvCache) -> VarlenStep | ReferenceStep:
        """Compute the step's indices and send them to the device."""
        if not rows.is_causal:
            return ReferenceBackend().prepare(rows, cache)
        context, key_offsets = _contexts(rows)
        slots, context_slots, queries, keys = send(
            (rows.slots, context, rows.offsets, key_offsets), cache.keys[0].device
        )
        return VarlenStep(
            cache,
            slots,
            context_slots,
            queries.to(torch.int32),
            keys.to(torch.int32),
            int(np.diff(rows.offsets).max()),
            int(rows.ends.max()),
        )


@dataclass(frozen=True, slots=True)
class VarlenStep:
    """An `engine.worker.forward.attention.PreparedStep` with its rows in the kernel's layout."""

    cache: KvCache
    slots: torch.Tensor  # [num_tokens] int64, where each token's key and value are written
    context_slots: torch.Tensor  # [num_keys] int64, the slots of each row's whole context
    query_offsets: torch.Tensor  # [num_rows + 1] int32
    key_offsets: torch.Tensor  # [num_rows + 1] int32
    queries_most: int  # the queries of the row with the most
    keys_most: int

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write keys and values into the cache and compute the attention in one call."""
        self.cache.write(call.layer, self.slots, key, value)
        keys, values = self.cache.read(call.layer, self.context_slots, query.dtype)
        result = varlen_attn(
            query,
            keys,
            values,
            self.query_offsets,
            self.key_offsets,
            self.queries_most,
            self.keys_most,
            scale=call.scaling,
            window_size=(-1 if call.sliding_window is None else call.sliding_window - 1, 0),
            enable_gqa=True,
            return_aux=AuxRequest(lse=call.sinks is not None),
        )
        if call.sinks is None:
            assert isinstance(result, torch.Tensor)  # a pair only with ``lse``
            return result
        out, sums = result
        # ``sums`` are [num_heads, num_tokens], unlike in the kernel's docstring.
        share = torch.sigmoid(sums - call.sinks.float()[:, None]).T[..., None]
        return (out * share).to(out.dtype)


def _contexts(rows: PackedRows) -> tuple[Ints, Ints]:
    """Return the slots of every row's whole context, one row after another, [num_keys], and the
    offsets of the rows, [num_rows + 1]."""
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows.ends)))
    owner = np.repeat(np.arange(len(rows.ends)), rows.ends)
    positions = np.arange(offsets[-1]) - offsets[owner]
    return rows.slots_at(owner, positions[:, None])[:, 0], offsets
