"""The echoed prompt always comes with the first token, however small the stream's buffer is."""

from __future__ import annotations

import pytest
import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Tokens
from engine.requests.text_values import GenerateRequest, OutputOptions, SamplingParams
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.simulator.determinism import VirtualThreads, run_deterministically

REQUEST = GenerateRequest(
    token_ids=(5, 6, 7), n=2, sampling=SamplingParams(max_tokens=3), output=OutputOptions(echo=True)
)


@pytest.mark.parametrize("buffer", [2, 3, 16])
@pytest.mark.parametrize("seed", range(3))
def test_every_choice_gets_the_prompt_first_and_once(buffer, seed):
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
        assert got[0].startswith("<5><6><7><")
        assert "".join(got).count("<5>") == 1
        assert len(got) == 3
