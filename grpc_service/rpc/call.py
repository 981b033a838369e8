"""One gRPC call, as its handler sees it.

Rule: a call ends once: by `Call.end`, or by its client.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from grpc_service.rpc import accounts
from grpc_service.rpc.errors import (
    Disconnected,
    HeadersTooLarge,
    InvalidMessage,
    RpcError,
    TooManyHeld,
)
from grpc_service.rpc.framing import COMPRESSIONS, compressor
from grpc_service.rpc.headers import (
    RESPONSE_HEADERS,
    encode_metadata,
    metadata_of,
    refusal_of,
    size_of,
    timeout_of,
    trailers_of,
)
from grpc_service.rpc.held_bytes import CALL_BYTES, Holding
from grpc_service.rpc.request_body import RequestBody
from grpc_service.rpc.status import StatusCode
from grpc_service.rpc.streams import ErrorCodes, StreamListener

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from google.protobuf.message import Message

    from grpc_service.rpc.connection import Connection
    from grpc_service.rpc.headers import Headers
    from grpc_service.rpc.status import Metadata
    from grpc_service.rpc.streams import Stream


COMPRESSED_PART_BYTES = 2**16  # takes about a millisecond


def _nothing() -> None:
    """Do nothing."""


async def compressed(data: bytes, encoding: str) -> bytes:
    """Return ``data`` compressed, in parts between which other tasks run.

    Cancellation: safe.
    """
    packer, parts = compressor(encoding), []
    for begin in range(0, len(data), COMPRESSED_PART_BYTES):
        parts.append(packer.compress(data[begin : begin + COMPRESSED_PART_BYTES]))
        await trio.lowlevel.checkpoint()
    return b"".join([*parts, packer.flush()])


class Call(StreamListener):
    """One call. Only the task that serves it may use it, except for `try_write` and `evict`, and
    for `read`, which another task may call meanwhile.

    ``method`` is the full name, such as ``helloworld.Greeter/SayHello``. ``peer`` is the client's
    address as grpc writes it, and ``connection`` carries the call. ``deadline`` is the client's, on
    Trio's clock; infinite without one. ``code`` is the status that the call was ended with; None
    while it runs, and for ever if its client has ended it. ``refusal`` is the HTTP answer to a
    request that is no gRPC call, and empty for a gRPC call. ``fault`` is the error that ends it
    unserved, such as malformed headers, or None. ``request`` is the request's body, which is closed
    once no more of it is needed. ``scope`` is cancelled when the client ends the call.

    A handler may set two things before its first `write`: ``initial_metadata``, which is sent with
    it (and not at all if `wait_for_window` has sent the headers already), and ``encoding``, gzip or
    deflate, by which messages of `Limits.compressed_bytes_min` and more are compressed; at first it
    is the request's, "" for none. An encoding that the client has not announced is not used.
    ``on_answer`` is called when the first message is sent, and when the call has ended.
    ``trailing_metadata`` may be set until the call's end, and is sent with its status.
    ``is_compressed`` says whether the last message of `read` came compressed. ``record`` is for the
    code that serves the call, which may keep an object of its own there.
    """

    def __init__(self, stream: Stream, connection: Connection) -> None:
        headers = dict(stream.headers)
        self._stream = stream
        self._touch = partial(connection.flusher.touch, connection)
        self.limits = limits = connection.limits
        self._has_begun = False  # the response's headers were sent
        self.has_answered = False  # a message was sent, or waits for the client
        self.on_answer: Callable[[], None] = _nothing
        self.record: Any = None
        self._change: trio.Event | None = None  # wakes the tasks that wait for the client
        self._held = connection.held
        self._answer = Holding(connection.holder, self._evict_answer)
        self.connection = connection
        self.is_compressed = False
        self.is_lost = False  # the connection was lost while the call ran
        self.is_evicted = False  # the server has ended the call to save memory or time
        encoding = headers.get(b"grpc-encoding", b"identity")
        path = headers.get(b":path", b"").decode("latin-1")
        self.method = path[1:] if path[:1] == "/" else ""
        self.request = RequestBody(
            stream, connection, encoding, self._touch, self._wake, self.method
        )
        self.encoding = encoding.decode("latin-1") if encoding in COMPRESSIONS else ""
        self._accepted = {*headers.get(b"grpc-accept-encoding", b"").replace(b" ", b"").split(b",")}
        self._accepted.add(encoding)
        self._used_encoding = ""  # the answer's encoding, once its first message is made
        self.initial_metadata: Metadata = ()
        self.trailing_metadata: Metadata = ()
        self.deadline = math.inf
        self.metadata: Metadata = ()
        self.fault: RpcError | None = None
        try:
            if (size := size_of(stream.headers)) > limits.header_list_bytes:
                limit = limits.header_list_bytes
                raise HeadersTooLarge(f"the headers have {size} bytes, of at most {limit}")
            for name, value in stream.headers:
                if name == b"grpc-timeout":  # the last of several such headers counts
                    self.deadline = trio.current_time() + timeout_of(value)
            self.metadata = metadata_of(stream.headers)
        except RpcError as fault:
            self.fault = fault.with_traceback(None)  # the traceback refers to this object
        self.refusal = refusal_of(headers)
        self.peer = connection.peer
        self.code: StatusCode | None = None
        self.scope = trio.CancelScope()

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None without a deadline."""
        return None if self.deadline == math.inf else self.deadline - trio.current_time()

    @property
    def is_late(self) -> bool:
        """Whether the client's deadline has passed and the call has no status yet."""
        if self.deadline == math.inf or self.code is not None:
            return False
        return not self._stream.is_over and trio.current_time() >= self.deadline

    # ---- the request

    async def read(self, *, stays: bool = False) -> bytes | None:
        """Wait for the next message and return it; None after the last one. If it ``stays``, the
        next `read` returns it again.

        Raises:
            RpcError: the client sent bytes that are no message, or too large a message. No
                other message will come.
        Cancellation: safe; no message is lost.
        """
        reader = self.request.reader
        if self._has_begun:  # so that other tasks run between thousands of messages
            await trio.lowlevel.checkpoint()
        while not reader.messages:
            if reader.error is not None:
                raise reader.error
            if self._stream.has_ended and not reader.is_decompressing:
                if self._stream.is_over:  # a reset came together with the request's end
                    await trio.lowlevel.checkpoint_if_cancelled()
                if reader.is_amid_message:
                    raise InvalidMessage("the request's message breaks off")
                return None
            self.request.note_waiting()
            await self._wait_for_change()
        if stays:
            return reader.messages[0][0]
        message, self.is_compressed = self.request.take()
        return message

    # ---- the answer

    async def wait_for_window(self) -> None:
        """Wait until the client's window has room for a byte of an answer. If it has none now, the
        headers are sent first, as the client may wait for them.

        Raises:
            RpcError: the window stayed closed for `Limits.request_timeout_s`, or too many calls
                wait.
        Cancellation: safe.
        """
        stream = self._stream
        if stream.has_window or stream.is_over:
            return
        self.connection.account.owe(accounts.WINDOWLESS_CALL)
        self._begin()
        self._touch()
        self._held.set_bytes(self._answer, CALL_BYTES)
        with trio.move_on_after(self.limits.request_timeout_s):
            while not (stream.has_window or self.is_evicted):
                stream.watch_window()
                await self._wait_for_change()
        self._held.set_bytes(self._answer, 0)
        if self.is_evicted:
            raise TooManyHeld("the client opens no window, and too many calls wait")
        if not stream.has_window:
            raise RpcError(StatusCode.DEADLINE_EXCEEDED, "the client's window stayed closed")

    async def write(self, message: Message | bytes, *, compress: bool = True) -> None:
        """Send a message, and wait until the client's window had room for all of it. ``compress``
        allows the message to be compressed.

        Raises:
            Disconnected: the client has ended the call.
        Cancellation: part of the message may have been sent; then the call can only be reset.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._send(message, compress=compress)
        self._touch()
        await self._wait_sent()
        if self._stream.is_over:
            raise Disconnected

    def try_write(self, data: bytes) -> bool:
        """Send a message's bytes if that needs no waiting. Return whether they were sent.

        Any code may call this, while the call's own task does not write. Nothing is sent before the
        task's first `write`.
        """
        stream = self._stream
        if not self._has_begun or stream.is_over or not stream.try_send_message(data):
            return False
        self._touch()
        return True

    async def answer(self, message: Message | bytes | None = None) -> None:
        """Send the last message, if there is one, and end the call with OK.

        Raises:
            Disconnected: the client has ended the call.
        Cancellation: as in `write`, the message may be sent in part.
        """
        if message is not None:
            await self._send(message)
            if self._stream.is_blocked:
                self._touch()
            await self._wait_sent()
        await self.end(StatusCode.OK)

    async def end(
        self,
        code: StatusCode,
        message: str = "",
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        """End the call with a status, unless it has ended.

        A message that waits for the client's window is dropped if nothing of it was sent. The rest
        of one that was sent in part gets `Limits.end_patience_s`; then the call is reset, and the
        client gets no status.

        Cancellation: the call may not have ended; `end` can be called again.
        """
        stream = self._stream
        if stream.is_over:
            return
        self.code = code
        if not stream.drop_message():
            with trio.move_on_after(self.limits.end_patience_s):
                await self._wait_sent()
            if stream.is_blocked:
                stream.reset(ErrorCodes.CANCEL)
        if not stream.is_over:
            trailers = trailers_of(code, message, [*self.trailing_metadata, *metadata])
            first = [] if self._has_begun else self._first_headers()
            stream.send_headers([*first, *trailers], is_last=True)
        self._touch()

    def refuse(self) -> None:
        """Answer a request that is no gRPC call with ``refusal``, unless the client has gone."""
        if not self._stream.is_over:
            self._stream.send_headers(self.refusal, is_last=True)
            self._touch()

    async def _send(self, message: Message | bytes, *, compress: bool = True) -> None:
        """Send a message as far as the client's window allows.

        Raises:
            Disconnected: the client has ended the call.
        Cancellation: nothing of the message was sent.
        """
        data = message if isinstance(message, bytes) else message.SerializeToString()
        self._begin()
        is_large = len(data) >= self.limits.compressed_bytes_min
        is_compressed = compress and is_large and bool(self._used_encoding)
        if is_compressed:
            data = await compressed(data, self._used_encoding)
            if self._stream.is_over:
                raise Disconnected
        if not self.has_answered:
            self.has_answered = True
            self.on_answer()
        self._stream.send_message(data, is_compressed=is_compressed)
        if self._stream.is_blocked:
            self._held.set_bytes(self._answer, self._stream.num_waiting)

    def _begin(self) -> None:
        """Send the response's headers, unless they were sent.

        Raises:
            Disconnected: the client has ended the call.
        """
        if self._stream.is_over:
            raise Disconnected
        if not self._has_begun:
            self._has_begun = True
            if self.encoding.encode() in COMPRESSIONS & self._accepted:
                self._used_encoding = self.encoding
            self._stream.send_headers(self._first_headers())

    async def _wait_sent(self) -> None:
        """Wait until no part of a message waits for the client's window.

        Raises:
            TooManyHeld: the message was dropped.
        """
        while self._stream.is_blocked:
            await self._wait_for_change()
        if self.is_evicted and not self._stream.is_over:
            raise TooManyHeld("the client does not read, and the server keeps too many answers")

    def _first_headers(self) -> Headers:
        """Return the headers that come before the first message."""
        used = self._used_encoding.encode()
        encoding = [(b"grpc-encoding", used)] if used else []
        return [*RESPONSE_HEADERS, *encoding, *encode_metadata(self.initial_metadata)]

    async def wait_received(self) -> None:
        """Wait until the client's machine has all that was written, or for
        `Limits.keepalive_timeout_s`. What is written stands in the sockets' buffers for a while,
        and is lost with the connection; the answer to a ping says that everything before it has
        arrived.

        Cancellation: safe. A connection that is lost cancels the call.
        """
        http2, received = self.connection.http2, trio.Event()
        key = http2.mark(received.set)
        self._touch()
        try:
            with trio.move_on_after(self.limits.keepalive_timeout_s):
                await received.wait()
        finally:
            http2.marks.pop(key, None)

    # ---- what the server keeps (`grpc_service.rpc.held_bytes`)

    def evict(self) -> None:
        """Reset the call, because it costs the server too much. Any code may call this."""
        self.is_evicted = True
        self._stream.reset(ErrorCodes.ENHANCE_YOUR_CALM)
        self._touch()
        self.scope.cancel(reason="the server has given up the call")

    def _evict_answer(self) -> None:
        self.is_evicted = True
        self.connection.account.charge(accounts.EVICTED_CALL)
        if not self._stream.drop_message():
            self._stream.reset(ErrorCodes.ENHANCE_YOUR_CALM)
            self._touch()
        self._wake()

    def release(self) -> None:
        """Stop counting bytes for this call, and drop the references of its parts to it, so that it
        is freed without Python's garbage collector."""
        self.connection.note_taken(self)
        self.on_answer()
        self.request.close()
        self._held.close(self._answer)

    # ---- what the client does (`grpc_service.rpc.streams.StreamListener`)

    @property
    def has_request(self) -> bool:
        """Whether a message of the request has come, or its end."""
        return self.request.has_request

    def on_data(self, data: bytes) -> None:
        """Take the next bytes of the request; wake the task if they complete a message."""
        self.request.feed(data)

    def on_end(self) -> None:
        """Wake the task, because the request is complete."""
        self.request.note_request()
        self._wake()

    def on_reset(self, *, is_lost: bool = False) -> None:
        """Cancel the call, because its client has ended it, or its connection is lost."""
        self.is_lost = is_lost and not self.scope.cancel_called
        self.scope.cancel(reason="the client ended the call")

    def on_sent(self) -> None:
        """Count the answer's bytes that still wait, and wake the task if there are none."""
        self._held.set_bytes(self._answer, self._stream.num_waiting)
        if not self._stream.is_blocked:
            self._wake()

    def _wake(self) -> None:
        change, self._change = self._change, None
        if change is not None:
            change.set()

    async def _wait_for_change(self) -> None:
        if self._change is None:
            self._change = trio.Event()
        await self._change.wait()
