"""Measures the time between two steps of a real model, with prepared plans and without, and what
they gain."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.factory import runner_spec
from engine.worker.text.runner import TorchRunner
from tools.lab.bench.frame import row_of
from tools.lab.gpu.checkpoints import REAL, TINY, write

if TYPE_CHECKING:
    from pathlib import Path

    from engine.core.text.plan import StepPlan, StepResult
    from tools.lab.gpu.target import Target

ROUNDS = 3


class Stamped(TorchRunner):
    """A runner that notes the start, the end and the number of rows of each step."""

    stamps: list[tuple[float, float, int]]

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        start = time.perf_counter()
        result = super().execute(plan)
        self.stamps.append((start, time.perf_counter(), len(plan.rows)))
        return result


def run(target: Target) -> None:
    """Measure one engine with prepared plans and one without, one after the other."""
    readers, tokens = (64, 128) if target.is_cuda else (4, 16)
    model = REAL[0] if target.is_cuda else TINY
    if not target.wants(f"gap, {model.name}"):
        return
    directory = write(model, target.folder, target.device)
    for prepared in (True, False):
        found = trio.run(_measure, directory, target.device, prepared, readers, tokens)
        which = (
            f"gap, {model.name}, {readers} readers, prepared plans {'on' if prepared else 'off'}"
        )
        gaps, steps, rates = zip(*found, strict=True)
        target.add(
            [
                row_of(f"{which}: between two steps", gaps, "ms"),
                row_of(f"{which}: a step", steps, "ms"),
                row_of(f"{which}: output", rates, "tokens/s", better="higher"),
            ]
        )


async def _measure(
    directory: Path, device: str, prepared: bool, readers: int, tokens: int
) -> list[tuple[float, float, float]]:
    """Measure several times, and return for each measurement the median time between two steps
    and of a step, both in ms, and the tokens generated per second."""
    config = EngineConfig(
        models=(ModelConfig(str(directory), device=device, dtype="bfloat16", threads=2),),
        prepared_plans=prepared,
        kv_cache_memory=1 << 30 if device != "cpu" else 1 << 26,
    )
    stamps: list[tuple[float, float, int]] = []

    def make(model: ModelConfig, config: EngineConfig) -> Stamped:
        runner = Stamped(runner_spec(model, config))
        runner.stamps = stamps
        return runner

    async with open_engine(config, make_runner=make) as engine:

        async def read(index: int) -> None:
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
            request = GenerateRequest(text=f"reader {index}", sampling=sampling)
            async with engine.generate(request) as stream:
                async for _event in stream:
                    pass

        found = []
        for _ in range(ROUNDS + 1):
            stamps.clear()
            start = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for index in range(readers):
                    nursery.start_soon(read, index)
            seconds = time.perf_counter() - start
            full = [stamp for stamp in stamps if stamp[2] == readers]
            gaps = [later[0] - end for (_, end, _), later in pairwise(full)]
            steps = [end - begin for begin, end, _ in full]
            found.append(
                (
                    1e3 * statistics.median(gaps),
                    1e3 * statistics.median(steps),
                    readers * tokens / seconds,
                )
            )
        return found[1:]
