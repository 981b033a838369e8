"""One HTTP/2 connection of a gRPC server, without its socket: bytes in, streams and bytes out.

h2 speaks the protocol: states, settings, header compression, windows, what is an error. Messages
go past it: making a DATA frame takes h2 eight times as long or more, much of what a token costs
from end to end (`python -m tools.bench primitives`, `front`). h2's count of the windows is kept.

Rule 1: nothing here waits, and nothing knows Trio. Rule 2: what is sent goes to the output in the
order of the calls; whoever holds the connection takes it (`take_output`). Rule 3: a message that
fits into one frame of `WHOLE_BYTES_MAX` is sent whole or not at all, so that a status can follow
one that the client's window has no room for.
Source: RFC 9113; gRPC over HTTP2 (PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any, Protocol

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.frame_buffer import FrameBuffer
from h2.settings import SettingCodes, Settings
from hyperframe.frame import DataFrame, GoAwayFrame

if TYPE_CHECKING:
    from collections.abc import Callable

    from h2.events import Event
    from hyperframe.frame import Frame

    Headers = list[tuple[bytes, bytes]]

__all__ = ["Connection", "ErrorCodes", "Listener", "ProtocolError", "Stream"]

# A frame's header and a message's prefix: length and type, flags, stream; compressed, length.
# Source: RFC 9113, section 4.1; PROTOCOL-HTTP2.md, Length-Prefixed-Message.
_DATA_AND_PREFIX = Struct(">IBIBI")
_DATA = Struct(">IBI")
_PREFIX = Struct(">BI")
_LENGTH_BYTES = 3
PREFIX_BYTES = _PREFIX.size

# A receiver's smallest window that grpc allows is four times that.
WHOLE_BYTES_MAX = 256
STREAM_WINDOW = 2**18  # guess: a request of usual size comes without waiting for the window
CONNECTION_WINDOW = 2**20  # guess: four of them
HEADER_LIST_BYTES_MAX = 2**15  # guess
CLOSED_STREAMS_MAX = 2**12  # guess: remembered, for what still comes for them
HEADER_TABLE_BYTES_MAX = 2**12  # of ours, a client's default, however much one would keep


class Listener(Protocol):
    """Whoever serves a stream."""

    def on_data(self, data: bytes) -> None:
        """More of the request's body."""
        ...

    def on_end(self) -> None:
        """The client has said everything."""
        ...

    def on_reset(self) -> None:
        """The client wants no more; nothing can be sent any more."""
        ...

    def on_drained(self) -> None:
        """What waited for the client's window has been sent."""
        ...


