"""How a request's events become messages of its call: credit, writes by the loop, and the end."""

import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from engine.core.common.types import RequestId
from engine.core.text.types import Tokens
from engine.errors import InvalidRequest
from engine.requests.stream import StreamOptions
from engine.requests.text.stream import TextStream
from engine.requests.text.values import GenerateRequest, Started
from grpc_service.access.rpc_record import Rpc
from grpc_service.access.unread_calls import (
    UNREAD_AGE_S,
    UNREAD_CALLS_PER_CONNECTION_MAX,
    UnreadCalls,
)
from grpc_service.app.application import STOP_GRACE_S
from grpc_service.services import call_writer
from grpc_service.services.call_writer import FAILURE_PATIENCE_S, CallWriter

BUFFER = 8
PEER = "ipv4:10.0.0.7:5123"
REQUEST = GenerateRequest(text="a")
STARTED = Started("r", "m", 1, (), ())


class Connection(str):
    """A connection whose client does not read."""

    __slots__ = ()
    is_being_read = False

    def note_taken(self, call):
        """Do nothing: only a server that drains needs the note."""


class Call:
    """Stands in for a gRPC call, and keeps what is written; its messages are the events.

    ``taken`` has what the replica's loop wrote while it delivered a step: ``is_open`` allows such
    writes, ``bug`` makes them fail. ``written`` has what the call's task wrote, one list for each
    time that the task was woken.
    """

    def __init__(self, *, is_open=False, bug=None, connection="one"):
        self.connection = Connection(connection)
        self.is_evicted = False
        self.code = None
        self.is_lost = False
        self.scope = trio.CancelScope()
        self.is_open = is_open
        self.bug = bug
        self.taken = []
        self.written = []
        self.status = None
        self.is_stuck = False

    def encode(self, events):
        self.written.append(list(events))
        return events

    def encode_short(self, event):
        return event

    def try_write(self, event):
        if self.bug is not None:
            raise self.bug
        if self.is_open:
            self.taken.append(event)
        return self.is_open

    async def write(self, message):
        if self.is_stuck:
            await trio.sleep_forever()

    async def end(self, *status):
        self.status = status

    def evict(self):
        self.is_evicted = True


class Served:
    """A request, and the task `run` that writes its events to ``call``."""

    def __init__(self, unread_calls, call, error=None):
        self.call = call
        self.rpc = Rpc(call=call, method="", peer="", address="")
        self.writer = CallWriter(self.rpc, unread_calls, call.encode, call.encode_short)
        options = StreamOptions("r", RequestId("r"), BUFFER, self.writer)
        self.stream = TextStream(REQUEST, options)
        self.scope = trio.CancelScope()
        if error is not None:
            self.stream.close(error)

    async def run(self):
        """Write the request's events. Cancellation: `scope` ends it."""
        with self.scope:
            await self.writer.run(self.stream)

    def make(self, *numbers):
        """Push a token for each number, as the replica's loop does."""
        for number in numbers:
            assert self.stream.credit.try_reserve()
            self.stream.credit.fill()
            self.stream._reader.push(token(number))


def token(number):
    return Tokens(RequestId("r"), 0, (number,), str(number))


@pytest.fixture
def now():
    """Return a list with the time of the unread calls' clock, which a test may change."""
    return [100.0]


@pytest.fixture
def unread_calls(now):
    """Return unread calls with the test's clock."""
    return UnreadCalls(lambda: now[0])


@pytest.fixture
async def serve(nursery, unread_calls):
    """Return a function that serves a request to a call; the call's task then waits for events."""

    async def start(error=None, **call):
        served = Served(unread_calls, Call(**call), error)
        nursery.start_soon(served.run)
        await wait_all_tasks_blocked()
        return served

    return start


# ---- credit


async def test_messages_that_the_task_wrote_give_their_credit_back(serve):
    served = await serve()
    served.make(1, 2, 3)
    assert served.stream.credit.filled == 3
    await wait_all_tasks_blocked()
    assert served.stream.credit.free == BUFFER


