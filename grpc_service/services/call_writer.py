"""Writes the events of one engine request to its call: one of gRPC, or a request over HTTP.

The engine pushes an event while it delivers a step. While the call's task waits for events, the
engine's delivery writes a short event, and the task sleeps on: waking it for each token would cost
20 µs. Everything else waits for the task. The bytes are sent when the delivery ends, by one system
call for each connection (`grpc_service.rpc`).

Rule 1: `CallWriter.push` waits for nothing and raises nothing. A bug in it ends its own call, and
neither the step loop nor another call.
Rule 2: an event that was written gives its credit (a message slot of its request) back at once. One
that cannot be written keeps it, and the core parks a request that has no credit left (D1).
Rule 3: once the request has failed, its client gets `FAILURE_PATIENCE_S` to take the events before
the failure. Then the events that it has not taken are dropped, and the status is sent.
`grpc_service.rpc.call.Call.end` describes the end of a message that was sent in part.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import trio
from google.protobuf.message import Message

from engine import logs
from engine.replica.threads import WorkerThreads
from engine.requests.bill import count
from engine.requests.readers import Leaving, taken
from grpc_service._generated.triolet.v1 import inference_pb2
from grpc_service.rpc.errors import Disconnected
from grpc_service.services.error_status import status_of
from grpc_service.services.operations_codec import encode_request_usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine.api.engine import Engine
    from engine.errors import TrioletError
    from engine.requests.kind import ClientRequest
    from engine.requests.quota import Origin
    from engine.requests.stream import RequestStream
    from grpc_service.access.unread_calls import UnreadCalls
    from grpc_service.rpc.status import Metadata

    Encode = Callable[[Sequence[Any]], Iterable[Any]]
    EncodeShort = Callable[[Any], bytes | None]

log = logging.getLogger(__name__)

# guess: by then a client that reads has taken the events before the failure. It is less than the
# app's `STOP_GRACE_S`, so that the requests which a drain ends get their status.
FAILURE_PATIENCE_S = 0.5

MESSAGES_IN_TURN = 16  # messages that are written before other tasks run; a guess

USAGE_TRAILER = "triolet-usage-bin"  # control.proto describes it at RequestUsage

_limiter = trio.CapacityLimiter(2)  # guess: threads that encode large answers

T = TypeVar("T")


async def encode_in_thread(job: Callable[[], T]) -> T:
    """Return ``job()``, which takes long, called in a thread. Cancellation: ``job`` ends first."""
    return await WorkerThreads().run(job, _limiter)


class WrittenCall(Protocol):
    """A call as its writer sees it: `grpc_service.rpc.call.Call`, or one over HTTP."""

    scope: trio.CancelScope
    is_lost: bool

    trailing_metadata: Metadata

    @property
    def connection(self) -> Any:
        """The connection, which has ``is_being_read`` and ``note_taken``."""

    @property
    def code(self) -> object:
        """The status code that ended the call; None while it runs."""

    def try_write(self, data: bytes) -> bool:
        """Write a message now, or return False."""

    async def write(self, message: Any) -> None:
        """Write a message, and wait until the client's side has room for it. Raises
        Disconnected."""

    async def wait_received(self) -> None:
        """Wait until the client has every message."""

    def evict(self) -> None:
        """Reset the call."""


class WrittenRecord(Protocol):
    """The record of such a call (`grpc_service.access.rpc_record`)."""

    arrived_at: float
    stream: RequestStream[Any] | None

    @property
    def call(self) -> Any:
        """The call, a `WrittenCall`."""

    @property
    def origin(self) -> Origin:
        """Where the request comes from."""


def _size_of(message: Any) -> int:
    """Return a message's bytes, before it is compressed."""
    if isinstance(message, bytes):
        return len(message)
    return message.ByteSize() if isinstance(message, Message) else 0


def _has_delta(message: Any) -> bool:
    """Return whether a message has the tokens of a choice, of which it has all in its batch."""
    return isinstance(message, inference_pb2.GenerateResponse) and message.HasField("delta")


