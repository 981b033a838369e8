"""One HTTP/2 connection of a gRPC server without its socket: bytes in, streams and bytes out.

h2 implements the protocol: states, settings, header compression, windows, errors. Messages bypass
h2: making a DATA frame takes h2 eight times as long or more, which is much of what a token costs
from end to end (`python -m tools.bench primitives`, `front`). h2's count of the windows stays
right, as `Stream` subtracts what it sends from h2's own numbers (`h2_overrides.Window`).

Rule 1: nothing here waits, and nothing knows Trio. Rule 2: whatever is sent goes to the output in
the order of the calls; the owner of the connection sends it (`take_output`). Rule 3: a message that
fits into one frame of `WHOLE_BYTES_MAX` is sent whole or not at all, so that a status can still
follow when the client's window has no room for the message.
Source: RFC 9113; gRPC over HTTP2 (PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any, Protocol

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

from grpc_service.rpc.framing import PREFIX_BYTES
from grpc_service.rpc.h2_overrides import ServerH2

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpc_service.rpc.framing import Headers
    from grpc_service.rpc.limits import Limits

__all__ = ["ErrorCodes", "Http2Connection", "ProtocolError", "Stream", "StreamListener"]

# A frame's header is length and type, flags, stream; a message's prefix is a flag for compression
# and the length. Source: RFC 9113, section 4.1; PROTOCOL-HTTP2.md, Length-Prefixed-Message.
_DATA_AND_PREFIX = Struct(">IBIBI")
_DATA = Struct(">IBI")
_PREFIX = Struct(">BI")

# grpc's clients allow windows of 1 KiB and more: four times this.
WHOLE_BYTES_MAX = 256
_PING = b"trio-rpc"  # any eight bytes


class StreamListener(Protocol):
    """The server's side of one stream."""

    def on_data(self, data: bytes) -> None:
        """Take the next bytes of the request's body."""
        ...

    def on_end(self) -> None:
        """Act on the end of the request's body."""
        ...

    def on_reset(self) -> None:
        """Act on the client's reset of the stream; nothing can be sent any more."""
        ...

    def on_drained(self) -> None:
        """Take note that the message that waited for the client's window has been sent."""
        ...


class Stream:
    """One stream of a connection. Its owner sets ``listener``.

    ``has_ended``: the client has sent the whole request. ``is_over``: nothing more can be sent, as
    the stream was ended or reset, or the connection is lost.
    """

    __slots__ = (
        *("_connection", "_is_begun", "_rest", "_window"),
        *("has_ended", "headers", "id", "is_over", "listener"),
    )

    def __init__(self, connection: Http2Connection, stream_id: int, headers: Headers) -> None:
        self._connection = connection
        self._window = connection.h2.window_of(stream_id)
        self._rest: bytes | memoryview = b""  # of the message that waits for the client's window
        self._is_begun = False  # whether part of that message has been sent
        self.id = stream_id
        self.headers = headers
        self.has_ended = False
        self.is_over = False
        self.listener: StreamListener

    @property
    def is_blocked(self) -> bool:
        """Whether a message, or part of one, waits for the client's window."""
        return bool(self._rest)

    def send_headers(self, headers: Headers, *, is_last: bool = False) -> None:
        """Send the first headers or, with ``is_last``, those that end the stream."""
        assert not (is_last and self._rest), "a message waits"
        connection = self._connection
        self.is_over = is_last
        connection.h2.send_headers(self.id, headers, end_stream=is_last)
        connection.collect()
        if is_last:
            if not self.has_ended:  # the rest of the request has no reader. RFC 9113, section 8.1.
                connection.h2.reset_stream(self.id, ErrorCodes.NO_ERROR)
                connection.collect()
            connection.forget(self)

    def try_send_message(self, data: bytes) -> bool:
        """Send a message if all of it can be sent now and in one frame; return whether it was."""
        connection, window = self._connection, self._window
        h2 = connection.h2
        size = len(data) + PREFIX_BYTES
        if (
            size > window.outbound_flow_control_window
            or size > h2.outbound_flow_control_window
            or size > h2.max_outbound_frame_size
            or connection.is_clogged
            or self._rest
        ):
            return False
        window.outbound_flow_control_window -= size
        h2.outbound_flow_control_window -= size
        connection.output.append(_DATA_AND_PREFIX.pack(size << 8, 0, self.id, 0, len(data)) + data)
        return True

    def send_message(self, data: bytes) -> None:
        """Send as much of a message as the client's window allows. If `is_blocked` then, the
        rest follows when the window opens, and `StreamListener.on_drained` is called."""
        assert not self._rest, "one message at a time"
        if not self.try_send_message(data):
            self._rest = memoryview(_PREFIX.pack(0, len(data)) + data)
            self._is_begun = False
            self.push()

    def push(self) -> None:
        """Send as much of the waiting message as the window allows by now."""
        connection, window = self._connection, self._window
        h2 = connection.h2
        while self._rest and not connection.is_clogged:
            rest = self._rest
            allowed = min(window.outbound_flow_control_window, h2.outbound_flow_control_window)
            size = min(allowed, len(rest), h2.max_outbound_frame_size)
            if size <= 0 or (size < len(rest) <= WHOLE_BYTES_MAX and not self._is_begun):
                break
            window.outbound_flow_control_window -= size
            h2.outbound_flow_control_window -= size
            connection.output.append(_DATA.pack(size << 8, 0, self.id) + rest[:size])
            self._rest, self._is_begun = rest[size:], True
        if self._rest:
            connection.blocked[self.id] = self
        else:
            connection.blocked.pop(self.id, None)

    def drop_message(self) -> bool:
        """Forget the waiting message and return True; if part of it was sent, only return False."""
        if self._rest and self._is_begun:
            return False
        self._rest = b""
        self._connection.blocked.pop(self.id, None)
        return True

    def reset(self, code: ErrorCodes) -> None:
        """End the stream without a status, unless it is over."""
        if not self.is_over:
            self.cut()
            self._connection.h2.reset_stream(self.id, code)
            self._connection.collect()
            self._connection.forget(self)

    def cut(self) -> None:
        """Mark the stream as over, and forget the waiting message."""
        self.is_over = True
        self._rest = b""


