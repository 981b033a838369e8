"""Streams of a Trio program, read when their block has been left."""

from __future__ import annotations

import pytest
import trio

from engine.api import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.errors import RequestCancelled
from engine.model.fake import FakeRunner, FakeScript
from engine.requests import GenerateRequest, SamplingParams
from tools.simulator.determinism import VirtualThreads, run_deterministically

STEP_S = 0.01


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lived_s", [0.0, STEP_S / 2, 3.5 * STEP_S, 30 * STEP_S])
def test_who_reads_on_after_the_block_hears_that_it_was_left(seed, lived_s):
    threads = VirtualThreads()
    runner = FakeRunner(script=FakeScript(step_s=STEP_S, sleep=threads.note_sleep))
    heard = []

    async def main():
        config = EngineConfig(models=(ModelConfig("fake"),), check_level=2)
        request = GenerateRequest(text="x", sampling=SamplingParams(max_tokens=20))
        async with (
            open_engine(config, make_runner=lambda *_: runner, threads=threads) as engine,
            trio.open_nursery() as nursery,
        ):

            async def read(stream):
                try:
                    async for _event in stream:
                        pass
                except RequestCancelled as error:
                    heard.append(error)

            async with engine.generate(request) as stream:
                nursery.start_soon(read, stream)
                await trio.sleep(lived_s)
            await read(stream)

    run_deterministically(main, seed)
    assert len(heard) == (1 if lived_s == 30 * STEP_S else 2)
