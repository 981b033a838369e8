"""One HTTP/2 connection of a gRPC server without its socket: bytes in, streams and bytes out.

h2 implements the protocol: states, settings, header compression, windows, errors. Messages bypass
h2 (`grpc_service.rpc.streams`). So do frames that change a window or nothing at all, which are most
frames of a client that only reads, and of a hostile client. The windows that such frames change are
h2's own (`h2_overrides.Window`).

Rule 1: nothing here waits, and nothing knows Trio. Rule 2: whatever is sent goes to the output in
the order of the calls; the owner of the connection sends it (`Output.take`).
Source: RFC 9113; gRPC over HTTP2 (PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError

from grpc_service.rpc import accounts, frames
from grpc_service.rpc.frame_filter import DRAIN_PING, FrameFilter
from grpc_service.rpc.frames import FrameSplitter
from grpc_service.rpc.h2_overrides import ServerH2
from grpc_service.rpc.headers import fault_of, fault_of_trailers, length_of, size_of
from grpc_service.rpc.streams import NOBODY, Output, Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpc_service.rpc.accounts import Account
    from grpc_service.rpc.headers import Headers
    from grpc_service.rpc.limits import Limits
    from grpc_service.rpc.streams import StreamListener

log = logging.getLogger(__name__)

__all__ = ["ErrorCodes", "Http2Connection", "ProtocolError", "TooCostlyError"]

# No shorter message is split. grpc's clients allow windows of 1 KiB, four times this, and more.
WHOLE_BYTES_MAX = 256
# A message of a quarter of the client's windows has room at some time: clients open a window again
# when three quarters of it are used, or earlier. Guess: no client does so later than those
# measured.
_WHOLE_SHARE = 4
_PING = b"trio-rpc"  # any eight bytes except `frame_filter.DRAIN_PING`
_WINDOW = 65_535  # window of a new connection. Source: RFC 9113, section 6.9.2.
_STREAM_MAX = 2**31 - 1
# Frames whose meaning depends on the states of streams or of the connection.
_FOR_H2 = {
    *(frames.UNCUT, frames.HEADERS, frames.SETTINGS, frames.PUSH_PROMISE, frames.GOAWAY),
}
# Other frames whose meaning depends on the frames before them. RST_STREAM is not among them: h2
# takes it together with its stream's headers, and the call then is not begun at all.
_IN_ORDER = {
    *(frames.DATA, frames.PRIORITY, frames.PING, frames.WINDOW_UPDATE, frames.CONTINUATION),
}


class TooCostlyError(ProtocolError):
    """The client's account is empty."""


