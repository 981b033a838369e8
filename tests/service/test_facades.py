"""Tests of both façades, `engine.aio` and `engine.blocking`, on fakes in real time.

The tests are written for asyncio. `InThreads` (`tests.support.facades`) gives the blocking façade
the same methods, each of which waits in a thread. No test depends on how long something takes;
`LIMIT_S` only bounds a hang. Every body runs in asyncio's debug mode (`run_loop`).
"""

import asyncio
import contextlib
import gc
import os
import sys
import threading
import weakref

import pytest

from engine.api import portal
from engine.config import EngineConfig, ModelConfig
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
from engine.requests.encode.values import EmbedRequest, RerankRequest
from engine.requests.text.values import GenerateRequest, OutputOptions, SamplingParams, Started
from engine.worker.fakes.digests import VOCAB_SIZE
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.support.bodies import run_by
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
    in_engine,
    in_threads,
    inner,
    messages,
    one_is_parked,
    one_waits,
    opened,
    park,
    read,
    request,
    run,
    run_loop,
    run_script,
    script_for,
    totals,
    until,
    until_token,
    wait_no_engine_threads,
    wait_until,
)

pytestmark = pytest.mark.timeout(LIMIT_S)


@pytest.fixture(params=[in_asyncio, in_threads], ids=lambda one: one.__name__)
def facade(request):
    """Return the function that opens an engine: in asyncio, or in a thread."""
    return request.param


@in_engine(in_process_buffer=3, script=FakeScript())
async def test_tasks_get_exactly_their_tokens(eng, *, facade):
    """Sixteen readers, small buffers, one engine."""

    async def read_thrice(index):
        for turn in range(3):
            prompt = (index + 1, turn + 1, 7)
            events = await read(eng.generate(request(prompt, SamplingParams(max_tokens=30))))
            assert isinstance(events[0], Started)
            assert isinstance(events[-1], Finished)
            assert ids_of(events) == expected_tokens(prompt, count=30)

    await asyncio.gather(*[read_thrice(index) for index in range(16)])
    await ended(eng, finished=48)


@pytest.mark.parametrize(("n", "buffer"), [(1, 1), (1, 2), (3, 3), (4, 5), (3, 30)])
def test_credit_that_comes_back_late_delays_no_step(facade, monkeypatch, n, buffer):
    """Credit that is not given back yet leaves room for the next message."""
    monkeypatch.setattr(portal, "RELEASE_AFTER_S", 1e9)

    async def body(eng):
        events = await read(eng.generate(request(sampling=SamplingParams(max_tokens=60), n=n)))
        assert len(ids_of(events)) == 60 * n

    run(body, facade, in_process_buffer=buffer, script=FakeScript(), stall_timeout_s=5)


@in_engine(in_process_buffer=16, stall_timeout_s=3 * LIMIT_S)
async def test_credit_comes_back_even_if_it_is_less_than_a_quarter_of_the_buffer(eng, *, facade):
    many = request((1, 2, 3), SHORT, n=15, output=OutputOptions(echo=True))
    events = await read(eng.generate(many))
    assert sum(isinstance(event, Finished) for event in events) == 15


@in_engine(in_process_buffer=4)
async def test_tasks_may_share_a_stream(eng, *, facade):
    async with eng.generate(request(sampling=SamplingParams(max_tokens=200))) as stream:
        parts = await asyncio.gather(*[read(stream) for _ in range(3)])
        ids = [token_id for part in parts for token_id in ids_of(part)]
        assert sorted(ids) == sorted(expected_tokens((1, 2, 3), count=200))
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@in_engine()
async def test_a_refusal_is_raised_at_the_first_event_and_then_the_stream_has_ended(eng, *, facade):
    stream = eng.generate(GenerateRequest(token_ids=(VOCAB_SIZE,)))
    with pytest.raises(InvalidRequest):
        await anext(stream)
    assert await read(stream) == []


@in_engine()
async def test_a_prompt_in_and_its_text_out(eng, *, facade):
    want = "".join(f"<{token}>" for token in expected_tokens((98, 99), count=5))
    assert await eng.complete("ab", max_tokens=5) == want
    assert await eng.complete(GenerateRequest(text="ab", sampling={"max_tokens": 5})) == want
    async with eng.generate("ab") as stream:
        assert (await anext(stream)).prompt_tokens == 2
    with pytest.raises(InvalidRequest, match=r"sampling\.top_p"):
        await eng.complete("ab", top_p=7)
    with pytest.raises(ModelNotFound):
        await eng.complete(GenerateRequest(text="ab", model="nobody"))


