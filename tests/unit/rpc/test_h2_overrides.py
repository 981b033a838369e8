"""Each part of h2's internals that the RPC library relies on.

A test here fails when h2 changes such a part, or when h2 does by itself what our override does, so
that the override can go. `plain` is h2's own connection, whose behaviour we override.
"""

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import (
    FlowControlError,
    FrameTooLargeError,
    ProtocolError,
    TooManyStreamsError,
)
from h2.settings import SettingCodes, Settings
from hpack.hpack import decode_integer
from hyperframe.frame import DataFrame, GoAwayFrame, SettingsFrame

from grpc_service.rpc.h2_overrides import QuietDataFrame, ServerH2
from grpc_service.rpc.limits import Limits

STREAMS_MAX = 3
LIMITS = Limits(streams_per_connection=STREAMS_MAX, closed_streams=10)
REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"localhost"),
]
ANSWER = [(b":status", b"200")]
END = [(b"grpc-status", b"0")]
WINDOW_MAX = 2**31 - 1


def plain():
    """Return h2's own connection, as a server."""
    one = H2Connection(H2Configuration(client_side=False, header_encoding=None))
    one.local_settings = Settings(
        client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS_MAX}
    )
    one.initiate_connection()
    return one


class Client(H2Connection):
    """h2's client, without its check of how many streams are open."""

    open_outbound_streams = 0

    def __init__(self):
        super().__init__(H2Configuration(client_side=True, header_encoding=None))
        self.initiate_connection()

    def request(self, *, is_ended=True):
        """Begin a call, and return its stream's number."""
        stream_id = self.get_next_available_stream_id()
        self.send_headers(stream_id, REQUEST, end_stream=is_ended)
        return stream_id


def exchange(client, server):
    """Pass bytes both ways until nobody has more to send; return the server's events."""
    events = server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())
    return events + server.receive_data(client.data_to_send())


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def server(client):
    """Return our server, after it and the client have exchanged their settings."""
    one = ServerH2(LIMITS)
    exchange(client, one)
    return one


# ---- Window


def test_a_streams_window_is_h2s_own_count(client, server):
    call = client.request()
    exchange(client, server)
    window = server.window_of(call)
    assert window.outbound_flow_control_window == server.local_flow_control_window(call) == 65_535
    window.outbound_flow_control_window -= 1000
    server.outbound_flow_control_window -= 400
    assert server.local_flow_control_window(call) == 64_535
    server.outbound_flow_control_window -= 1000
    assert server.local_flow_control_window(call) == 65_535 - 1400, (
        "the connection's window is smaller"
    )


def test_h2_adds_to_the_windows_what_the_client_allows(client, server):
    call = client.request()
    exchange(client, server)
    window = server.window_of(call)
    client.increment_flow_control_window(5, call)
    client.increment_flow_control_window(7)
    events = exchange(client, server)
    assert [one.stream_id for one in events if isinstance(one, WindowUpdated)] == [call, 0]
    assert window.outbound_flow_control_window == 65_540
    assert server.outbound_flow_control_window == 65_542
    client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 65_635})
    exchange(client, server)
    assert window.outbound_flow_control_window == 65_640
    assert server.outbound_flow_control_window == 65_542


def test_h2_refuses_a_window_above_the_remaining_maximum(client, server):
    server.outbound_flow_control_window = 10
    client.increment_flow_control_window(WINDOW_MAX - 65_535)
    exchange(client, server)
    assert server.outbound_flow_control_window == WINDOW_MAX - 65_535 + 10
    server.outbound_flow_control_window = WINDOW_MAX
    client._inbound_flow_control_window_manager.current_window_size = 0
    client.increment_flow_control_window(1)
    with pytest.raises(FlowControlError):
        exchange(client, server)


# ---- FrameLengths

TOO_LONG = (16_385).to_bytes(3, "big")


