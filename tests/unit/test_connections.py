"""Connections and calls, over a transport in memory and on a clock that jumps."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
from collections import Counter
from contextlib import asynccontextmanager

import grpc
import pytest
import trio
import trio.testing
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    PingAckReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes

from engine.errors import InvalidRequest, RequestTooLarge
from grpc_service import connections
from grpc_service.config import ServerConfig
from grpc_service.connections import (
    CALLS_PER_CONNECTION_MAX,
    CLOGGED_BYTES,
    END_PATIENCE_S,
    STARTS_PER_TURN,
    STREAMS_PER_CONNECTION_MAX,
    Disconnected,
    Flusher,
    RpcServer,
)
from grpc_service.framing import MessageReader

MINUTE = 60.0
CONFIG = ServerConfig()
SILENCE_S = CONFIG.keepalive_time_s + CONFIG.keepalive_timeout_s


@pytest.fixture
def autojump_clock():
    return trio.testing.MockClock(autojump_threshold=0)


# ---- a transport, a listener and a client in memory


class Wire:
    """The server's transport: ``room`` bytes can be sent before it takes no more."""

    def __init__(self):
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.room = math.inf
        self.is_closed = False  # by the server
        self.has_left = False  # the client
        self.ready = trio.Event()  # what is a handshake for TLS is over
        self.ready.set()
        self._changed = trio.lowlevel.ParkingLot()

    def change(self):
        self._changed.unpark_all()

    async def receive(self):
        await trio.lowlevel.checkpoint()
        while not (self.incoming or self.has_left):
            await self._changed.park()
        data = bytes(self.incoming[: 2**14])
        del self.incoming[: len(data)]
        return data

    def send_now(self, data):
        if self.has_left:
            raise BrokenPipeError("the client has left")
        size = min(len(data), self.room)
        self.room -= size
        self.outgoing += data[:size]
        return size

    async def send(self, data):
        await trio.lowlevel.checkpoint()
        rest = memoryview(data)
        while rest := rest[self.send_now(rest) :]:
            await self._changed.park()

    async def close(self):
        self.is_closed = True


class Http2(H2Connection):
    """A client that opens more streams than it may, and goes on after GOAWAY."""

    open_outbound_streams = 0

    def _receive_goaway_frame(self, frame):
        return [], [ConnectionTerminated()]


class Client:
    """An h2 client at the other end of a wire; ``ends`` has how each call ended: its status, what
    came of HTTP if there was none, or the code of a reset."""

    def __init__(self, wire, *, window=65_535, is_deaf=False):
        self.wire = wire
        self.is_deaf = is_deaf  # it answers nothing
        self.h2 = Http2(H2Configuration(client_side=True, header_encoding="latin-1"))
        self.h2.local_settings[SettingCodes.INITIAL_WINDOW_SIZE] = window
        self.h2.local_settings.acknowledge()
        self.h2.initiate_connection()
        self.messages = {}
        self.readers = {}
        self.headers = {}
        self.ends = {}
        self.num_pings = 0
        self.is_told_to_go = False
        self.say()

    def say(self):
        self.wire.incoming += self.h2.data_to_send()
        self.wire.change()

    def call(self, *messages, is_last=True, **headers):
        """Begin one; ``x_name`` is the header x-name."""
        stream_id = self.h2.get_next_available_stream_id()
        found = {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/a.B/C",
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        } | {name.replace("_", "-"): value for name, value in headers.items()}
        found[":method"] = found.pop("method", "POST")
        self.readers[stream_id] = MessageReader(2**30)
        self.messages[stream_id] = []
        self.h2.send_headers(stream_id, found.items())
        self.send(stream_id, b"".join(map(framed, messages)), is_last=is_last)
        return stream_id

    def send(self, stream_id, data, *, is_last=False):
        self.h2.send_data(stream_id, data, end_stream=is_last)
        self.say()

    def reset(self, stream_id):
        self.h2.reset_stream(stream_id, ErrorCodes.CANCEL)
        self.ends[stream_id] = "reset by the client"
        self.say()

    def leave(self):
        self.wire.has_left = True
        self.wire.change()

    def open(self, size, stream_id=None):
        self.h2.increment_flow_control_window(size, stream_id)
        self.say()

    def hear(self):
        """Take what has been sent; whether there was any."""
        data = bytes(self.wire.outgoing)
        self.wire.outgoing.clear()
        for event in self.h2.receive_data(data) if data else ():
            self.take(event)
        if not self.is_deaf:
            self.say()
        return bool(data)

    def take(self, event):
        if isinstance(event, ResponseReceived):
            self.headers[event.stream_id] = dict(event.headers)
        elif isinstance(event, TrailersReceived):
            self.headers[event.stream_id] |= dict(event.headers)
        elif isinstance(event, DataReceived):
            reader = self.readers[event.stream_id]
            reader.feed(event.data)
            while reader.messages:
                self.messages[event.stream_id].append(reader.take())
        elif isinstance(event, StreamEnded):
            found = self.headers[event.stream_id]
            self.ends[event.stream_id] = found.get("grpc-status", found[":status"])
        elif isinstance(event, StreamReset):
            self.ends.setdefault(event.stream_id, event.error_code)
        elif isinstance(event, PingAckReceived):
            self.num_pings += 1
        elif isinstance(event, ConnectionTerminated):
            self.is_told_to_go = True

    async def settle(self):
        """Until nobody has anything to do but wait."""
        while True:
            await trio.testing.wait_all_tasks_blocked()
            if not self.hear():
                return


