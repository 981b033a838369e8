"""Measures how long a step keeps the event loop from its other tasks (R143).

A task sleeps for `TICK_S` again and again, beside `READERS` tasks that wait for the results of a
simulated device with steps of `STEP_S`. The figure is the longest time by which the ticking task
woke too late in a run. The reference is the same task while nothing else runs. Steps that release
the GIL must leave the loop free. For steps that do not, which is the case that `--runner process`
is for, the figure is reported.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.requests.text_values import GenerateRequest, SamplingParams
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.simulated import Device, HoldingDevice, PythonDevice

if TYPE_CHECKING:
    from engine.api.engine import Engine

MEASURES = ("engine/core", "engine/replica", "engine/requests")

STEP_S = 0.1
TICK_S = 0.001
READERS = 8
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "2"))
BAR_MS = 20.0  # as R188 has it for calls
KINDS: dict[str, type[Device] | None] = {
    "without steps": None,
    "beside steps that release the GIL": Device,
    "beside steps of Python code": PythonDevice,
    "beside steps that hold the GIL": HoldingDevice,
}


async def longest_gap_ms(kind: type[Device] | None) -> float:
    """Return by how much the ticking task woke too late, at most. Cancellation: after the step in
    flight."""
    device = (kind or Device)(STEP_S)
    config = EngineConfig(models=(ModelConfig("fake"),))
    async with open_engine(config, make_runner=lambda model, config: device) as engine:
        await engine.wait_ready()
        async with trio.open_nursery() as nursery:
            if kind is not None:
                for number in range(READERS):
                    nursery.start_soon(_read, engine, number)
                while device.steps < 2:  # noqa: ASYNC110  (a thread's count)
                    await trio.sleep(TICK_S)
            longest, end = 0.0, time.monotonic() + WINDOW_S
            while (began := time.monotonic()) < end:
                await trio.sleep(TICK_S)
                longest = max(longest, time.monotonic() - began - TICK_S)
            nursery.cancel_scope.cancel()
    return 1e3 * longest


async def _read(engine: Engine, number: int) -> None:
    """Read an answer that is longer than the run. Cancellation: at once."""
    sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
    async with engine.generate(GenerateRequest(text=f"{number}", sampling=sampling)) as stream:
        async for _event in stream:
            pass


def run() -> list[Row]:
    """Return the bench's rows."""
    found = repeat_in_turn([partial(trio.run, longest_gap_ms, kind) for kind in KINDS.values()])
    return [
        row_of(f"longest gap {name}", gaps, "ms", bar=BAR_MS if kind is Device else None)
        for (name, kind), gaps in zip(KINDS.items(), found, strict=True)
    ]
