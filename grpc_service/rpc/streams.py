"""The streams of an HTTP/2 connection: what is sent and received in one call.

Messages bypass h2: making a DATA frame takes h2 eight times as long or more, which is much of what
a token costs from end to end (D1). h2's count of the windows stays right, as `Stream` subtracts
what it sends from h2's own numbers (`h2_overrides.Window`).

Rule: a message that fits into one frame of `Http2Connection.whole_bytes` is sent whole or not at
all, so that a status can still follow when the client's window has no room for the message.
Source: RFC 9113; gRPC over HTTP2 (PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import logging
from struct import Struct
from typing import TYPE_CHECKING

from h2.errors import ErrorCodes

from grpc_service.rpc import accounts
from grpc_service.rpc.framing import PREFIX_BYTES

if TYPE_CHECKING:
    from grpc_service.rpc.h2_overrides import Window
    from grpc_service.rpc.headers import Headers
    from grpc_service.rpc.http2 import Http2Connection

log = logging.getLogger(__name__)

__all__ = ["ErrorCodes", "Output", "Stream", "StreamListener"]

# A frame's header is length and type, flags, stream; a message's prefix is a flag for compression
# and the length. Source: RFC 9113, section 4.1; PROTOCOL-HTTP2.md, Length-Prefixed-Message.
_DATA_AND_PREFIX = Struct(">IBIBI")
_DATA = Struct(">IBI")
_PREFIX = Struct(">BI")


class StreamListener:
    """The listener to the events of one stream. This class ignores the events, as the listener of
    streams that are over (`NOBODY`)."""

    @property
    def has_request(self) -> bool:
        """Whether a message of the request has come, or its end."""
        return True

    def on_data(self, data: bytes) -> None:
        """Take the next bytes of the request's body."""

    def on_end(self) -> None:
        """Act on the end of the request's body."""

    def on_reset(self, *, is_lost: bool = False) -> None:
        """Act on the client's reset of the stream or, with ``is_lost``, on the end of its
        connection; nothing can be sent any more."""

    def on_sent(self) -> None:
        """Take note that a part of the message that waits for the client's window, or its last
        part, was sent, or that a watched window has opened."""


NOBODY = StreamListener()


class Output(list[bytes]):
    """The frames of a connection that are to be sent, in their order. ``num_data`` counts the DATA
    frames among them; its reader resets it."""

    __slots__ = ("num_data",)

    def __init__(self) -> None:
        super().__init__()
        self.num_data = 0

    def take(self) -> bytes:
        """Remove and return the frames; the caller sends them."""
        if not self:
            return b""
        data = self[0] if len(self) == 1 else b"".join(self)
        self.clear()
        return data