class Listener:
    """What ``accept`` takes wires from."""

    def __init__(self):
        self.arrivals, self._queue = trio.open_memory_channel(math.inf)

    async def accept(self):
        return await self._queue.receive(), "ipv4:127.0.0.1:5"

    def close(self):
        self._queue.close()


class Server(RpcServer):
    async def _transport_of(self, sock):
        await sock.ready.wait()
        return sock


class Running:
    """A server whose calls are served by ``handler``, and the calls that were."""

    def __init__(self, handler, config=CONFIG):
        self.contexts = []
        self.cancelled = []
        self.handler = handler
        self.flusher = Flusher()
        self.server = Server(config, self.flusher, self.serve)
        self.listener = Listener()
        self.has_ended = False  # the server
        self.num_running = 0
        self.peak_running = 0

    async def serve(self, context):
        self.contexts.append(context)
        self.num_running += 1
        self.peak_running = max(self.peak_running, self.num_running)
        try:
            await self.handler(context)
        except trio.Cancelled:
            self.cancelled.append(context)
            raise
        except Disconnected:
            pass
        finally:
            self.num_running -= 1

    async def run(self):
        await self.server.run([self.listener])
        self.has_ended = True

    @property
    def clients(self):
        return list(self.server._clients)

    async def connect(self, **options):
        client = Client(Wire(), **options)
        self.listener.arrivals.send_nowait(client.wire)
        await client.settle()
        return client

    def check_idle(self):
        """Nothing is left of any call."""
        assert self.num_running == 0
        for client in self.clients:
            assert client._num_calls == 0
            assert not client._calls.child_tasks - client_tasks(client)
            assert client.is_quiet
            assert not client.http2.blocked
            assert not client.http2.h2.streams
        turnstile = self.server.turnstile
        assert turnstile._num_passed == len(turnstile._line) == 0


def client_tasks(client):
    """The connection's own."""
    return {one for one in client._calls.child_tasks if "_serve" not in one.name}


@pytest.fixture
def serving(monkeypatch):
    monkeypatch.setattr(connections, "accept", Listener.accept)

    @asynccontextmanager
    async def run(handler, config=CONFIG):
        running = Running(handler, config)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.run)
            yield running
            nursery.cancel_scope.cancel()

    return run


def framed(data):
    return b"\0" + len(data).to_bytes(4, "big") + data


async def echo(context):
    while (data := await context.read()) is not None:
        await context.write(data)
    await context.end(grpc.StatusCode.OK)


async def wait(context):
    await trio.sleep_forever()


# ---- turnstile