async def test_events_that_are_not_written_yet_hold_their_credit(serve):
    served = await serve()
    served.call.is_stuck = True
    served.make(1, 2)
    await wait_all_tasks_blocked()
    assert served.stream.credit.filled == 2


async def test_events_without_credit_give_none_back(serve):
    served = await serve()
    served.make(1)
    served.stream._reader.push(STARTED)
    await wait_all_tasks_blocked()
    assert served.call.written == [[token(1), STARTED]]
    assert served.stream.credit.free == BUFFER


async def test_a_starved_stream_is_reported_when_its_credit_comes_back(serve):
    served = await serve(is_open=True)
    posted = []
    served.stream.replica = SimpleNamespace(loop=SimpleNamespace(post=posted.append))
    served.stream.credit.mark_starved()
    served.make(1)
    served.make(2)
    assert [event.request_id for event in posted] == ["r"]


async def test_results_sent_are_counted_in_the_log_under_the_requests_id(serve, caplog):
    served = await serve(is_open=True)
    with caplog.at_level(logging.DEBUG, logger="grpc_service.services.call_writer"):
        served.make(1)
        served.make(2)
    assert [(record.getMessage(), record.request_id) for record in caplog.records] == [
        ("results sent: 1", "r"),
        ("results sent: 2", "r"),
    ]


# ---- the call's task


async def test_a_waiting_task_is_woken_by_an_event(serve):
    served = await serve()
    served.make(1)
    await wait_all_tasks_blocked()
    assert served.call.written == [[token(1)]]


async def test_events_that_come_before_the_tasks_turn_are_written_together(serve):
    served = await serve()
    served.make(1)
    served.make(2)
    await wait_all_tasks_blocked()
    assert served.call.written == [[token(1), token(2)]]


async def test_other_tasks_run_while_many_messages_are_written(unread_calls, nursery, monkeypatch):
    """The test's own task has a turn before the last of the events that waited is written."""
    served = Served(unread_calls, Call())
    written = []

    async def write(message):
        written.append(message)

    served.call.write = write
    monkeypatch.setattr(call_writer, "MESSAGES_IN_TURN", 2)
    served.make(*range(BUFFER))
    nursery.start_soon(served.run)
    seen = []
    while len(written) < BUFFER:
        await trio.lowlevel.checkpoint()
        seen.append(len(written))
    assert {*seen} - {0, BUFFER}


async def test_a_generators_messages_are_made_one_by_one(unread_calls, nursery, monkeypatch):
    """A batch of vectors is large, and a slow client reads it for long."""
    served, made, written = Served(unread_calls, Call()), [], []

    def encode(events):
        for event in events:
            made.append(event)
            yield event

    async def write(message):
        written.append(message)
        assert len(made) == len(written)

    monkeypatch.setattr(served.writer, "_encode", encode)
    served.call.write = write
    served.make(*range(BUFFER))
    nursery.start_soon(served.run)
    await wait_all_tasks_blocked()
    assert len(written) == BUFFER


async def test_events_that_come_while_the_task_is_busy_are_not_lost(unread_calls, nursery):
    served = Served(unread_calls, Call(is_open=True))
    served.make(1)
    nursery.start_soon(served.run)
    served.make(2)
    await wait_all_tasks_blocked()
    assert served.call.written == [[token(1), token(2)]]
    assert not served.call.taken


async def test_a_cancelled_task_ends_the_request(serve):
    served = await serve()
    served.scope.cancel()
    served.make(1)
    await wait_all_tasks_blocked()
    assert served.stream.scope.cancel_called
    assert not served.call.written


async def test_the_end_comes_after_the_last_events(serve):
    served = await serve()
    served.make(1)
    served.stream.close(None)
    await wait_all_tasks_blocked()
    assert served.call.written == [[token(1)]]
    assert served.call.status is None, "the interceptor ends a call that succeeded"
    assert served.writer.has_left