class Stream:
    """One call; ``listener`` is who serves it."""

    __slots__ = (
        *("_connection", "_is_begun", "_rest", "_state"),
        *("has_ended", "headers", "id", "is_over", "listener"),
    )

    def __init__(self, connection: Connection, stream_id: int, headers: Headers) -> None:
        self._connection = connection
        self._state = connection.h2.streams[stream_id]
        self._rest: bytes | memoryview = b""
        self._is_begun = False  # part of the message that waits has been sent
        self.id = stream_id
        self.headers = headers
        self.has_ended = False  # the client has said everything
        self.is_over = False  # nothing more is sent: it was ended, reset, or the connection is gone
        self.listener: Listener

    @property
    def is_blocked(self) -> bool:
        """Part of a message waits for the client's window."""
        return bool(self._rest)

    def send_headers(self, headers: Headers, *, is_last: bool = False) -> None:
        """Send the first headers or, with ``is_last``, those that end the stream."""
        assert not (is_last and self._rest), "a message waits"
        connection = self._connection
        self.is_over = is_last
        connection.h2.send_headers(self.id, headers, end_stream=is_last)
        connection.collect()
        if is_last:
            if not self.has_ended:  # RFC 9113, section 8.1: nobody will read the rest
                connection.h2.reset_stream(self.id, ErrorCodes.NO_ERROR)
                connection.collect()
            connection.forget(self)

    def try_send_message(self, data: bytes) -> bool:
        """Send a message whole, if it can be sent now and in one frame."""
        connection, state = self._connection, self._state
        h2 = connection.h2
        size = len(data) + PREFIX_BYTES
        if (
            size > state.outbound_flow_control_window
            or size > h2.outbound_flow_control_window
            or size > h2.max_outbound_frame_size
            or connection.is_clogged
            or self._rest
        ):
            return False
        state.outbound_flow_control_window -= size
        h2.outbound_flow_control_window -= size
        connection.output.append(_DATA_AND_PREFIX.pack(size << 8, 0, self.id, 0, len(data)) + data)
        return True

    def send_message(self, data: bytes) -> None:
        """Send a message as the client's window lets it; with `is_blocked`, what is left goes
        when the window opens, and `Listener.on_drained` is called then."""
        assert not self._rest, "one message at a time"
        if not self.try_send_message(data):
            self._rest = memoryview(_PREFIX.pack(0, len(data)) + data)
            self._is_begun = False
            self.push()

    def push(self) -> None:
        """Send what the window has come to allow."""
        connection, state = self._connection, self._state
        h2 = connection.h2
        while self._rest and not connection.is_clogged:
            rest = self._rest
            window = min(state.outbound_flow_control_window, h2.outbound_flow_control_window)
            size = min(window, len(rest), h2.max_outbound_frame_size)
            if size <= 0 or (size < len(rest) <= WHOLE_BYTES_MAX and not self._is_begun):
                break
            state.outbound_flow_control_window -= size
            h2.outbound_flow_control_window -= size
            connection.output.append(_DATA.pack(size << 8, 0, self.id) + rest[:size])
            self._rest, self._is_begun = rest[size:], True
        if self._rest:
            connection.blocked[self.id] = self
        else:
            connection.blocked.pop(self.id, None)

    def drop_message(self) -> bool:
        """Forget a message that waits whole for the window. False: part of it has been sent."""
        if self._rest and self._is_begun:
            return False
        self._rest = b""
        self._connection.blocked.pop(self.id, None)
        return True

    def reset(self, code: ErrorCodes) -> None:
        """End the stream without a status."""
        if not self.is_over:
            self.cut()
            self._connection.h2.reset_stream(self.id, code)
            self._connection.collect()
            self._connection.forget(self)

    def cut(self) -> None:
        """Nothing more can be sent."""
        self.is_over = True
        self._rest = b""


class Connection:
    """One client's connection. ``output`` is for `Stream`; others use `take_output`.

    ``on_stream`` is asked who serves a new stream. ``is_clogged`` is set by the holder while the
    transport takes nothing: messages wait as they do for a window, until `unclog`.
    """

    def __init__(self, on_stream: Callable[[Stream], Listener], *, streams_max: int) -> None:
        self._on_stream = on_stream
        self._streams_max = streams_max
        self.h2 = _H2()
        self.h2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: streams_max,
                SettingCodes.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES_MAX,
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            },
        )
        self.output: list[bytes] = []
        self.blocked: dict[int, Stream] = {}  # streams whose messages wait for a window
        self.is_clogged = False
        self.is_ending = False
        self._streams: dict[int, Stream] = {}
        self._are_windows_open = False  # more may be sent on any stream
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(CONNECTION_WINDOW - 65_535)
        self.collect()

    @property
    def num_streams(self) -> int:
        """Streams that are not over."""
        return len(self._streams)

    def receive(self, data: bytes) -> None:
        """Take what the client sent, and tell the listeners what it is for them.

        Raises:
            ProtocolError: it is not HTTP/2 as it should be; what the client is told of it is in
                the output, after which the connection ends.
        """
        try:
            events = self.h2.receive_data(data)
            self.collect()  # that settings were heard goes before what they have come to allow
            for event in events:
                self._take(event)
            if self._are_windows_open:  # once, however often it was said: it is a look at each
                self._are_windows_open = False
                self._push_all()
        finally:
            self.collect()

    def _take(self, event: Any) -> None:
        kind = event.__class__
        if kind is WindowUpdated:
            self._open_window(event.stream_id)
        elif kind is RemoteSettingsChanged:
            self._are_windows_open = True  # their first size may have grown
        elif kind is RequestReceived:
            self._begin(event.stream_id, event.headers)
        elif kind is ConnectionTerminated:
            self.is_ending = True  # it opens no more streams; those that run go on
        elif kind is DataReceived:
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if (found := self._streams.get(event.stream_id)) is not None:
                found.listener.on_data(event.data)
        elif kind is StreamEnded:
            if (found := self._streams.get(event.stream_id)) is not None:
                found.has_ended = True
                found.listener.on_end()
        elif kind is StreamReset:
            if (found := self._streams.get(event.stream_id)) is not None:
                found.cut()
                self.forget(found)
                found.listener.on_reset()
            else:
                self.h2.drop(event.stream_id)

    def _begin(self, stream_id: int, headers: Headers) -> None:
        state = self.h2.streams.get(stream_id)
        if state is None or state.closed:
            return  # by a reset that came with it
        if self.is_ending or len(self._streams) >= self._streams_max:
            self.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            self.h2.drop(stream_id)
            return
        stream = Stream(self, stream_id, headers)
        self._streams[stream_id] = stream
        stream.listener = self._on_stream(stream)

    def _open_window(self, stream_id: int) -> None:
        if not stream_id:
            self._are_windows_open = True
        elif (stream := self.blocked.get(stream_id)) is not None:
            self._push(stream)

    def unclog(self) -> None:
        """The transport takes bytes again."""
        self.is_clogged = False
        self._push_all()

    def _push_all(self) -> None:
        for stream in list(self.blocked.values()):
            self._push(stream)

    def _push(self, stream: Stream) -> None:
        stream.push()
        if not stream.is_blocked:
            stream.listener.on_drained()

    def forget(self, stream: Stream) -> None:
        """A stream is over."""
        self._streams.pop(stream.id, None)
        self.blocked.pop(stream.id, None)
        self.h2.drop(stream.id)

    def ping(self) -> None:
        """Ask whether the client is there."""
        self.h2.ping(b"triolet?")
        self.collect()

    def end_gracefully(self) -> None:
        """Tell the client to open no more streams here; those that run go on."""
        self.is_ending = True
        frame = GoAwayFrame(0, last_stream_id=self.h2.highest_inbound_stream_id)
        self.output.append(frame.serialize())

    def cut(self) -> None:
        """The connection is gone."""
        for stream in list(self._streams.values()):
            stream.cut()
            self.forget(stream)

    def collect(self) -> None:
        """Put what h2 has made behind what is there already."""
        if data := self.h2.data_to_send():
            self.output.append(data)

    def take_output(self) -> bytes:
        """Everything to be sent; whoever takes it sends it, in this order."""
        if not self.output:
            return b""
        data = self.output[0] if len(self.output) == 1 else b"".join(self.output)
        self.output.clear()
        return data


