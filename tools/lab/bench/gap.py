"""Measures the time between two steps: from the end of a fake 20 ms step to the start of the next,
on the worker's clock.

128 readers take every token, in the engine's process or over gRPC from a process of their own. The
gap is the time of two hops, the commit, the commands and the plan together, with plans that
were prepared during the step and without.

A prepared plan saves the time to make a plan, however long the step takes. So its gain is measured
where it is largest: with fake steps just long enough for the loop to plan and to deliver meanwhile.
With shorter steps the loop itself is the limit, and with longer ones planning is a smaller part. A
cycle is the time from a step's start to the next one's. In these rows nobody reads the tokens,
because readers in the engine's process would share its thread; each stream's buffer holds all of
its tokens.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.requests.text.values import GenerateRequest, SamplingParams
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.wire import ENDLESS, PacedRunner, Peer, peer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.lab.bench.wire import Stamp

MEASURES = (
    "engine/core",
    "engine/replica",
    "engine/requests",
    "grpc_service/rpc",
    "grpc_service/services",
)

READERS = 128
STEP_S = 0.020
STEPS = 60
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "2"))
BAR_MS = 1.0
RUNNER = {"step_s": STEP_S, "num_blocks": READERS * 16 + 1024, "max_model_len": ENDLESS + 200}
SHORT = ((64, 0.001), (128, 0.002), (256, 0.004))  # rows and seconds of a step
CYCLES = 100
CYCLE_TURNS = 11  # because the gain is near the noise of one run
BAR_GAIN = 1.0  # per cent


def gap_ms(stamps: Sequence[Stamp]) -> float:
    """Return the median time in ms between two successive steps that both had all readers' rows."""
    gaps = [
        start - end
        for (_, end, rows), (start, _, next_rows) in pairwise(stamps)
        if rows == next_rows == READERS
    ]
    return 1e3 * statistics.median(gaps)


async def _measure(prepared: bool) -> float:
    """Return the gap with readers in the engine's process."""
    runner = PacedRunner(**RUNNER)
    config = EngineConfig(models=(ModelConfig("fake"),), prepared_plans=prepared)
    async with open_engine(config, make_runner=lambda model, config: runner) as engine:

        async def read(index: int) -> None:
            request = GenerateRequest(
                text=f"reader {index}", sampling=SamplingParams(max_tokens=STEPS, ignore_eos=True)
            )
            async with engine.generate(request) as stream:
                async for _event in stream:
                    if len(runner.stamps) >= STEPS // 2:
                        return

        async with trio.open_nursery() as nursery:
            for index in range(READERS):
                nursery.start_soon(read, index)
    return gap_ms(list(runner.stamps))


async def _measure_cycle(rows: int, step_s: float, prepared: bool) -> float:
    """Return the median time in ms from the start of a step of all ``rows`` to the next one's.
    Cancellation: after the step in flight."""
    runner = PacedRunner(step_s=step_s, num_blocks=rows * CYCLES // 8, max_model_len=2 * CYCLES)
    config = EngineConfig(models=(ModelConfig("fake"),), prepared_plans=prepared, max_num_seqs=rows)
    sampling = SamplingParams(max_tokens=CYCLES, ignore_eos=True)
    async with open_engine(config, make_runner=lambda model, config: runner) as engine:
        await engine.wait_ready()
        answers = [
            engine.submit(GenerateRequest(text=f"{number}", sampling=sampling), buffer=2 * CYCLES)
            for number in range(rows)
        ]
        for answer in answers:
            await answer.wait_closed()
    return 1e3 * statistics.median(
        next_start - start
        for (start, _, now), (next_start, _, later) in pairwise(runner.stamps)
        if now == later == rows
    )


def cycle_rows() -> list[Row]:
    """Return the rows of short steps, with prepared plans and without in turn."""
    ways = [(*size, prepared) for size in SHORT for prepared in (True, False)]
    found = repeat_in_turn([partial(trio.run, _measure_cycle, *way) for way in ways], CYCLE_TURNS)
    cycles = dict(zip(ways, found, strict=True))
    rows = []
    for count, step_s in SHORT:
        name = f"{count} rows, steps of {1e3 * step_s:g} ms"
        on, off = cycles[count, step_s, True], cycles[count, step_s, False]
        gains = [100 * (long / short - 1) for short, long in zip(on, off, strict=True)]
        rows += [
            row_of(f"cycle, {name}, prepared plans on", on, "ms"),
            row_of(f"cycle, {name}, prepared plans off", off, "ms"),
            row_of(f"gain by prepared plans, {name}", gains, "%", bar=BAR_GAIN, better="higher"),
        ]
    return rows


def _measure_wire(server: Peer) -> float:
    """Return the gap with readers over gRPC."""
    with peer("readers", address=server.address, streams=READERS, max_tokens=ENDLESS):
        server.ask()
        time.sleep(WINDOW_S)
        stamps = server.ask()
    return gap_ms(stamps)


def run() -> list[Row]:
    """Return the bench's rows."""
    on, off = repeat_in_turn([lambda: trio.run(_measure, True), lambda: trio.run(_measure, False)])
    with (
        peer("triolet", runner=RUNNER) as prepared,
        peer("triolet", runner=RUNNER, engine={"prepared_plans": False}) as unprepared,
    ):
        wire_on, wire_off = repeat_in_turn(
            [lambda: _measure_wire(prepared), lambda: _measure_wire(unprepared)]
        )
    return [
        row_of(f"gap p50, {READERS} readers, prepared plans on", on, "ms", bar=BAR_MS),
        row_of(f"gap p50, {READERS} readers, prepared plans off", off, "ms", bar=BAR_MS),
        row_of(f"gap p50, {READERS} gRPC clients, prepared on", wire_on, "ms", bar=BAR_MS),
        row_of(f"gap p50, {READERS} gRPC clients, prepared off", wire_off, "ms", bar=BAR_MS),
        *cycle_rows(),
    ]