class Turns(trio.abc.Instrument):
    """Counts how often Trio's loop has gone round; pytest-trio adds it to the test's."""

    def __init__(self):
        self.count = 0

    def before_io_wait(self, timeout):
        self.count += 1


async def pass_all(turnstile, count, turns, *, cancelled=()):
    """In which turn each passed, in the order in which they came."""
    scopes = [trio.CancelScope() for _ in range(count)]
    came, passed = [], {}

    async def go(number):
        came.append(number)
        with scopes[number]:
            await turnstile.enter()
            passed[number] = turns.count

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(go, number)
        await trio.lowlevel.checkpoint()
        for number in cancelled:
            scopes[number].cancel()
    return [passed.get(number) for number in came]


@pytest.fixture
def turns():
    return Turns()


async def test_a_turn_lets_so_many_through_first_come_first_served(turns):
    turnstile = connections._Turnstile()
    for count in (1, STARTS_PER_TURN, STARTS_PER_TURN + 1, 10 * STARTS_PER_TURN + 3, 2):
        passed = await pass_all(turnstile, count, turns)
        assert passed == sorted(passed)
        assert max(Counter(passed).values()) <= STARTS_PER_TURN
        assert passed[-1] - passed[0] <= count // STARTS_PER_TURN + 2
        await trio.testing.wait_all_tasks_blocked()
        assert turnstile._num_passed == 0


async def test_who_leaves_the_line_holds_up_nobody(turns):
    turnstile = connections._Turnstile()
    passed = await pass_all(turnstile, 200, turns, cancelled=range(0, 200, 2))
    others = [one for one in passed if one is not None]
    assert 100 <= len(others) < 200
    assert max(Counter(others).values()) <= STARTS_PER_TURN
    await trio.testing.wait_all_tasks_blocked()
    assert turnstile._num_passed == len(turnstile._line) == 0


async def test_a_turnstile_that_is_idle_wakes_nobody(turns):
    turnstile = connections._Turnstile()
    await pass_all(turnstile, 50, turns)
    await trio.testing.wait_all_tasks_blocked()
    before = turns.count
    await trio.sleep(0.05)
    assert turns.count <= before + 3


# ---- flusher


class Flushed:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def flush(self):
        self.log.append(self.name)


def test_what_is_written_while_it_holds_goes_out_once_for_each_connection():
    log, flusher = [], Flusher()
    one, two = Flushed(log, 1), Flushed(log, 2)
    flusher.touch(one)
    assert log == [1]
    flusher.hold()
    for _ in range(3):
        flusher.touch(two)
        flusher.touch(one)
    assert log == [1]
    flusher.release()
    assert log == [1, 2, 1]
    flusher.release()
    flusher.touch(two)
    assert log == [1, 2, 1, 2]


async def test_tokens_of_a_step_go_out_in_one_write(serving, autojump_clock):
    async with serving(wait) as running:
        client = await running.connect()
        calls = [client.call(b"") for _ in range(20)]
        await client.settle()
        for context in running.contexts:
            assert not context.try_write(b"too early")
            await context.write(b"first")
        await client.settle()
        sizes = []
        send_now = client.wire.send_now
        client.wire.send_now = lambda data: sizes.append(len(data)) or send_now(data)
        running.flusher.hold()
        assert all(context.try_write(b"token") for context in running.contexts)
        assert not sizes
        running.flusher.release()
        assert len(sizes) == 1
        await client.settle()
        assert [client.messages[call] for call in calls] == [[b"first", b"token"]] * 20


# ---- a call


