"""A server's connection against h2's client, in memory: whatever the client's windows, the
transport and the calls do, no rule of HTTP/2 is broken and no byte is lost, doubled or moved.

The client keeps the rules' books: h2 raises what a server does wrong (flow control, frames' sizes,
a closed stream).
"""

from __future__ import annotations

import time

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    PingAckReceived,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame, RstStreamFrame
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from grpc_service.framing import RESPONSE_HEADERS, MessageReader
from grpc_service.http2 import (
    HEADER_TABLE_BYTES_MAX,
    PREFIX_BYTES,
    WHOLE_BYTES_MAX,
    Connection,
    ProtocolError,
    Stream,
)

STREAMS_MAX = 6
REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"localhost"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]
WINDOW_MAX = 2**31 - 1

# to nothing, a frame that goes whole or not at all, one frame, several, several windows
sizes = st.one_of(
    st.integers(0, 20),
    st.integers(WHOLE_BYTES_MAX - PREFIX_BYTES - 2, WHOLE_BYTES_MAX - PREFIX_BYTES + 2),
    st.integers(0, 2000),
    st.sampled_from([16_378, 16_379, 16_380, 40_000, 70_000, 200_000]),
)
windows = st.one_of(st.integers(0, 600), st.sampled_from([16_384, 65_535, 100_000, 2**20]))
pick = st.integers(0, 1000)


class Listener:
    """Notes what it is told."""

    def __init__(self, stream):
        self.stream = stream
        self.num_drained = 0
        self.has_ended = False
        self.is_reset = False

    def on_data(self, data):
        pass

    def on_end(self):
        self.has_ended = True

    def on_reset(self):
        assert not self.is_reset
        self.is_reset = True

    def on_drained(self):
        assert not self.stream.is_blocked
        self.num_drained += 1


class Call:
    """One call: what the server has sent of it, and what the client has got."""

    def __init__(self, stream_id):
        self.id = stream_id
        self.sent = []  # messages, but for a dropped one
        self.reader = MessageReader(2**30)
        self.got = []
        self.frames = []  # sizes of the DATA that came
        self.has_ended = False  # the client's side
        self.has_begun = False  # the response's headers are sent
        self.is_ended = False  # by the server
        self.is_reset = False  # by the client
        self.is_closed = False  # as the client sees it
        self.num_blocked = 0  # messages that went out only later

    def take(self, data):
        self.frames.append(len(data))
        self.reader.feed(data)
        while self.reader.messages:
            self.got.append(self.reader.take())


class Client(H2Connection):
    """Opens more streams than it may, and knows at once how large a frame may be."""

    open_outbound_streams = 0

    def _local_settings_acked(self):
        changes = super()._local_settings_acked()
        self.incoming_buffer.max_frame_size = self.max_inbound_frame_size
        return changes


def make_client():
    client = Client(H2Configuration(client_side=True, header_encoding=None))
    client.initiate_connection()
    return client


