"""A server's connection against h2's client, in memory.

Whatever the client's windows, the transport and the calls do, the server breaks no rule of HTTP/2,
and no byte is lost, doubled or moved. h2's client raises if the server breaks a rule of flow
control, of sizes of frames, or of closed streams.
"""

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
from hpack import Encoder
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame, PingFrame, RstStreamFrame
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from grpc_service.rpc.accounts import Account
from grpc_service.rpc.framing import PREFIX_BYTES, MessageReader
from grpc_service.rpc.headers import RESPONSE_HEADERS
from grpc_service.rpc.http2 import WHOLE_BYTES_MAX, Http2Connection, ProtocolError
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.streams import Stream

STREAMS_MAX = 6
LIMITS = Limits(budget=1e9, streams_per_connection=STREAMS_MAX)
LIMITS_OF_MANY = Limits(budget=1e9)
REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"localhost"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]
WINDOW_MAX = 2**31 - 1

# Sizes: nothing, a frame that is never split, one frame, several frames, several windows.
sizes = st.one_of(
    st.integers(0, 20),
    st.integers(WHOLE_BYTES_MAX - PREFIX_BYTES - 2, WHOLE_BYTES_MAX - PREFIX_BYTES + 2),
    st.integers(0, 2000),
    st.sampled_from([16_378, 16_379, 16_380, 40_000, 70_000, 200_000]),
)
windows = st.one_of(st.integers(0, 600), st.sampled_from([16_384, 65_535, 100_000, 2**20]))
pick = st.integers(0, 1000)


def make_server(on_stream):
    """Return a server's connection, whose limits on what a client may cost are never reached."""
    return Http2Connection(on_stream, LIMITS, Account(LIMITS, lambda: 0.0))


class Listener:
    """The server's listener of a stream: records which methods the connection calls."""

    has_request = True

    def __init__(self, stream):
        self.stream = stream
        self.num_sent = 0
        self.has_ended = False
        self.is_reset = False

    def on_data(self, data):
        self.stream.release()

    def on_end(self):
        self.has_ended = True

    def on_reset(self, *, is_lost=False):
        assert not self.is_reset
        self.is_reset = True

    def on_sent(self):
        self.num_sent += not self.stream.is_blocked


class Call:
    """One call: what the server has sent in it, and what the client has received."""

    def __init__(self, stream_id):
        self.id = stream_id
        self.sent = []  # messages, without those that were dropped
        self.reader = MessageReader(2**30)
        self.got = []
        self.frames = []  # sizes of the DATA frames that the client received
        self.has_ended = False  # the client has ended its side
        self.has_begun = False  # the server has sent the response's headers
        self.is_ended = False  # the server has sent trailers
        self.is_reset = False  # the client has reset the stream
        self.is_closed = False  # the client has seen the stream's end
        self.num_blocked = 0  # messages that had to wait for a window

    def take(self, data):
        self.frames.append(len(data))
        self.reader.feed(data)
        while self.reader.messages:
            self.got.append(self.reader.take()[0])


class Client(H2Connection):
    """A client that opens more streams than allowed, and accepts the largest frames at once."""

    open_outbound_streams = 0

    def _local_settings_acked(self):
        changes = super()._local_settings_acked()
        self.incoming_buffer.max_frame_size = self.max_inbound_frame_size
        return changes


def make_client():
    """Return a client that has begun its connection."""
    client = Client(H2Configuration(client_side=True, header_encoding=None))
    client.initiate_connection()
    return client