async def test_messages_come_and_go_and_a_status_ends_them(serving, autojump_clock):
    async with serving(echo) as running:
        client = await running.connect()
        call = client.call(b"one", b"", is_last=False)
        await client.settle()
        assert client.messages[call] == [b"one", b""]
        assert call not in client.ends
        big = bytes(range(256)) * 200
        for begin in range(0, len(framed(big)), 1000):
            client.send(call, framed(big)[begin : begin + 1000])
            await client.settle()
        client.h2.end_stream(call)
        client.say()
        await client.settle()
        assert client.messages[call] == [b"one", b"", big]
        assert client.ends == {call: "0"}
        assert running.contexts[0].code is grpc.StatusCode.OK
        assert running.contexts[0].method == "a.B/C"
        assert running.contexts[0].peer == "ipv4:127.0.0.1:5"
        running.check_idle()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (framed(b"broken")[:-1], InvalidRequest),
        (b"\0\0", InvalidRequest),
        (b"\0\xff\xff\xff\xff", RequestTooLarge),
        (b"", None),
    ],
)
async def test_what_is_wrong_with_a_body_is_raised_where_it_is_read(
    serving, autojump_clock, body, error
):
    raised = []

    async def handler(context):
        try:
            raised.append(await context.read())
        except (InvalidRequest, RequestTooLarge) as found:
            raised.append(type(found))
        await context.end(grpc.StatusCode.INVALID_ARGUMENT, "tölpel 100%")

    async with serving(handler) as running:
        client = await running.connect()
        call = client.call(is_last=False)
        await client.settle()
        client.send(call, body, is_last=True)
        await client.settle()
        assert raised == [error]
        assert client.ends == {call: "3"}
        assert client.headers[call]["grpc-message"] == "t%C3%B6lpel 100%25"
        running.check_idle()


async def test_the_rest_of_a_message_gets_its_patience_and_then_the_call_is_reset(
    serving, autojump_clock
):
    took = []

    async def handler(context):
        with trio.move_on_after(5):
            await context.write(bytes(100_000))
        before = trio.current_time()
        await context.end(grpc.StatusCode.INTERNAL)
        took.append(trio.current_time() - before)

    async with serving(handler) as running:
        client = await running.connect()
        call = client.call()
        await client.settle()
        await trio.sleep(10)
        await client.settle()
        assert took == [pytest.approx(END_PATIENCE_S)]
        assert client.ends == {call: ErrorCodes.CANCEL}
        running.check_idle()


async def test_a_status_follows_a_message_whose_rest_goes_in_time(serving, autojump_clock):
    async def handler(context):
        with trio.move_on_after(5):
            await context.write(bytes(100_000))
        await context.end(grpc.StatusCode.INTERNAL)

    async with serving(handler) as running:
        client = await running.connect()
        call = client.call()
        await client.settle()
        await trio.sleep(5 + END_PATIENCE_S / 2)
        client.open(2**20)
        client.open(2**20, call)
        await client.settle()
        assert client.messages[call] == [bytes(100_000)]
        assert client.ends == {call: "13"}
        running.check_idle()


async def test_a_message_that_waits_whole_is_dropped_and_the_status_follows_at_once(
    serving, autojump_clock
):
    async def handler(context):
        await context.write(b"12345")
        with trio.move_on_after(5):
            await context.write(bytes(100))
        await context.end(grpc.StatusCode.ABORTED)

    async with serving(handler) as running:
        client = await running.connect(window=50)
        call = client.call()
        await client.settle()
        await trio.sleep(5)
        await client.settle()
        assert client.ends == {call: "10"}
        assert client.messages[call] == [b"12345"]
        assert not client.readers[call].is_amid_message
        running.check_idle()


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_deadline_ends_a_call_with_its_status(serving, autojump_clock, has_begun):
    async def handler(context):
        assert context.time_remaining() == pytest.approx(2)
        if has_begun:
            await context.write(b"a")
        await trio.sleep_forever()

    async with serving(handler) as running:
        client = await running.connect()
        call = client.call(grpc_timeout="2S")
        await client.settle()
        await trio.sleep(1.9)
        await client.settle()
        assert not client.ends
        await trio.sleep(0.2)
        await client.settle()
        assert client.ends == {call: "4"}
        assert running.cancelled == running.contexts
        running.check_idle()


