"""Measures decode and prefill in tokens/s, without the server, beside other engines.

Each engine is a process of its own with the same random-weight checkpoint in bfloat16, the same
prompt ids, greedy sampling and `THREADS` threads. They take turns, and an engine that waits for its
turn is suspended. ``s135`` and ``q05`` are dense models, ``lfm350`` is a hybrid and ``moe850`` a
mixture (`tools.lab.bench.checkpoints`). The top of an engine's file in `tools/lab/peers` says what
is on its clock: for ours plan, execute and commit, and the same for vLLM; llama.cpp and
transformers have no scheduler and make no text. Decode: every sequence gets `STEPS` more tokens,
beginning at the named context. Prefill: prompts that no cache has, until each has its first token.

Further rows are each engine's memory behind its cases, a step while two other processes keep both
cores busy, and the cost of a step outside the model (packing, sampling, text) by rows and by
context, with a tiny model.

`BENCH_ONLY` is a regular expression that selects measurements by name. `BENCH_PEERS` is a
comma-separated list of the engines to compare with; unset, `COMPARED` or `COMPARED_TOO`
(transformers' continuous batching is slower than its plain forward and takes minutes).

These changes made the kernels (`engine/kernels`) faster, measured in one core's processor time on
shared machines:

- One call computes a whole forward, with a barrier between its parts and no allocation. Four calls
  a layer, with Python in each, cost more than the matrix products of a small model.
- Blocks of products are functions of their own where a vector takes several registers. Inlined, GCC
  kept the sums of integers in memory, and one row with AVX2 took four times as long.
- Weights are in panels of 16 outputs with inputs in pairs, the order that AVX512-BF16 and AMX need.
  A core reads them from front to back, and tied embeddings are looked up in them.
- AMX computes single rows, too. A tile takes as long as for 16 rows, most of the time is waiting
  for weights, and a row has the same bits in any batch.
- Numbers between products are float32: no slower, and closer to float32 than stock bfloat16.
- Attention has an exponential by `vscalefps`, masks only at the diagonal, and no denormals in
  masked scores. Products take inputs in equal parts of at most 640, with sums in registers.
- The last layer computes only the rows whose logits are wanted: q05's prompt took a 24th less.
- A decode's attention takes all key heads of a position, prefetches 32 positions ahead into the
  second-level cache, and multiplies pairs of bfloat16: 179 tokens/s instead of 69 with 8 sequences
  at 4,096. (A prefetch into the first-level cache, or in long bursts, takes twice as long.)
- The next pair of panels is fetched while 16 to 64 rows are multiplied by the current one: 32 rows
  took 21.5 ms instead of 25. Weights of 8 and 4 bits are fetched 1.5 KiB ahead, and up to four rows
  are divided into few, long tasks.
- Codes of 4 bits need no table, and with AVX2 their sums have 16 bits.
- With many rows, codes become tiles: bytes, scales and offsets in float32, in the order in which a
  block of rows reads them, made once for 256 rows. Products of K-quants take 0.9 times as long, and
  0.75 times with AVX2.
- The memory of logits and activations is kept, and small vector functions are always inlined.

These changes gained nothing, or less than the noise: other numbers of rows and panels in a block of
sums; prefetching float weights, which the processor does itself; rounding a single row's inputs to
int8 in every thread; blocks of three or six rows for integer sums; blocks of four panels for a
single row; huge pages for the KV pool and for tensors; a kernel of dot products for single rows
beside AMX; widening int8 weights to bfloat16; and dividing a product's inputs into smaller parts.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from tools.lab.bench.checkpoints import MAX_LEN, MODELS, checkpoint, gguf
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.peers.environments import PEERS
from tools.lab.peers.process import OURS, EngineProcess, memory_mb, start

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MEASURES = ("engine/core", "engine/worker", "engine/kernels")

SHAPES = ("s135", "q05", "lfm350", "moe850")
AT_LENGTH = ("s135", "q05")  # also measured with long contexts
COMPARED = ("llama.cpp", "vllm", "transformers")
# A hybrid and a mixture are compared with llama.cpp, because transformers needs minutes for one
# measurement of them on a processor without instructions for bfloat16.
COMPARED_TOO = dict.fromkeys(("lfm350", "moe850"), ("llama.cpp",))
THREADS = 2
STEPS = 32
OUTSIDE_STEPS = 64
KV_BYTES = 2 << 30
BARS = {1: 0.7, 8: 1.0, 32: 1.0}  # of decodes by batch: our tokens/s divided by the best peer's
BAR_PREFILL = 1.0
BAR_BUSY = 3.0
# Bars of a step's cost outside the model, with a quarter for noise: by context, and by rows.
BAR_CONTEXT = 1.25
BAR_LINEAR = 1.25
# With random weights many tokens are nearly tied, and rounding to bfloat16 decides: about half of
# two engines' first tokens agree. Two different models agree in none.
BAR_SAME = 0.25
BUSY = "while True: pass"


@dataclass(frozen=True)
class Case:
    """One measurement, which is made with several engines. ``length`` is the prompts' length."""

    shape: str
    what: str
    batch: int
    length: int
    bar: float | None

    @property
    def name(self) -> str:
        """The row's name, with the length of the context."""
        if self.what == "prefill":
            return f"{self.shape} prefill {self.batch} × {self.length}"
        return f"{self.shape} decode B={self.batch} at {self.length - 1}"


