"""What holds for both façades, `engine.aio` and `engine.blocking`, on fakes in real time.

The tests are written for asyncio. `InThreads` (`tests.support.facades`) gives the blocking façade
the same methods, each of which waits in a thread. No test depends on how long something takes;
`LIMIT_S` only bounds a hang. Every body runs in asyncio's debug mode (`run_loop`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading

import pytest

from engine.api import portal
from engine.core.common.events import Finished, PauseMode
from engine.core.text.types import Tokens
from engine.errors import (
    InvalidRequest,
    ModelNotFound,
    RequestAborted,
    RequestCancelled,
    RequestNotFound,
    ShuttingDown,
    SpawnFailed,
    StepFailed,
)
from engine.requests.encode_values import EmbedRequest, RerankRequest
from engine.requests.text_values import GenerateRequest, OutputOptions, SamplingParams, Started
from engine.worker.fakes.digests import VOCAB_SIZE  # X
from engine.worker.fakes.text import FakeScript
from tests.support.core_driver import expected_tokens
from tests.support.facades import (
    ENDLESS,
    LIMIT_S,
    SHORT,
    STEP_S,
    broken_config,
    ended,
    engine_threads,
    fake_embed,
    fake_rank,
    has,
    ids_of,
    in_asyncio,
    in_threads,
    messages,
    one_is_parked,
    one_waits,
    opened,
    park,
    read,
    request,
    run,
    run_loop,
    until,
    until_token,
    wait_no_engine_threads,
)

pytestmark = pytest.mark.timeout(LIMIT_S)


@pytest.fixture(params=[in_asyncio, in_threads], ids=lambda one: one.__name__)
def facade(request):
    """Return a way to open an engine."""
    return request.param


def test_tasks_get_exactly_their_tokens(facade):
    """Sixteen readers, small buffers, one engine."""

    async def body(eng):
        async def read_thrice(index):
            for turn in range(3):
                prompt = (index + 1, turn + 1, 7)
                events = await read(eng.generate(request(prompt, SamplingParams(max_tokens=30))))
                assert isinstance(events[0], Started)
                assert isinstance(events[-1], Finished)
                assert ids_of(events) == expected_tokens(prompt, count=30)

        await asyncio.gather(*[read_thrice(index) for index in range(16)])
        await ended(eng, finished=48)

    run(facade, body, in_process_buffer=3, script=FakeScript())


@pytest.mark.parametrize(("n", "buffer"), [(1, 1), (1, 2), (3, 3), (4, 5), (3, 30)])
def test_credit_that_comes_back_late_delays_no_step(facade, monkeypatch, n, buffer):
    """Credit that is not given back yet leaves room for the next message."""
    monkeypatch.setattr(portal, "RELEASE_AFTER_S", 1e9)

    async def body(eng):
        events = await read(eng.generate(request(sampling=SamplingParams(max_tokens=60), n=n)))
        assert len(ids_of(events)) == 60 * n

    run(facade, body, in_process_buffer=buffer, script=FakeScript(), stall_timeout_s=5)


def test_credit_comes_back_even_if_it_is_less_than_a_quarter_of_the_buffer(facade):
    async def body(eng):
        many = request((1, 2, 3), SHORT, n=15, output=OutputOptions(echo=True))
        events = await read(eng.generate(many))
        assert sum(isinstance(event, Finished) for event in events) == 15

    run(facade, body, in_process_buffer=16, stall_timeout_s=3 * LIMIT_S)


def test_tasks_may_share_a_stream(facade):
    async def body(eng):
        async with eng.generate(request(sampling=SamplingParams(max_tokens=200))) as stream:
            parts = await asyncio.gather(*[read(stream) for _ in range(3)])
            ids = [token_id for part in parts for token_id in ids_of(part)]
            assert sorted(ids) == sorted(expected_tokens((1, 2, 3), count=200))
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run(facade, body, in_process_buffer=4)


def test_a_refusal_is_raised_at_the_first_event_and_then_the_stream_has_ended(facade):
    async def body(eng):
        stream = eng.generate(GenerateRequest(token_ids=(VOCAB_SIZE,)))
        with pytest.raises(InvalidRequest):
            await anext(stream)
        assert await read(stream) == []

    run(facade, body)


def test_a_prompt_in_and_its_text_out(facade):
    async def body(eng):
        want = "".join(f"<{token}>" for token in expected_tokens((98, 99), count=5))
        assert await eng.complete("ab", max_tokens=5) == want
        assert await eng.complete(GenerateRequest(text="ab", sampling={"max_tokens": 5})) == want
        async with eng.generate("ab") as stream:
            assert (await anext(stream)).prompt_tokens == 2
        with pytest.raises(InvalidRequest, match=r"sampling\.top_p"):
            await eng.complete("ab", top_p=7)
        with pytest.raises(ModelNotFound):
            await eng.complete(GenerateRequest(text="ab", model="nobody"))

    run(facade, body)


def test_a_full_stream_holds_up_no_other(facade):

    async def body(eng):
        stream = await park(eng)
        sampling = SamplingParams(max_tokens=50)
        assert len(ids_of(await read(eng.generate(request((9,), sampling))))) == 50
        stream.close()

    run(facade, body, in_process_buffer=4)


async def broken_out_of(eng):
    """Dropped, the stream is collected at once."""
    await until_token(eng.generate(request()))
    await ended(eng, cancelled=1)


async def left_by_an_exception(eng):
    with contextlib.suppress(KeyError):
        async for event in eng.generate(request()):
            if isinstance(event, Tokens):
                raise KeyError
    await ended(eng, cancelled=1)


async def left_its_block(eng):
    async with eng.generate(request()) as stream:
        await anext(stream)
    await ended(eng, cancelled=1)
    with pytest.raises(RequestCancelled):
        await read(stream)


async def never_iterated(eng):
    eng.generate(request())
    await ended(eng, cancelled=1)


async def of_a_cycle_collected_on_the_engines_thread(eng):
    """The collector runs on any thread."""
    box = [eng.generate(request())]
    box.append(box)
    del box
    await eng._caller.ask(lambda engine: gc.collect())
    await ended(eng, cancelled=1)


WAYS = [
    broken_out_of,
    left_by_an_exception,
    left_its_block,
    never_iterated,
    of_a_cycle_collected_on_the_engines_thread,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_request_that_nobody_reads_any_more_ends(facade, way):
    """Such a request ends at once, and its blocks are free."""
    run(facade, way, in_process_buffer=4)


def test_a_stream_closed_before_it_has_begun_is_ended(facade):
    """The model is still loading."""

    async def body(eng):
        stream = eng.generate(request())
        stream.close()
        stream.close()
        with pytest.raises(RequestCancelled, match="after 0 tokens"):
            await read(stream)

    run(facade, body, script=FakeScript(load_s=0.5))


def test_everything_else_an_engine_does(facade):
    async def body(eng):
        await eng.wait_ready()
        assert [status.name for status in await eng.list_models()] == ["fake"]
        assert (await eng.get_model("fake")).max_model_len == 2048
        spans, longest = await eng.tokenize(text="ab")
        assert ([span.token_id for span in spans], longest) == ([98, 99], 2048)
        assert await eng.detokenize([5, 6]) == "<5><6>"
        with pytest.raises(ModelNotFound):
            await eng.tokenize("nobody", text="a")
        with pytest.raises(ModelNotFound):
            await eng.get_model("nobody")
        await eng.reset_prefix_cache()
        await eng.pause(PauseMode.KEEP)
        stream = eng.generate(request(request_id="a"))

        await until(lambda: one_waits(eng))
        assert (await eng.explain("a")).state == "WAITING"
        with pytest.raises(RequestNotFound):
            await eng.explain("b")
        await eng.resume()
        await eng.abort("a")
        with pytest.raises(RequestAborted):
            await read(stream)

    run(facade, body)


def test_drain_lets_other_tasks_finish(facade):
    async def body(eng):
        stream = eng.generate(request(sampling=SamplingParams(max_tokens=300)))
        await anext(stream)
        reader = asyncio.create_task(read(stream))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(eng.drain(), STEP_S)
        await eng.drain()
        assert len(ids_of(await reader)) == 300
        with pytest.raises(ShuttingDown):
            await anext(eng.generate(request()))

    run(facade, body)


def test_a_model_that_fails_to_load_is_an_error_for_every_waiting_request(facade):
    async def body(eng):
        with pytest.raises(SpawnFailed, match="no weights"):
            await eng.wait_ready()
        with pytest.raises(SpawnFailed):
            await read(eng.generate(request()))

    run(facade, body, script=FakeScript(load_error=SpawnFailed("no weights")))


def test_an_engine_that_cannot_start_raises_and_leaves_no_thread(facade):
    async def main():
        with pytest.raises(AttributeError):
            await facade(lambda module: module.open_engine(broken_config()))
        wait_no_engine_threads()

    run_loop(main)


@pytest.mark.parametrize("is_referenced", [True, False])
def test_closing_with_an_abandoned_full_stream(facade, is_referenced):
    """Held or dropped, the stream has no reader any more."""

    async def main():
        eng = await opened(facade, in_process_buffer=2)
        stream = await park(eng)
        if not is_referenced:
            del stream
        await eng.close(LIMIT_S / 2)
        wait_no_engine_threads()
        if is_referenced:
            with pytest.raises(ShuttingDown):
                await read(stream)

    run_loop(main)


def test_closing_while_tasks_wait(facade):
    """Tasks in an iterator, in a call, and in `close` itself all wake."""

    async def main():
        eng = await opened(facade, script=FakeScript(load_s=0.2))
        await eng.pause(PauseMode.KEEP)
        reader = asyncio.create_task(read(eng.generate(request())))
        caller = asyncio.create_task(eng.drain())

        await until(lambda: one_waits(eng))
        await asyncio.gather(*[eng.close() for _ in range(3)])
        for task in (reader, caller):
            with pytest.raises(ShuttingDown):
                await task
        wait_no_engine_threads()

    run_loop(main)


def test_closing_during_a_load_joins_it(facade):
    """Nothing is abandoned, and a task that waited for the load learns of the end."""

    async def main():
        eng = await opened(facade, script=FakeScript(load_s=0.5))
        waiter = asyncio.create_task(eng.wait_ready())
        await until(lambda: has(len(eng._portal._waiters) == 1))
        await eng.close()
        with pytest.raises(ShuttingDown):
            await waiter

    run_loop(main)


def test_closing_with_a_limit_does_not_wait_longer_and_blocks_no_loop(facade):
    entered, go_on = threading.Event(), threading.Event()

    def sleep(seconds):
        entered.set()
        go_on.wait(LIMIT_S)

    async def main():
        eng = await opened(facade, script=FakeScript(load_s=1, sleep=sleep))
        assert entered.wait(LIMIT_S)
        await eng.close(0.01)
        assert len(engine_threads()) == 1
        closing = asyncio.create_task(eng.close())
        await asyncio.sleep(0.01)
        assert not closing.done()
        go_on.set()
        await closing
        wait_no_engine_threads()

    run_loop(main)


CALLS = {
    "generate": lambda eng, stream, chat: anext(eng.generate(request())),
    "tokenize": lambda eng, stream, chat: eng.tokenize(text="a"),
    "detokenize": lambda eng, stream, chat: eng.detokenize([1]),
    "list_models": lambda eng, stream, chat: eng.list_models(),
    "get_model": lambda eng, stream, chat: eng.get_model("fake"),
    "wait_ready": lambda eng, stream, chat: eng.wait_ready(),
    "statistics": lambda eng, stream, chat: eng.statistics(),
    "pause": lambda eng, stream, chat: eng.pause(PauseMode.KEEP),
    "resume": lambda eng, stream, chat: eng.resume(),
    "reset_prefix_cache": lambda eng, stream, chat: eng.reset_prefix_cache(),
    "abort": lambda eng, stream, chat: eng.abort("a"),
    "explain": lambda eng, stream, chat: eng.explain("a"),
    "drain": lambda eng, stream, chat: eng.drain(),
    "chat": lambda eng, stream, chat: eng.chat(),
    "encoder": lambda eng, stream, chat: eng.encoder(),
    "cross_encoder": lambda eng, stream, chat: eng.cross_encoder(),
    "embed": lambda eng, stream, chat: anext(eng.embed(EmbedRequest(inputs=("a",)))),
    "rerank": lambda eng, stream, chat: anext(
        eng.rerank(RerankRequest(query="q", documents=("a",)))
    ),
    "next": lambda eng, stream, chat: read(stream),
    "ask": lambda eng, stream, chat: anext(chat.ask("a")),
    "reset": lambda eng, stream, chat: chat.reset(),
}


def test_after_closing_every_call_raises(facade):
    """A call raises, and a call that only ends something does nothing."""

    async def main():
        eng = await opened(facade)
        stream, chat = eng.generate(request()), eng.chat()
        await eng.close()
        for call in CALLS.values():
            with pytest.raises(ShuttingDown):
                await call(eng, stream, chat)
        for one in (chat, eng, chat):
            await one.close()
        stream.close()
        chat.stop()

    run_loop(main)


def test_an_engine_whose_thread_dies_leaves_nobody_waiting(facade, caplog):
    """The task whose call never gets an answer, and another that reads."""

    async def main():
        eng = await opened(facade, in_process_buffer=4)
        reader = asyncio.create_task(read(eng.generate(request())))
        await eng.wait_ready()
        with pytest.raises(ShuttingDown):
            await eng._caller.ask(lambda engine: sys.exit(1))
        with pytest.raises(ShuttingDown):
            await reader
        with pytest.raises(ShuttingDown):
            await eng.statistics()

    run_loop(main)
    assert "the engine's thread failed" in caplog.text


def test_a_conversation(facade):
    async def body(eng):
        async with eng.chat(system="Be brief.", sampling=SHORT) as chat:
            for question in ("one", "two"):
                texts = [e.text async for e in chat.ask(question) if isinstance(e, Tokens)]
                assert (await messages(chat))[-1]["content"] == "".join(texts)
            roles = [message["role"] for message in await messages(chat)]
            assert roles == ["system", *["user", "assistant"] * 2]
            await chat.reset()
            assert len(await messages(chat)) == 1
        with pytest.raises(ShuttingDown, match="chat is closed"):
            await anext(chat.ask("three"))
        assert len(ids_of(await read(eng.generate(request(sampling=SHORT))))) == 5

    run(facade, body, in_process_buffer=4)


def test_a_stop_ends_the_iteration_of_another_task(facade):
    """The reader waits in its iterator."""

    async def body(eng):
        async with eng.chat(sampling=ENDLESS) as chat:
            await eng.pause(PauseMode.KEEP)
            reader = asyncio.create_task(read(chat.ask("one")))
            await until(lambda: one_waits(eng))
            with pytest.raises(InvalidRequest, match="still runs"):
                await anext(chat.ask("two"))
            chat.stop()
            assert ids_of(await reader) == []
            await eng.resume()
            stream = chat.ask("two")  # an earlier stop does not count
            assert len([await anext(stream) for _ in range(5)]) == 5

    run(facade, body, in_process_buffer=8)


def test_a_chat_closes_however_full_its_stream_is(facade):

    async def body(eng):
        chat = eng.chat(sampling=ENDLESS)
        stream = chat.ask("one")

        await until(lambda: one_is_parked(eng))
        await chat.close()
        assert [event for event in await read(stream) if isinstance(event, Finished)] == []
        await ended(eng)

    run(facade, body, in_process_buffer=4)


@pytest.mark.parametrize("kind", ["encoder", "cross_encoder"])
def test_a_bad_input_does_not_end_an_encoder(facade, kind):

    async def body(eng):
        if kind == "encoder":
            handle = eng.encoder(function=fake_embed)
            call, want = handle.embed, ((1.0,), (2.0,))
        else:
            handle = eng.cross_encoder(function=fake_rank)
            call, want = (lambda texts: handle.rank("q", texts)), (1.0, 2.0)
        async with handle:
            with pytest.raises(InvalidRequest):
                await call(["bad"])
            with pytest.raises(StepFailed):
                await call(["broken"])
            assert await call(["a", "bb"]) == want
            slow = asyncio.create_task(call(["slow"]))
            await until(lambda: has(len(handle._handle._guard._running) == 1))
            handle.stop()
            with pytest.raises(RequestCancelled):
                await slow
            assert await call(["a", "bb"]) == want
        with pytest.raises(ShuttingDown):
            await call(["a"])

    run(facade, body)
