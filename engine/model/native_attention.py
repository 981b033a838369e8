"""The CPU's compiled attention: blocks read in place (D12).

Rule: a step's arrays are made once, in `prepare`, and live as long as the step does.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.model import native

if TYPE_CHECKING:
    from engine.model.attention import AttentionCall
    from engine.model.kv_cache import KvCache
    from engine.model.packing import PackedRows


class NativeBackend:
    """`engine.model.attention.AttentionBackend` by the compiled kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.arena = library.triolet_arena_new()
        weakref.finalize(self, library.triolet_arena_free, self.arena)

    def prepare(self, rows: PackedRows, cache: KvCache) -> NativeStep:
        """The rows' addresses; nothing is computed."""
        return NativeStep(self, rows, cache)


class NativeStep:
    """One step's rows as the kernels take them; see `engine.model.attention.PreparedStep`."""

    def __init__(self, backend: NativeBackend, rows: PackedRows, cache: KvCache) -> None:
        self.backend = backend
        self.cache = cache
        arrays = (rows.starts, rows.ends, rows.offsets, rows.tables, rows.slots)
        self._arrays = [np.ascontiguousarray(array, np.int64) for array in arrays]
        self.rows = native.Rows(
            *(array.ctypes.data for array in self._arrays),
            len(rows.starts),
            rows.tables.shape[1],
            rows.block_size,
            rows.num_tokens,
        )

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """One layer's part of the step.

        Raises:
            MemoryError: there is no memory to work in; keys and values may be written.
        """
        library, dtype = self.backend.library, self.cache.keys[call.layer].dtype
        query, key, value = (one.contiguous() for one in (query, key, value))
        out = torch.empty_like(query)
        asked = native_call(call, self.cache, query.shape[1], key.shape[1], query.shape[2])
        status = library.triolet_attend(
            native.KINDS[dtype],
            ctypes.byref(asked),
            ctypes.byref(self.rows),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
            self.backend.arena,
        )
        if status:
            raise MemoryError("no memory for a step's attention")
        return out


def native_call(
    call: AttentionCall, cache: KvCache, heads: int, kv_heads: int, head_dim: int
) -> native.Attention:
    """One layer's attention, as the kernels take it; its addresses live as long as ``cache``."""
    return native.Attention(
        cache.keys[call.layer].data_ptr(),
        cache.values[call.layer].data_ptr(),
        heads,
        kv_heads,
        head_dim,
        call.sliding_window or 0,
        call.scaling,
        call.softcap or 0.0,
    )