def cases() -> list[Case]:
    """Return the measurements. A prompt is one token longer than its context, because its last
    token is the first to be decoded and caches hold the tokens before it."""
    found = []
    for shape in SHAPES:
        found += [Case(shape, "decode", batch, 129, bar) for batch, bar in BARS.items()]
        found += [Case(shape, "prefill", *size, BAR_PREFILL) for size in ((1, 1024), (8, 128))]
        if shape in AT_LENGTH:
            found += [Case(shape, "decode", batch, 4097, None) for batch in (1, 8)]
    return found


def settings(shape: str, seqs: int) -> dict[str, Any]:
    """Return the settings of an engine's process."""
    file = gguf(shape) if shape in SHAPES else None
    return {
        "model": str(checkpoint(shape)),
        "gguf": str(file or ""),
        "vocab": MODELS[shape].shape.vocab,
        "dtype": "bfloat16",
        "threads": THREADS,
        "kv_bytes": KV_BYTES,
        "max_len": MAX_LEN,
        "seqs": seqs,
    }


class Measured:
    """Measures one case with one engine and keeps the answers. ``steps`` are those of a decode."""

    def __init__(self, engine: EngineProcess, case: Case, steps: int = STEPS) -> None:
        self.engine, self.case, self.steps = engine, case, steps
        self.answers: list[dict[str, Any]] = []
        self._calls = count()

    def __call__(self) -> float:
        """Measure once and return the tokens per second of the whole batch."""
        case = self.case
        turn = next(self._calls) if case.what == "prefill" else ""  # new prompts for each turn
        answer = self.engine.ask(
            case.what, f"{case.name} {turn}", case.batch, case.length, steps=self.steps
        )
        self.answers.append(answer)
        tokens = self.steps if case.what == "decode" else case.length
        return float(case.batch * tokens / answer["seconds"])

    def same_share(self, other: Measured) -> float:
        """Return the share of prompts for which both engines computed the same first token."""
        pairs = [
            one == theirs
            for mine, their in zip(self.answers, other.answers, strict=True)
            for one, theirs in zip(mine["first"], their["first"], strict=True)
        ]
        return sum(pairs) / len(pairs)

    @property
    def note(self) -> str:
        """For our engine: the time of a step outside the model; else ""."""
        if "outside_s" not in self.answers[0]:
            return ""
        outside = sorted(one["outside_s"] / self.steps for one in self.answers[1:])
        return f"outside the model {1e3 * outside[len(outside) // 2]:.2f} ms a step"


def compare(case: Case, engines: Sequence[EngineProcess], missing: Sequence[str]) -> list[Row]:
    """Return the rows of one case. The first of ``engines`` is ours."""
    measured = [Measured(engine, case) for engine in engines]
    samples = repeat_in_turn(measured)
    rows = [
        row_of(f"{case.name}: {one.engine.name}", found, "tokens/s", better="higher", note=one.note)
        for one, found in zip(measured, samples, strict=True)
    ]
    rows += [Row(f"{case.name}: {name}", None, "tokens/s") for name in missing]
    if len(engines) > 1:
        by_name = {one.engine.name: found for one, found in zip(measured, samples, strict=True)}
        rows.append(against_best(case, by_name, missing))
    for other in measured[1:] if case.batch == max(BARS) else ():
        name = f"{case.name}: first tokens as {other.engine.name}"
        share = measured[0].same_share(other)
        rows.append(row_of(name, [share], "share", bar=BAR_SAME, better="higher"))
    return rows


