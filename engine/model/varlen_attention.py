"""CUDA's attention: torch's `varlen_attn`, one call for all rows of a step (D12).

Rule 1: what a step needs is made once, in `prepare`, and sent in one copy; a layer neither waits
for the device nor sends it anything.
Rule 2: a row reads slots of its own sequence only, and only those that are written.

`varlen_attn` takes a block table too, and this does not use it: of the kernels behind it, the one
that torch ships takes none (torch's pull request 175924: with FlashAttention 2 it is an error;
FlashAttention's own check is for blocks of a multiple of 256 tokens, and ours hold 16 where
nobody says otherwise), and FlashAttention 3, which does, is a package of its own. So a layer's
keys and values are gathered into packed rows first.

Causality is to the lower right: the last query of a row stands at its last key. A window of
(left, right) is of keys beside the query's own, so ours of w tokens is (w - 1, 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from engine.model.transfer import send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.model.architectures import LayerShape
    from engine.model.attention import AttentionCall
    from engine.model.kv_cache import KvCache
    from engine.model.packing import Ints, PackedRows

# What FlashAttention 2 checks: source, torch's flash_attn/flash_api.cpp, `mha_varlen_fwd`.
DTYPES = (torch.float16, torch.bfloat16)
WIDTH_STEP, WIDTH_MOST = 8, 256
CAPABILITY_LEAST = (8, 0)


def objection(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[LayerShape],
    calls: Sequence[AttentionCall],
) -> str:
    """Why the kernel cannot compute these layers on a CUDA device; "" where it can."""
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
        least, own = (".".join(map(str, one)) for one in (CAPABILITY_LEAST, have))
        return f"CUDA's kernel needs compute capability {least}, and {device} has {own}"
    return ""


class VarlenBackend:
    """`engine.model.attention.AttentionBackend` by `varlen_attn`."""

    def prepare(self, rows: PackedRows, cache: KvCache) -> VarlenStep:
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
    """One step's rows as the kernel takes them; see `engine.model.attention.PreparedStep`."""

    cache: KvCache
    slots: torch.Tensor  # [num_tokens] int64, where each token's key and value are written
    context_slots: torch.Tensor  # [num_keys] int64, each row's from its first position on
    query_offsets: torch.Tensor  # [num_rows + 1] int32
    key_offsets: torch.Tensor  # [num_rows + 1] int32
    queries_most: int  # of one row
    keys_most: int

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.cache.write(call.layer, self.slots, key, value)
        keys, values = self.cache.read(call.layer, self.context_slots)
        out = varlen_attn(
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
        )
        assert isinstance(out, torch.Tensor)  # a pair only where it is asked for one
        return out


def _contexts(rows: PackedRows) -> tuple[Ints, Ints]:
    """The slots of every row's whole context, one row after another, and where each begins:
    [num_keys] and [num_rows + 1]."""
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows.ends)))
    owner = np.repeat(np.arange(len(rows.ends)), rows.ends)
    positions = np.arange(offsets[-1]) - offsets[owner]
    return rows.slots_at(owner, positions[:, None])[:, 0], offsets
