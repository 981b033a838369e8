"""Between the engine and a call's handler: credit, straight writes, news, how a call is left."""

from __future__ import annotations

import gc
import logging
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from engine.core.events import Tokens
from engine.core.types import RequestId
from engine.errors import InvalidRequest, Overloaded
from engine.generation import Generation
from engine.loop import Deliveries
from engine.requests import GenerateRequest, Started
from grpc_service.bridge import Bridge
from grpc_service.connections import Flusher
from grpc_service.rpc import Rpc, current
from grpc_service.zombies import ZOMBIE_AGE_S, ZOMBIES_PER_ADDRESS_MAX

BUFFER = 8
PEER = "ipv4:10.0.0.7:5123"
REQUEST = GenerateRequest(text="a")


class Engine:
    """Takes every request, and makes what a test says; ``refusal`` ends each at once."""

    def __init__(self):
        self.config = SimpleNamespace(stream_buffer=BUFFER)
        self.deliveries = Deliveries()
        self.refusal = None

    def submit(self, request, *, buffer, origin):
        generation = Generation(request, "r", RequestId("r"), buffer)
        if self.refusal is not None:
            generation.close(self.refusal)
        return generation

    @contextmanager
    def delivery(self):
        """What is made in the block goes out as one step's."""
        self.deliveries.on_begin()
        try:
            yield
        finally:
            self.deliveries.on_end()


class Connection:
    """Counts how often it was flushed."""

    num_flushed = 0

    def flush(self):
        self.num_flushed += 1


class Handler:
    """Reads a call in a task of its own; ``received`` has a list for each `receive`."""

    def __init__(self, call):
        self.call = call
        self.received = []
        self.error = None

    async def run(self):
        try:
            while events := await self.call.receive():
                self.received.append(list(events))
        except Exception as error:
            self.error = error
        finally:
            self.call.leave()


class Window:
    """Takes straight writes while it is open."""

    def __init__(self, *, is_open=True, error=None):
        self.is_open = is_open
        self.error = error
        self.taken = []

    def write(self, event):
        if self.error is not None:
            raise self.error
        if self.is_open:
            self.taken.append(event)
        return self.is_open


def token(number):
    return Tokens(RequestId("r"), 0, (number,), str(number))


def make(call, *numbers):
    """The model made these tokens."""
    for number in numbers:
        assert call.generation.credit.try_reserve()
        call.generation.credit.fill()
        call.generation._push(token(number))


@pytest.fixture
def now():
    """What the front's clock says, at ``now[0]``."""
    return [100.0]


@pytest.fixture
def flusher():
    return Flusher()


@pytest.fixture
async def bridge(now, flusher):
    return Bridge(Engine(), flusher, clock=lambda: now[0])


@pytest.fixture
async def call(bridge):
    return bridge.generate(REQUEST, PEER)


@pytest.fixture
async def handled(nursery, bridge):
    """Starts a handler, which waits for news when this is back."""

    async def start(window=None):
        call = bridge.generate(REQUEST, PEER)
        if window is not None:
            call.write_straight(window.write)
        handler = Handler(call)
        nursery.start_soon(handler.run)
        await wait_all_tasks_blocked()
        return handler

    return start


# ---- credit


async def test_what_is_written_gives_its_credit_back_at_once(call):
    make(call, 1, 2, 3)
    call.written(2)
    assert call.generation.credit.filled == 1
    call.written(1)
    assert call.generation.credit.free == BUFFER


async def test_what_is_received_and_not_written_holds_its_credit(call):
    make(call, 1, 2)
    assert len(await call.receive()) == 2
    assert call.generation.credit.filled == 2


async def test_messages_without_credit_give_none_back(call):
    make(call, 1)
    call.written(0)
    assert call.generation.credit.filled == 1


async def test_results_sent_are_counted_in_the_log_of_the_calls_own_context(call, caplog):
    with caplog.at_level(logging.DEBUG, logger="grpc_service.bridge"):
        make(call, 1, 2)
        call.written(1)
        call.written(1)
    assert [record.getMessage() for record in caplog.records] == [
        "results sent: 1",
        "results sent: 2",
    ]


# ---- news


async def test_a_handler_that_waits_hears_of_what_comes(handled):
    handler = await handled()
    make(handler.call, 1)
    await wait_all_tasks_blocked()
    assert handler.received == [[token(1)]]


