"""The compiled attention for CPUs, which reads the cache's blocks in place (D12).

Rule: a step's arrays are made once, in `NativeBackend.prepare`, and live as long as the step.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.worker.forward import kernel_structs as structs
from engine.worker.forward import native

if TYPE_CHECKING:
    from engine.worker.forward.attention import AttentionCall
    from engine.worker.forward.kv_cache import KvCache
    from engine.worker.forward.packing import PackedRows


class NativeBackend:
    """An `engine.worker.forward.attention.AttentionBackend` that calls the compiled kernels."""

    label = "compiled"

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.arena = native.new_arena(library, self)

    def prepare(self, rows: PackedRows, cache: KvCache) -> NativeStep:
        """Collect the addresses of the step's rows; nothing is computed."""
        return NativeStep(self, rows, cache)


class NativeStep:
    """An `engine.worker.forward.attention.PreparedStep` with its rows in the kernels' layout."""

    def __init__(self, backend: NativeBackend, rows: PackedRows, cache: KvCache) -> None:
        self.backend = backend
        self.cache = cache
        rows = rows.short_apart()
        arrays = (rows.starts, rows.ends, rows.offsets, rows.tables, rows.slots, rows.untils)
        self._arrays = [np.ascontiguousarray(array, np.int64) for array in arrays]
        self.rows = structs.Rows(
            *(array.ctypes.data for array in self._arrays),
            len(rows.starts),
            rows.tables.shape[1],
            rows.block_size,
            rows.num_tokens,
            cache.num_blocks,
        )

    def attend(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Compute one layer's attention.

        Raises:
            MemoryError: There is no scratch memory. EngineBug: A row's blocks are not the cache's.
        """
        library = self.backend.library
        query, key, value = (tensor.contiguous() for tensor in (query, key, value))
        out = torch.empty_like(query)
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        job = native_call(
            call,
            self.cache,
            query.shape[1],
            key.shape[1],
            query.shape[2],
            None if sinks is None else sinks.data_ptr(),
        )
        status = library.triolet_attend(
            structs.KINDS[query.dtype],
            ctypes.byref(job),
            ctypes.byref(self.rows),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
            self.backend.arena,
        )
        native.check(status, "a step's attention")
        return out


def native_call(
    call: AttentionCall,
    cache: KvCache,
    heads: int,
    kv_heads: int,
    head_dim: int,
    sinks: int | None,
) -> structs.Attention:
    """Return the attention parameters of one layer for the kernels. ``sinks`` is the address of the
    layer's sinks in float32, or None for a layer without sinks. The addresses in the result are
    valid as long as ``cache`` and the sinks live."""
    return structs.Attention(
        cache.keys[call.layer].data_ptr(),
        cache.values[call.layer].data_ptr(),
        *(scales[call.layer].data_ptr() if scales else None for scales in cache.scales),
        sinks,
        structs.CACHE_KINDS[cache.dtype],
        heads,
        kv_heads,
        head_dim,
        call.sliding_window or 0,
        call.scaling,
        call.softcap or 0.0,
    )