class CallWriter:
    """The `Reader` of one request's stream: writes events in `push`, or else in the call's task.

    ``encode`` makes messages of events that are ready together. ``encode_short`` makes the bytes
    of one credited event: b"" if there is nothing to send, None if `encode` has to do it.
    ``is_large``: the first events take long to encode, which then happens in a thread.
    ``is_kept``: a message counts as received when the client has it (`Call.wait_received`), and not
    when it is written.
    """

    def __init__(
        self,
        rpc: WrittenRecord,
        unread_calls: UnreadCalls,
        encode: Encode,
        encode_short: EncodeShort = lambda event: None,
        *,
        is_large: bool = False,
        is_kept: bool = False,
    ) -> None:
        self._rpc = rpc
        self._call: WrittenCall = rpc.call
        self._unread_calls = unread_calls
        self._encode = encode
        self._encode_short = encode_short
        self._is_large = is_large
        self._is_kept = is_kept
        self._pending: list[Any] = []  # events for the task
        self._waiter: trio.Event | None = None  # set while the task waits for events
        self._has_ended = False
        self._error: TrioletError | None = None  # the failed request's error
        self._bug: Exception | None = None  # raised in `push` or `end`
        self.has_left = False  # the call's task has stopped writing
        self._is_answered = False  # every event of a request that succeeded was encoded
        self._is_done = False  # the client has everything, or the call got its status
        self._num_written = 0
        self._batch: list[Any] = []  # events since the last message of `_write` that was written
        self._made: Sequence[Any] = ()  # the messages of these events
        self._num_made_written = 0  # how many of those messages were written
        self._num_bytes = 0  # of the messages that were written
        self._writing = trio.CancelScope()  # gets a deadline when the request fails

    @property
    def is_being_read(self) -> bool:
        """Whether the client still reads from the call's connection, if only slowly."""
        return bool(self._call.connection.is_being_read)

    # ---- the engine's side, in the delivery of a step

    def push(self, event: Any) -> None:
        """Write the event if the task waits and the client's window has room for it; else leave
        it to the task."""
        waiter = self._waiter
        if waiter is not None and not waiter.is_set():
            try:
                data = self._encode_short(event)
                if data is not None and (not data or self._call.try_write(data)):
                    self._give_back(1)
                    self._num_bytes += _size_of(data)
                    if self._batch and data:
                        self._batch = []
                    return
            except Exception as bug:
                self._bug = bug
            waiter.set()
        self._pending.append(event)

    def end(self, error: TrioletError | None) -> None:
        """Let the task end the call once it has written the events that wait or, if the request
        failed, after `FAILURE_PATIENCE_S`."""
        self._has_ended, self._error = True, error
        if error is not None:
            self._writing.deadline = trio.current_time() + FAILURE_PATIENCE_S
        else:
            self._count_unread()
        if self._waiter is not None:
            self._waiter.set()

    def evict(self) -> None:
        """Reset the call, because its client does not read the answer and has too many such
        calls."""
        self._call.evict()

    def _count_unread(self) -> None:
        try:
            self._unread_calls.ended(self, self._call.connection)
        except Exception as bug:
            self._bug = bug

    def _give_back(self, num_events: int) -> None:
        """Give back the credit of events that were written."""
        stream = self._stream
        self._num_written += num_events
        if log.isEnabledFor(logging.DEBUG):
            request_id = logs.printable(stream.request_id)
            log.debug("results sent: %d", self._num_written, extra={"request_id": request_id})
        # After an error the request is over, or another call has taken the stream over.
        if self._error is None:
            stream.release(num_events)

    # ---- the call's task

    async def serve(self, engine: Engine, request: ClientRequest) -> None:
        """Submit a request and write its events until the call ends. The request's timeout counts
        from `Rpc.arrived_at`. Raises `Disconnected`, and ends the request if cancelled (`run`)."""
        stream = engine.submit(
            request,
            buffer=engine.config.stream_buffer,
            reader=self,
            awaits_reader=True,
            arrived_at=self._rpc.arrived_at,
            origin=self._rpc.origin,
        )
        del request  # the stream drops its input when it is not needed any more
        await self.run(stream)

    async def run(self, stream: RequestStream[Any]) -> None:
        """Write the events of ``stream``, whose reader this is, and end the call if it fails.

        Raises:
            Disconnected: the client has ended the call.
        Cancellation: ends the request.
        """
        self._stream = self._rpc.stream = stream
        self._call.connection.note_taken(self._call)
        try:
            with self._writing:
                await self._write_events()
                self._is_answered = True
            if self._writing.cancelled_caught and self._error is not None:
                raise self._error
            if self._is_kept:
                await self._call.wait_received()
            self._is_done = True
            self._cancel()
            self._tell_usage()
        except Disconnected:
            raise
        except Exception as error:
            self._is_done = True
            self._cancel()
            self._tell_usage()
            await self._fail(error)
        finally:
            self._leave()

    async def _write_events(self) -> None:
        """Write every event, until the request has succeeded.

        Raises what `_receive` and `Call.write` raise. Cancellation: as `Call.write`.
        """
        stream = self._stream
        while events := await self._receive():
            self._batch += events
            await self._write(events)
            num_credited = sum([isinstance(event, stream.credited) for event in events])
            if num_credited:
                self._give_back(num_credited)

    async def _write(self, events: Sequence[Any]) -> None:
        """Write events that are ready together. Raises and cancellation: as `Call.write`."""
        self._made, self._num_made_written = (), 0
        made = await self._messages_of(events)
        if isinstance(made, list):
            self._made = made
        for number, message in enumerate(made, 1):  # a generator makes them one by one
            await self._call.write(message)
            self._num_made_written = number
            self._num_bytes += _size_of(message)
            if not number % MESSAGES_IN_TURN:
                await trio.lowlevel.checkpoint()
            self._stream.note_taken()
        if self._num_made_written:
            self._batch, self._made = [], ()

    async def _receive(self) -> Sequence[Any]:
        """Return every event that waits, at least one; () once the request has succeeded.

        Raises:
            TrioletError: the request failed; every event before that was returned.
            Exception: a bug in `push`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._bug is not None:
                raise self._bug
            if self._pending:
                events, self._pending = self._pending, []
                return taken(events) if self._stream.wants_progress else events
            if self._error is not None:
                raise self._error
            if self._has_ended:
                return ()
            self._waiter = trio.Event()
            try:
                await self._waiter.wait()
            finally:
                self._waiter = None

    def _tell_usage(self) -> None:
        """Let the call's trailers say what the request has used so far."""
        used = encode_request_usage(self._stream.bill.record(self._stream))
        self._call.trailing_metadata = ((USAGE_TRAILER, used.SerializeToString()),)

    async def _fail(self, error: Exception) -> None:
        """End the call with the status of ``error``."""
        await self._rpc.call.end(*status_of(error))

    async def _messages_of(self, events: Sequence[Any]) -> Iterable[Any]:
        if not self._is_large:
            return self._encode(events)
        self._is_large = False
        return await encode_in_thread(lambda: self._encode(events))

    def _cancel(self) -> None:
        """End the request, if it has not ended and its client may not resume it."""
        call = self._call
        # A call without a status or a cancellation ends because its connection is cut.
        is_lost = call.code is None and (call.is_lost or not call.scope.cancel_called)
        is_lost &= not self._is_done
        gone = Leaving(self._num_unread(), self._num_bytes, is_lost)
        self._stream.leave(self, trio.current_time(), gone)

    def _num_unread(self) -> int:
        """Return how many tokens, or other results, were not written. Of events that are written
        together, those count whose messages can be told."""
        batch = self._batch
        if num_written := self._num_made_written:
            if not self._made:  # by a generator, each message of which has a result or more
                results = [one for one in batch if isinstance(one, self._stream.result_types)]
                batch = results[num_written:]
            elif len(self._made) == len(batch):
                batch = batch[num_written:]
            else:
                batch = self._left_of(batch, self._made[:num_written])
        return count(self._stream, [*batch, *self._pending])

    def _left_of(self, events: list[Any], written: Sequence[Any]) -> list[Any]:
        """Return the events of which the ``written`` messages have nothing, or only a part."""
        choices = {message.delta.choice for message in written if _has_delta(message)}
        return [event for event in events if getattr(event, "choice", None) not in choices]

    def _leave(self) -> None:
        """End the request, if it has not ended, and count the call as one without unread events."""
        self._cancel()
        self.has_left = True
        self._unread_calls.gone(self)
        # The frames of a traceback hold this writer: a cycle that only the collector would free.
        for failure in (self._error, self._bug):
            if failure is not None:
                failure.__traceback__ = None
        self._bug = None