async def test_what_a_step_made_comes_at_its_end_and_together(bridge, handled):
    handler = await handled()
    with bridge.engine.delivery():
        make(handler.call, 1, 2)
        await wait_all_tasks_blocked()
        assert not handler.received
    await wait_all_tasks_blocked()
    assert handler.received == [[token(1), token(2)]]


async def test_all_calls_with_news_in_a_step_hear_of_them(bridge, handled):
    handlers = [await handled() for _ in range(3)]
    with bridge.engine.delivery():
        for number, handler in enumerate(handlers):
            make(handler.call, number)
    await wait_all_tasks_blocked()
    assert [handler.received for handler in handlers] == [[[token(n)]] for n in range(3)]


async def test_news_while_the_task_is_busy_are_not_lost(call):
    make(call, 1)
    assert await call.receive() == [token(1)]
    make(call, 2)  # the task writes
    make(call, 3)
    assert await call.receive() == [token(2), token(3)]


async def test_news_between_the_wake_up_and_the_tasks_turn_come_with_it(handled):
    handler = await handled(Window(is_open=False))
    make(handler.call, 1)
    make(handler.call, 2)
    await wait_all_tasks_blocked()
    assert handler.received == [[token(1), token(2)]]


async def test_a_cancelled_receive_loses_nothing(nursery, call):
    with trio.CancelScope() as scope:
        scope.cancel()
        await call.receive()
    scope = trio.CancelScope()

    async def receive():
        with scope:
            await call.receive()

    nursery.start_soon(receive)
    await wait_all_tasks_blocked()
    scope.cancel()
    make(call, 1)  # before the task has its turn
    await wait_all_tasks_blocked()
    make(call, 2)
    assert await call.receive() == [token(1), token(2)]


async def test_the_end_comes_after_the_last_events(handled):
    handler = await handled()
    make(handler.call, 1)
    handler.call.generation.close(None)
    await wait_all_tasks_blocked()
    assert handler.received == [[token(1)]]
    assert handler.error is None


async def test_an_error_comes_after_the_last_events(handled):
    handler = await handled()
    make(handler.call, 1)
    error = InvalidRequest([], message="planted")
    handler.call.generation.close(error)
    await wait_all_tasks_blocked()
    assert handler.received == [[token(1)]]
    assert handler.error is error


async def test_a_refusal_comes_from_the_first_receive(bridge):
    bridge.engine.refusal = InvalidRequest([], message="refused")
    call = bridge.generate(REQUEST)
    with pytest.raises(InvalidRequest, match="refused"):
        await call.receive()


# ---- straight writes


async def test_an_event_that_comes_alone_is_written_straight(bridge, handled):
    window = Window()
    handler = await handled(window)
    for number in range(3):
        with bridge.engine.delivery():
            make(handler.call, number)
    await wait_all_tasks_blocked()
    assert window.taken == [token(0), token(1), token(2)]
    assert not handler.received
    assert handler.call.generation.credit.free == BUFFER


async def test_a_write_that_refuses_leaves_the_event_to_the_task(handled):
    window = Window(is_open=False)
    handler = await handled(window)
    make(handler.call, 1)
    await wait_all_tasks_blocked()
    assert handler.received == [[token(1)]]
    assert handler.call.generation.credit.filled == 1, "the task has not written it"
    window.is_open = True
    make(handler.call, 2)
    assert window.taken == [token(2)]
    assert handler.call.generation.credit.filled == 1


async def test_several_events_are_the_tasks_to_write(bridge, handled):
    window = Window()
    handler = await handled(window)
    with bridge.engine.delivery():
        make(handler.call, 1, 2)
    await wait_all_tasks_blocked()
    assert handler.received == [[token(1), token(2)]]
    assert not window.taken


async def test_an_event_that_comes_with_the_end_is_the_tasks_to_write(bridge, handled):
    window = Window()
    handler = await handled(window)
    with bridge.engine.delivery():
        make(handler.call, 1)
        handler.call.generation.close(None)
    await wait_all_tasks_blocked()
    assert handler.received == [[token(1)]]
    assert not window.taken


async def test_nothing_is_written_straight_while_the_task_is_busy(call):
    window = Window()
    call.write_straight(window.write)
    make(call, 1)
    assert not window.taken
    assert await call.receive() == [token(1)]


async def test_receive_raises_what_a_straight_write_raises(handled):
    error = RuntimeError("planted")
    handler = await handled(Window(error=error))
    make(handler.call, 1)
    await wait_all_tasks_blocked()
    assert handler.error is error