class Http2Connection:
    """The connection of one client.

    ``on_stream`` is called for each new stream and returns its listener. ``account`` counts the
    client's work. ``output``, ``blocked_by_stream`` and ``blocked_by_connection`` (streams that
    wait for a window), ``marks`` and ``h2`` are for `Stream` and `FrameFilter`. ``streams`` are
    those that are not over. ``splitter`` counts complete frames, and knows whether one is
    incomplete. The owner sends the ``output``, and sets ``is_clogged`` while the transport accepts
    nothing: messages then wait as they do for a window, until `unclog`. ``is_ending``: client or
    server has announced that no more streams will be opened. ``is_reserved``: it serves only health
    checks and the like (`Limits.lasting_methods`); its owner sets it.
    """

    def __init__(
        self, on_stream: Callable[[Stream], StreamListener], limits: Limits, account: Account
    ) -> None:
        self._on_stream = on_stream
        self._limits = limits
        self.account = account
        self.h2 = ServerH2(limits)
        self.output = Output()
        self.blocked_by_stream: dict[int, Stream] = {}  # streams waiting for their own window
        self.blocked_by_connection: dict[int, Stream] = {}  # waiting for the connection's window
        self.is_clogged = False
        self.is_ending = False
        self._has_named_last = False
        self.is_reserved = False
        self.streams: dict[int, Stream] = {}
        self.marks: dict[bytes, Callable[[], None]] = {}  # callbacks by the bodies of pings
        self._num_marks = 0
        self._has_settings = False  # the client's SETTINGS frame has come
        self._is_window_open = False  # more may be sent on the connection than before
        self._are_all_open = False  # more may be sent on every stream
        self.splitter = FrameSplitter(self.h2.max_inbound_frame_size)
        self._filter = FrameFilter(self)
        self.collect()

    @property
    def has_too_large_block(self) -> bool:
        """Whether an incomplete block of headers is larger than every list that is served."""
        return self.splitter.num_block_bytes > 2 * self._limits.header_list_bytes

    def receive(self, data: bytes) -> None:
        """Take bytes from the client and call the listeners.

        Raises:
            ProtocolError: the bytes break the protocol, or the client's account is empty. The
                output then ends with a frame that says why, and the connection cannot be used any
                more.
        """
        run: list[bytes] = []  # frames for one call of h2
        try:
            for frame in self.splitter.split(data):
                if frame.kind in _FOR_H2:
                    self._filter.charge(frame)
                    if frame.kind == frames.HEADERS and self._filter.is_over(frame.stream_id):
                        self.account.charge(accounts.RESET_CALL)  # h2 answers with a reset
                    run.append(frame.data)
                    continue
                if run and frame.kind in _IN_ORDER:
                    self._pass(run)
                if not self._filter.take(frame):
                    run.append(frame.data)
            if run:
                self._pass(run)
            # Once for all frames, because the following calls visit many streams.
            if self._are_all_open:
                self._are_all_open = False
                self._push_each(self.blocked_by_stream)
            if self._is_window_open:
                self._is_window_open = False
                self._push_each(self.blocked_by_connection)
            self._pay()
        finally:
            self.collect()

    def _pass(self, run: list[bytes]) -> None:
        """Let h2 take frames, and act on what they mean."""
        events = self.h2.receive_data(b"".join(run))
        run.clear()
        self.collect()  # the acknowledgement of settings goes before what the settings allow
        for event in events:
            self._take(event)

    def _pay(self) -> None:
        """End the connection if its account is empty."""
        # A client answers what it is sent with window updates and pings.
        self.account.earn(accounts.SENT_DATA * self.output.num_data)
        self.output.num_data = 0
        if self.account.is_empty():
            self.h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            raise TooCostlyError("the client sends too much that brings no work")

    # ---- h2's events

    def _take(self, event: Any) -> None:
        kind = event.__class__
        if kind is RemoteSettingsChanged:
            if self._has_settings:  # a client's first settings belong to the connection's opening
                self.account.charge(accounts.SETTINGS_FRAME)
            self._has_settings = True
            self.account.charge(accounts.SETTINGS_STREAM * len(self.streams))
            self._are_all_open = self._is_window_open = True  # the initial size may have grown
        elif kind is RequestReceived:
            self._begin(event.stream_id, event.headers)
        elif kind is ConnectionTerminated:
            self.is_ending = True  # streams that run go on
        elif kind is DataReceived:
            self.h2.release_connection(event.flow_controlled_length)
            if (stream := self.streams.get(event.stream_id)) is not None:
                stream.take_data(event.data, event.flow_controlled_length)
        elif kind is TrailersReceived:
            stream = self.streams.get(event.stream_id)
            if stream is not None and (fault := fault_of_trailers(event.headers)):
                stream.reset_malformed(fault)
        elif kind is StreamEnded:
            if (stream := self.streams.get(event.stream_id)) is not None:
                stream.take_end()
        elif kind is StreamReset:
            self.account.charge(accounts.RESET_CALL)
            if (stream := self.streams.get(event.stream_id)) is not None:
                listener = stream.listener
                stream.cut()
                self.forget(stream)
                listener.on_reset()
            else:
                self._filter.leave(event.stream_id)

    def _begin(self, stream_id: int, headers: Headers) -> None:
        excess = size_of(headers) - accounts.HEADER_BYTES_FREE
        if excess > 0:
            self.account.charge(accounts.HEADER_BYTE * excess)
        if not self.h2.is_open(stream_id):
            return  # a reset came with the request
        is_full = len(self.streams) >= self._limits.streams_per_connection
        lasts_only = self.is_ending or self.is_reserved
        if is_full or (lasts_only and not self._is_lasting(headers)):
            self._refuse(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        if fault := fault_of(headers):
            log.debug("a stream is reset: %s", fault)
            self._refuse(stream_id, ErrorCodes.PROTOCOL_ERROR)
            return
        window = self.h2.window_of(stream_id)
        stream = Stream(self, stream_id, window, headers, length_of(headers))
        self.streams[stream_id] = stream
        stream.listener = self._on_stream(stream)

    def _is_lasting(self, headers: Headers) -> bool:
        return dict(headers).get(b":path", b"").startswith(self._limits.lasting_methods)

    def _refuse(self, stream_id: int, code: ErrorCodes) -> None:
        """Reset a stream that was never served."""
        self.account.charge(accounts.FAILED_CALL)
        self.h2.reset_stream(stream_id, code)
        self._filter.leave(stream_id)

    @property
    def whole_bytes(self) -> int:
        """The size up to which a message is sent whole or not at all (`Stream`)."""
        window = min(_WINDOW, self.h2.remote_settings.initial_window_size)
        return min(WHOLE_BYTES_MAX, window // _WHOLE_SHARE)

    def open_window(self, stream_id: int) -> None:
        """Send messages that wait for a window which is open now: at once or after `receive`."""
        if not stream_id:
            self._is_window_open = True
        elif (stream := self.blocked_by_stream.get(stream_id)) is not None:
            self._push(stream)

    def unclog(self) -> None:
        """Send the messages that waited while the transport was clogged."""
        self.is_clogged = False
        self._push_each(self.blocked_by_connection)

    def _push_each(self, streams: dict[int, Stream]) -> None:
        for stream in list(streams.values()):
            if streams is self.blocked_by_connection and self.h2.outbound_flow_control_window <= 0:
                break
            self._push(stream)
            self.account.owe(accounts.VISIT)

    def _push(self, stream: Stream) -> None:
        if num_before := stream.num_waiting:
            stream.push()
            if stream.num_waiting < num_before:
                stream.listener.on_sent()
        elif stream.has_window:
            del self.blocked_by_stream[stream.id]
            stream.listener.on_sent()

    def forget(self, stream: Stream) -> None:
        """Remove a stream that is over."""
        self.streams.pop(stream.id, None)
        stream.listener = NOBODY
        self.blocked_by_connection.pop(stream.id, None)
        self.blocked_by_stream.pop(stream.id, None)
        if stream.has_ended:
            self.h2.drop(stream.id)
        else:
            self._filter.leave(stream.id)

    def ping(self) -> None:
        """Send a ping, which the client must answer."""
        self.h2.ping(_PING)
        self.collect()

    def mark(self, on_received: Callable[[], None]) -> bytes:
        """Call ``on_received`` once the client's machine has all the output so far. Return its key
        in ``marks``, from which the caller must remove it."""
        self._num_marks += 1
        key = self._num_marks.to_bytes(8, "big")  # the body of no other ping
        self.marks[key] = on_received
        self.h2.ping(key)
        self.collect()
        return key

    def drain(self) -> None:
        """Announce that the connection will take no more streams. New streams are still served
        until the client has answered the ping that follows. Source: RFC 9113, 6.8."""
        self.output.append(self.h2.goaway(_STREAM_MAX))
        self.h2.ping(DRAIN_PING)
        self.collect()

    def send_goaway(self, *, knows: bool = True) -> None:
        """Take no more streams; those that run go on. Idempotent.

        The frame names the last stream only to a client that ``knows`` of the end, because it has
        answered the ping of `drain`, or that is served nothing more. Any other client may have sent
        calls meanwhile, and would repeat elsewhere the calls behind that stream. Each of these is
        served, if its method is of `Limits.lasting_methods`, or refused by itself."""
        self.is_ending = True
        if knows and not self._has_named_last:
            self._has_named_last = True
            self.output.append(self.h2.goaway(self.h2.highest_inbound_stream_id))

    def cut(self) -> list[StreamListener]:
        """End every stream, as the connection is lost. Return the listeners that still wait for
        their request; the others have been called."""
        left = []
        for stream in list(self.streams.values()):
            listener = stream.listener
            stream.cut()
            self.forget(stream)
            if listener.has_request:
                listener.on_reset(is_lost=True)
            else:
                left.append(listener)
        return left

    def close(self) -> None:
        """End every stream, and take nothing more. References to this object are dropped, so that
        it is freed without Python's garbage collector."""
        self.cut()
        self.h2.close()
        self.marks.clear()
        del self._filter, self._on_stream

    def collect(self) -> None:
        """Append the frames that h2 has made to the output."""
        if data := self.h2.data_to_send():
            self.output.append(data)