async def test_a_reset_ends_the_call_alone(serving, autojump_clock):
    async with serving(wait) as running:
        client = await running.connect()
        first, second = client.call(), client.call()
        await client.settle()
        client.reset(first)
        await client.settle()
        assert [one.code for one in running.cancelled] == [None]
        assert running.cancelled[0].is_over
        assert not running.cancelled[0].try_write(b"late")
        with pytest.raises(Disconnected):
            await running.cancelled[0].write(b"late")
        await running.cancelled[0].end(grpc.StatusCode.OK)
        assert running.num_running == 1
        client.reset(second)
        await client.settle()
        running.check_idle()


@pytest.mark.parametrize("is_blocked", [False, True])
async def test_a_reset_ends_who_writes(serving, autojump_clock, is_blocked):
    async def handler(context):
        while True:
            await context.write(bytes(1000))
            if not is_blocked:
                await trio.sleep(1)

    async with serving(handler) as running:
        client = await running.connect(window=5000)
        call = client.call()
        await client.settle()
        client.reset(call)
        await client.settle()
        await trio.sleep(10)
        running.check_idle()
        assert not running.clients[0]._unsent


async def test_a_lost_connection_ends_its_calls_alone(serving, autojump_clock):
    async with serving(wait) as running:
        lost, other = await running.connect(), await running.connect()
        for _ in range(5):
            lost.call()
        other.call()
        await lost.settle()
        await other.settle()
        lost.leave()
        await lost.settle()
        assert len(running.cancelled) == 5
        assert lost.wire.is_closed
        assert running.num_running == 1
        assert len(running.clients) == 1
        assert not other.wire.is_closed


async def test_a_message_of_a_step_to_a_client_that_has_left_ends_its_connection(
    serving, autojump_clock
):
    async with serving(wait) as running:
        client = await running.connect()
        client.call()
        await client.settle()
        await running.contexts[0].write(b"a")
        client.wire.has_left = True  # and nothing tells the reader
        running.flusher.hold()
        assert running.contexts[0].try_write(b"b")
        running.flusher.release()
        await trio.testing.wait_all_tasks_blocked()
        assert client.wire.is_closed
        assert running.num_running == len(running.clients) == 0


# ---- a connection


async def test_a_client_that_answers_no_ping_is_cut(serving, autojump_clock):
    async with serving(wait) as running:
        client = await running.connect(is_deaf=True)
        client.call()
        await client.settle()
        await trio.sleep(SILENCE_S - 1)
        assert not client.wire.is_closed
        await trio.sleep(2)
        assert client.wire.is_closed
        assert running.num_running == 0
        assert len(running.cancelled) == 1


async def test_a_client_that_says_nothing_at_all_is_cut(serving, autojump_clock):
    async with serving(wait) as running:
        wire = Wire()
        running.listener.arrivals.send_nowait(wire)
        await trio.sleep(SILENCE_S + 1)
        assert wire.is_closed
        assert not running.clients


async def test_a_client_that_answers_pings_stays(serving, autojump_clock):
    async with serving(wait) as running:
        client = await running.connect()
        client.call()
        for _ in range(20):
            await client.settle()
            await trio.sleep(CONFIG.keepalive_timeout_s - 1)
        assert not client.wire.is_closed
        assert running.num_running == 1


async def test_a_client_that_takes_no_bytes_is_held_little_for_and_not_read_from(
    serving, autojump_clock
):
    async def handler(context):
        for _ in range(1000):
            await context.write(bytes(1000))
        await context.end(grpc.StatusCode.OK)

    async with serving(handler) as running:
        client = await running.connect(window=2**30)
        client.open(2**30)
        await client.settle()
        client.wire.room = 0
        calls = [client.call() for _ in range(10)]
        await client.settle()
        connection = running.clients[0]
        assert CLOGGED_BYTES <= len(connection._unsent) < CLOGGED_BYTES + 20_000
        assert connection.http2.is_clogged
        assert len(connection.http2.blocked) == 10
        for _ in range(10_000):
            client.h2.ping(b"12345678")
        client.say()
        await client.settle()
        assert len(client.wire.incoming) == 170_000 - 2**14  # it was waiting to read
        assert len(connection._unsent) < CLOGGED_BYTES + 20_000 + 2**14
        assert not connection.http2.take_output()
        client.wire.room = math.inf
        client.wire.change()
        await client.settle()
        assert [client.messages[call] for call in calls] == [[bytes(1000)] * 1000] * 10
        assert client.ends == dict.fromkeys(calls, "0")
        assert client.num_pings == 10_000
        assert not connection.http2.is_clogged
        running.check_idle()


