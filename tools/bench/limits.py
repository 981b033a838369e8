"""What the machine could do at most, on the threads that `step` has: how fast its cores multiply
matrices, and how fast weights stream through them for one row.

The product is 2048 by 2048 by 2048. The stream is s135's head, 49,152 by 576 in bfloat16, 57 MB,
times a vector: plainly, and packed beforehand by oneDNN where it can be. Bytes are those of the
weights.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from tools.bench.frame import Row, repeat_in_turn, row_of
from tools.bench.step import THREADS

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 2048
VOCAB, HIDDEN = 49_152, 576
TURNS = 20


def per_turn(do: Callable[[], object]) -> float:
    """Seconds of one of `TURNS`."""
    start = time.perf_counter()
    for _ in range(TURNS):
        do()
    return (time.perf_counter() - start) / TURNS


def product(dtype: torch.dtype) -> Callable[[], float]:
    """GFLOP/s of the product."""
    one, other = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
    return lambda: 2e-9 * SIDE**3 / per_turn(lambda: one @ other)


def streams() -> dict[str, Callable[[], float]]:
    """GB/s of each way to stream the weights."""
    weight = torch.randn(VOCAB, HIDDEN).bfloat16()
    row = torch.randn(1, HIDDEN).bfloat16()
    size = 1e-9 * weight.numel() * weight.element_size()
    found: dict[str, Callable[[], float]] = {
        "F.linear": lambda: size / per_turn(lambda: torch.nn.functional.linear(row, weight))
    }
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        call = torch.ops.mkldnn._linear_pointwise
        found["packed"] = lambda: size / per_turn(lambda: call(row, packed, None, "none", [], ""))
    return found


@torch.inference_mode()
def run() -> list[Row]:
    torch.set_num_threads(THREADS)
    ways = streams()
    fast, plain, *streamed = repeat_in_turn(
        [product(torch.bfloat16), product(torch.float32), *ways.values()]
    )
    return [
        row_of("product of matrices, bfloat16", fast, "GFLOP/s", better="higher"),
        row_of("product of matrices, float32", plain, "GFLOP/s", better="higher"),
        *(
            row_of(f"weights streamed for one row, {name}", found, "GB/s", better="higher")
            for name, found in zip(ways, streamed, strict=True)
        ),
    ]
