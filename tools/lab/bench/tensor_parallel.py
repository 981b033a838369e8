"""Measures a divided model: two ranks of one thread each, against one process of one and of two.

All three engines are worker processes, driven by our scheduler without a server. They take turns,
with the same prompts and checkpoint. The memory is their processes' resident memory.

On one socket, the ranks share the memory bus and the cores that a single process would have, so
that dividing can only cost: this bench shows how much. A gain needs a GPU for each rank.

`BENCH_ONLY` is a regular expression that selects measurements by name.

Each sum of the ranks is a round trip over loopback: 48 in a step of q05, and 24 in one of d40, a
small model of 12 layers.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tools.lab.bench.checkpoints import checkpoint
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.peers.triolet import TrioletEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MEASURES = ("engine/worker", "engine/kernels")

SHAPES = ("d40", "q05")  # not s135, whose 3 key-value heads two ranks cannot share
BATCHES = (1, 8)
STEPS = 16
PROMPT_TOKENS = 32
PREFILL_TOKENS = 256
VOCAB = 8_000  # of the drawn prompts
SETTINGS = {
    "dtype": "bfloat16",
    "kv_bytes": 1 << 28,
    "seqs": 16,
    "runner": "process",
}


@dataclass(frozen=True)
class Way:
    """How a model is run."""

    name: str
    tp: int
    threads: int  # of each process


WAYS = (Way("1 process × 1 thread", 1, 1), Way("1 process × 2 threads", 1, 2),
        Way("2 ranks × 1 thread", 2, 1))  # fmt: skip
BASE = WAYS[0]


def prompts(count: int, length: int) -> list[list[int]]:
    """Return random prompts, which are the same at every call."""
    rng = random.Random(7)
    return [[rng.randrange(10, VOCAB) for _ in range(length)] for _ in range(count)]


def decode_rate(engine: TrioletEngine, batch: int) -> float:
    """Return how many tokens a second a decode of ``batch`` sequences makes."""
    found = engine.decode(prompts(batch, PROMPT_TOKENS), STEPS)
    rate: float = batch * STEPS / found["seconds"]
    return rate


def prefill_rate(engine: TrioletEngine) -> float:
    """Return how many tokens of a prompt are computed in a second."""
    found = engine.prefill(prompts(1, PREFILL_TOKENS))
    rate: float = PREFILL_TOKENS / found["seconds"]
    return rate


def cases(shape: str) -> dict[str, Callable[[TrioletEngine], float]]:
    """Return what is measured of a shape."""
    every: dict[str, Callable[[TrioletEngine], float]] = {
        **{f"decode, batch {one}": partial(decode_rate, batch=one) for one in BATCHES},
        f"prefill of {PREFILL_TOKENS}": prefill_rate,
    }
    only = os.environ.get("BENCH_ONLY", "")
    return {what: one for what, one in every.items() if re.search(only, f"{shape}, {what}")}


def compare(shape: str, engines: Mapping[Way, TrioletEngine]) -> list[Row]:
    """Return the rows of one shape."""
    rows = []
    for what, measure in cases(shape).items():
        samples = repeat_in_turn([partial(measure, engine) for engine in engines.values()])
        by_way = dict(zip(engines, samples, strict=True))
        for way, found in by_way.items():
            name = f"{shape}, {what}: {way.name}"
            rows.append(row_of(name, found, "tokens/s", better="higher"))
            if way is not BASE:
                ratios = [one / base for one, base in zip(found, by_way[BASE], strict=True)]
                rows.append(row_of(f"{name}, against {BASE.name}", ratios, "×", better="higher"))
    for way, engine in engines.items():
        held = [engine.worker_bytes / way.tp / 1e6]
        rows.append(row_of(f"{shape}, memory of a process: {way.name}", held, "MB"))
    return rows


def run() -> list[Row]:
    """Return the rows of all shapes."""
    rows = []
    for shape in SHAPES:
        if not cases(shape):
            continue
        model = str(checkpoint(shape))
        engines = {
            way: TrioletEngine({**SETTINGS, "model": model, "threads": way.threads, "tp": way.tp})
            for way in WAYS
        }
        try:
            rows += compare(shape, engines)
        finally:
            for engine in engines.values():
                engine.close()
    return rows
