"""Acts on the frames of a client that h2 need not see.

h2 makes objects of every frame, some 30 µs of work. Here a frame costs a tenth of that or less, if
it changes nothing but a window, or nothing at all. Such are most frames of a client that reads, and
nearly all of a hostile one. The client's account is charged for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError

from grpc_service.rpc import accounts, frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpc_service.rpc.frames import Frame
    from grpc_service.rpc.h2_overrides import Window
    from grpc_service.rpc.http2 import Http2Connection

DRAIN_PING = b"trio-end"  # body of the ping whose answer shows that the client got the GOAWAY
_PING_HEAD = bytes([0, 0, 8, frames.PING, frames.ACK, 0, 0, 0, 0])
_SETTING_BYTES = 6
_PING_BYTES, _PRIORITY_BYTES, _NUMBER_BYTES = 8, 5, 4
_WINDOW_MAX = 2**31 - 1  # Source: RFC 9113, section 6.9.1.
_GIVE_BACK_BYTES = 2**15  # skipped before the window reopens. Guess: half of the smallest window


def _window_update(size: int) -> bytes:
    """Return the frame that opens the connection's window by ``size`` bytes."""
    return bytes([0, 0, 4, frames.WINDOW_UPDATE, 0, 0, 0, 0, 0]) + size.to_bytes(4, "big")


class FrameFilter:
    """The filter of one connection."""

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self._account = connection.account
        self._left: dict[int, None] = {}  # streams that ended while their clients were sending
        self._dropped_bytes = 0  # skipped DATA, not yet given back to the connection's window

    def take(self, frame: Frame) -> bool:
        """Act on a frame, and return True; return False for a frame that h2 has to see.

        Raises:
            ProtocolError: the frame breaks the protocol.
        """
        return _ACTS.get(frame.kind, FrameFilter._skip_unknown)(self, frame)

    def charge(self, frame: Frame) -> None:
        """Charge a frame that only h2 can handle.

        Raises:
            ProtocolError: the frame is so large that h2 would take too long.
        """
        if frame.kind == frames.SETTINGS:
            num_settings = frame.size // _SETTING_BYTES
            self._account.charge(accounts.SETTING * num_settings)
            if not num_settings:
                self._account.charge(accounts.H2_FRAME)
            elif num_settings > accounts.SETTINGS_MAX:
                self._end("too many settings at once")
        elif frame.kind == frames.UNCUT:
            self._account.charge(accounts.H2_FRAME)
            if self._connection.has_too_large_block:
                self._end("a block of headers is too large")
        elif frame.kind != frames.HEADERS:
            self._account.charge(accounts.H2_FRAME)

    def _end(self, why: str) -> None:
        self._connection.h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
        raise ProtocolError(why)

    def is_over(self, stream_id: int) -> bool:
        """Return whether the client has opened this stream, and it is over."""
        connection = self._connection
        is_opened = stream_id % 2 == 1 and stream_id <= connection.h2.highest_inbound_stream_id
        return is_opened and stream_id not in connection.streams

    def leave(self, stream_id: int) -> None:
        """Forget a stream in h2's table. What its client still sends on it is skipped."""
        h2 = self._connection.h2
        h2.drop(stream_id)
        self._left[stream_id] = None
        if len(self._left) > h2.MAX_CLOSED_STREAMS:
            del self._left[next(iter(self._left))]

    def _skip_data(self, frame: Frame) -> bool:
        """Skip DATA for a stream that we have ended, and DATA without bytes."""
        stream = self._connection.streams.get(frame.stream_id)
        if stream is None:
            if frame.stream_id not in self._left:
                self._account.charge(accounts.RESET_CALL)  # h2 answers with a reset
                return False
            if frame.flags & frames.END_STREAM:
                del self._left[frame.stream_id]
            self._dropped_bytes += frame.size
            if self._dropped_bytes >= _GIVE_BACK_BYTES:
                self._connection.output.append(_window_update(self._dropped_bytes))
                self._dropped_bytes = 0
        elif frame.size or stream.has_ended or frame.flags & (frames.END_STREAM | frames.PADDED):
            if frame.size < accounts.SMALL_DATA_BYTES and not frame.flags & frames.END_STREAM:
                self._account.charge(accounts.SMALL_DATA)
            return False
        self._account.charge(accounts.NO_OP_FRAME)
        return True

    def _skip_priority(self, frame: Frame) -> bool:
        """Skip PRIORITY, which has no meaning any more. Source: RFC 9113, section 5.3.2."""
        stream = self._connection.streams.get(frame.stream_id)
        if frame.size != _PRIORITY_BYTES and stream is not None:
            stream.reset_malformed("PRIORITY has another size", ErrorCodes.FRAME_SIZE_ERROR)
        elif frame.size != _PRIORITY_BYTES or not frame.stream_id:
            return False
        self._account.charge(accounts.NO_OP_FRAME)
        return True

    def _skip_reset(self, frame: Frame) -> bool:
        """Skip the reset of a stream that is over."""
        if frame.size != _NUMBER_BYTES or not self.is_over(frame.stream_id):
            return False
        self._left.pop(frame.stream_id, None)
        self._account.charge(accounts.NO_OP_FRAME)
        return True

    def _skip_unknown(self, frame: Frame) -> bool:
        """Skip a frame of an unknown kind. Source: RFC 9113, section 4.1."""
        self._account.charge(accounts.NO_OP_FRAME)
        return True

    def _answer_ping(self, frame: Frame) -> bool:
        """Answer a ping; take note of the client's answer to ours."""
        if frame.size != _PING_BYTES or frame.stream_id:
            return False
        self._account.charge(accounts.PING)
        body = frame.data[frames.HEAD_BYTES :]
        if not frame.flags & frames.ACK:
            self._connection.output.append(_PING_HEAD + body)
        elif body == DRAIN_PING:
            self._connection.send_goaway()
        elif (on_received := self._connection.marks.pop(body, None)) is not None:
            on_received()
        return True

    def _take_window_update(self, frame: Frame) -> bool:
        """Open a window, and send what waits for it; let h2 refuse a wrong increment."""
        stream_id, increment = frame.stream_id, frame.number
        stream = self._connection.streams.get(stream_id)
        if frame.size != _NUMBER_BYTES or not (increment or stream):
            return False
        self._account.charge(accounts.WINDOW_UPDATE)
        if not stream_id:
            window: Window = self._connection.h2
        elif stream is not None:
            if not increment:
                stream.reset_malformed("a window is opened by nothing")
                return True
            window = stream.window
        else:
            return self.is_over(stream_id)
        if window.outbound_flow_control_window > _WINDOW_MAX - increment:
            return False
        window.outbound_flow_control_window += increment
        self._connection.open_window(stream_id)
        return True

    def _refuse_continuation(self, frame: Frame) -> bool:
        """End the connection, because this frame continues nothing. Source: RFC 9113, 6.10."""
        self._connection.h2.close_connection(ErrorCodes.PROTOCOL_ERROR)
        raise ProtocolError("CONTINUATION without HEADERS before it")


_ACTS: dict[int, Callable[[FrameFilter, Frame], bool]] = {
    frames.DATA: FrameFilter._skip_data,
    frames.PRIORITY: FrameFilter._skip_priority,
    frames.RST_STREAM: FrameFilter._skip_reset,
    frames.PING: FrameFilter._answer_ping,
    frames.WINDOW_UPDATE: FrameFilter._take_window_update,
    frames.CONTINUATION: FrameFilter._refuse_continuation,
}
