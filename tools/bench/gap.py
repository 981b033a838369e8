"""The time between two steps: end of a fake 20 ms step to the start of the next, on the worker's
own clock, with 128 in-process readers that take every token."""

from __future__ import annotations

import statistics
import time

import trio

from engine.api import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.plan import Logits, RowResult, StepPlan, StepResult
from engine.model.fake import FakeRunner
from engine.requests import GenerateRequest, SamplingParams
from tools.bench.frame import Row, repeat_in_turn, row_of

READERS = 128
STEP_S = 0.020
STEPS = 60
BAR_MS = 1.0


class TimedRunner(FakeRunner):
    """Sleeps a step, answers at once, and notes when steps begin and end."""

    def __init__(self) -> None:
        super().__init__(num_blocks=READERS * 16, max_model_len=256)
        self.gaps_s: list[float] = []
        self._ended = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        now = time.perf_counter()
        if self._ended and len(plan.rows) == READERS:
            self.gaps_s.append(now - self._ended)
        time.sleep(STEP_S)
        rows = tuple(
            RowResult(row.sequence, (7,), "x")
            if row.logits is not Logits.NONE
            else RowResult(row.sequence)
            for row in plan.rows
        )
        result = StepResult(plan.plan_id, rows)
        self._ended = time.perf_counter()
        return result


async def _measure(prepared: bool) -> float:
    runner = TimedRunner()
    config = EngineConfig(models=(ModelConfig("fake"),), prepared_plans=prepared)
    async with open_engine(config, make_runner=lambda model, config: runner) as engine:

        async def read(index: int) -> None:
            request = GenerateRequest(
                text=f"reader {index}", sampling=SamplingParams(max_tokens=STEPS, ignore_eos=True)
            )
            async with engine.generate(request) as stream:
                async for _event in stream:
                    if len(runner.gaps_s) >= STEPS // 2:
                        return

        async with trio.open_nursery() as nursery:
            for index in range(READERS):
                nursery.start_soon(read, index)
    return 1e3 * statistics.median(runner.gaps_s)


def run() -> list[Row]:
    on, off = repeat_in_turn([lambda: trio.run(_measure, True), lambda: trio.run(_measure, False)])
    return [
        row_of(f"gap p50, {READERS} readers, prepared plans on", on, "ms", bar=BAR_MS),
        row_of(f"gap p50, {READERS} readers, prepared plans off", off, "ms", bar=BAR_MS),
    ]