@pytest.mark.parametrize("num_bytes", [3, 9])
def test_a_frame_that_is_too_long_is_refused_before_it_comes(server, num_bytes):
    with pytest.raises(FrameTooLargeError):
        server.receive_data((TOO_LONG + b"\0\0\0\0\0\1")[:num_bytes])


def test_h2_itself_waits_for_a_frame_that_is_too_long(client):
    server = plain()
    exchange(client, server)
    assert server.receive_data(TOO_LONG + b"\0\0\0\0\0\1" + bytes(16_000)) == []


def test_the_longest_frame_is_taken(client, server):
    call = client.request(is_ended=False)
    client.send_data(call, bytes(16_384))
    events = exchange(client, server)
    assert [len(one.data) for one in events if isinstance(one, DataReceived)] == [16_384]


# ---- QuietDataFrame


@pytest.mark.parametrize("make", [lambda: ServerH2(LIMITS), plain])
def test_h2_describes_frames_and_we_leave_out_the_body_of_data(client, monkeypatch, make):
    server = make()
    described = []
    monkeypatch.setattr(DataFrame, "_body_repr", lambda frame: described.append(frame) or "")
    call = client.request(is_ended=False)
    client.send_data(call, b"body", end_stream=True)
    events = exchange(client, server)
    assert [one.data for one in events if isinstance(one, DataReceived)] == [b"body"]
    assert any(isinstance(one, StreamEnded) for one in events)
    assert bool(described) == (not isinstance(server, ServerH2))


def test_a_frame_of_data_is_of_our_kind_before_h2_looks_for_its_handler(server):
    assert QuietDataFrame in server._frame_dispatch_table
    frame = DataFrame(1, b"x")
    frame.__class__ = QuietDataFrame  # `QuietDataFrame` adds no attributes to h2's `DataFrame`
    assert frame.serialize() == DataFrame(1, b"x").serialize()


# ---- ServerH2.open_inbound_streams


def test_a_stream_too_many_does_not_end_the_connection(client, server):
    calls = [client.request() for _ in range(STREAMS_MAX + 2)]
    events = exchange(client, server)
    assert [one.stream_id for one in events if isinstance(one, RequestReceived)] == calls


def test_h2_itself_ends_a_connection_for_a_stream_too_many(client):
    server = plain()
    exchange(client, server)
    for _ in range(STREAMS_MAX + 1):
        client.request()
    with pytest.raises(TooManyStreamsError):
        exchange(client, server)


# ---- ServerH2.drop, ServerH2.is_open


def ended(client, server):
    """Return the number of a call that the server has ended."""
    call = client.request()
    exchange(client, server)
    assert server.is_open(call)
    server.send_headers(call, ANSWER + END, end_stream=True)
    exchange(client, server)
    assert not server.is_open(call)
    return call


def test_a_closed_stream_stays_in_h2s_table_until_it_is_dropped(client, server):
    calls = [ended(client, server) for _ in range(2 * STREAMS_MAX)]
    assert list(server.streams) == calls
    for call in calls:
        server.drop(call)
    assert not server.streams
    running = client.request()
    exchange(client, server)
    server.drop(running)
    server.drop(99)
    assert list(server.streams) == [running], "only a closed stream is dropped"


def test_frames_that_come_late_for_a_dropped_stream_harm_nobody(client, server):
    call = client.request(is_ended=False)
    exchange(client, server)
    server.reset_stream(call, ErrorCodes.CANCEL)
    server.drop(call)
    client.send_data(call, b"late")
    client.increment_flow_control_window(5, call)
    assert not [one for one in exchange(client, server) if isinstance(one, DataReceived)]
    other = ended(client, server)
    server.drop(other)
    client.reset_stream(client.request())
    assert [one for one in exchange(client, server) if isinstance(one, StreamReset)]


def test_h2_remembers_as_many_closed_streams_as_the_limit_says(client, server):
    for _ in range(2 * LIMITS.closed_streams):
        server.drop(ended(client, server))
    assert len(server._closed_streams) == server.MAX_CLOSED_STREAMS == LIMITS.closed_streams


