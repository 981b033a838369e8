"""Tokenising in virtual time: who waits for it while the engine ends, and what it may raise."""

from __future__ import annotations

import pytest
import trio

from engine.api import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.errors import EngineBug, ShuttingDown
from engine.model.fake import FakeRunner, FakeScript, FakeTokenizer
from engine.prompts import INLINE_TOKENIZE_CHARS
from engine.requests import GenerateRequest, SamplingParams
from tools.simulator.determinism import VirtualThreads, run_deterministically

CONFIG = EngineConfig(models=(ModelConfig("fake"),), check_level=2)
LONG = "a" * INLINE_TOKENIZE_CHARS


class Panic(BaseException):
    """What a library in Rust raises when it panics."""


def run(body, seed, encode):
    threads = VirtualThreads()

    class Tokenizer(FakeTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            return encode(threads, text)

    class Runner(FakeRunner):
        tokenizer = Tokenizer()

    def make_runner(model, config):
        return Runner(script=FakeScript(step_s=0.01, sleep=threads.note_sleep))

    async def main():
        async with (
            trio.open_nursery() as nursery,
            open_engine(CONFIG, make_runner=make_runner, threads=threads) as engine,
        ):
            await engine.wait_ready()
            await body(engine, nursery)

    run_deterministically(main, seed)


@pytest.mark.parametrize("seed", range(12))
def test_who_tokenises_while_the_engine_ends_hears_that_it_does(seed):
    ends = []

    def encode(threads, text):
        threads.note_sleep(5.0)
        return (1, 2, 3)

    async def body(engine, nursery):
        async def tokenize():
            with pytest.raises(ShuttingDown):
                await engine.tokenize("", text=LONG)
            ends.append(trio.current_time())

        nursery.start_soon(tokenize)
        await trio.sleep(1)  # and the engine closes, while the first half is made

    run(body, seed, encode)
    assert len(ends) == 1


@pytest.mark.parametrize("text", ["p", "p" + LONG])
def test_a_tokenizer_that_panics_ends_its_own_request_and_no_other(text):
    def encode(threads, text):
        if text.startswith("p"):
            raise Panic("planted")
        return (1, 2, 3)

    async def body(engine, nursery):
        request = GenerateRequest(text="x", sampling=SamplingParams(max_tokens=20))
        other = engine.submit(request, buffer=99)
        bad = engine.submit(GenerateRequest(text=text), buffer=99)
        with pytest.raises(EngineBug):
            await engine.tokenize("", text=text)
        with trio.fail_after(10):
            await bad.wait_closed()
            await other.wait_closed()
        assert isinstance(bad.error, EngineBug)
        assert other.error is None

    run(body, 0, encode)
