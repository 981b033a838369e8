"""Measures the machine's limits with the threads of the bench `step`: how fast it multiplies
matrices and streams weights for one row, and how fast a decode's attention reads the cache.

The product is 2048 × 2048 × 2048. The stream multiplies s135's head (49,152 × 576 in bfloat16, 57
MB) by a vector, plainly and, where possible, packed beforehand by oneDNN. Its bytes are those of
the weights. The attention is that of a step of s135 with shuffled blocks, for 8 sequences of 4,096
tokens and for 32 of 128. Its bytes are those of keys and values.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.worker.forward import native
from engine.worker.forward.attention import AttentionCall
from engine.worker.forward.kv_cache import KvCache
from engine.worker.forward.native_attention import NativeBackend
from engine.worker.forward.packing import pack
from engine.worker.load.architectures import LayerShape
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.step import THREADS

if TYPE_CHECKING:
    from collections.abc import Callable

MEASURES = ("engine/kernels", "engine/worker/forward")

SIDE = 2048
VOCAB, HIDDEN = 49_152, 576
TURNS = 20
HEADS, LAYERS, CACHED, BLOCK = 9, 30, LayerShape(3, 64), 16
READ = ((8, 4096), (32, 128))  # sequences, tokens of each


def per_turn(do: Callable[[], object]) -> float:
    """Return the mean time of a call in seconds, over `TURNS` calls."""
    start = time.perf_counter()
    for _ in range(TURNS):
        do()
    return (time.perf_counter() - start) / TURNS


def product(dtype: torch.dtype) -> Callable[[], float]:
    """Return a measurement of the product in GFLOP/s."""
    one, other = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
    return lambda: 2e-9 * SIDE**3 / per_turn(lambda: one @ other)


def streams() -> dict[str, Callable[[], float]]:
    """Return measurements in GB/s of each way to stream the weights."""
    weight = torch.randn(VOCAB, HIDDEN).bfloat16()
    row = torch.randn(1, HIDDEN).bfloat16()
    size = 1e-9 * weight.numel() * weight.element_size()
    found: dict[str, Callable[[], float]] = {
        "weights streamed for one row, F.linear": lambda: (
            size / per_turn(lambda: torch.nn.functional.linear(row, weight))
        )
    }
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        call = torch.ops.mkldnn._linear_pointwise
        found["weights streamed for one row, packed"] = lambda: (
            size / per_turn(lambda: call(row, packed, None, "none", [], ""))
        )
    return found


def reads() -> dict[str, Callable[[], float]]:
    """Return measurements in GB/s of reading the cache, or none without the kernels."""
    try:
        backend = NativeBackend(native.load())
    except native.Unavailable:
        return {}
    return {
        f"cache read by attention, {count} × {length}": attention(backend, count, length)
        for count, length in READ
    }


def attention(backend: NativeBackend, count: int, length: int) -> Callable[[], float]:
    """Return a measurement in GB/s of a decode's attention in all layers, for ``count`` sequences
    of ``length`` tokens."""
    blocks = length // BLOCK
    cache = KvCache(
        [CACHED] * LAYERS, count * blocks, BLOCK, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    order = random.Random(0).sample(range(count * blocks), count * blocks)
    tables = np.array(order).reshape(count, blocks)
    rows = pack([length - 1] * count, [1] * count, list(tables), BLOCK)
    step = backend.prepare(rows, cache)
    query, key = (
        torch.randn(count, heads, CACHED.head_dim).bfloat16()
        for heads in (HEADS, CACHED.num_kv_heads)
    )
    size = 2e-9 * LAYERS * count * length * CACHED.numbers_per_token

    def attend() -> None:
        for layer in range(LAYERS):
            step.attend(AttentionCall(layer, 0.125), query, key, key)

    return lambda: size / per_turn(attend)


@torch.inference_mode()
def run() -> list[Row]:
    """Return the bench's rows."""
    torch.set_num_threads(THREADS)
    ways = streams() | reads()
    fast, plain, *others = repeat_in_turn(
        [product(torch.bfloat16), product(torch.float32), *ways.values()]
    )
    return [
        row_of("product of matrices, bfloat16", fast, "GFLOP/s", better="higher"),
        row_of("product of matrices, float32", plain, "GFLOP/s", better="higher"),
        *(
            row_of(name, found, "GB/s", better="higher")
            for name, found in zip(ways, others, strict=True)
        ),
    ]