class Schedule(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.listeners = {}
        self.calls = {}
        self.server = Connection(self.on_stream, streams_max=STREAMS_MAX)
        self.client = make_client()
        self.to_client = bytearray()
        self.to_server = bytearray()
        self.refused = set()
        self.num_messages = 0

    def on_stream(self, stream):
        self.listeners[stream.id] = listener = Listener(stream)
        return listener

    # ---- the wire

    def to_the_client(self, size=None):
        self.to_client += self.server.take_output()
        if data := bytes(self.to_client[:size]):
            del self.to_client[: len(data)]
            for event in self.client.receive_data(data):
                self.hear(event)

    def to_the_server(self, size=None):
        self.to_server += self.client.data_to_send()
        if data := bytes(self.to_server[:size]):
            del self.to_server[: len(data)]
            self.watching(lambda: self.server.receive(data))

    def watching(self, act):
        """Do it; a listener is told that it is drained exactly if a message that was blocked then
        is not, though it was neither dropped nor reset."""
        blocked = dict(self.server.blocked)
        before = {one: self.listeners[one].num_drained for one in self.listeners}
        act()
        for stream_id, listener in self.listeners.items():
            has_gone = (
                stream_id in blocked
                and stream_id not in self.server.blocked
                and not listener.stream.is_over
            )
            told = listener.num_drained - before.get(stream_id, 0)
            if not listener.stream.is_over:
                assert told == has_gone
            else:
                assert told <= (stream_id in blocked)

    def hear(self, event):
        if isinstance(event, DataReceived):
            self.calls[event.stream_id].take(event.data)
            # nothing is acknowledged: windows open by the rules alone
        elif isinstance(event, StreamEnded):
            self.calls[event.stream_id].is_closed = True
        elif isinstance(event, StreamReset):
            if event.stream_id in self.calls:
                self.calls[event.stream_id].is_closed = True
            if event.error_code == ErrorCodes.REFUSED_STREAM:
                self.refused.add(event.stream_id)
                del self.calls[event.stream_id]
            else:
                assert event.error_code in (ErrorCodes.NO_ERROR, ErrorCodes.CANCEL)
        else:
            assert not isinstance(event, ConnectionTerminated)

    # ---- choices

    @property
    def running(self):
        """Calls that the server knows and may send in."""
        return [
            call
            for call in self.calls.values()
            if call.id in self.listeners and not self.stream(call).is_over
        ]

    @property
    def open(self):
        """Calls that the client knows and may send in."""
        return [one for one in self.calls.values() if not (one.is_reset or one.is_closed)]

    def stream(self, call):
        return self.listeners[call.id].stream

    def one_of(self, calls, which):
        return calls[which % len(calls)] if calls else None

    # ---- what the client does

    @initialize(window=windows, is_answered=st.booleans())
    def first_settings(self, window, is_answered):
        self.exchange()
        self.change_settings(window, 16_384, 4096)
        if is_answered:
            self.exchange()

    def exchange(self):
        """Until nothing more comes."""
        while True:
            self.to_the_server()
            self.to_the_client()
            self.to_server += self.client.data_to_send()
            if not (self.to_server or self.server.output):
                break

    @precondition(lambda self: len(self.calls) < STREAMS_MAX + 3)
    @rule(is_ended=st.booleans(), body=st.integers(0, 3000), arrives=st.booleans())
    def client_calls(self, is_ended, body, arrives):
        stream_id = self.client.get_next_available_stream_id()
        self.calls[stream_id] = Call(stream_id)
        self.client.send_headers(stream_id, REQUEST)
        body = min(body, self.client.local_flow_control_window(stream_id))
        self.client.send_data(stream_id, bytes(body), end_stream=is_ended)
        self.calls[stream_id].has_ended = is_ended
        if arrives:
            self.exchange()

    @precondition(lambda self: self.open)
    @rule(which=pick)
    def client_ends_its_side(self, which):
        if call := self.one_of([one for one in self.open if not one.has_ended], which):
            call.has_ended = True
            self.client.end_stream(call.id)

    @precondition(lambda self: self.open)
    @rule(which=pick, is_so=st.sampled_from([True, False, False, False]))
    def client_resets(self, which, is_so):
        if is_so and (call := self.one_of(self.open, which)):
            self.client.reset_stream(call.id, ErrorCodes.CANCEL)
            call.is_reset = True

    @precondition(lambda self: self.open)
    @rule(which=pick, size=windows.filter(bool))
    def client_opens_a_streams_window(self, which, size):
        if call := self.one_of(self.open, which):
            self.open_window(size, call.id)

    @rule(size=windows.filter(bool))
    def client_opens_the_connections_window(self, size):
        self.open_window(size, None)

    def open_window(self, size, stream_id):
        self.client.increment_flow_control_window(size, stream_id)

    @rule(window=windows, frame=st.sampled_from([16_384, 16_385, 60_000]), table=windows)
    def client_changes_settings(self, window, frame, table):
        self.change_settings(window, frame, min(table, 2**16))

    def change_settings(self, window, frame, table):
        """All of them: h2's client takes any answer for that to the next change of each."""
        self.client.update_settings(
            {
                SettingCodes.INITIAL_WINDOW_SIZE: window,
                SettingCodes.MAX_FRAME_SIZE: frame,
                SettingCodes.HEADER_TABLE_SIZE: table,
            }
        )

    @rule()
    def both_ping(self):
        self.client.ping(b"12345678")
        self.server.ping()

    # ---- what the transport does

    @rule(size=st.one_of(st.none(), st.integers(1, 60)))
    def bytes_reach_the_server(self, size):
        self.to_the_server(size)

    @rule(size=st.one_of(st.none(), st.integers(1, 60), st.integers(1, 40_000)))
    def bytes_reach_the_client(self, size):
        self.to_the_client(size)

    @rule()
    def everything_arrives(self):
        self.exchange()

    @rule()
    def transport_clogs(self):
        self.server.is_clogged = True

    @rule()
    def transport_takes_bytes_again(self):
        self.watching(self.server.unclog)

    # ---- what the server does

    @precondition(lambda self: self.running)
    @rule(which=pick, some=st.lists(sizes, min_size=1, max_size=4), may_wait=st.booleans())
    def server_sends(self, which, some, may_wait):
        for size in some:
            call = self.one_of(
                [one for one in self.running if not self.stream(one).is_blocked], which
            )
            if call is not None:
                self.send(call, size, may_wait)

    def send(self, call, size, may_wait):
        stream = self.stream(call)
        if not call.has_begun:
            call.has_begun = True
            stream.send_headers(RESPONSE_HEADERS)
        self.num_messages += 1
        message = (self.num_messages.to_bytes(4, "big") * (size // 4 + 1))[:size]
        could = self.could_send(call, len(message) + PREFIX_BYTES)
        if may_wait:
            stream.send_message(message)
            assert not (could and stream.is_blocked)
        elif not stream.try_send_message(message):
            assert not could
            return
        else:
            assert could
        call.sent.append(message)
        call.num_blocked += stream.is_blocked

    def could_send(self, call, size):
        h2 = self.server.h2
        window = min(
            h2.streams[call.id].outbound_flow_control_window, h2.outbound_flow_control_window
        )
        return size <= min(window, h2.max_outbound_frame_size) and not self.server.is_clogged

    @precondition(lambda self: self.server.blocked)
    @rule(which=pick)
    def server_drops_a_message(self, which):
        call = self.one_of([one for one in self.running if self.stream(one).is_blocked], which)
        if call is not None:
            self.drop(call)

    def drop(self, call):
        """What is a whole frame or nothing is never there in part."""
        stream, message = self.stream(call), call.sent[-1]
        is_dropped = stream.drop_message()
        assert stream.is_blocked == (not is_dropped)
        if is_dropped:
            call.sent.pop()
            call.num_blocked -= 1
        else:
            assert len(message) + PREFIX_BYTES > WHOLE_BYTES_MAX
        return is_dropped

    @precondition(lambda self: self.running)
    @rule(which=pick)
    def server_ends(self, which):
        call = self.one_of(self.running, which)
        stream = self.stream(call)
        if stream.is_blocked and not self.drop(call):
            stream.reset(ErrorCodes.CANCEL)
            call.is_reset = True
        else:
            self.end(call)
        assert stream.is_over
        assert not stream.is_blocked

    def end(self, call):
        trailers = [(b"grpc-status", b"0"), (b"x-id", b"%d" % call.id)]
        headers = trailers if call.has_begun else RESPONSE_HEADERS + trailers
        self.stream(call).send_headers(headers, is_last=True)
        call.is_ended = True

    # ---- what holds

    @invariant()
    def what_came_is_a_prefix_of_what_was_sent(self):
        for call in self.calls.values():
            assert call.reader.error is None
            if not call.is_reset:  # h2 tells nothing of a stream that the client has reset
                assert call.got == call.sent[: len(call.got)]

    @invariant()
    def nothing_is_kept_of_what_is_over(self):
        server = self.server
        assert set(server.blocked) <= set(server._streams)
        assert set(server._streams) == set(server.h2.streams)
        assert len(server._streams) <= STREAMS_MAX
        for stream_id, listener in self.listeners.items():
            stream = listener.stream
            assert stream.is_over == (stream_id not in server._streams)
            assert stream.is_blocked == (stream_id in server.blocked)

    def teardown(self):
        """Everything arrives, every window opens, every call ends: nothing is left."""
        self.watching(self.server.unclog)
        self.exchange()
        self.to_the_client()
        for call in self.running:
            window = self.client.streams[call.id]._inbound_window_manager
            self.open_window(2**29 - window.current_window_size, call.id)
        window = self.client._inbound_flow_control_window_manager.current_window_size
        self.open_window(2**30 - window, None)
        self.exchange()
        self.the_windows_are_as_the_client_sees_them()
        assert not self.server.blocked
        for call in self.calls.values():
            if call.is_reset:
                continue  # perhaps together with its begin, and so nobody has served it
            stream = self.stream(call)
            assert call.got == call.sent
            assert not call.reader.is_amid_message
            assert call.is_closed == stream.is_over == call.is_ended
            assert self.listeners[call.id].num_drained == call.num_blocked
        for call in self.running:
            self.end(call)
        self.exchange()
        assert not self.server._streams
        assert not self.server.h2.streams
        assert not self.server.take_output()

    def the_windows_are_as_the_client_sees_them(self):
        manager = self.client._inbound_flow_control_window_manager
        assert self.server.h2.outbound_flow_control_window == manager.current_window_size
        for stream_id, state in self.server.h2.streams.items():
            theirs = self.client.streams[stream_id]._inbound_window_manager
            assert state.outbound_flow_control_window == theirs.current_window_size


Schedule.TestCase.settings = settings(stateful_step_count=60)
TestEveryInterleaving = Schedule.TestCase


# ---- single claims


class Pair:
    """A server's connection and a client that have greeted each other."""

    def __init__(self, **settings):
        self.listeners = {}
        self.server = Connection(self.on_stream, streams_max=STREAMS_MAX)
        self.client = make_client()
        if settings:
            self.client.update_settings({SettingCodes[name]: settings[name] for name in settings})
        self.exchange()

    def on_stream(self, stream):
        self.listeners[stream.id] = listener = Listener(stream)
        return listener

    def exchange(self):
        """Both hear all the other says; what the client is told."""
        self.server.receive(self.client.data_to_send())
        events = self.client.receive_data(self.server.take_output())
        self.server.receive(self.client.data_to_send())
        return events

    def call(self, *, is_ended=True):
        stream_id = self.client.get_next_available_stream_id()
        self.client.send_headers(stream_id, REQUEST, end_stream=is_ended)
        return stream_id

    def begin(self):
        stream_id = self.call()
        self.exchange()
        stream = self.listeners[stream_id].stream
        stream.send_headers(RESPONSE_HEADERS)
        return stream


def test_a_call_that_is_reset_as_it_begins_is_served_by_nobody():
    pair = Pair()
    for _ in range(3):
        pair.client.reset_stream(pair.call(), ErrorCodes.CANCEL)
    last = pair.call()
    pair.exchange()
    assert list(pair.listeners) == [last]
    assert list(pair.server.h2.streams) == [last]


def test_one_stream_too_many_is_refused_and_the_others_go_on():
    pair = Pair()
    calls = [pair.call() for _ in range(STREAMS_MAX + 2)]
    resets = [one for one in pair.exchange() if isinstance(one, StreamReset)]
    assert [one.stream_id for one in resets] == calls[STREAMS_MAX:]
    assert {one.error_code for one in resets} == {ErrorCodes.REFUSED_STREAM}
    assert list(pair.listeners) == calls[:STREAMS_MAX]
    pair.listeners[calls[0]].stream.send_headers(RESPONSE_HEADERS, is_last=True)
    pair.exchange()
    pair.call()
    assert not [one for one in pair.exchange() if isinstance(one, StreamReset)]
    assert pair.server.num_streams == len(pair.server.h2.streams) == STREAMS_MAX


def test_calls_go_on_after_the_client_has_said_that_it_opens_no_more():
    pair = Pair(INITIAL_WINDOW_SIZE=10)
    stream = pair.begin()
    stream.send_message(b"message")
    assert stream.is_blocked
    pair.exchange()
    pair.client.ping(b"12345678")
    data = pair.client.data_to_send()
    pair.client.increment_flow_control_window(100, stream.id)
    window = pair.client.data_to_send()
    pair.server.receive(data + GoAwayFrame(0, last_stream_id=0).serialize() + window)
    pair.server.ping()
    stream.send_headers([(b"grpc-status", b"0")], is_last=True)
    events = pair.client.receive_data(pair.server.take_output())
    assert [one.data for one in events if isinstance(one, DataReceived)] == [b"\0\0\0\0\7message"]
    assert any(isinstance(one, PingAckReceived) for one in events)
    assert any(isinstance(one, StreamEnded) for one in events)
    assert pair.server.is_ending


def test_a_server_that_ends_refuses_what_begins_and_ends_what_runs():
    pair = Pair()
    stream = pair.begin()
    pair.server.end_gracefully()
    late, reset = pair.call(), pair.call()
    pair.client.reset_stream(reset)
    pair.server.receive(pair.client.data_to_send())
    assert list(pair.listeners) == [stream.id]
    stream.send_message(b"message")
    stream.send_headers([(b"grpc-status", b"0")], is_last=True)
    data = pair.server.take_output()
    assert RstStreamFrame(late, error_code=ErrorCodes.REFUSED_STREAM).serialize() in data
    assert GoAwayFrame(0, last_stream_id=stream.id).serialize() in data
    assert not pair.server.h2.streams


def test_a_message_that_was_begun_takes_every_byte_that_a_window_gives():
    pair = Pair(INITIAL_WINDOW_SIZE=300)
    stream = pair.begin()
    stream.send_message(bytes(400))
    assert stream.is_blocked
    pair.exchange()
    for _ in range(105):
        assert stream.is_blocked
        pair.client.increment_flow_control_window(1, stream.id)
        pair.server.receive(pair.client.data_to_send())
        assert [one.data for one in pair.exchange() if isinstance(one, DataReceived)] == [b"\0"]
    assert not stream.is_blocked
    assert pair.listeners[stream.id].num_drained == 1


def test_a_large_message_is_taken_apart_once():
    """It took its size times the number of its frames."""
    pair = Pair(INITIAL_WINDOW_SIZE=WINDOW_MAX)
    pair.client.increment_flow_control_window(2**30)
    stream = pair.begin()
    message = bytes(2**26)
    began_at = time.perf_counter()
    stream.send_message(message)
    assert time.perf_counter() - began_at < 5  # 8 s of copying, where it is not
    assert not stream.is_blocked
    assert sum(map(len, pair.server.output)) > len(message)


@pytest.mark.parametrize("is_of_settings", [False, True])
def test_a_flood_that_opens_windows_has_each_stream_looked_at_once(monkeypatch, is_of_settings):
    """It took a look at every stream for each frame: 2 ms of all clients' time for 13 bytes."""
    pair = Pair(INITIAL_WINDOW_SIZE=0)
    streams = [pair.begin() for _ in range(STREAMS_MAX)]
    for stream in streams:
        stream.send_message(b"x")
    pair.exchange()
    pushed = []
    push = Stream.push
    monkeypatch.setattr(Stream, "push", lambda self: (pushed.append(self), push(self)))
    for _ in range(100):
        if is_of_settings:
            pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        else:
            pair.client.increment_flow_control_window(1)
    pair.server.receive(pair.client.data_to_send())
    assert pushed == streams


def test_a_client_that_keeps_a_huge_table_has_us_keep_none():
    pair = Pair(HEADER_TABLE_SIZE=2**32 - 1)
    for number in range(200):
        stream = pair.begin()
        trailers = [(b"grpc-status", b"0"), (b"grpc-message", b"%d" % number * 30)]
        stream.send_headers(trailers, is_last=True)
        pair.exchange()
    assert pair.server.h2.encoder.header_table._current_size <= HEADER_TABLE_BYTES_MAX


@given(
    st.lists(st.one_of(st.binary(max_size=40), st.integers(0, 4)), max_size=12),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(1, 60),
)
def test_whatever_a_client_sends_nothing_but_a_protocol_error_is_raised(parts, edits, step):
    pair = Pair()
    pair.begin()
    for part in parts:
        if isinstance(part, bytes):
            pair.client._data_to_send += part
        elif part == 0 and pair.client.get_next_available_stream_id() < 2 * STREAMS_MAX:
            pair.call(is_ended=False)
        elif part == 1:
            pair.client.ping(b"12345678")
        elif part == 2:
            pair.client.increment_flow_control_window(5)
        elif part == 3:
            pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 5})
        else:
            pair.client._data_to_send += GoAwayFrame(0).serialize()
    data = bytearray(pair.client.data_to_send())
    for place, value in edits:
        if place < len(data):
            data[place] = value
    try:
        for begin in range(0, len(data), step):
            pair.server.receive(bytes(data[begin : begin + step]))
    except ProtocolError:
        pair.server.cut()
        pair.server.take_output()
    assert set(pair.server._streams) <= set(pair.server.h2.streams)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01\x02", b"PRX"]
)
def test_what_is_not_http2_is_a_protocol_error(data):
    server = Connection(lambda stream: None, streams_max=STREAMS_MAX)
    with pytest.raises(ProtocolError):
        server.receive(data)
