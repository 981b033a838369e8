"""One gRPC call, as its handler sees it.

Rule: a call ends once: by `Call.end`, or by its client.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from grpc_service.rpc.errors import Disconnected, InvalidMessage
from grpc_service.rpc.framing import (
    RESPONSE_HEADERS,
    MessageReader,
    metadata_of,
    refusal_of,
    timeout_of,
    trailers_of,
)
from grpc_service.rpc.http2 import ErrorCodes
from grpc_service.rpc.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from google.protobuf.message import Message

    from grpc_service.rpc.http2 import Stream
    from grpc_service.rpc.limits import Limits


class Call:
    """One call. Only the task that serves it may use it, except for `try_write`.

    ``method`` is the full name, such as ``helloworld.Greeter/SayHello``. ``peer`` is the client's
    address as grpc writes it. ``deadline`` is the client's, on Trio's clock; infinite without one.
    ``code`` is the status that the call was ended with; None while it runs, and for ever if its
    client has ended it. ``refusal`` is the HTTP answer to a request that is no gRPC call, and empty
    for a gRPC call. ``scope`` is cancelled when the client ends the call. ``touch`` is called after
    each write, because the connection then has output.
    """

    def __init__(
        self, stream: Stream, peer: str, touch: Callable[[], None], limits: Limits
    ) -> None:
        headers = dict(stream.headers)
        self._stream = stream
        self._touch = touch
        self._end_patience_s = limits.end_patience_s
        self._has_begun = False  # the response's headers were sent
        self._change: trio.Event | None = None  # the task waits for the client
        encoding = headers.get(b"grpc-encoding", b"identity")
        self._reader = MessageReader(limits.max_message_bytes, encoding)
        timeout_s = timeout_of(headers.get(b"grpc-timeout", b""))
        self.deadline = math.inf if timeout_s is None else trio.current_time() + timeout_s
        self.method = headers.get(b":path", b"").decode("latin-1").removeprefix("/")
        self.metadata = metadata_of(stream.headers)
        self.refusal = refusal_of(headers)
        self.peer = peer
        self.code: StatusCode | None = None
        self.scope = trio.CancelScope()

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None without a deadline."""
        return None if self.deadline == math.inf else self.deadline - trio.current_time()

    @property
    def is_late(self) -> bool:
        """Whether the client's deadline has passed and the call has no status yet."""
        return self.code is None and not self.is_over and trio.current_time() >= self.deadline

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._stream.is_over

    # ---- the request

    async def read(self) -> bytes | None:
        """Wait for the next message and return it; None after the last one.

        Raises:
            RpcError: the client sent something that is no message, or too large a message. No
                other message will come.
        Cancellation: safe; no message is lost.
        """
        reader = self._reader
        if self._has_begun:  # thousands of messages may be there, and no answer has to wait
            await trio.lowlevel.checkpoint()
        while not reader.messages:
            if reader.error is not None:
                raise reader.error
            if self._stream.has_ended:
                if reader.is_amid_message:
                    raise InvalidMessage("the request's message breaks off")
                return None
            await self._wait_for_change()
        return reader.take()

    # ---- the answer

    async def write(self, message: Message | bytes) -> None:
        """Send a message, and wait until the client's window had room for all of it.

        Raises:
            Disconnected: the client has ended the call.
        Cancellation: part of the message may have been sent, and then only a reset can follow.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._send(message)
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
        Cancellation: as `write`.
        """
        if message is not None:
            self._send(message)
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
            with trio.move_on_after(self._end_patience_s):
                await self._wait_sent()
            if stream.is_blocked:
                stream.reset(ErrorCodes.CANCEL)
        if not stream.is_over:
            trailers = trailers_of(code, message, metadata)
            stream.send_headers(
                trailers if self._has_begun else RESPONSE_HEADERS + trailers, is_last=True
            )
        self._touch()

    def refuse(self) -> None:
        """Answer a request that is no gRPC call with ``refusal``, unless the client has gone."""
        if not self._stream.is_over:
            self._stream.send_headers(self.refusal, is_last=True)
            self._touch()

    def _send(self, message: Message | bytes) -> None:
        if self._stream.is_over:
            raise Disconnected
        if not self._has_begun:
            self._has_begun = True
            self._stream.send_headers(RESPONSE_HEADERS)
        data = message if isinstance(message, bytes) else message.SerializeToString()
        self._stream.send_message(data)

    async def _wait_sent(self) -> None:
        """Wait until no part of a message waits for the client's window."""
        while self._stream.is_blocked:
            await self._wait_for_change()

    # ---- what the client does (`grpc_service.rpc.http2.StreamListener`)

    def on_data(self, data: bytes) -> None:
        """Take the next bytes of the request; wake the task if they complete a message."""
        reader = self._reader
        reader.feed(data)
        if reader.messages or reader.error is not None:
            self._wake()

    def on_end(self) -> None:
        """Wake the task, because the request is complete."""
        self._wake()

    def on_reset(self) -> None:
        """Cancel the call, because its client has ended it."""
        self.scope.cancel(reason="the client ended the call")

    def on_drained(self) -> None:
        """Wake the task, because its message was sent."""
        self._wake()

    def _wake(self) -> None:
        if self._change is not None:
            self._change.set()

    async def _wait_for_change(self) -> None:
        self._change = trio.Event()
        await self._change.wait()
        self._change = None
