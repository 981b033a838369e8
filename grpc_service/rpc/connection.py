"""One connection of the server: its socket, its HTTP/2, and a task for each of its calls.

A call is a task in its connection's nursery: a reset or a lost connection cancels it. Bytes leave
where they are made, with one system call for all streams of a connection (`Flusher`).

Rule 1: nothing of one connection waits for another, and nothing of one stream waits for another's
window. Rule 2: a client that accepts no bytes is not read from either, once `Limits.clogged_bytes`
wait for it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import TYPE_CHECKING, Protocol

import trio

from grpc_service.rpc.call import Call
from grpc_service.rpc.http2 import Http2Connection, ProtocolError
from grpc_service.rpc.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from grpc_service.rpc.fairness import FairShareLimiter, StartLimiter
    from grpc_service.rpc.http2 import Stream
    from grpc_service.rpc.limits import Limits
    from grpc_service.rpc.sockets import Transport

    ServeCall = Callable[[Call], Awaitable[None]]

log = logging.getLogger(__name__)

# Bytes sent in one piece while a client is slow: one TLS record. A client that accepts anything at
# all accepts so many within `Limits.keepalive_timeout_s`.
SEND_BYTES = 2**14


class Flushable(Protocol):
    """Something with output, such as a `Connection`."""

    def flush(self) -> None:
        """Send the output. Never raises."""
        ...


class Flusher:
    """Decides when output is sent: at once or, between `hold` and `release`, at `release`. Each
    connection is then flushed once, whatever was written for it."""

    def __init__(self) -> None:
        self._touched: dict[Flushable, None] = {}
        self._is_holding = False

    def touch(self, connection: Flushable) -> None:
        """Note that ``connection`` has output."""
        if self._is_holding:
            self._touched[connection] = None
        else:
            connection.flush()

    def hold(self) -> None:
        """Collect output until `release`. Must not be nested."""
        self._is_holding = True

    def release(self) -> None:
        """Send the output that was collected since `hold`. Never raises."""
        self._is_holding = False
        touched, self._touched = self._touched, {}
        for connection in touched:
            connection.flush()


@dataclass(frozen=True, slots=True)
class Shared:
    """What the connections of one server share. ``serve_call`` serves a call from start to end.
    ``on_progress`` is called when a call has ended, and when waiting output was sent."""

    limits: Limits
    flusher: Flusher
    start_limiter: StartLimiter
    share: FairShareLimiter
    serve_call: ServeCall
    on_progress: Callable[[], None]


class Connection:
    """One client's connection, over an open ``transport``. ``peer`` is the client's address."""

    def __init__(self, shared: Shared, transport: Transport, peer: str) -> None:
        self._shared = shared
        self._limits = shared.limits
        self._transport = transport
        self._unsent = b""  # output that the transport did not accept at once
        self._may_write = trio.Event()  # `_unsent` is not empty
        self._has_written = trio.Event()  # `_unsent` is empty again
        self._heard_at = trio.current_time()  # when the client last showed that it is alive
        self._part_bytes = shared.limits.part_bytes_max  # the size of the next part to be handled
        self._calls: trio.Nursery
        self._num_calls = 0  # tasks of calls that have not ended
        self._has_room = trio.Event()  # a call has ended
        self._scope = trio.CancelScope()
        self._touch = partial(shared.flusher.touch, self)
        self.peer = peer
        self.http2 = Http2Connection(self._on_stream, shared.limits)

    async def run(self) -> None:
        """Serve until the connection ends; then cancel its calls and close it.

        Cancellation: ends the connection.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._calls = nursery
                    self.flush()
                    nursery.start_soon(self._write_unsent)
                    nursery.start_soon(self._ping_if_silent)
                    await self._read()
                    nursery.cancel_scope.cancel(reason="the connection has ended")
        finally:
            self.http2.cut()
            with trio.CancelScope(shield=True):
                await self._transport.close()

    def cut(self, reason: str) -> None:
        """End the connection and its calls."""
        self._scope.cancel(reason=reason)

    def end_gracefully(self) -> None:
        """Accept no more calls; those that run go on."""
        self.http2.end_gracefully()
        self.flush()

    @property
    def is_quiet(self) -> bool:
        """Whether no call runs and no output waits."""
        return not (self.http2.num_streams or self._unsent)

    # ---- in

    async def _read(self) -> None:
        """Read until the client closes, breaks the protocol, or is lost."""
        http2, transport = self.http2, self._transport
        try:
            while data := await transport.receive():
                self._heard_at = trio.current_time()
                await self._handle(data)
        except ProtocolError as error:
            log.debug("%s: %s", self.peer, error)
            self.flush()
            http2.cut()  # h2 sends nothing after a protocol error
        except OSError as error:
            log.debug("%s: %s", self.peer, error)

    async def _handle(self, data: bytes) -> None:
        """Handle received bytes in parts that take about `Limits.part_s` each."""
        limits, share = self._limits, self._shared.share
        while data:
            await share.enter()
            began_at = thread_time()
            self.http2.receive(data[: self._part_bytes])
            took = thread_time() - began_at
            self._touch()
            data = data[self._part_bytes :]
            if took > limits.part_s:
                self._part_bytes = max(self._part_bytes // 2, limits.part_bytes_min)
            elif took < limits.part_s / 4:
                self._part_bytes = min(self._part_bytes * 2, limits.part_bytes_max)
            if took > limits.part_s / 4:
                share.spend(took)
            await self._wait_for_room()
            if data:
                await trio.lowlevel.checkpoint()

    async def _wait_for_room(self) -> None:
        """Wait while too much output waits, or too many calls have not ended: a client may reset
        every call as soon as it has begun it."""
        while len(self._unsent) >= self._limits.clogged_bytes:
            await self._has_written.wait()
        while self._num_calls > self._limits.calls_per_connection:
            self._has_room = trio.Event()
            await self._has_room.wait()

    async def _ping_if_silent(self) -> None:
        """Ping a client that is silent, and cut its connection if it stays silent."""
        limits = self._limits
        while True:
            heard_at = self._heard_at
            await trio.sleep_until(heard_at + limits.keepalive_time_s)
            if self._heard_at != heard_at:
                continue
            self.http2.ping()
            self.flush()
            await trio.sleep(limits.keepalive_timeout_s)
            if self._heard_at == heard_at:
                log.info("%s: no answer to a ping; the connection is cut", self.peer)
                self.cut("no answer to a ping")

    # ---- out

    def flush(self) -> None:
        """Send the output as far as the transport accepts it now; `_write_unsent` sends the rest.
        Never raises: a transport that fails ends the connection."""
        data = self.http2.take_output()
        if not data:
            return
        if self._unsent:
            self._unsent += data
        else:
            try:
                num_sent = self._transport.send_now(data)
            except OSError as error:
                self.cut(str(error))
                return
            if num_sent == len(data):
                return
            self._unsent = data[num_sent:]
            self._has_written = trio.Event()
            self._may_write.set()
        if len(self._unsent) >= self._limits.clogged_bytes:
            self.http2.is_clogged = True

    async def _write_unsent(self) -> None:
        """Send what `flush` could not send at once."""
        while True:
            await self._may_write.wait()
            self._may_write = trio.Event()
            try:
                while data := self._unsent:
                    for begin in range(0, len(data), SEND_BYTES):
                        await self._transport.send(memoryview(data)[begin : begin + SEND_BYTES])
                        self._heard_at = trio.current_time()  # accepting bytes is a sign of life
                    self._unsent = self._unsent[len(data) :]
            except OSError as error:
                self.cut(str(error))
                return
            self._has_written.set()
            self._shared.on_progress()
            if self.http2.is_clogged:
                self.http2.unclog()
                self.flush()

    # ---- calls

    def _on_stream(self, stream: Stream) -> Call:
        call = Call(stream, self.peer, self._touch, self._limits)
        self._num_calls += 1
        self._calls.start_soon(self._serve, call)
        return call

    async def _serve(self, call: Call) -> None:
        try:
            with call.scope:
                await self._shared.start_limiter.enter()  # a call that is reset leaves the queue
                if call.refusal:
                    call.refuse()
                    return
                call.scope.deadline = call.deadline
                await self._shared.serve_call(call)
            if call.scope.cancelled_caught:  # by the deadline, or by a reset: `end` does nothing
                await call.end(StatusCode.DEADLINE_EXCEEDED, "the deadline passed")
        finally:
            self._num_calls -= 1
            self._has_room.set()
            self._shared.on_progress()