class _Frames(FrameBuffer):
    """Looks at a frame's length before it has come; h2 would wait for 16 MiB to say no."""

    def __next__(self) -> Frame:
        if len(self._data) >= _LENGTH_BYTES:
            self._validate_frame_length(int.from_bytes(self._data[:_LENGTH_BYTES], "big"))
        frame = super().__next__()
        if frame.__class__ is DataFrame:
            frame.__class__ = _DataFrame
        return frame


class _DataFrame(DataFrame):
    """Tells nothing of its body: h2 has every frame described, for a log that is off."""

    __repr__ = object.__repr__


class _H2(H2Connection):
    """A server's; names and values are bytes, and those that we send are not looked at again.
    Streams that are over are dropped one by one (`drop`), and not looked for among all of them."""

    MAX_CLOSED_STREAMS = CLOSED_STREAMS_MAX

    def __init__(self) -> None:
        super().__init__(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.incoming_buffer = _Frames(server=True)
        self._frame_dispatch_table[_DataFrame] = self._receive_data_frame

    @property
    def open_inbound_streams(self) -> int:
        """None that h2 would have to count: it would end the connection for one too many, where
        `Connection` refuses that one. Source: RFC 9113, section 5.1.2."""
        return 0

    def drop(self, stream_id: int) -> None:
        """Forget a stream, if it is closed, but for how it was."""
        state = self.streams.get(stream_id)
        if state is not None and state.closed:
            del self.streams[stream_id]
            self._closed_streams[stream_id] = state.closed_by

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        """The client opens no more streams; h2 would let those that run neither speak nor hear."""
        return [], [ConnectionTerminated()]

    def _acknowledge_settings(self) -> list[Frame]:
        frames: list[Frame] = super()._acknowledge_settings()
        encoder = self.encoder
        if encoder.header_table_size > HEADER_TABLE_BYTES_MAX:
            encoder.header_table_size = HEADER_TABLE_BYTES_MAX
        # of several sizes the smallest and the last are told, which alone the client surely allows;
        # hpack would tell all, or none if the last came twice. Source: RFC 7541, section 4.2.
        if told := encoder.table_size_changes:
            told[:] = [min(told), told[-1]]
            encoder.header_table.resized = True
        return frames
