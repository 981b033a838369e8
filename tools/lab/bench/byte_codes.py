"""Measures how many byte codes Python executes for a decoded token: in the text core, and in the
engine's loop with readers in its process.

A count is the same in every run of one version of Python, so that small changes show on any
machine. To compare two commits, run the bench in a worktree of each. The core's count is of plan
and commit of a step as in the bench `schedule`; the loop's is of all that its thread executes
between two tokens of a reader, Trio included. The fake runner's own thread is not counted.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeRunner, FakeScript
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.schedule import SHORT, decoding_scheduler, step

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

MEASURES = ("engine/core", "engine/replica", "engine/api", "engine/requests")

ROWS = (1, 8, 64)
READERS = (1, 16)
STEPS = 32  # the steps that are counted, in which each row fills two blocks
BEFORE = 20  # steps before the counted ones; the first of them also do work that is done once
STEP_S = 0.003


class Count:
    """How many byte codes the functions called since `counting` began have executed."""

    def __init__(self) -> None:
        self.total = 0

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Take one event of `sys.settrace`."""
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.total += 1
        return self.trace


@contextmanager
def counting() -> Iterator[Count]:
    """Count the byte codes that this thread runs in the context."""
    count = Count()
    sys.settrace(count.trace)
    try:
        yield count
    finally:
        sys.settrace(None)


def of_core(rows: int) -> float:
    """Return the byte codes of a step's plan and commit, and of making its results."""
    scheduler = decoding_scheduler(rows, SHORT)
    for number in range(BEFORE):
        step(scheduler, 2.0 + number)
    with counting() as count:
        for number in range(STEPS):
            step(scheduler, 100.0 + number)
    return count.total / STEPS


async def _of_loop(readers: int) -> float:
    runner = FakeRunner(script=FakeScript(step_s=STEP_S))
    config = EngineConfig(models=(ModelConfig("fake"),), check_level=0)
    sampling = SamplingParams(max_tokens=BEFORE + 2 * STEPS, ignore_eos=True)
    totals: list[int] = []
    async with open_engine(config, make_runner=lambda model, config: runner) as engine:

        async def read(number: int, count: Count) -> None:
            request = GenerateRequest(text=f"reader {number}", sampling=sampling)
            async with engine.generate(request) as stream:
                counts = [count.total async for _event in stream]
            if number == 0:
                totals.extend(counts)

        await engine.wait_ready()
        with counting() as count:
            async with trio.open_nursery() as nursery:
                for number in range(readers):
                    nursery.start_soon(read, number, count)
    return (totals[BEFORE + STEPS] - totals[BEFORE]) / STEPS / readers


def of_loop(readers: int) -> float:
    """Return the byte codes that the event loop's thread runs for each token."""
    return trio.run(_of_loop, readers)


def run() -> list[Row]:
    """Return the bench's rows."""
    named = {f"the core's step, {rows} rows": partial(of_core, rows) for rows in ROWS}
    for readers in READERS:
        named[f"the loop's token, {readers} readers"] = partial(of_loop, readers)
    samples = repeat_in_turn(list(named.values()))
    return [row_of(name, counts, "byte codes") for name, counts in zip(named, samples, strict=True)]