# ---- ServerH2.goaway, ServerH2._receive_goaway_frame


def serve_after_goaway(client, server):
    """Answer a call after the client has sent GOAWAY; return the client's events for the answer."""
    call = client.request()
    exchange(client, server)
    events = server.receive_data(GoAwayFrame(0).serialize())
    assert any(isinstance(one, ConnectionTerminated) for one in events)
    server.send_headers(call, ANSWER)
    server.send_headers(call, END, end_stream=True)
    server.ping(b"12345678")
    return client.receive_data(server.data_to_send())


def test_a_call_goes_on_after_its_clients_goaway(client, server):
    assert any(isinstance(one, StreamEnded) for one in serve_after_goaway(client, server))


def test_h2_itself_ends_everything_after_a_clients_goaway(client):
    server = plain()
    exchange(client, server)
    with pytest.raises(ProtocolError):
        serve_after_goaway(client, server)


def test_our_goaway_names_the_last_stream_and_h2_goes_on(client, server):
    call = client.request()
    exchange(client, server)
    frame = GoAwayFrame(0)
    frame.parse_body(memoryview(server.goaway(call)[9:]))
    assert frame.last_stream_id == call
    assert frame.error_code == 0
    server.send_headers(call, ANSWER + END, end_stream=True)
    assert any(isinstance(one, StreamEnded) for one in client.receive_data(server.data_to_send()))


# ---- ServerH2._acknowledge_settings


def settings_frame(*sizes):
    """Return SETTINGS frames, one frame for each size of the header table in ``sizes``."""
    frames = [SettingsFrame(0, {SettingsFrame.HEADER_TABLE_SIZE: size}) for size in sizes]
    return b"".join(frame.serialize() for frame in frames)


def test_our_header_table_stays_small_whatever_a_client_allows(client, server):
    server.receive_data(settings_frame(2**30))
    assert server.encoder.header_table_size == LIMITS.header_table_bytes


def test_h2_itself_keeps_a_header_table_as_large_as_a_client_allows(client):
    server = plain()
    exchange(client, server)
    server.receive_data(settings_frame(2**30))
    assert server.encoder.header_table_size == 2**30


@pytest.mark.parametrize(
    ("sizes", "announced"),
    [
        ((100, 2**20), [100, 4096]),
        ((100, 100), [100, 100]),
        ((300, 200, 100, 150), [100, 150]),
        ((2**20, 2**21), [4096, 4096]),
    ],
)
def test_of_several_sizes_the_smallest_and_the_last_are_announced(client, server, sizes, announced):
    call = client.request()
    exchange(client, server)
    server.receive_data(settings_frame(*sizes))
    assert server.encoder.table_size_changes == announced
    server.data_to_send()
    server.send_headers(call, ANSWER + END, end_stream=True)
    block = server.data_to_send()[9:]
    found = []
    while block[0] >> 5 == 0b001:  # an update of the table's size. Source: RFC 7541, section 6.3.
        size, length = decode_integer(block, 5)
        found.append(size)
        block = block[length:]
    assert found == announced


# ---- faults of compression


@pytest.mark.parametrize("block", [b"\x80", b"\xff\xff\xff", b"\x3f\xff\xff\xff"])
def test_a_block_that_cannot_be_decompressed_has_its_own_error(client, server, block):
    head = len(block).to_bytes(3, "big") + b"\x01\x04\0\0\0\x01"
    theirs = plain()
    exchange(Client(), theirs)
    wanted = ((server, ErrorCodes.COMPRESSION_ERROR), (theirs, ErrorCodes.PROTOCOL_ERROR))
    for one, code in wanted:
        one.data_to_send()
        with pytest.raises(ProtocolError):
            one.receive_data(head + block)
        assert one.data_to_send()[-4:] == code.to_bytes(4, "big")
