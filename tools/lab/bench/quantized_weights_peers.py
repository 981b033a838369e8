"""Measures weights of 8 and 4 bits beside llama.cpp's and vLLM's: tokens/s, and engines' memory.

The checkpoints, the prompts and what is on the clock are those of the bench `step`. llama.cpp has
the same weights in its own formats, which its own quantiser makes: Q8_0, Q4_0 and Q4_K_M. All
engines take turns; one that waits is suspended. Bits per weight are 8.5 for int8 and Q8_0, 4.5
for int4 and Q4_0. The head has 8 bits in int4 (in a model with tied embeddings), 6 in Q4_K_M.
vLLM, if it is installed, serves the weights in W8A8 (`tools.lab.bench.w8a8`), if it can load that.

`BENCH_ONLY` is a regular expression that selects measurements by name.

q05's int4 misses its bar with one stream: the step waits for memory, and a token reads as many
bytes here as with llama.cpp, whose quantiser keeps q05's head in 8 bits, too, because Q6_K's blocks
of 256 do not divide its 896 inputs. A head of fewer bits would be read faster; there is no kernel
for one.
"""

from __future__ import annotations

import os
import re
import statistics
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tools.lab.bench.checkpoints import gguf
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.quantized_weights import BATCHES, SHAPES, cases
from tools.lab.bench.step import Measured, memory_rows, settings
from tools.lab.bench.w8a8 import w8a8
from tools.lab.peers.environments import PEERS, Peer
from tools.lab.peers.process import OURS, EngineProcess, start

if TYPE_CHECKING:
    from tools.lab.bench.step import Case

MEASURES = ("engine/core", "engine/worker", "engine/kernels")

OWN = {"bfloat16": "none", "int8": "int8", "int4": "int4"}
KINDS = ("Q8_0", "Q4_0", "Q4_K_M")
LIKE = {"int8": "Q8_0", "int4": "Q4_0"}  # with as many bits
W8A8 = "vLLM's W8A8"
# One stream against llama.cpp's format with as many bits; several streams against its fastest one.
BAR_ONE = 1.15
BAR_MANY = 1.5


def ratio_row(name: str, own: list[float], other: list[float], bar: float | None) -> Row:
    """Return the row of our tokens/s divided by another engine's of the same turn."""
    ratios = [mine / theirs for mine, theirs in zip(own, other, strict=True)]
    return row_of(name, ratios, "×", bar=bar, better="higher")


def compare(case: Case, engines: list[EngineProcess]) -> list[Row]:
    """Return the rows of one case."""
    samples = repeat_in_turn([Measured(engine, case) for engine in engines])
    by_name = {engine.name: found for engine, found in zip(engines, samples, strict=True)}
    rows = [
        row_of(f"{case.name}: {name}", found, "tokens/s", better="higher")
        for name, found in by_name.items()
    ]
    best = max(KINDS, key=lambda kind: statistics.median(by_name[kind]))
    for own, like in LIKE.items():
        if case.what == "decode" and case.batch == 1:
            name, other, bar = f"against {like}", like, BAR_ONE
        else:
            name, other = "against the best of llama.cpp's", best
            bar = BAR_MANY if case.what == "decode" else None
        rows.append(ratio_row(f"{case.name}, {name}: {own}", by_name[own], by_name[other], bar))
    if W8A8 in by_name:
        name = f"{case.name}, against {W8A8}: int8"
        rows.append(ratio_row(name, by_name["int8"], by_name[W8A8], None))
    return rows


def run() -> list[Row]:
    """Return the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    rows: list[Row] = []
    for shape in SHAPES:
        chosen = [case for case in cases(shape) if wanted.search(case.name)]
        if not chosen:
            continue
        common = settings(shape, max(BATCHES))
        with ExitStack() as stack:
            engines = []
            for name, quantization in OWN.items():
                own = {"quantization": quantization}
                engines.append(_start(stack, name, OURS, common | own))
            for kind in KINDS:
                if (file := gguf(shape, kind)) is None:
                    raise SystemExit("python -m tools.lab.peers install llama.cpp")
                engines.append(
                    _start(stack, kind, PEERS["llama.cpp"], common | {"gguf": str(file)})
                )
            vllm = PEERS["vllm"]
            model = str(w8a8(shape)) if vllm.is_installed else ""
            if other := start(vllm, common | {"model": model}):
                engines.append(_kept(stack, W8A8, other))
            for case in chosen:
                rows += compare(case, engines)
            rows += memory_rows(shape, engines)
    return rows


def _start(stack: ExitStack, name: str, peer: Peer, chosen: dict[str, Any]) -> EngineProcess:
    return _kept(stack, name, EngineProcess(peer, chosen))


def _kept(stack: ExitStack, name: str, engine: EngineProcess) -> EngineProcess:
    """Name an engine, as one peer may have several, and have the stack close it."""
    engine.name = name
    stack.callback(engine.close)
    return engine
