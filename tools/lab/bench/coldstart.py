"""Measures many waiters for one cold model of two replicas: loads, memory, and their extra wait.

The model is a fake whose load fills `BYTES` of memory in its thread, and sleeps. A waiter's extra
wait begins when the load returns in the loading thread, and ends when the waiter has a replica. The
reference is an event, without an engine, that a thread sets for as many waiters.

The memory is sampled every `SAMPLE_S` while the model loads: what the pool has reserved, and by how
much the process grew. Both figures would be far higher if each waiter caused a load of its own.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig, WorkerConfig
from engine.worker.fakes.text import FakeRunner
from tools.lab.bench.frame import Row, repeat_in_turn, row_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.worker.interface import LoadProgress
    from engine.worker.text.interface import ModelInfo

MEASURES = ("engine/pool", "engine/requests")

WAITERS = (10, 100, 500)
REPLICAS = 2
MIB = 1 << 20
BYTES = 64 * MIB  # of each replica
LOAD_S = 0.3
SAMPLE_S = 0.005
BAR_MS = 50.0
OWN_MIB = 16  # guess: memory of the waiters and the threads, beside the model's


class HeavyRunner(FakeRunner):
    """A runner whose load takes `LOAD_S` and fills memory. ``returned`` collects the times at which
    loads ended."""

    returned: list[float]
    weights = b""

    def load(self, progress: Callable[[LoadProgress], None]) -> ModelInfo:
        """Fill the memory, sleep, load, and record the time."""
        self.weights = b"w" * BYTES
        time.sleep(LOAD_S)
        info = super().load(progress)
        self.returned.append(time.monotonic())
        return info

    def close(self) -> None:
        """Release the memory."""
        super().close()
        self.weights = b""


@dataclass
class Seen:
    """The figures of one cold start. ``reserved`` and ``grown`` are the highest samples, in MiB."""

    wait_ms: float
    loads: int = 0
    reserved: float = 0.0
    grown: float = 0.0


def resident() -> float:
    """Return the process's memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


async def _wait_for_model(waiters: int) -> Seen:
    """Return the figures of one cold start. Cancellation: at once."""
    returned: list[float] = []

    def make_runner(model: ModelConfig, config: EngineConfig) -> HeavyRunner:
        runner = HeavyRunner(memory_bytes=BYTES)
        runner.returned = returned
        return runner

    model = ModelConfig("cold", lazy=True, workers=(WorkerConfig(count=REPLICAS),))
    config = EngineConfig(models=(model,), memory_limit=10 * REPLICAS * BYTES)
    woken: list[float] = []
    seen, before = Seen(0.0), resident()

    async def wait() -> None:
        await engine.wait_ready("cold")
        woken.append(time.monotonic())

    async def sample() -> None:
        while True:
            seen.reserved = max(seen.reserved, engine.statistics().totals.memory_reserved / MIB)
            seen.grown = max(seen.grown, resident() - before)
            await trio.sleep(SAMPLE_S)

    async with (
        open_engine(config, make_runner=make_runner) as engine,
        trio.open_nursery() as sampling,
    ):
        sampling.start_soon(sample)
        async with trio.open_nursery() as nursery:
            for _ in range(waiters):
                nursery.start_soon(wait)
        await engine.load_model("cold")  # until the other replica is loaded, too
        sampling.cancel_scope.cancel()
    seen.wait_ms = 1e3 * (max(woken) - min(returned))
    seen.loads = len(returned)
    return seen


async def _wait_for_event(waiters: int) -> Seen:
    """Return the longest wait in ms for a bare event. Cancellation: after the event is set."""
    event, woken, returned = trio.Event(), [], []

    async def wait() -> None:
        await event.wait()
        woken.append(time.monotonic())

    def load() -> None:
        time.sleep(LOAD_S)
        returned.append(time.monotonic())
        trio.from_thread.run_sync(event.set)

    async with trio.open_nursery() as nursery:
        for _ in range(waiters):
            nursery.start_soon(wait)
        await trio.to_thread.run_sync(load)
    return Seen(1e3 * (max(woken) - returned[0]))


def run() -> list[Row]:
    """Return the bench's rows."""
    rows = []
    size = REPLICAS * BYTES / MIB
    for waiters in WAITERS:
        mine, bare = repeat_in_turn(
            [
                partial(trio.run, _wait_for_model, waiters),
                partial(trio.run, _wait_for_event, waiters),
            ]
        )
        name = f"{waiters} waiters"
        rows += [
            row_of(f"{name}: loads", [seen.loads for seen in mine], "", bar=REPLICAS),
            row_of(
                f"{name}: reserved at most while loading",
                [seen.reserved for seen in mine],
                "MiB",
                bar=size,
            ),
            row_of(
                f"{name}: the process's growth at most while loading",
                [seen.grown for seen in mine],
                "MiB",
                bar=size + OWN_MIB,
            ),
            row_of(
                f"{name}: the last waiter's wait after ready",
                [seen.wait_ms for seen in mine],
                "ms",
                bar=BAR_MS,
            ),
            row_of(
                f"{name}: the last waiter's wait after a bare event",
                [seen.wait_ms for seen in bare],
                "ms",
            ),
        ]
    return rows
