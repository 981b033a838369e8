"""The echoed prompt comes first and always, however small the stream's buffer is."""

from __future__ import annotations

import pytest
import trio

from engine.api import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.events import Tokens
from engine.model.fake import FakeRunner, FakeScript
from engine.requests import GenerateRequest, OutputOptions, SamplingParams
from tools.simulator.determinism import VirtualThreads, run_deterministically

REQUEST = GenerateRequest(
    token_ids=(5, 6, 7), n=2, sampling=SamplingParams(max_tokens=3), output=OutputOptions(echo=True)
)


@pytest.mark.parametrize("buffer", [2, 3, 16])
@pytest.mark.parametrize("seed", range(3))
def test_every_choice_gets_the_prompt_first(buffer, seed):
    threads, texts = VirtualThreads(), {0: [], 1: []}
    script = FakeScript(step_s=0.01, sleep=threads.note_sleep)

    async def main():
        config = EngineConfig(models=(ModelConfig("fake"),), check_level=2)
        runner = FakeRunner(script=script)
        async with open_engine(
            config, make_runner=lambda model, config: runner, threads=threads
        ) as engine:
            generation = engine.submit(REQUEST, buffer=buffer)
            while True:
                try:
                    event = await generation.receive()
                except trio.EndOfChannel:
                    break
                if isinstance(event, Tokens):
                    texts[event.choice].append(event.text)
            assert generation.error is None
            await engine.wait_idle()

    run_deterministically(main, seed)
    for got in texts.values():
        assert got[0] == "<5><6><7>"
        assert len(got) == 4