async def test_an_error_comes_after_the_last_events(serve):
    served = await serve()
    served.make(1)
    served.stream.close(InvalidRequest([], message="planted"))
    await wait_all_tasks_blocked()
    assert served.call.written == [[token(1)]]
    assert "planted" in served.call.status[1]


@pytest.mark.parametrize("fails_first", [False, True])
async def test_a_failed_call_gets_its_status_though_its_client_does_not_read(
    serve, autojump_clock, fails_first
):
    """The request fails before the call's task writes the last event, or during that write."""
    served = await serve()
    served.call.is_stuck = True
    served.make(1)
    if not fails_first:
        await wait_all_tasks_blocked()
    served.stream.close(InvalidRequest([], message="planted"))
    await wait_all_tasks_blocked()
    assert served.call.status is None, "the client has some time to read"
    await trio.sleep(FAILURE_PATIENCE_S)
    await wait_all_tasks_blocked()
    assert "planted" in served.call.status[1]
    assert served.writer.has_left


def test_a_failed_call_gets_its_status_before_a_drain_ends():
    assert FAILURE_PATIENCE_S < STOP_GRACE_S


async def test_a_call_that_succeeded_waits_until_its_client_reads(serve, autojump_clock):
    served = await serve()
    served.call.is_stuck = True
    served.make(1)
    served.stream.close(None)
    await trio.sleep(3600)
    assert not served.writer.has_left


async def test_a_refusal_ends_the_call(serve):
    served = await serve(error=InvalidRequest([], message="refused"))
    assert "refused" in served.call.status[1]
    assert not served.call.written


# ---- writes in a delivery


async def test_an_event_that_comes_while_the_task_waits_is_written_at_once(serve):
    served = await serve(is_open=True)
    served.make(0, 1, 2)
    assert served.call.taken == [token(0), token(1), token(2)]
    assert served.stream.credit.free == BUFFER
    await wait_all_tasks_blocked()
    assert not served.call.written


async def test_a_write_that_the_call_does_not_take_is_left_to_the_task(serve):
    served = await serve()
    served.make(1)
    assert served.stream.credit.filled == 1, "the task has not written the event"
    served.call.is_open = True
    served.make(2)
    assert not served.call.taken, "an event may not overtake the one before"
    await wait_all_tasks_blocked()
    assert served.call.written == [[token(1), token(2)]]
    served.make(3)
    assert served.call.taken == [token(3)]


async def test_an_event_without_a_short_form_is_left_to_the_task(serve):
    served = await serve(is_open=True)
    served.call.encode_short = served.writer._encode_short = lambda event: None
    served.make(1)
    assert not served.call.taken
    await wait_all_tasks_blocked()
    assert served.call.written == [[token(1)]]


async def test_progress_has_one_place_and_no_credit(serve):
    served = await serve(is_open=True)
    served.call.encode_short = served.writer._encode_short = lambda event: None
    served.stream.wants_progress = True
    for number in range(3):
        served.stream.show(number)
    served.make(7)
    served.stream.show(3)
    await wait_all_tasks_blocked()
    assert served.call.written == [[3, token(7)]]
    served.stream.show(4)
    await wait_all_tasks_blocked()
    assert served.call.written[1:] == [[4]]
    assert served.stream.credit.free == BUFFER


async def test_an_event_with_nothing_to_send_gives_its_credit_back(serve):
    served = await serve()
    served.writer._encode_short = lambda event: b""
    served.make(1)
    assert served.stream.credit.free == BUFFER
    await wait_all_tasks_blocked()
    assert not served.call.written


async def test_nothing_is_written_in_a_delivery_while_the_task_is_busy(serve):
    served = await serve()
    served.call.is_stuck = True
    served.make(1)
    await wait_all_tasks_blocked()
    served.call.is_open = True
    served.make(2)
    assert not served.call.taken