def against_best(case: Case, samples: dict[str, list[float]], missing: Sequence[str]) -> Row:
    """Return the row of our engine against the fastest other one. If a peer is missing, the bar
    can be missed, but not met."""
    ours = samples.pop(OURS.name)
    best = max(samples, key=lambda name: statistics.median(samples[name]))
    ratios = [mine / theirs for mine, theirs in zip(ours, samples[best], strict=True)]
    bar, note = case.bar, f"the best is {best}"
    if missing and bar is not None and statistics.median(ratios) >= bar:
        bar, note = None, f"{note}; a bar of {bar:g} needs {', '.join(missing)} too"
    return row_of(
        f"{case.name}: against the best", ratios, "×", bar=bar, better="higher", note=note
    )


def memory_rows(shape: str, engines: Sequence[EngineProcess]) -> list[Row]:
    """Return the rows of the engines' memory after the cases, whose KV caches are still held."""
    return [row_of(f"{shape} memory: {one.name}", [memory_mb(one.pid)], "MB") for one in engines]


@contextmanager
def opened(shape: str, peers: Sequence[str], seqs: int) -> Iterator[list[EngineProcess]]:
    """Run our engine and the installed ``peers``, all with the model loaded."""
    chosen = settings(shape, seqs)
    with ExitStack() as stack:
        found = []
        for peer in (OURS, *(PEERS[name] for name in peers)):
            engine = start(peer, chosen)
            if engine is None:
                continue
            stack.callback(engine.close)
            found.append(engine)
        if not found or found[0].name != OURS.name:
            raise SystemExit("our own engine did not start")
        yield found


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run a number of processes that compute endlessly."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def beside_busy(ours: EngineProcess, shape: str) -> list[Row]:
    """Return the rows of a step alone and beside two busy processes, measured in turn."""

    def step_ms() -> float:
        answer = ours.ask("decode", "busy", 8, 129, STEPS)
        return float(1e3 * answer["seconds"] / STEPS)

    def step_ms_beside() -> float:
        with busy(THREADS):
            return step_ms()

    alone, beside = repeat_in_turn([step_ms, step_ms_beside])
    ratios = [b / a for b, a in zip(beside, alone, strict=True)]
    return [
        row_of(f"{shape} step of B=8, alone", alone, "ms"),
        row_of(f"{shape} step of B=8, beside two busy processes", beside, "ms"),
        row_of(f"{shape} beside two busy processes against alone", ratios, "×", bar=BAR_BUSY),
    ]


def outside(ours: EngineProcess) -> list[Row]:
    """Return the rows of a step's cost outside the model, by rows and by context."""

    def outside_us(batch: int, length: int) -> float:
        answer = ours.ask("decode", "outside", batch, length, OUTSIDE_STEPS)
        return float(1e6 * answer["outside_s"] / OUTSIDE_STEPS)

    sizes = [(8, 129), (32, 129), (128, 129), (8, 4097), (32, 4097)]
    samples = repeat_in_turn([partial(outside_us, *size) for size in sizes])
    by_size = dict(zip(sizes, samples, strict=True))
    rows = [
        row_of(f"outside the model, {batch} rows at {length - 1}", by_size[batch, length], "µs")
        for batch, length in sizes
    ]

    def ratio(name: str, one: tuple[int, int], other: tuple[int, int], bar: float) -> Row:
        ratios = [a / b for a, b in zip(by_size[one], by_size[other], strict=True)]
        return row_of(f"outside the model, {name}", ratios, "×", bar=bar)

    return [
        *rows,
        ratio("32 rows at 4096 against 128", (32, 4097), (32, 129), BAR_CONTEXT),
        ratio("128 rows against 32", (128, 129), (32, 129), 4 * BAR_LINEAR),
    ]


def run() -> Iterator[Row]:
    """Yield the bench's rows."""
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    named = os.environ.get("BENCH_PEERS")
    for shape in SHAPES:
        chosen = [case for case in cases() if case.shape == shape and wanted.search(case.name)]
        beside = shape == SHAPES[0] and wanted.search("s135 beside two busy processes")
        if not chosen and not beside:
            continue
        compared = COMPARED_TOO.get(shape, COMPARED)
        peers = compared if named is None else [name for name in named.split(",") if name]
        with opened(shape, peers if chosen else [], max(BARS)) as engines:
            names = {engine.name for engine in engines}
            missing = [name for name in compared if name not in names]
            for one in engines:
                yield row_of(f"{shape} load: {one.name}", [one.load_s], "s")
            for case in chosen:
                yield from compare(case, engines, missing)
            if chosen:
                yield from memory_rows(shape, engines)
            yield from beside_busy(engines[0], shape) if beside else ()
    if wanted.search("outside the model"):
        with opened("thin", [], 128) as engines:
            yield from outside(engines[0])