async def test_a_calls_bug_is_neither_the_loops_nor_another_calls(bridge, flusher, handled):
    """A straight write, the books of credit and the front's own can fail."""
    broken = [
        await handled(Window(error=RuntimeError("planted"))),
        await handled(window := Window()),
        await handled(),
    ]
    good = await handled()
    bridge.zombies.ended = lambda *_: 1 / 0
    connection = Connection()
    with bridge.engine.delivery():
        make(broken[0].call, 1)
        broken[1].call.generation._push(token(2))  # has no slot to give back
        broken[2].call.generation.close(None)
        make(good.call, 4)
        flusher.touch(connection)
        assert not connection.num_flushed
    assert connection.num_flushed == 1
    await wait_all_tasks_blocked()
    names = [type(handler.error).__name__ for handler in broken]
    assert names == ["RuntimeError", "EngineBug", "ZeroDivisionError"]
    assert window.taken == [token(2)]
    assert good.received == [[token(4)]]
    assert good.error is None


async def test_what_was_written_goes_out_whatever_happens(bridge, flusher, monkeypatch):
    connection = Connection()
    call = bridge.generate(REQUEST)
    monkeypatch.setattr(type(call), "advance", lambda self: 1 / 0)
    bridge.engine.deliveries.on_begin()
    make(call, 1)
    flusher.touch(connection)
    with pytest.raises(ZeroDivisionError):
        bridge.engine.deliveries.on_end()
    assert connection.num_flushed == 1
    flusher.touch(connection)
    assert connection.num_flushed == 2, "nothing is held any more"


# ---- leaving


async def test_leaving_ends_the_request_and_may_be_repeated(call):
    make(call, 1)
    call.leave()
    assert call.generation.scope.cancel_called
    call.leave()
    call.cancel()
    make(call, 2)  # a step that was under way
    call.generation.close(InvalidRequest([], message="planted"))


async def test_a_call_that_is_left_hears_of_nothing(call):
    window = Window()
    call.write_straight(window.write)
    call.leave()
    assert call.generation.on_ready is None
    make(call, 1)
    call.generation.close(None)
    assert not window.taken


async def test_a_call_that_is_left_is_no_garbage_in_a_cycle(nursery, bridge):
    """Its failures know its frames."""
    left = []

    def break_off(event):
        raise RuntimeError("planted")

    async def handle(write, end):
        current.set(rpc := Rpc("triolet.v1.Inference/Generate"))
        call = bridge.generate(REQUEST, PEER)
        assert rpc.generation is call.generation
        left.append(weakref.ref(call))
        call.write_straight(write)
        nursery.start_soon(end, call.generation)
        try:
            await call.receive()
        except Exception:
            pass
        finally:
            call.leave()

    async def give(generation):
        await wait_all_tasks_blocked()
        generation._push(Started("r", "m", 1, (), ()))

    async def fail(generation):
        await wait_all_tasks_blocked()
        generation.close(InvalidRequest([], message="planted"))

    gc.collect()
    gc.disable()
    try:
        nursery.start_soon(handle, Window(is_open=False).write, give)
        nursery.start_soon(handle, Window().write, fail)
        nursery.start_soon(handle, break_off, give)
        await wait_all_tasks_blocked(0.01)
        assert [one() for one in left] == [None] * 3
    finally:
        gc.enable()


async def test_an_ended_call_is_a_zombie_until_it_is_left(bridge, now, call):
    call.generation.close(None)
    assert bridge.zombies.count() == 0
    now[0] += ZOMBIE_AGE_S
    assert bridge.zombies.count() == 1
    call.leave()
    assert bridge.zombies.count() == 0


async def test_a_call_that_was_refused_counts_as_ended(bridge, now):
    bridge.engine.refusal = InvalidRequest([], message="refused")
    call = bridge.generate(REQUEST)
    now[0] += ZOMBIE_AGE_S
    assert bridge.zombies.count() == 1
    call.leave()
    assert bridge.zombies.count() == 0


async def test_a_call_that_is_left_before_its_end_is_never_a_zombie(bridge, now, call):
    call.leave()
    call.generation.close(None)
    now[0] += ZOMBIE_AGE_S
    assert bridge.zombies.count() == 0


async def test_a_client_with_too_many_zombies_gets_no_call(bridge, now):
    for _ in range(ZOMBIES_PER_ADDRESS_MAX):
        bridge.generate(REQUEST, PEER).generation.close(None)
    now[0] += ZOMBIE_AGE_S
    with pytest.raises(Overloaded):
        bridge.generate(REQUEST, PEER)
    bridge.generate(REQUEST, "ipv4:10.0.0.8:5123")