@in_engine(in_process_buffer=4)
async def test_a_full_stream_holds_up_no_other(eng, *, facade):
    stream = await park(eng)
    sampling = SamplingParams(max_tokens=50)
    assert len(ids_of(await read(eng.generate(request((9,), sampling))))) == 50
    stream.close()


async def broken_out_of(eng):
    """A stream that is dropped is collected at once."""
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
    """Python's garbage collector may run on any thread, also on the engine's."""
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
    """The request ends at once, and its blocks are free."""
    run(way, facade, in_process_buffer=4)


@in_engine(script=FakeScript(load_s=0.5))
async def test_a_stream_closed_before_it_has_begun_is_ended(eng, *, facade):
    """The model is still loading."""
    stream = eng.generate(request())
    stream.close()
    stream.close()
    with pytest.raises(RequestCancelled, match="after 0 tokens"):
        await read(stream)


@in_engine()
async def test_everything_else_an_engine_does(eng, *, facade):
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


@in_engine()
async def test_drain_lets_other_tasks_finish(eng, *, facade):
    stream = eng.generate(request(sampling=SamplingParams(max_tokens=300)))
    await anext(stream)
    reader = asyncio.create_task(read(stream))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(eng.drain(), STEP_S)
    await eng.drain()
    assert len(ids_of(await reader)) == 300
    with pytest.raises(ShuttingDown):
        await anext(eng.generate(request()))


@in_engine(script=FakeScript(load_error=SpawnFailed("no weights")))
async def test_a_model_that_fails_to_load_is_an_error_for_every_waiting_request(eng, *, facade):
    with pytest.raises(SpawnFailed, match="no weights"):
        await eng.wait_ready()
    with pytest.raises(SpawnFailed):
        await read(eng.generate(request()))


@run_by(run_loop)
async def test_an_engine_that_cannot_start_raises_and_leaves_no_thread(*, facade):
    with pytest.raises(AttributeError):
        await facade(lambda module: module.open_engine(broken_config()))
    wait_no_engine_threads()


@pytest.mark.parametrize("is_referenced", [True, False])
@run_by(run_loop)
async def test_closing_with_an_abandoned_full_stream(*, facade, is_referenced):
    """Whether the test holds the stream or drops it, the stream has no reader."""
    eng = await opened(facade, in_process_buffer=2)
    stream = await park(eng)
    if not is_referenced:
        del stream
    await eng.close(LIMIT_S / 2)
    wait_no_engine_threads()
    if is_referenced:
        with pytest.raises(ShuttingDown):
            await read(stream)


@run_by(run_loop)
async def test_closing_while_tasks_wait(*, facade):
    """Tasks in an iterator, in a call, and in `close` itself all wake."""
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


@run_by(run_loop)
async def test_closing_during_a_load_joins_it(*, facade):
    """No thread is abandoned, and a task that waited for the load gets an error."""
    eng = await opened(facade, script=FakeScript(load_s=0.5))
    waiter = asyncio.create_task(eng.wait_ready())
    await until(lambda: has(len(eng._portal._waiters) == 1))
    await eng.close()
    with pytest.raises(ShuttingDown):
        await waiter


@run_by(run_loop)
async def test_closing_with_a_limit_does_not_wait_longer_and_blocks_no_loop(*, facade):
    entered, go_on = threading.Event(), threading.Event()

    def sleep(seconds):
        entered.set()
        go_on.wait(LIMIT_S)

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


@run_by(run_loop)
async def test_after_closing_every_call_raises(*, facade):
    """Calls raise, except those that only end something, which do nothing."""
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


def test_an_engine_whose_thread_dies_leaves_nobody_waiting(facade, caplog):
    """One task's call gets no answer, and another task reads a stream."""

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


@in_engine(in_process_buffer=4)
async def test_a_conversation(eng, *, facade):
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