async def test_a_client_that_takes_no_bytes_for_long_is_cut(serving, autojump_clock):
    async def handler(context):
        await context.write(bytes(2**20))

    async with serving(handler) as running:
        client = await running.connect(window=2**30)
        client.open(2**30)
        await client.settle()
        client.wire.room = 0
        client.call()
        await client.settle()
        await trio.sleep(SILENCE_S + 1)
        assert client.wire.is_closed
        assert running.num_running == 0


async def test_a_client_that_takes_bytes_slowly_gets_them_all(serving, autojump_clock):
    """It is not read from meanwhile, and so no answer to a ping is heard."""

    async def handler(context):
        await context.write(bytes(2**20))
        await context.end(grpc.StatusCode.OK)

    async with serving(handler) as running:
        client = await running.connect(window=2**30)
        client.open(2**30)
        await client.settle()
        client.wire.room = 0
        call = client.call()
        for _ in range(150):
            await client.settle()
            await trio.sleep(4)
            client.wire.room = 10_000
            client.wire.change()
        assert client.ends == {call: "0"}
        assert client.messages[call] == [bytes(2**20)]
        assert not client.wire.is_closed


async def test_calls_go_on_after_their_client_has_said_that_it_leaves(serving, autojump_clock):
    async def handler(context):
        await trio.sleep(10)
        await context.write(b"late")
        await context.end(grpc.StatusCode.OK)

    async with serving(handler) as running:
        client = await running.connect()
        call = client.call(b"")
        await client.settle()
        client.wire.incoming += GOAWAY
        client.say()
        await client.settle()
        await trio.sleep(100)
        await client.settle()
        assert client.messages[call] == [b"late"]
        assert client.ends == {call: "0"}


GOAWAY = b"\0\0\x08\x07\0\0\0\0\0" + bytes(8)


# ---- the end of a server


async def test_a_server_that_stops_says_so_lets_calls_finish_and_cuts_the_rest(
    serving, autojump_clock
):
    async def handler(context):
        await context.read()
        await trio.sleep(float(context.metadata[-1][1]))
        await context.end(grpc.StatusCode.OK)

    async with serving(handler) as running:
        client = await running.connect()
        soon, never = client.call(b"", x_wait="3"), client.call(b"", x_wait="1000")
        await client.settle()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.server.stop, 10)
            await client.settle()
            assert client.is_told_to_go
            assert len(client.ends) == 0
            began_at = trio.current_time()
            await trio.sleep(4)
            await client.settle()
            assert client.ends == {soon: "0"}
            assert not client.wire.is_closed
        assert trio.current_time() - began_at == pytest.approx(10)
        await trio.testing.wait_all_tasks_blocked()
        assert client.wire.is_closed
        assert never not in client.ends
        assert running.num_running == len(running.clients) == 0


async def test_a_server_without_calls_stops_at_once(serving, autojump_clock):
    async with serving(wait) as running:
        clients = [await running.connect() for _ in range(3)]
        began_at = trio.current_time()
        await running.server.stop(MINUTE)
        await trio.testing.wait_all_tasks_blocked()
        assert trio.current_time() == began_at
        assert running.has_ended
        assert all(client.wire.is_closed for client in clients)
        assert not running.clients


@pytest.mark.parametrize("is_ready", [False, True])
async def test_a_server_that_stops_waits_for_no_handshake(serving, autojump_clock, is_ready):
    """One that ends in time is told to go, one that does not is cut."""
    async with serving(wait) as running:
        holder = await running.connect()
        holder.call()
        await holder.settle()
        client = Client(Wire())
        client.wire.ready = trio.Event()
        running.listener.arrivals.send_nowait(client.wire)
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.server.stop, 10)
            await trio.sleep(5)
            if is_ready:
                client.wire.ready.set()
                await client.settle()
                assert client.is_told_to_go
        await trio.testing.wait_all_tasks_blocked()
        assert running.has_ended
        assert client.wire.is_closed == is_ready  # the other was not yet anybody's
        assert not running.clients
        assert not running.num_running