class Schedule(RuleBasedStateMachine):
    """Random acts of a client, a transport and a server over one connection."""

    def __init__(self):
        super().__init__()
        self.listeners = {}
        self.calls = {}
        self.server = make_server(self.on_stream)
        self.client = make_client()
        self.whole_bytes = WHOLE_BYTES_MAX  # messages up to this size were never split
        self.to_client = bytearray()
        self.to_server = bytearray()
        self.refused = set()
        self.num_messages = 0

    def on_stream(self, stream):
        """Begin to listen to a stream that the client has opened."""
        self.listeners[stream.id] = listener = Listener(stream)
        return listener

    # ---- the wire

    def to_the_client(self, size=None):
        """Let the client receive bytes that the server has sent: ``size``, or all."""
        self.to_client += self.server.output.take()
        if data := bytes(self.to_client[:size]):
            del self.to_client[: len(data)]
            for event in self.client.receive_data(data):
                self.hear(event)

    def to_the_server(self, size=None):
        """Let the server receive bytes that the client has sent: ``size``, or all."""
        self.to_server += self.client.data_to_send()
        if data := bytes(self.to_server[:size]):
            del self.to_server[: len(data)]
            self.watching(lambda: self.server.receive(data))

    def watching(self, act):
        """Call ``act``, and check that listeners learn that their messages were sent.

        `on_sent` is called exactly if the stream's message was blocked before and is not any more,
        and was neither dropped nor reset.
        """
        blocked = self.waiting
        before = {one: self.listeners[one].num_sent for one in self.listeners}
        act()
        for stream_id, listener in self.listeners.items():
            has_gone = (
                stream_id in blocked
                and stream_id not in self.waiting
                and not listener.stream.is_over
            )
            num_calls = listener.num_sent - before.get(stream_id, 0)
            if not listener.stream.is_over:
                assert num_calls == has_gone
            else:
                assert num_calls <= (stream_id in blocked)

    def hear(self, event):
        if isinstance(event, DataReceived):
            self.calls[event.stream_id].take(event.data)
            # The client opens no window by itself: only the rule `open_window` does.
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
        """Return the calls that the server knows and may send messages in."""
        return [
            call
            for call in self.calls.values()
            if call.id in self.listeners and not self.stream(call).is_over
        ]

    @property
    def open(self):
        """Return the calls that the client knows and may send messages in."""
        return [one for one in self.calls.values() if not (one.is_reset or one.is_closed)]

    def stream(self, call):
        return self.listeners[call.id].stream

    def one_of(self, calls, which):
        """Return one of the calls, or None if there are none."""
        return calls[which % len(calls)] if calls else None

    # ---- what the client does

    @initialize(window=windows, is_answered=st.booleans())
    def first_settings(self, window, is_answered):
        self.exchange()
        self.change_settings(window, 16_384, 4096)
        if is_answered:
            self.exchange()

    def exchange(self):
        """Pass bytes both ways until no more come."""
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
        """Change all settings at once: h2's client takes an ACK for the next change of each
        setting."""
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

    # ---- the transport

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
        """Send a message of a size, and check that it is sent at once if it can be."""
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

    @property
    def waiting(self):
        """The streams with a message that waits for some window, or for the transport."""
        return {*self.server.blocked_by_stream, *self.server.blocked_by_connection}

    def could_send(self, call, size):
        """Return whether a message of this size can be sent at once."""
        h2 = self.server.h2
        window = min(
            h2.streams[call.id].outbound_flow_control_window, h2.outbound_flow_control_window
        )
        return size <= min(window, h2.max_outbound_frame_size) and not self.server.is_clogged

    @precondition(lambda self: self.waiting)
    @rule(which=pick)
    def server_drops_a_message(self, which):
        call = self.one_of([one for one in self.running if self.stream(one).is_blocked], which)
        if call is not None:
            self.drop(call)

    def drop(self, call):
        """Drop a blocked message. Messages of at most `whole_bytes` are never sent in part."""
        stream, message = self.stream(call), call.sent[-1]
        is_dropped = stream.drop_message()
        assert stream.is_blocked == (not is_dropped)
        if is_dropped:
            call.sent.pop()
            call.num_blocked -= 1
        else:
            assert len(message) + PREFIX_BYTES > self.whole_bytes
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

    # ---- invariants

    @invariant()
    def streams_wait_for_what_they_lack(self):
        assert not set(self.server.blocked_by_stream) & set(self.server.blocked_by_connection)
        for stream in self.server.blocked_by_connection.values():
            # SETTINGS may shrink a stream's window while the connection's window is used up.
            assert stream.has_window or self.server.h2.outbound_flow_control_window <= 0

    @invariant()
    def windows_are_remembered(self):
        self.whole_bytes = min(self.whole_bytes, self.server.whole_bytes)

    @invariant()
    def received_bytes_are_a_prefix_of_sent_ones(self):
        for call in self.calls.values():
            assert call.reader.error is None
            if not call.is_reset:  # h2 has no events for a stream that the client has reset
                assert call.got == call.sent[: len(call.got)]

    @invariant()
    def nothing_is_kept_of_ended_calls(self):
        server = self.server
        assert self.waiting <= set(server.streams)
        assert set(server.streams) == set(server.h2.streams)
        assert len(server.streams) <= STREAMS_MAX
        for stream_id, listener in self.listeners.items():
            stream = listener.stream
            assert stream.is_over == (stream_id not in server.streams)
            assert stream.is_blocked == (stream_id in self.waiting)

    def teardown(self):
        """Let everything arrive, open every window and end every call: nothing is left."""
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
        assert not self.waiting
        for call in self.calls.values():
            if call.is_reset:
                continue  # a reset that came with the call's beginning leaves nothing to check
            stream = self.stream(call)
            assert call.got == call.sent
            assert not call.reader.is_amid_message
            assert call.is_closed == stream.is_over == call.is_ended
            assert self.listeners[call.id].num_sent == call.num_blocked
        for call in self.running:
            self.end(call)
        self.exchange()
        assert not self.server.streams
        assert not self.server.h2.streams
        assert not self.server.output.take()

    def the_windows_are_as_the_client_sees_them(self):
        manager = self.client._inbound_flow_control_window_manager
        assert self.server.h2.outbound_flow_control_window == manager.current_window_size
        for stream_id, state in self.server.h2.streams.items():
            theirs = self.client.streams[stream_id]._inbound_window_manager
            assert state.outbound_flow_control_window == theirs.current_window_size


