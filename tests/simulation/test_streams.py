"""Streams of a Trio program, read after their block was left."""

from __future__ import annotations

import pytest
import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.errors import ReaderStalled, RequestCancelled
from engine.requests.encode_values import EmbedRequest
from engine.requests.text_values import GenerateRequest, SamplingParams
from engine.status import Capability
from engine.worker.fakes.encoder import FakeEncoder
from engine.worker.fakes.text import FakeRunner, FakeScript
from tools.simulator.determinism import VirtualThreads, run_deterministically

STEP_S = 0.01


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lived_s", [0.0, STEP_S / 2, 3.5 * STEP_S, 30 * STEP_S])
def test_a_reader_that_reads_on_after_the_block_gets_the_end(seed, lived_s):
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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("encodes", [False, True], ids=["text", "encoder"])
def test_a_reader_that_stalls_is_ended_however_busy_the_model_is(seed, encodes):
    """Steps that follow one another leave the loop no moment in which it waits."""
    threads = VirtualThreads()
    script = FakeScript(step_s=STEP_S, sleep=threads.note_sleep)
    capability = Capability.TEXT_EMBEDDING if encodes else Capability.TEXT_TO_TEXT
    model = ModelConfig("fake", capability=capability)
    config = EngineConfig(models=(model,), check_level=2, stall_timeout_s=1.0, max_num_seqs=4)
    runner = FakeEncoder(script=script) if encodes else FakeRunner(script=script)

    def request(count):
        if encodes:
            return EmbedRequest(inputs=((1, 2),) * count)
        return GenerateRequest(token_ids=(1, 2), sampling=SamplingParams(max_tokens=count))

    async def main():
        async with open_engine(config, make_runner=lambda *_: runner, threads=threads) as engine:
            await engine.wait_ready()
            stalled = engine.submit(request(500), buffer=2)
            with trio.move_on_after(2.0):
                while True:  # another request always has something to compute
                    busy = engine.submit(request(20), buffer=500)
                    await trio.sleep(5 * STEP_S)
            assert not busy.is_closed or busy.error is None
            assert isinstance(stalled.error, ReaderStalled)

    run_deterministically(main, seed)
