"""Tokenising, mostly in virtual time: requests that wait while the engine ends, and exceptions."""

from __future__ import annotations

import pytest
import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.text.plan import RowResult
from engine.errors import EngineBug, ShuttingDown, TrioletError
from engine.requests.text_values import GenerateRequest, SamplingParams
from engine.requests.tokenizing import INLINE_TOKENIZE_CHARS
from engine.worker.fakes.text import FakeRunner, FakeScript
from engine.worker.fakes.tokenizer import FakeTokenizer
from tests.simulator.determinism import VirtualThreads, run_deterministically

CONFIG = EngineConfig(models=(ModelConfig("fake"),), check_level=2)
LONG = "a" * INLINE_TOKENIZE_CHARS


class Panic(BaseException):
    """The kind of exception that a panic in a Rust library raises."""


def run(body, seed, encode):
    """Run ``body(engine, nursery)`` with a tokenizer that calls ``encode(threads, text)``."""
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
def test_a_request_that_tokenises_while_the_engine_ends_gets_an_error(seed):
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
        await trio.sleep(1)  # the engine closes while the first half is tokenised

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


async def test_a_request_that_tokenises_when_its_loop_dies_gets_an_error():
    entered, go_on = trio.Event(), trio.Event()

    class SlowTokenizer(FakeTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            if len(text) > INLINE_TOKENIZE_CHARS:
                trio.from_thread.run_sync(entered.set)
                trio.from_thread.run(go_on.wait)
            return super().encode(text)[:20]

    class Runner(FakeRunner):
        """Return a result for a sequence that is not in the plan: a bug that ends the loop."""

        tokenizer = SlowTokenizer()

        def execute(self, plan):
            result = super().execute(plan)
            return result.__class__(result.plan_id, (RowResult(99),))

    with trio.fail_after(20):
        async with (
            open_engine(CONFIG, make_runner=lambda *_: Runner()) as engine,
            engine.generate(GenerateRequest(text="x" + LONG)) as slow,
        ):
            await entered.wait()
            async with engine.generate(GenerateRequest(text="short")) as short:
                assert (await error_of(short)).reason == "ENGINE_BUG"
            go_on.set()
            assert (await error_of(slow)).reason == "ENGINE_BUG"


async def error_of(stream):
    """Return the error with which a stream ends."""
    with pytest.raises(TrioletError) as caught:
        async for _event in stream:
            pass
    return caught.value