Schedule.TestCase.settings = settings(stateful_step_count=60)
TestEveryInterleaving = Schedule.TestCase


# ---- examples


class Pair:
    """A server's connection and a client that have exchanged their settings."""

    def __init__(self, **settings):
        self.listeners = {}
        self.server = make_server(self.on_stream)
        self.client = make_client()
        if settings:
            self.client.update_settings({SettingCodes[name]: settings[name] for name in settings})
        self.exchange()

    def on_stream(self, stream):
        """Begin to listen to a stream that the client has opened."""
        self.listeners[stream.id] = listener = Listener(stream)
        return listener

    def exchange(self):
        """Let client and server receive everything; return the client's events."""
        self.server.receive(self.client.data_to_send())
        events = self.client.receive_data(self.server.output.take())
        self.server.receive(self.client.data_to_send())
        return events

    def call(self, *, is_ended=True):
        """Begin a call at the client, and return its stream's number."""
        stream_id = self.client.get_next_available_stream_id()
        self.client.send_headers(stream_id, REQUEST, end_stream=is_ended)
        return stream_id

    def begin(self):
        """Begin a call, and return the server's stream of it."""
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
    assert len(pair.server.streams) == len(pair.server.h2.streams) == STREAMS_MAX


def test_calls_go_on_after_the_client_has_sent_goaway():
    pair = Pair(INITIAL_WINDOW_SIZE=100)
    stream = pair.begin()
    stream.send_message(bytes(85))  # ten bytes of the window are left
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
    events = pair.client.receive_data(pair.server.output.take())
    assert [one.data for one in events if isinstance(one, DataReceived)] == [b"\0\0\0\0\7message"]
    assert any(isinstance(one, PingAckReceived) for one in events)
    assert any(isinstance(one, StreamEnded) for one in events)
    assert pair.server.is_ending


def test_a_server_that_stops_refuses_new_calls_and_lets_running_ones_end():
    pair = Pair()
    stream = pair.begin()
    pair.server.send_goaway()
    late, reset = pair.call(), pair.call()
    pair.client.reset_stream(reset)
    pair.server.receive(pair.client.data_to_send())
    assert list(pair.listeners) == [stream.id]
    stream.send_message(b"message")
    stream.send_headers([(b"grpc-status", b"0")], is_last=True)
    data = pair.server.output.take()
    assert RstStreamFrame(late, error_code=ErrorCodes.REFUSED_STREAM).serialize() in data
    assert GoAwayFrame(0, last_stream_id=stream.id).serialize() in data
    assert not pair.server.h2.streams


class Leaver:
    """A client that obeys GOAWAY, as bytes: it opens no call once it has read one."""

    def __init__(self):
        self.to_server = bytearray(make_client().data_to_send())
        self.frames = []  # frames that the client has read
        self.opened = []
        self._encoder = Encoder()
        self._buffer = bytearray()

    @property
    def last_ids(self):
        """Return the last streams of the GOAWAY frames that the client has read."""
        return [one.last_stream_id for one in self.frames if isinstance(one, GoAwayFrame)]

    def open(self):
        """Open a call, unless a GOAWAY has come."""
        if not self.last_ids:
            self.opened.append(2 * len(self.opened) + 1)
            block = self._encoder.encode(REQUEST)
            flags = ["END_HEADERS", "END_STREAM"]
            self.to_server += HeadersFrame(self.opened[-1], block, flags=flags).serialize()

    def read(self, data):
        """Read bytes of the server's, and answer its pings."""
        self._buffer += data
        while len(self._buffer) >= 9:
            one, size = Frame.parse_frame_header(memoryview(self._buffer[:9]))
            if len(self._buffer) < 9 + size:
                return
            one.parse_body(memoryview(bytes(self._buffer[9 : 9 + size])))
            del self._buffer[: 9 + size]
            self.frames.append(one)
            if isinstance(one, PingFrame):
                self.to_server += PingFrame(0, one.opaque_data, flags=["ACK"]).serialize()