@in_engine(in_process_buffer=8)
async def test_a_stop_ends_the_iteration_of_another_task(eng, *, facade):
    """The reader waits in its iterator."""
    async with eng.chat(sampling=ENDLESS) as chat:
        await eng.pause(PauseMode.KEEP)
        reader = asyncio.create_task(read(chat.ask("one")))
        await until(lambda: one_waits(eng))
        with pytest.raises(InvalidRequest, match="still runs"):
            await anext(chat.ask("two"))
        chat.stop()
        assert ids_of(await reader) == []
        await eng.resume()
        stream = chat.ask("two")  # an earlier `stop` does not end it
        assert len([await anext(stream) for _ in range(5)]) == 5


@in_engine(in_process_buffer=4)
async def test_a_chat_closes_however_full_its_stream_is(eng, *, facade):
    chat = eng.chat(sampling=ENDLESS)
    stream = chat.ask("one")

    await until(lambda: one_is_parked(eng))
    await chat.close()
    assert [event for event in await read(stream) if isinstance(event, Finished)] == []
    await ended(eng)


@pytest.mark.parametrize("kind", ["encoder", "cross_encoder"])
@in_engine()
async def test_a_bad_input_does_not_end_an_encoder(eng, *, facade, kind):
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
        await until(lambda: has(len(handle._handle._running) == 1))
        handle.stop()
        with pytest.raises(RequestCancelled):
            await slow
        assert await call(["a", "bb"]) == want
    with pytest.raises(ShuttingDown):
        await call(["a"])


@in_engine()
async def test_encoders_that_are_not_configured_are_an_error(eng, *, facade):
    with pytest.raises(ModelNotFound):
        await eng.encoder().embed(["a"])
    with pytest.raises(ModelNotFound):
        await eng.cross_encoder().rank("q", ["a"])


# ---- what is dropped


def test_engines_opened_and_closed_again_and_again_leave_nothing(facade):
    """Only threads that Trio caches stay; no file descriptor stays, and no future logs an error."""

    async def main():
        async with await opened(facade, in_process_buffer=2) as eng:
            held.append(eng.generate(request()))
            await asyncio.gather(*[read(eng.generate(request(sampling=SHORT))) for _ in range(4)])
            call = asyncio.create_task(eng.encoder(function=fake_embed).embed(["slow"]))
            await asyncio.sleep(STEP_S)
            await eng.statistics()
        with pytest.raises(ShuttingDown):
            await call

    held = []
    run_loop(main)
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run_loop(main)
    wait_no_engine_threads()
    left = set(threading.enumerate()) - threads
    assert [t.name for t in left if not t.name.startswith("Trio thread")] == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@run_by(run_loop)
async def test_an_engine_that_is_dropped_is_closed(*, facade):
    """`__del__` signals, and the thread ends by itself."""
    eng = await opened(facade, in_process_buffer=2)
    thread = eng._portal.thread
    await park(eng)
    alive = weakref.ref(inner(eng))
    del eng
    wait_until(lambda: gc.collect() is not None and alive() is None)
    wait_until(lambda: not thread.is_alive())


def test_nothing_is_kept_alive_by_a_closed_engine(facade):
    """Freed are the engine, its streams and handles, the asyncio loop and the model."""
    runners = []

    def make_runner(model, config):
        runners.append(FakeRunner(script=FakeScript(step_s=STEP_S)))
        return runners[0]

    async def main():
        config = EngineConfig(models=(ModelConfig("fake"),))
        eng = await facade(lambda module: module.open_engine(config, make_runner=make_runner))
        await eng.wait_ready()
        chat = eng.chat()
        things = [eng, eng._portal, chat, chat.ask("a"), eng.generate(request()), runners[0]]
        refs.extend(weakref.ref(inner(thing)) for thing in things)
        refs.append(weakref.ref(asyncio.get_running_loop()))
        await eng.close()

    refs = []
    run_loop(main)
    runners.clear()
    wait_until(lambda: gc.collect() is not None and [ref() for ref in refs] == [None] * 7)


@in_engine()
async def test_a_dropped_chat_is_closed_but_not_while_it_is_read_through(eng, *, facade):
    stream = eng.chat(sampling=SHORT).ask("one")
    gc.collect()
    assert len(ids_of(await read(stream))) == 5
    chat = eng.chat(sampling=ENDLESS)
    handle = chat._handle
    del chat
    gc.collect()
    await until(lambda: eng._caller.ask(lambda engine: handle.is_closed))


# ---- the interpreter, from outside