async def test_a_refused_call_is_none_that_a_stop_waits_for(serving, autojump_clock):
    async with serving(wait) as running:
        client = await running.connect()
        client.call(method="GET")
        began_at = trio.current_time()
        client.wire.room = 0
        await client.settle()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.server.stop, MINUTE)
            await trio.sleep(1)
            client.wire.room = math.inf
            client.wire.change()
        assert trio.current_time() - began_at == pytest.approx(1)


# ---- what is no call


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"method": "GET"}, "405"),
        ({"method": "PUT"}, "405"),
        ({"content_type": "application/json"}, "415"),
        ({"content_type": ""}, "415"),
        ({"content_type": "application/grpc-web+proto"}, "415"),
        ({"content_type": "application/grpc+proto"}, "0"),
        ({"content_type": "application/grpc;charset=utf-8"}, "0"),
    ],
)
async def test_what_is_no_call_is_told_so_in_http(serving, autojump_clock, headers, status):
    async with serving(echo) as running:
        client = await running.connect()
        call = client.call(**headers)
        await client.settle()
        assert client.ends == {call: status}
        assert len(running.contexts) == (status == "0")
        endless = client.call(is_last=False, **headers)
        await client.settle()
        assert client.ends.get(endless) == (None if status == "0" else status)
        if status == "0":
            client.reset(endless)
            await client.settle()
        running.check_idle()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        bytes(30),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 40,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + GOAWAY[:9] + b"\0",
    ],
)
async def test_what_is_not_http2_is_closed_and_harms_nobody_else(serving, autojump_clock, data):
    async with serving(echo) as running:
        client = await running.connect()
        call = client.call(is_last=False)
        await client.settle()
        wire = Wire()
        wire.incoming += data
        running.listener.arrivals.send_nowait(wire)
        await trio.testing.wait_all_tasks_blocked()
        if len(data) > 50 or data[:3] != b"PRI":
            assert wire.is_closed
        client.send(call, framed(b"a"), is_last=True)
        await client.settle()
        assert client.ends == {call: "0"}


async def test_a_client_that_breaks_the_protocol_loses_its_calls_and_nobody_elses(
    serving, autojump_clock
):
    async with serving(wait) as running:
        bad, good = await running.connect(), await running.connect()
        bad.call()
        good.call()
        await bad.settle()
        await good.settle()
        bad.wire.incoming += b"\0\0\1\0\0\0\0\0\0x"  # DATA on stream 0
        bad.wire.change()
        await bad.settle()
        assert bad.is_told_to_go
        assert bad.wire.is_closed
        assert len(running.cancelled) == 1
        assert running.num_running == 1


async def test_a_stream_too_many_is_refused_and_the_others_are_served(serving, autojump_clock):
    async with serving(echo) as running:
        client = await running.connect()
        calls = [client.call(is_last=False) for _ in range(STREAMS_PER_CONNECTION_MAX + 5)]
        await client.settle()
        refused = {call for call, end in client.ends.items() if end == ErrorCodes.REFUSED_STREAM}
        assert refused == set(calls[STREAMS_PER_CONNECTION_MAX:])
        assert running.num_running == STREAMS_PER_CONNECTION_MAX
        for call in calls[:STREAMS_PER_CONNECTION_MAX]:
            client.send(call, framed(b"a"), is_last=True)
        await client.settle()
        assert Counter(client.ends.values())["0"] == STREAMS_PER_CONNECTION_MAX
        running.check_idle()


async def test_headers_too_large_end_their_connection_alone(serving, autojump_clock):
    async with serving(echo) as running:
        bad, good = await running.connect(), await running.connect()
        bad.call(**{f"x-{number}": "a" * 1000 for number in range(100)})
        await bad.settle()
        assert bad.wire.is_closed
        assert not running.contexts
        call = good.call(b"b")
        await good.settle()
        assert good.ends == {call: "0"}