async def test_a_bug_in_a_delivery_ends_only_its_call(serve, unread_calls, monkeypatch):
    """The write, the return of credit, and the count of unread calls can each have a bug."""
    broken = await serve(bug=RuntimeError("planted"))
    unpaid = await serve(is_open=True)
    uncounted = await serve()
    good = await serve()
    broken.make(1)
    unpaid.stream._reader.push(token(2))  # has no credit to return
    good.make(4)
    monkeypatch.setattr(unread_calls, "ended", lambda *_: 1 / 0)
    uncounted.stream.close(None)
    await wait_all_tasks_blocked()
    assert unpaid.call.taken == [token(2)]
    assert good.call.written == [[token(4)]]
    assert not good.writer.has_left
    for served in (broken, unpaid, uncounted):
        assert served.call.status is not None
        assert served.writer.has_left
        assert served.stream.scope.cancel_called or served.stream.is_closed


# ---- leaving


async def test_a_call_that_is_left_gets_nothing_more(serve):
    served = await serve(is_open=True)
    served.scope.cancel()
    await wait_all_tasks_blocked()
    assert served.stream.scope.cancel_called
    served.make(2)  # tokens of a step that was running when the client left
    served.stream.close(InvalidRequest([], message="planted"))
    assert not served.call.taken
    assert served.writer.has_left


async def test_a_call_that_is_left_is_no_garbage_in_a_cycle(nursery, unread_calls):
    """Red if a failure's traceback, which refers to the call's frames, keeps the call alive."""
    left = []

    async def serve(call, end):
        served = Served(unread_calls, call)
        left.append(weakref.ref(served.writer))
        nursery.start_soon(end, served.stream)
        await served.run()

    async def give(stream):
        await wait_all_tasks_blocked()
        stream._reader.push(STARTED)
        await wait_all_tasks_blocked(0.001)
        stream.close(None)

    async def fail(stream):
        await wait_all_tasks_blocked()
        stream.close(InvalidRequest([], message="planted"))

    gc.collect()
    gc.disable()
    try:
        nursery.start_soon(serve, Call(), give)
        nursery.start_soon(serve, Call(is_open=True), fail)
        bug = InvalidRequest([], message="planted")  # other errors are logged and kept
        nursery.start_soon(serve, Call(bug=bug), give)
        del bug
        await wait_all_tasks_blocked(0.01)
        assert [one() for one in left] == [None] * 3
    finally:
        gc.enable()


# ---- unread calls


async def test_an_ended_call_is_unread_until_it_is_left(serve, unread_calls, now):
    served = await serve()
    served.call.is_stuck = True
    served.make(1)
    await wait_all_tasks_blocked()
    served.stream.close(None)
    assert unread_calls.count() == 0
    now[0] += UNREAD_AGE_S
    assert unread_calls.count() == 1
    served.scope.cancel()
    await wait_all_tasks_blocked()
    assert unread_calls.count() == 0


async def test_a_call_that_failed_is_never_unread(unread_calls, now):
    Served(unread_calls, Call(), InvalidRequest([], message="refused"))
    now[0] += UNREAD_AGE_S
    assert unread_calls.count() == 0


async def test_a_call_that_is_left_before_its_end_is_never_unread(serve, unread_calls, now):
    served = await serve()
    served.scope.cancel()
    await wait_all_tasks_blocked()
    served.stream.close(None)
    now[0] += UNREAD_AGE_S
    assert unread_calls.count() == 0


async def test_of_too_many_unread_calls_the_oldest_is_reset_and_no_other_client_is_refused(
    unread_calls, now
):
    oldest = Served(unread_calls, Call())
    oldest.stream.close(None)
    other = Served(unread_calls, Call(connection="another"))
    other.stream.close(None)
    for _ in range(UNREAD_CALLS_PER_CONNECTION_MAX - 1):
        Served(unread_calls, Call()).stream.close(None)
    now[0] += UNREAD_AGE_S
    unread_calls.count()
    assert not oldest.call.is_evicted
    last = Served(unread_calls, Call())
    last.stream.close(None)
    now[0] += UNREAD_AGE_S
    assert unread_calls.count() == UNREAD_CALLS_PER_CONNECTION_MAX + 1
    assert oldest.call.is_evicted
    assert not any(one.call.is_evicted for one in (other, last))
