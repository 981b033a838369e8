"""Measures many waiters for one cold model of two replicas: loads, memory, and their extra wait.

The model is a fake of 2 GB whose load sleeps in its thread (R130, R132). A waiter's extra wait
begins when the load returns in the loading thread, and ends when the waiter has a replica (R109).
The reference is a bare event that a thread sets for as many waiters.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig, WorkerConfig
from engine.worker.fakes.text import FakeRunner
from tools.bench.frame import Row, repeat_in_turn, row_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.worker.interface import LoadProgress, ModelInfo

WAITERS = (10, 100, 500)
REPLICAS = 2
BYTES = 2 << 30
LOAD_S = 0.3
BAR_MS = 50.0


class SleepyRunner(FakeRunner):
    """A runner whose load takes `LOAD_S`. ``returned`` collects the times at which loads ended."""

    returned: list[float]

    def load(self, progress: Callable[[LoadProgress], None]) -> ModelInfo:
        """Sleep, load, and record the time."""
        time.sleep(LOAD_S)
        info = super().load(progress)
        self.returned.append(time.monotonic())
        return info


async def _wait_for_model(waiters: int, loads: list[int], peaks: list[int]) -> float:
    """Return the longest extra wait in ms."""
    returned: list[float] = []

    def make_runner(model: ModelConfig, config: EngineConfig) -> SleepyRunner:
        runner = SleepyRunner(memory_bytes=BYTES)
        runner.returned = returned
        return runner

    model = ModelConfig("cold", lazy=True, workers=(WorkerConfig(count=REPLICAS),))
    config = EngineConfig(models=(model,), memory_limit=10 * REPLICAS * BYTES)
    woken: list[float] = []

    async def wait() -> None:
        await engine.wait_ready("cold")
        woken.append(time.monotonic())

    async with open_engine(config, make_runner=make_runner) as engine:
        async with trio.open_nursery() as nursery:
            for _ in range(waiters):
                nursery.start_soon(wait)
        await engine.load_model("cold")  # until the other replica is loaded, too
        loads.append(len(returned))
        peaks.append(engine.statistics().totals.memory_reserved)
    return 1e3 * (max(woken) - min(returned))


async def _wait_for_event(waiters: int) -> float:
    """Return the longest wait in ms for a bare event."""
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
    return 1e3 * (max(woken) - returned[0])


def run() -> list[Row]:
    """Return the bench's rows."""
    rows = []
    for waiters in WAITERS:
        loads: list[int] = []
        peaks: list[int] = []
        mine, bare = repeat_in_turn(
            [
                partial(trio.run, _wait_for_model, waiters, loads, peaks),
                partial(trio.run, _wait_for_event, waiters),
            ]
        )
        gigabytes = [peak / 2**30 for peak in peaks]
        rows += [
            row_of(f"loads of {REPLICAS} replicas, {waiters} waiters", loads, "", bar=REPLICAS),
            row_of("  reserved", gigabytes, "GiB", bar=REPLICAS * BYTES / 2**30),
            row_of("  the last waiter's wait after ready", mine, "ms", bar=BAR_MS),
            row_of("  a bare event's", bare, "ms"),
        ]
    return rows
