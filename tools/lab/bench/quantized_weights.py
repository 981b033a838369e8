"""Measures weights of 8 and 4 bits against bfloat16: tokens/s, and memory while a model loads.

The tokens/s are those of the bench `step`: engines without a server, each in a process of its own,
with the same random-weight checkpoint and prompts. They take turns; one that waits is suspended.

The memory is what a process has allocated (RssAnon), less what it had before the load: libraries,
kernels and the tokenizer. A thread looks at it every millisecond, so that the highest value is
known, too. RssAnon leaves out mapped files, such as the checkpoint. The memory that a load
takes beside the weights (constraints, the KV pool, activations) is measured with a tiny model of
the same vocabulary, and is subtracted.

The last rows are those of `tools.lab.bench.variants`: kernels of other processors.

`BENCH_ONLY` is a regular expression that selects measurements by name.

Without VNNI (Zen 3), a prompt's int8 products of s135 gain 1.2 times and miss the bar of 1.3.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tools.lab.bench import variants
from tools.lab.bench.checkpoints import checkpoint
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.step import Case, Measured, settings
from tools.lab.bench.wire import ROOT
from tools.lab.peers.process import OURS, EngineProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

MEASURES = ("engine/worker", "engine/kernels")

SHAPES = ("s135", "q05")
PLAIN = "bfloat16"
WAYS = {PLAIN: "none", "bfloat16 int8": "int8", "bfloat16 int4": "int4"}
BATCHES = (1, 8, 32)
BARS = {("decode", 8): 1.0, ("decode", 32): 1.0}  # against bfloat16
BARS_PREFILL = {"bfloat16 int8": 1.3, "bfloat16 int4": 1.0}
BARS_MEMORY = {"bfloat16 int8": 0.58, "bfloat16 int4": 0.38}  # against bfloat16
BAR_PEAK = 1.3


def cases(shape: str) -> list[Case]:
    """Return what is measured of a shape."""
    decodes = [Case(shape, "decode", batch, 129, None) for batch in BATCHES]
    return [*decodes, Case(shape, "prefill", 1, 1024, None)]


def bar_of(case: Case, way: str) -> float | None:
    """Return the bar of a case's tokens/s, divided by those of bfloat16."""
    return BARS_PREFILL[way] if case.what == "prefill" else BARS.get((case.what, case.batch))


def compare(case: Case, engines: Sequence[EngineProcess]) -> list[Row]:
    """Return the rows of one case."""
    samples = repeat_in_turn([Measured(engine, case) for engine in engines])
    by_way = dict(zip(WAYS, samples, strict=True))
    rows = [
        row_of(f"{case.name}: {way}", found, "tokens/s", better="higher")
        for way, found in by_way.items()
    ]
    for way in (way for way in WAYS if way != PLAIN):
        ratios = [own / plain for own, plain in zip(by_way[way], by_way[PLAIN], strict=True)]
        name = f"{case.name}, against {PLAIN}: {way}"
        rows.append(row_of(name, ratios, "×", bar=bar_of(case, way), better="higher"))
    return rows


def anonymous_bytes() -> int:
    """Return how many bytes of anonymous memory this process has resident (RssAnon)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


class Watch:
    """A context in which a thread reads this process's memory every millisecond. ``peak`` is the
    highest value, in bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_done.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())


def load_once(directory: str, quantization: str) -> dict[str, float]:
    """Load a model in this process. Return the bytes by which the process has grown at the end and
    at most, the bytes of the weights, and the seconds of the load."""
    from engine.worker.forward import native
    from engine.worker.interface import RunnerSpec
    from engine.worker.text.runner import TorchRunner
    from engine.worker.tokenizing.tokenizer import load_tokenizer

    native.load()
    spec = RunnerSpec(
        directory,
        dtype=PLAIN,
        quantization=quantization,
        kv_bytes=1 << 22,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        threads=2,
    )
    tokenizer = load_tokenizer(Path(directory))
    before, start = anonymous_bytes(), time.perf_counter()
    del tokenizer  # the load makes its own
    runner = TorchRunner(spec)
    with Watch() as watch:
        runner.load(lambda _progress: None)
    seconds = time.perf_counter() - start
    return {
        "end": anonymous_bytes() - before,
        "peak": watch.peak - before,
        "weights": float(runner._model.num_bytes),  # type: ignore[union-attr]
        "seconds": seconds,
    }


def in_process(directory: Path, quantization: str) -> dict[str, float]:
    """Do `load_once` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "tools.lab.bench.quantized_weights",
        str(directory),
        quantization,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def memory(shape: str) -> list[Row]:
    """Return the rows of the memory of a shape's weights."""
    loads = [partial(in_process, checkpoint(shape), way) for way in WAYS.values()]
    *found, thin = repeat_in_turn([*loads, partial(in_process, checkpoint("thin"), "none")])
    beside = [one["end"] - one["weights"] for one in thin]
    ends = [[one["end"] - own for one, own in zip(samples, beside, strict=True)]
            for samples in found]  # fmt: skip
    rows = [row_of(f"{shape} memory beside the weights", [own / 1e6 for own in beside], "MB")]
    for way, samples, own_ends in zip(WAYS, found, ends, strict=True):
        shares = [own / plain for own, plain in zip(own_ends, ends[0], strict=True)]
        peaks = [
            (one["peak"] - own) / end
            for one, own, end in zip(samples, beside, own_ends, strict=True)
        ]
        bar = None if way == PLAIN else BAR_PEAK
        rows += [
            row_of(f"{shape} memory of the weights: {way}", [end / 1e6 for end in own_ends], "MB"),
            row_of(f"{shape} time to load: {way}", [one["seconds"] for one in samples], "s"),
            row_of(f"{shape} most memory of the load against its end: {way}", peaks, "×", bar=bar),
        ]
        if way != PLAIN:
            against = f"{shape} memory of the weights, against {PLAIN}: {way}"
            rows.append(row_of(against, shares, "×", bar=BARS_MEMORY[way]))
    return rows


def run() -> list[Row]:
    """Return the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    rows: list[Row] = []
    for shape in SHAPES:
        if wanted.search(f"{shape} memory"):
            rows += memory(shape)
        chosen = [case for case in cases(shape) if wanted.search(case.name)]
        if not chosen:
            continue
        with ExitStack() as stack:
            engines = []
            for quantization in WAYS.values():
                own = settings(shape, max(BATCHES)) | {"quantization": quantization}
                engines.append(EngineProcess(OURS, own))
                stack.callback(engines[-1].close)
            for case in chosen:
                rows += compare(case, engines)
    return rows + variants.run(SHAPES, wanted)


if __name__ == "__main__":
    print(json.dumps(load_once(sys.argv[1], sys.argv[2])))