class Stream:
    """One stream of a connection. Its owner sets ``listener``, which is `NOBODY` once it is over.

    ``has_ended``: the client has sent the whole request. ``is_over``: nothing more can be sent, as
    the stream was ended or reset, or the connection is lost. ``window`` is the client's.
    """

    __slots__ = (
        *("_connection", "_is_begun", "_missing", "_rest", "_taken_bytes"),
        *("has_ended", "headers", "id", "is_over", "listener", "window"),
    )

    def __init__(
        self,
        connection: Http2Connection,
        stream_id: int,
        window: Window,
        headers: Headers,
        length: int | None,
    ) -> None:
        self._connection = connection
        self._missing = length  # bytes of the request's body to come, if their number is known
        self._rest: bytes | memoryview = b""  # unsent bytes of the message that waits for a window
        self._is_begun = False  # whether part of the waiting message has been sent
        self._taken_bytes = 0  # bytes of the stream's window that are used and not given back yet
        self.id = stream_id
        self.window = window
        self.headers = headers
        self.has_ended = False
        self.is_over = False
        self.listener: StreamListener

    @property
    def is_blocked(self) -> bool:
        """Whether a message, or part of one, waits for the client's window."""
        return bool(self._rest)

    @property
    def has_window(self) -> bool:
        """Whether the client's window has room for a byte, as far as this stream is concerned."""
        return self.window.outbound_flow_control_window > 0

    def watch_window(self) -> None:
        """Have `StreamListener.on_sent` called when the client opens the window."""
        self._connection.blocked_by_stream[self.id] = self

    @property
    def num_waiting(self) -> int:
        """Bytes that wait for the client's window."""
        return len(self._rest)

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

    # ---- in

    def take_data(self, data: bytes, num_bytes: int) -> None:
        """Take bytes of the request's body; reset the stream if they are more than announced.
        ``num_bytes`` is their part of the stream's window, which `release` gives back."""
        self._taken_bytes += num_bytes
        if self._missing is not None:
            self._missing -= len(data)
            if self._missing < 0:
                self.reset_malformed("the body is longer than its content-length")
                return
        self.listener.on_data(data)

    def release(self) -> None:
        """Let the client send as many bytes as have come since the last call."""
        if not (self.is_over or self.has_ended):
            self._connection.h2.release_stream(self.id, self._taken_bytes)
            self._connection.collect()
        self._taken_bytes = 0

    def take_end(self) -> None:
        """Take the end of the request; reset the stream if its body is shorter than announced."""
        self.has_ended = True
        if self._missing:
            self.reset_malformed("the body is shorter than its content-length")
        else:
            self.listener.on_end()

    def reset_malformed(self, why: str, code: ErrorCodes = ErrorCodes.PROTOCOL_ERROR) -> None:
        """Reset the stream, because its client has broken the protocol."""
        log.debug("a stream is reset: %s", why)
        self._connection.account.charge(accounts.FAILED_CALL)
        listener = self.listener
        self.reset(code)
        listener.on_reset()

    # ---- out

    def try_send_message(self, data: bytes, *, is_compressed: bool = False) -> bool:
        """Send a message if all of it can be sent now and in one frame; return whether it was."""
        connection, window = self._connection, self.window
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
        head = _DATA_AND_PREFIX.pack(size << 8, 0, self.id, is_compressed, len(data))
        output = connection.output
        output.append(head + data)
        output.num_data += 1
        return True

    def send_message(self, data: bytes, *, is_compressed: bool = False) -> None:
        """Send as much of a message as the client's window allows. If `is_blocked` then, the
        rest follows when the window opens, and `StreamListener.on_sent` is called."""
        assert not self._rest, "one message at a time"
        if not self.try_send_message(data, is_compressed=is_compressed):
            self._rest = memoryview(_PREFIX.pack(is_compressed, len(data)) + data)
            self._is_begun = False
            self.push()

    def push(self) -> None:
        """Send as much of the waiting message as the window allows by now."""
        connection, window = self._connection, self.window
        h2 = connection.h2
        while self._rest and not connection.is_clogged:
            rest = self._rest
            allowed = min(window.outbound_flow_control_window, h2.outbound_flow_control_window)
            size = min(allowed, len(rest), h2.max_outbound_frame_size)
            if size <= 0 or (size < len(rest) <= connection.whole_bytes and not self._is_begun):
                break
            window.outbound_flow_control_window -= size
            h2.outbound_flow_control_window -= size
            connection.output.append(_DATA.pack(size << 8, 0, self.id) + rest[:size])
            self._rest, self._is_begun = rest[size:], True
            # A client may open its window by one byte at a time.
            connection.output.num_data += not self._rest or size >= accounts.USEFUL_DATA_BYTES
        self._wait()

    def _wait(self) -> None:
        """Enter the stream among those that wait for a window: its own or the connection's."""
        connection, num_missing = self._connection, len(self._rest)
        own = self.window.outbound_flow_control_window
        is_too_small = not self._is_begun and own < num_missing <= connection.whole_bytes
        lacks_own = own <= 0 or is_too_small
        if num_missing and lacks_own:
            connection.blocked_by_stream[self.id] = self
        else:
            connection.blocked_by_stream.pop(self.id, None)
        if num_missing and not lacks_own:
            connection.blocked_by_connection[self.id] = self
        else:
            connection.blocked_by_connection.pop(self.id, None)

    def drop_message(self) -> bool:
        """Forget the waiting message and return True; if part of it was sent, only return False."""
        if self._rest and self._is_begun:
            return False
        self._rest = b""
        self._connection.blocked_by_connection.pop(self.id, None)
        self._connection.blocked_by_stream.pop(self.id, None)
        return True

    def reset(self, code: ErrorCodes) -> None:
        """End the stream without a status, unless it is over."""
        if not self.is_over:
            self.cut()
            if self._connection.h2.is_open(self.id):  # false if a reset came with the fault
                self._connection.h2.reset_stream(self.id, code)
                self._connection.collect()
            self._connection.forget(self)

    def cut(self) -> None:
        """Mark the stream as over, and forget the waiting message."""
        self.is_over = True
        self._rest = b""
