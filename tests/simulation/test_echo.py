"""The echoed prompt always comes with the first token, however small the stream's buffer is."""

import pytest

from engine.core.text.types import Tokens
from engine.requests.text.values import GenerateRequest, OutputOptions, SamplingParams
from engine.worker.fakes.text import FakeScript
from tests.simulator.determinism import run_deterministically
from tests.support.virtual_engine import fake_engine, read_all

REQUEST = GenerateRequest(
    token_ids=(5, 6, 7), n=2, sampling=SamplingParams(max_tokens=3), output=OutputOptions(echo=True)
)


@pytest.mark.parametrize("buffer", [2, 3, 16])
@pytest.mark.parametrize("seed", range(3))
def test_every_choice_gets_the_prompt_first_and_once(buffer, seed):
    texts = {0: [], 1: []}

    async def main():
        async with fake_engine(FakeScript(step_s=0.01), waits=False) as engine:
            generation = engine.submit(REQUEST, buffer=buffer)
            for event in await read_all(generation):
                if isinstance(event, Tokens):
                    texts[event.choice].append(event.text)
            assert generation.error is None
            await engine.wait_idle()

    run_deterministically(main, seed)
    for got in texts.values():
        assert got[0].startswith("<5><6><7><")
        assert "".join(got).count("<5>") == 1
        assert len(got) == 3
