"""Measures a request alone (`single_request`) and eight at once (`concurrent_8x`) on each device
that this machine has.

The model is s135 in bfloat16, in the bench's own process. A request has a prompt of `PROMPT` ids
that no cache has, and `OUTPUT` tokens. The time is that of all requests together, from the first
submit to the last token. There are no rows of devices that a machine does not have.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.load.devices import pick_device
from tools.lab.bench.checkpoints import MODELS, checkpoint
from tools.lab.bench.frame import REPEATS, Row, row_of
from tools.lab.peers.asked import prompts

if TYPE_CHECKING:
    from engine.api.engine import Engine

MEASURES = ("engine/core", "engine/replica", "engine/requests", "engine/worker", "engine/kernels")

MODEL = "s135"
PROMPT, OUTPUT = 128, 64
SIZES = {"single_request": 1, "concurrent_8x": 8}


def devices() -> list[str]:
    """Return the kinds of device that there are, the one that ``auto`` picks first."""
    kinds = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    found = [*(kind for kind, is_there in kinds.items() if is_there), "cpu"]
    assert found[0] == pick_device("auto").type
    return found


async def seconds(engine: Engine, name: str, count: int) -> float:
    """Return the time of ``count`` requests that are sent at once. Cancellation: at once."""
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)

    async def ask(ids: list[int]) -> None:
        request = GenerateRequest(token_ids=tuple(ids), sampling=sampling)
        async with engine.generate(request) as stream:
            async for _event in stream:
                pass

    asked = prompts(name, count, PROMPT, MODELS[MODEL].shape.vocab)
    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for ids in asked:
            nursery.start_soon(ask, ids)
    return time.perf_counter() - began


async def measure(device: str) -> dict[str, list[float]]:
    """Return the times of each size on a device, measured in turn. Cancellation: after the step in
    flight."""
    model = ModelConfig(str(checkpoint(MODEL)), name=MODEL, dtype="bfloat16", device=device)
    found: dict[str, list[float]] = {name: [] for name in SIZES}
    async with open_engine(EngineConfig(models=(model,), kv_cache_memory=1 << 28)) as engine:
        await engine.wait_ready()
        for turn in range(REPEATS + 1):
            for name, count in SIZES.items():
                taken = await seconds(engine, f"{name} {turn}", count)
                if turn:  # the first turn only warms up
                    found[name].append(taken)
    return found


def run() -> list[Row]:
    """Return the bench's rows."""
    rows = []
    for device in devices():
        for name, times in trio.run(partial(measure, device)).items():
            count = SIZES[name]
            rates = [count / taken for taken in times]
            rows += [
                row_of(f"{name} on {device}", [1e3 * taken for taken in times], "ms"),
                row_of(f"{name} on {device}, requests", rates, "1/s", better="higher"),
                row_of(
                    f"{name} on {device}, output",
                    [OUTPUT * rate for rate in rates],
                    "tokens/s",
                    better="higher",
                ),
            ]
    return rows