LEFT_OPEN = {
    "idle": """
async def main():
    global eng
    eng = await open_fake(aio)
asyncio.run(main())
""",
    "with a stream that is held": """
async def main():
    global eng, stream
    eng = await open_fake(aio, step_s=0.01)
    stream = eng.generate(request())
    await anext(stream)
asyncio.run(main())
""",
    "with all in a cycle": """
async def main():
    eng = await open_fake(aio, step_s=0.01)
    box = [eng, eng.generate(request()), eng.chat(), eng.chat().ask("a")]
    box.append(box)
    await anext(box[1])
asyncio.run(main())
""",
    "while it loads": """
async def main():
    global eng
    eng = await open_fake(aio, load_s=1)
asyncio.run(main())
""",
    "while another thread reads, which is told": """
async def main():
    async with open_fake(aio, step_s=0.01) as eng:
        try:
            async for _ in eng.generate(request()):
                begun.set()
        except engine.TrioletError as error:
            print(error.reason)
begun = threading.Event()
threading.Thread(target=lambda: asyncio.run(main())).start()
begun.wait()
""",
    "while daemons wait for it": """
async def main(wait):
    await wait()
async def read():
    async for _ in eng.generate(request()):
        pass
async def ask_on():
    while True:
        await eng.statistics()
async def open_paused():
    global eng
    eng = await open_fake(aio, step_s=0.01)
    await eng.pause(PauseMode.KEEP)
async def begun():
    while (await eng.statistics()).totals.waiting == 0:
        time.sleep(0.01)
asyncio.run(open_paused())
for wait in (read, eng.drain, ask_on):
    threading.Thread(target=lambda wait=wait: asyncio.run(main(wait)), daemon=True).start()
    asyncio.run(begun())
""",
    "after a step that hangs, for the limit": """
async def main():
    global eng, stream
    eng = await open_fake(aio, step_s=1, sleep=lambda s: s and go_on.wait())
    stream = eng.generate(request())
    await anext(stream)
portal.EXIT_LIMIT_S = 0.5
go_on = threading.Event()
asyncio.run(main())
""",
    "twice": """
async def main():
    global engines
    engines = await open_fake(aio), await open_fake(aio)
asyncio.run(main())
""",
    "inside its block, by sys.exit": """
async def main():
    async with open_fake(aio, step_s=0.01) as eng:
        async for _ in eng.generate(request()):
            sys.exit(0)
asyncio.run(main())
""",
}


@pytest.mark.parametrize("text", LEFT_OPEN.values(), ids=LEFT_OPEN.keys())
def test_the_interpreter_exits_with_an_engine_left_open(facade, text):
    """The exit takes bounded time and shows no traceback."""
    code, out, err = run_script(script_for(facade, text))
    assert (code, err) == (0, "")
    assert out == ("SHUTTING_DOWN\n" if "print" in text else "")


def test_calls_in_a_forked_child_raise(facade):
    """Every call raises at once; closing and exiting do nothing to the parent's engine."""
    script = """
async def open_and_begin():
    global eng, stream, chat
    eng = await open_fake(aio, step_s=0.001)
    stream, chat = eng.generate(request(300)), eng.chat()
    await anext(stream)
async def in_the_child():
    for call in (eng.statistics, eng.wait_ready, lambda: anext(chat.ask("a")),
                 lambda: anext(eng.generate(request()))):
        try:
            await call()
        except engine.TrioletError as error:
            print(type(error).__name__, "fork" in str(error), flush=True)
    stream.close()
    await chat.close()
    await eng.close()
async def count():
    print(len([event async for event in eng.generate(request(5))]))
    await eng.close()
asyncio.run(open_and_begin())
child = os.fork()
if child == 0:
    asyncio.run(in_the_child())
    del stream, chat, eng
    sys.exit(7)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
asyncio.run(count())
"""
    code, out, err = run_script(script_for(facade, script))
    assert (code, err) == (0, "")
    assert out == "ShuttingDown True\n" * 4 + "7\n7\n"


@in_engine()
async def test_the_process_id_decides_about_a_fork(eng, *, facade, monkeypatch):
    await eng.pause(PauseMode.KEEP)
    stream = eng.generate(request())
    real = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: real + 1)
        with pytest.raises(ShuttingDown, match="fork"):
            await read(stream)  # the first event may have come before
        with pytest.raises(ShuttingDown, match="fork"):
            eng.chat()
        with pytest.raises(ShuttingDown, match="fork"):
            await eng.statistics()
        await eng.close()
    assert (await totals(eng)).waiting <= 1
