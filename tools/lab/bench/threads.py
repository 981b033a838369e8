"""Measures the default number of threads beside fixed ones: alone, under CPU quotas, and beside
processes that spin.

Each engine is our own, as in the bench `step`, with s135 in bfloat16 and a context of 128. One has
the default number of threads, which the engine chooses, and each other a fixed one. A quota is set
on a control group of version 1 (this needs root). An engine is started inside the group, because it
reads its quota when it starts. A ratio divides two engines' tokens/s of the same turn. A pause
of `PAUSE_S` before each measurement gives back the quota that the last one used up, and lets its
threads go to sleep.

Alone, the time between tokens of one sequence is measured beside llama.cpp, in runs of `TOKENS`.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine.limits.cpu import cpu_limit
from tools.lab.bench.frame import Row, percentile, repeat_in_turn, row_of
from tools.lab.bench.step import STEPS, Case, Measured, busy, settings
from tools.lab.peers.environments import PEERS
from tools.lab.peers.process import OURS, EngineProcess, start

if TYPE_CHECKING:
    from collections.abc import Iterator

MEASURES = ("engine/worker", "engine/kernels", "engine/limits")

SHAPE = "s135"
QUOTAS = (0.5, 1.0, 1.5)
BATCHES = (1, 8)
REPEATS = int(os.environ.get("BENCH_COUNT", "10"))
PAUSE_S = 0.25  # a quota's period is 0.1 s
BAR = 0.9
PEER, TOKENS, P99_BAR = "llama.cpp", 200, 1.2
GROUPS = Path("/sys/fs/cgroup/cpu")
DEFAULT = "the default"


def fixed_counts() -> list[int]:
    """Return the numbers of threads to compare with: powers of two, and all cores."""
    cores = cpu_limit().cores
    return sorted({1 << i for i in range(cores.bit_length()) if 1 << i <= cores} | {cores})


@contextmanager
def quota_group(quota: float) -> Iterator[Path]:
    """Make a control group with a quota of so many cores. The block has to empty the group."""
    group = GROUPS / f"triolet-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text(str(int(quota * 100_000)))
        yield group
    finally:
        group.rmdir()


@contextmanager
def inside(group: Path | None) -> Iterator[None]:
    """Move this process into a control group for the block; processes started there stay in it."""
    if group is None:
        yield
        return
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def engines_in(group: Path | None) -> Iterator[dict[str, EngineProcess]]:
    """Start the engines in a control group, and yield them by the names of their rows."""
    counts = {DEFAULT: 0} | {
        f"{count} thread{'s' * (count > 1)}": count for count in fixed_counts()
    }
    with ExitStack() as stack, inside(group):
        found = {}
        for name, threads in counts.items():
            chosen = settings(SHAPE, max(BATCHES)) | {"threads": threads, "gguf": ""}
            found[name] = EngineProcess(OURS, chosen)
            stack.callback(found[name].close)
        yield found


def rested(measured: Measured) -> float:
    """Wait for `PAUSE_S`, so that no other measurement has an effect, and measure."""
    time.sleep(PAUSE_S)
    return measured()


def compare(where: str, batch: int, engines: dict[str, EngineProcess]) -> list[Row]:
    """Return the rows of ``batch`` sequences. ``where`` is part of their names: "alone" or so."""
    case = Case(SHAPE, "decode", batch, 129, None)
    measured = [partial(rested, Measured(engine, case)) for engine in engines.values()]
    samples = dict(zip(engines, repeat_in_turn(measured, REPEATS), strict=True))
    title = f"{where}, B={batch}"
    rows = [
        row_of(f"{title}: {name}", found, "tokens/s", better="higher")
        for name, found in samples.items()
    ]
    mine = samples.pop(DEFAULT)
    best = max(samples, key=lambda name: sorted(samples[name])[REPEATS // 2])
    ratios = [own / other for own, other in zip(mine, samples[best], strict=True)]
    name = f"{title}: the default against the best"
    note = f"{best}; {STEPS} steps a run"
    return [*rows, row_of(name, ratios, "×", bar=BAR, better="higher", note=note)]


def between_tokens(where: str, ours: EngineProcess) -> Iterator[Row]:
    """Yield the rows of the time between tokens of one sequence, beside another engine."""
    other = start(PEERS[PEER], settings(SHAPE, max(BATCHES)))
    engines = [ours] if other is None else [ours, other]

    def p99_ms(engine: EngineProcess) -> float:
        step_s = engine.ask("decode", "between tokens", 1, 129, TOKENS)["step_s"]
        return 1e3 * percentile(step_s, 0.99)

    samples = repeat_in_turn([partial(p99_ms, engine) for engine in engines], REPEATS)
    name = f"{where}, B=1: between tokens, p99"
    for engine, found in zip(engines, samples, strict=True):
        yield row_of(f"{name}: {engine.name}", found, "ms")
    if other is not None:
        other.close()
        ratios = [mine / their for mine, their in zip(*samples, strict=True)]
        yield row_of(f"{name}: against {PEER}", ratios, "×", bar=P99_BAR)


def run() -> Iterator[Row]:
    """Yield the bench's rows."""
    wanted = os.environ.get("BENCH_ONLY", "")
    places = {"alone": 0, "beside one spinning process": 1, "beside two spinning processes": 2}
    if any(wanted in where for where in places):
        with engines_in(None) as engines:
            for where, spinning in places.items():
                if wanted not in where:
                    continue
                with busy(spinning):
                    for batch in BATCHES:
                        yield from compare(where, batch, engines)
                if not spinning:
                    yield from between_tokens(where, engines[DEFAULT])
    for quota in QUOTAS:
        where = f"quota of {quota:g} cores"
        if wanted not in where:
            continue
        if not os.access(GROUPS / "cpu.cfs_quota_us", os.W_OK):
            print(f"{where}: this process may make no control groups", file=sys.stderr)
            continue
        with quota_group(quota) as group, engines_in(group) as engines:
            for batch in BATCHES:
                yield from compare(where, batch, engines)