instants = st.one_of(
    st.just(("open", 1)),
    st.tuples(st.sampled_from(["to_server", "to_client"]), st.integers(1, 200)),
)


@given(st.lists(instants, max_size=12), st.lists(instants, max_size=20), st.booleans())
def test_a_call_opened_around_the_instant_of_a_drain_is_served_or_refused(
    before, after, is_impatient
):
    """A client that answers the server's ping loses no call that it opened before it read GOAWAY.
    Otherwise such a call is refused by REFUSED_STREAM, and may be sent again elsewhere.

    Red if the last stream is announced before the client has answered.
    """
    leaver, to_client, served = Leaver(), bytearray(), {}

    def on_stream(stream):
        served[stream.id] = listener = Listener(stream)
        return listener

    server = Http2Connection(on_stream, LIMITS_OF_MANY, Account(LIMITS_OF_MANY, lambda: 0.0))

    def act(name, size):
        if name == "open":
            leaver.open()
        elif name == "to_server":
            server.receive(bytes(leaver.to_server[:size]))
            del leaver.to_server[:size]
        else:
            leaver.read(to_client[:size])
            del to_client[:size]
        to_client.extend(server.output.take())

    for one in before:
        act(*one)
    server.drain()
    for one in after:
        act(*one)
    if is_impatient:
        server.send_goaway()
    for _ in range(3):
        act("to_server", 10_000)
        act("to_client", 10_000)
    assert leaver.last_ids == [2**31 - 1, max(served, default=0)]
    resets = {
        one.stream_id: one.error_code for one in leaver.frames if isinstance(one, RstStreamFrame)
    }
    assert sorted([*served, *resets]) == leaver.opened
    assert set(resets.values()) <= {ErrorCodes.REFUSED_STREAM}
    assert all(number > leaver.last_ids[1] for number in resets)
    assert is_impatient or not resets
    event(f"{'refused' if resets else 'served'} of {min(len(leaver.opened), 3)}")


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
    assert pair.listeners[stream.id].num_sent == 1


def test_a_large_message_is_split_once():
    """Red if each frame copies the rest of the message."""
    pair = Pair(INITIAL_WINDOW_SIZE=WINDOW_MAX)
    pair.client.increment_flow_control_window(2**30)
    stream = pair.begin()
    message = bytes(2**26)
    began_at = time.perf_counter()
    stream.send_message(message)
    assert time.perf_counter() - began_at < 5  # a copy for each frame would take 8 s
    assert not stream.is_blocked
    assert sum(map(len, pair.server.output)) > len(message)


@pytest.mark.parametrize("is_of_settings", [False, True])
def test_a_flood_that_opens_windows_looks_at_each_stream_at_most_once(monkeypatch, is_of_settings):
    """Red if each frame of 13 bytes makes the server look at every stream, which takes 2 ms."""
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
    assert pushed == (streams if is_of_settings else []), "they wait for their own windows"


def test_a_client_with_a_huge_header_table_leaves_ours_small():
    pair = Pair(HEADER_TABLE_SIZE=2**32 - 1)
    for number in range(200):
        stream = pair.begin()
        trailers = [(b"grpc-status", b"0"), (b"grpc-message", b"%d" % number * 30)]
        stream.send_headers(trailers, is_last=True)
        pair.exchange()
    assert pair.server.h2.encoder.header_table._current_size <= LIMITS.header_table_bytes


@given(
    st.lists(st.one_of(st.binary(max_size=40), st.integers(0, 4)), max_size=12),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(1, 60),
)
def test_whatever_a_client_sends_only_a_protocol_error_is_raised(parts, edits, step):
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
        pair.server.output.take()
    assert set(pair.server.streams) <= set(pair.server.h2.streams)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01\x02", b"PRX"]
)
def test_bytes_that_are_not_http2_are_a_protocol_error(data):
    server = make_server(lambda stream: None)
    with pytest.raises(ProtocolError):
        server.receive(data)