class Http2Connection:
    """The connection of one client.

    ``on_stream`` is called for each new stream and returns its listener. ``output``, ``blocked``
    and ``h2`` are for `Stream`. The owner sets ``is_clogged`` while the transport accepts nothing:
    messages then wait as they do for a window, until `unclog`. ``is_ending``: client or server has
    announced that no more streams will be opened.
    """

    def __init__(self, on_stream: Callable[[Stream], StreamListener], limits: Limits) -> None:
        self._on_stream = on_stream
        self._streams_max = limits.streams_per_connection
        self.h2 = ServerH2(limits)
        self.output: list[bytes] = []
        self.blocked: dict[int, Stream] = {}  # streams with a message that waits for a window
        self.is_clogged = False
        self.is_ending = False
        self._streams: dict[int, Stream] = {}
        self._are_windows_open = False  # more may be sent on any stream than before
        self.collect()

    @property
    def num_streams(self) -> int:
        """Number of streams that are not over."""
        return len(self._streams)

    def receive(self, data: bytes) -> None:
        """Take bytes from the client and call the listeners.

        Raises:
            ProtocolError: the bytes break the protocol. The output then ends with a frame that
                says why, and the connection cannot be used any more.
        """
        try:
            events = self.h2.receive_data(data)
            self.collect()  # the acknowledgement of settings goes before what the settings allow
            for event in events:
                self._take(event)
            if self._are_windows_open:  # once for all events, as it visits every blocked stream
                self._are_windows_open = False
                self._push_all()
        finally:
            self.collect()

    def _take(self, event: Any) -> None:
        kind = event.__class__
        if kind is WindowUpdated:
            self._open_window(event.stream_id)
        elif kind is RemoteSettingsChanged:
            self._are_windows_open = True  # the initial size may have grown
        elif kind is RequestReceived:
            self._begin(event.stream_id, event.headers)
        elif kind is ConnectionTerminated:
            self.is_ending = True  # streams that run go on
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
        if not self.h2.is_open(stream_id):
            return  # a reset came with the request
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
        """Send what waited while the transport was clogged."""
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
        """Remove a stream that is over."""
        self._streams.pop(stream.id, None)
        self.blocked.pop(stream.id, None)
        self.h2.drop(stream.id)

    def ping(self) -> None:
        """Send a ping, which the client must answer."""
        self.h2.ping(_PING)
        self.collect()

    def end_gracefully(self) -> None:
        """Ask the client to open no more streams; those that run go on."""
        self.is_ending = True
        self.output.append(self.h2.goaway())

    def cut(self) -> None:
        """End every stream, as the connection is lost."""
        for stream in list(self._streams.values()):
            stream.cut()
            self.forget(stream)

    def collect(self) -> None:
        """Append the frames that h2 has made to the output."""
        if data := self.h2.data_to_send():
            self.output.append(data)

    def take_output(self) -> bytes:
        """Remove and return the output; the caller sends it."""
        if not self.output:
            return b""
        data = self.output[0] if len(self.output) == 1 else b"".join(self.output)
        self.output.clear()
        return data