async def linger(context):
    """Hard to end."""
    with trio.CancelScope(shield=True):
        await trio.sleep(1)


@pytest.mark.parametrize("handler", [wait, linger])
async def test_a_flood_of_resets_leaves_nothing_and_others_are_served_meanwhile(
    serving, autojump_clock, handler
):
    async def serve(context):
        await (echo(context) if context.method == "good/Call" else handler(context))

    async with serving(serve) as running:
        bad, good = await running.connect(), await running.connect()
        connection = running.clients[0]
        for begin in range(0, 5000, 500):
            calls = [bad.call() for _ in range(500)]
            await trio.lowlevel.checkpoint()
            for call in calls:
                bad.reset(call)
            if begin == 2500:
                call = good.call(b"a", **{":path": "/good/Call"})
                await good.settle()
                assert good.ends == {call: "0"}
            assert connection._num_calls < CALLS_PER_CONNECTION_MAX + 1000
        for _ in range(10):
            await bad.settle()
            await trio.sleep(1)
        assert not bad.wire.is_closed
        assert not bad.wire.incoming
        assert set(bad.ends.values()) == {"reset by the client"}
        running.check_idle()
        assert len(connection.http2.h2._closed_streams) <= connection.http2.h2.MAX_CLOSED_STREAMS
        call = bad.call(b"b", **{":path": "/good/Call"})
        await bad.settle()
        assert bad.ends[call] == "0"


async def test_calls_that_are_reset_in_the_line_leave_it(serving, autojump_clock):
    """Other clients' calls waited behind them."""
    async with serving(echo) as running:
        client = await running.connect()
        calls = [client.call(b"a", is_last=False) for _ in range(900)]
        await trio.lowlevel.checkpoint()
        for call in calls:
            client.reset(call)
        await client.settle()
        assert len(running.contexts) < len(calls) / 2
        running.check_idle()


async def test_a_client_whose_bytes_take_long_is_read_a_little_at_a_time(
    serving, autojump_clock, monkeypatch
):
    sizes = []
    monkeypatch.setattr(connections, "PART_S", -1.0)  # all of them do
    async with serving(echo) as running:
        client = await running.connect()
        http2 = running.clients[0].http2
        receive = http2.receive
        monkeypatch.setattr(http2, "receive", lambda data: (sizes.append(len(data)), receive(data)))
        call = client.call(bytes(16_000))
        await client.settle()
        assert client.messages[call] == [bytes(16_000)]
        assert client.ends == {call: "0"}
    assert sizes[20:]
    assert max(sizes[20:]) <= connections.PART_BYTES_MIN


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_call_is_late_if_its_deadline_ended_it(serving, autojump_clock, is_reset):
    found = []

    async def serve(context):
        try:
            await wait(context)
        finally:
            found.append(context.is_late)

    async with serving(serve) as running:
        client = await running.connect()
        call = client.call(b"a", grpc_timeout="100m")
        await trio.testing.wait_all_tasks_blocked()
        if is_reset:
            client.reset(call)
        await trio.sleep(1)
        await client.settle()
        assert found == [not is_reset]
        assert client.ends == {call: "reset by the client" if is_reset else "4"}


# ---- TLS


@contextlib.contextmanager
def shaking_hands(said=b""):
    """Serves a TLS server's socket whose client has ``said`` that; it is closed at the end."""
    server = RpcServer(CONFIG, Flusher(), wait, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        theirs.send(said)
        yield lambda: server._serve(ours, "unix:")
    assert ours.fileno() == -1


async def test_a_socket_is_closed_when_its_handshake_is_cut(autojump_clock):
    with shaking_hands() as serve:
        with trio.move_on_after(1):
            await serve()


async def test_a_handshake_has_its_time(autojump_clock):
    with shaking_hands() as serve:
        with trio.fail_after(MINUTE):
            await serve()


async def test_garbage_instead_of_a_handshake_is_closed(autojump_clock):
    with shaking_hands(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") as serve:
        await serve()
