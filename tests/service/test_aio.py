"""The asyncio façade: tasks that read, wait, are cancelled, drop and close, on fakes in real time.

test_facades.py has what holds for the blocking façade, too. No test depends on how long something
takes; `LIMIT_S` only bounds a hang. Every body runs in asyncio's debug mode, which checks that
callbacks of other threads come through ``call_soon_threadsafe``.
"""

import asyncio
import contextlib
import gc
import signal
from functools import partial

import pytest

from engine.api import aio
from engine.api._generated import blocking
from engine.core.common.events import PauseMode
from engine.errors import (
    RequestCancelled,
)
from engine.requests.text.values import SamplingParams
from tests.support.bodies import run_by
from tests.support.core_driver import expected_tokens
from tests.support.facades import (
    LIMIT_S,
    SHORT,
    STEP_S,
    ended,
    fake_embed,
    ids_of,
    in_asyncio,
    open_fake,
    park,
    read,
    request,
    run,
    run_loop,
    run_script,
    totals,
    until,
    until_token,
    wait_no_engine_threads,
)

pytestmark = pytest.mark.timeout(LIMIT_S)


in_engine = partial(run_by, run, facade=in_asyncio)


# ---- reading


@in_engine(in_process_buffer=8)
async def test_only_credit_of_taken_events_is_given_back(eng):
    """A parked stream holds credit for exactly the events that wait for its reader."""
    stream = await park(eng)
    for taken in range(1, 4):
        await anext(stream)

        async def is_even(taken=taken):
            def look(engine):
                return engine.statistics().totals.parked, stream._feed._source.credit.filled

            is_parked, filled = await eng._caller.ask(look)
            return is_parked and filled == len(stream._feed.items) == 8

        await until(is_even)
    stream.close()


@in_engine(in_process_buffer=64)
async def test_the_events_of_a_step_cross_together(eng):
    """However many streams a loop reads, each turn of the engine wakes the loop once."""
    num_streams, num_tokens, calls = 32, 40, []
    await eng.wait_ready()
    await eng.pause(PauseMode.KEEP)
    sampling = SamplingParams(max_tokens=num_tokens)
    streams = [eng.generate(request((7, i), sampling)) for i in range(num_streams)]

    async def all_wait():
        return (await totals(eng)).waiting == num_streams

    await until(all_wait)
    steps_before = (await totals(eng)).step_count
    loop = asyncio.get_running_loop()
    call = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *args: (calls.append(args[0]), call(*args))[1]
    await eng.resume()
    assert [len(ids_of(one)) for one in await asyncio.gather(*map(read, streams))] == [
        num_tokens
    ] * num_streams
    num_steps = (await totals(eng)).step_count - steps_before
    crossings = [one for one in calls if one.__name__ == "_wake"]
    assert len(crossings) <= num_steps + 5


@in_engine(in_process_buffer=16)
async def test_a_stream_that_always_has_events_leaves_the_loop_to_others(eng):
    stream = await park(eng)
    turns = []

    async def take_turns():
        while True:
            turns.append(len(stream._feed.items))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        other = group.create_task(take_turns())
        await asyncio.sleep(0)
        for _ in range(17):  # Started, and 16 tokens that are all there
            await anext(stream)
        assert len(turns) >= 4
        other.cancel()
    stream.close()


@in_engine(in_process_buffer=4)
async def test_loops_in_several_threads_share_an_engine(eng):
    def in_a_thread(index):
        async def main():
            prompt = (index + 1, 5)
            events = await read(eng.generate(request(prompt, SamplingParams(max_tokens=30))))
            assert ids_of(events) == expected_tokens(prompt, count=30)
            await eng.get_model("fake")

        run_loop(main)

    await asyncio.gather(*[asyncio.to_thread(in_a_thread, index) for index in range(5)])
    await ended(eng, finished=5)
    gc.collect()
    assert len(eng._caller.streams._crossings) == 0  # no event waits for a loop


@in_engine()
async def test_a_stream_refuses_another_loop(eng):
    stream = eng.generate(request(sampling=SHORT))

    async def main():
        with pytest.raises(RuntimeError, match="another event loop"):
            await anext(stream)

    await asyncio.to_thread(run_loop, main)
    assert len(ids_of(await read(stream))) == 5


@in_engine()
async def test_without_a_running_loop_nothing_begins(eng):
    engines = []

    def outside():
        with pytest.raises(RuntimeError, match="no running event loop"):
            eng.generate(request())

    await asyncio.to_thread(outside)
    assert (await totals(eng)).requests_total.cancelled == 0
    engines.append(eng)


# ---- ending early


async def cancelled_while_it_waits(eng):
    """The test holds task and stream, so that no finaliser ends the request."""
    await eng.pause(PauseMode.KEEP)
    stream = eng.generate(request())
    task = asyncio.create_task(read(stream))

    async def waits():
        return (await totals(eng)).waiting == 1 and stream._feed._waiting

    await until(waits)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await ended(eng, cancelled=1)
    await eng.resume()
    with pytest.raises(RequestCancelled):
        await read(stream)


async def cancelled_between_two_events(eng):
    stream = await park(eng)

    async def read_on():
        async for _event in stream:
            asyncio.current_task().cancel()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(read_on())
    await ended(eng, cancelled=1)


async def cancelled_before_it_has_begun(eng):
    await eng.pause(PauseMode.KEEP)
    task = asyncio.create_task(read(eng.generate(request())))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await ended(eng, cancelled=1)
    await eng.resume()


async def timed_out(eng):
    await eng.wait_ready()
    stream = eng.generate(request())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(20 * STEP_S):
            await read(stream)
    await ended(eng, cancelled=1)


async def timed_out_by_wait_for(eng):
    await eng.wait_ready()
    stream = eng.generate(request())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(stream), 20 * STEP_S)
    await ended(eng, cancelled=1)


async def closed(eng):
    stream = eng.generate(request())
    async with contextlib.aclosing(stream):
        await until_token(stream)
    await stream.aclose()
    await ended(eng, cancelled=1)


async def a_generator_of_ours_is_closed(eng):
    """Web applications stream a body by such a generator, and close it when the client leaves."""

    async def body():
        async for event in eng.generate(request()):
            yield event

    generator = body()
    await until_token(generator)
    await generator.aclose()
    await ended(eng, cancelled=1)


async def a_generator_of_ours_is_dropped(eng):
    async def body():
        async for event in eng.generate(request()):
            yield event

    await until_token(body())
    await ended(eng, cancelled=1)


async def one_of_a_task_group_fails(eng):
    held = []

    async def fail():
        await asyncio.sleep(5 * STEP_S)
        raise KeyError

    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            held.extend([group.create_task(read(eng.generate(request()))) for _ in range(3)])
            group.create_task(fail())
    await ended(eng, cancelled=3)


WAYS = [
    cancelled_while_it_waits,
    cancelled_between_two_events,
    cancelled_before_it_has_begun,
    timed_out,
    timed_out_by_wait_for,
    closed,
    a_generator_of_ours_is_closed,
    a_generator_of_ours_is_dropped,
    one_of_a_task_group_fails,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_request_that_nobody_reads_any_more_ends(way):
    """The request ends at once, and its blocks are free."""
    run(way, in_asyncio, in_process_buffer=4)


@in_engine()
async def test_the_end_of_a_loop_ends_its_requests(eng):
    """`asyncio.run` cancels the remaining tasks; the engine goes on for other loops."""

    async def main():
        tasks.extend([asyncio.create_task(read(eng.generate(request()))) for _ in range(3)])
        await asyncio.sleep(10 * STEP_S)

    tasks = []
    await asyncio.to_thread(run_loop, main)
    await ended(eng, cancelled=3)


@in_engine()
async def test_a_loop_that_is_closed_without_its_tasks_ends_its_requests(eng):
    """The engine cannot hand anything over to a closed loop: the next event finds this out."""
    await eng.pause(PauseMode.KEEP)

    def in_a_thread():
        async def read_here():
            await read(eng.generate(request()))

        loop = asyncio.new_event_loop()
        tasks.append(loop.create_task(read_here()))
        loop.call_later(5 * STEP_S, loop.stop)
        loop.run_forever()
        loop.close()

    tasks = []
    await asyncio.to_thread(in_a_thread)
    await eng.resume()
    await ended(eng, cancelled=1)
    tasks[0]._log_destroy_pending = False  # asyncio would log that the task is pending


# ---- the rest of the surface


@run_by(run_loop)
async def test_an_engine_may_be_awaited():
    """A notebook or an actor has no block that lasts as long as the engine."""
    eng = await open_fake(aio)
    assert len(ids_of(await read(eng.generate(request(sampling=SHORT))))) == 5
    await eng.close()
    await eng.close()
    wait_no_engine_threads()


@run_by(run_loop)
async def test_opening_that_is_cancelled_leaves_no_thread():
    async def open_one():
        await open_fake(aio)

    task = asyncio.create_task(open_one())
    await asyncio.sleep(0)  # the engine's thread starts
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_no_engine_threads()


@in_engine()
async def test_a_call_that_is_cancelled_cancels_what_it_waits_for(eng):
    encoder = eng.encoder(function=fake_embed)
    call = asyncio.create_task(encoder.embed(["slow"]))
    await until(lambda: eng._caller.ask(lambda engine: len(encoder._handle._running)))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: eng._caller.ask(lambda engine: not len(encoder._handle._running)))


# ---- closing


def test_both_facades_have_the_same_surface():
    def surface(cls):
        return {name for name in dir(cls) if not name.startswith("_")}

    for name in ("Engine", "Chat", "Encoder", "CrossEncoder"):
        assert surface(getattr(aio, name)) == surface(getattr(blocking, name))
    assert surface(aio.Stream) == surface(blocking.Stream) | {"aclose"}
    assert aio.__all__ == blocking.__all__


# ---- the interpreter, from outside

WAITS = {"iterator": "[event async for event in stream]", "call": "await eng.drain()"}


@pytest.mark.parametrize("text", WAITS.values(), ids=WAITS.keys())
def test_ctrl_c_cancels_the_task_that_waits(text):
    code, out, err = run_script(
        f"""
async def main():
    async with open_fake(aio) as eng:
        await eng.pause(PauseMode.KEEP)
        stream = eng.generate(request())
        print("ready", flush=True)
        {text}
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", len(portal._open))
""",
        sends=signal.SIGINT,
    )
    assert (code, out, err) == (0, "interrupted 0\n", "")
