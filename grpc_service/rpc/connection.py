"""One connection of the server: its socket, its HTTP/2, and a task for each of its calls.

A call is a task in its connection's nursery: a reset or a lost connection cancels it. Bytes leave
where they are made, with one system call for all streams of a connection (`Flusher`).

Rule 1: nothing of one connection waits for another, and nothing of one stream waits for another's
window. Rule 2: a client that accepts no bytes is not read from either, once `Limits.clogged_bytes`
wait for it. Rule 3: a client that costs more than it brings is read from no faster than the
`OverheadLimiter` allows, and its connection ends when its budget is empty. Rule 4: a call is not
served before its client can take a byte of the answer.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from dataclasses import dataclass
from time import thread_time
from typing import TYPE_CHECKING

import trio

from grpc_service.rpc import accounts
from grpc_service.rpc.accounts import Account
from grpc_service.rpc.call import Call
from grpc_service.rpc.call_tasks import CallTasks
from grpc_service.rpc.held_bytes import Holder, Holding
from grpc_service.rpc.http2 import Http2Connection, ProtocolError, TooCostlyError
from grpc_service.rpc.sockets import address_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpc_service.rpc.accounts import Addresses
    from grpc_service.rpc.call_tasks import ServeCall
    from grpc_service.rpc.fairness import (
        FairLock,
        FairShareLimiter,
        OverheadLimiter,
        StartLimiter,
    )
    from grpc_service.rpc.held_bytes import HeldBytes
    from grpc_service.rpc.limits import Limits
    from grpc_service.rpc.request_body import RequestBody
    from grpc_service.rpc.sockets import PlainTransport
    from grpc_service.rpc.streams import Stream, StreamListener

log = logging.getLogger(__name__)

# Bytes sent in one piece while a client is slow: one TLS record. A client that accepts anything at
# all accepts one record within `Limits.keepalive_timeout_s`.
SEND_BYTES = 2**14
# The size of a new client's first part (`Limits.part_bytes_min`), as nothing is known yet of what
# the client's frames cost. A client with cheap frames gets larger parts soon. Guess.
FIRST_PART_BYTES = 2**12


@dataclass(frozen=True, slots=True)
class Shared:
    """The objects that all connections of one server share.

    A connection holds ``decompressing`` while it decompresses a large message. ``serve_call``
    serves a call from start to end. ``on_progress`` is called when a call has ended, and when
    waiting output was sent.
    """

    limits: Limits
    flusher: Flusher
    start_limiter: StartLimiter
    share: FairShareLimiter
    overhead: OverheadLimiter
    held: HeldBytes
    decompressing: FairLock
    serve_call: ServeCall
    on_progress: Callable[[], None]
    addresses: Addresses


class Connection:
    """One client's connection, over an open ``transport``.

    ``peer`` is the client's address as grpc writes it, and ``address`` the same without a port;
    ``certified`` is the name in its certificate. Its calls obey ``limits``, count the bytes they
    keep in ``held`` for its ``holder``, charge its ``account``, and touch it with ``flusher`` after
    making output. ``arrivals`` has the calls that no handler has taken yet, ``to_decompress`` the
    large compressed requests.
    """

    def __init__(self, shared: Shared, transport: PlainTransport, peer: str) -> None:
        self._shared = shared
        self.limits = shared.limits
        self.flusher = shared.flusher
        self._transport = transport
        self._unsent = b""  # output that the transport has not accepted yet
        self._is_writing = False  # the transport did not accept or send everything at once
        self._may_write = trio.Event()  # `_is_writing` is set
        self._has_written = trio.Event()  # `_is_writing` has become False
        self._heard_at = trio.current_time()  # when the client last showed that it is alive
        self._part_bytes = FIRST_PART_BYTES  # the size of the next part to be handled
        self._nursery: trio.Nursery
        self._calls: CallTasks
        self._must_leave = trio.Event()
        self._is_to_close = trio.Event()  # set: to close the connection after its last call
        self._is_over = False  # all that the client still sends is dropped
        self._frame_left_s = math.inf  # seconds left for the rest of an incomplete frame
        self._scope = trio.CancelScope()
        self._to_end: list[StreamListener] = []  # calls whose streams have ended, to be cancelled
        self._idle_since = trio.current_time()  # since when there are no calls, if there are none
        self._change = trio.Event()  # a call has ended, or output was sent, or no calls may come
        self.peer = peer
        self.address = address_of(peer)
        self.certified = transport.certified
        self.held = shared.held
        self.holder = Holder(self.address)
        self._output = Holding(self.holder, self._give_up)  # counts the unsent output
        self.to_decompress: deque[RequestBody] = deque()
        budget_share = shared.addresses.budget_share(self.address)
        self.account = Account(shared.limits, trio.current_time, budget_share)
        self.http2 = Http2Connection(self._on_stream, shared.limits, self.account)
        self.arrivals: set[Call] = set()

    async def run(self) -> None:
        """Serve until the connection ends; then cancel its calls and close it.

        Cancellation: ends the connection.
        """
        shared = self._shared
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    self._calls = CallTasks(
                        nursery, shared.start_limiter, shared.serve_call, self._note_change
                    )
                    self.flush()
                    for task in self._write_unsent, self._ping_if_silent, self._leave, self._retire:
                        nursery.start_soon(task)
                    await self._read()
                    await self._end_calls()
                    nursery.cancel_scope.cancel(reason="the connection has ended")
        finally:
            # The parts of this object drop their references to it, so that no cycle is left.
            self.http2.close()
            self.held.close(self._output)
            del self._calls
            self.account.owe(accounts.SERVING + self._transport.opening_s / accounts.POINT_S)
            shared.addresses.add_debt_s(self.address, self.account.take_debt_s())
            with trio.CancelScope(shield=True):
                await self._transport.close()

    def cut(self, reason: str) -> None:
        """End the connection and its calls."""
        self._scope.cancel(reason=reason)

    def drain(self, *, stays: bool = False) -> None:
        """Ask the client to begin no more calls. Calls that run, or were sent before the client
        knew, go on. Close the connection after the last call unless it ``stays`` open for
        `Limits.lasting_methods`. Idempotent."""
        if not stays:
            self._is_to_close.set()
        if not (self._must_leave.is_set() or self._is_over):
            self._must_leave.set()
            self.http2.drain()
            self.flush()

    @property
    def is_being_read(self) -> bool:
        """Whether the client has read answers or sent requests within `Limits.held_stall_s`."""
        idle_s = trio.current_time() - self.holder.progressed_at
        return idle_s < self.limits.held_stall_s

    @property
    def is_quiet(self) -> bool:
        """Whether no call runs and no output waits."""
        return not (self.http2.streams or self._is_writing)

    @property
    def is_done(self) -> bool:
        """Whether no call runs or will come, and no output waits."""
        return self.is_quiet and (self.http2.is_ending or self._is_over)

    async def _leave(self) -> None:
        """Wait until the client is asked to leave. Then take no more calls once the client knows
        that, and close the connection after the last call, unless it stays open (`drain`)."""
        await self._must_leave.wait()
        with trio.move_on_after(self.limits.leave_patience_s):
            while not self.http2.is_ending:
                await self._wait_for_change()
        self.http2.send_goaway(knows=False)
        self.flush()
        self._shared.on_progress()
        await self._is_to_close.wait()
        while not self.is_quiet:
            await self._wait_for_change()
        self.http2.send_goaway()  # so that clients repeat elsewhere what they have just sent
        self.flush()
        self._is_over = True
        await self._linger()

    async def _retire(self) -> None:
        """Ask the client to connect anew after `Limits.connection_age_s`, and to leave after
        `Limits.connection_idle_s` without a call."""
        limits = self.limits
        age_s = limits.reserved_s if self.http2.is_reserved else limits.connection_age_s
        old_at = self._idle_since + age_s * random.uniform(0.9, 1.1)  # clients leave one by one
        while True:
            is_idle = not self.http2.streams
            idle_since = self._idle_since if is_idle else trio.current_time()
            leave_at = min(old_at, idle_since + limits.connection_idle_s)
            if trio.current_time() >= leave_at:
                self.drain()
                return
            await trio.sleep_until(leave_at)

    async def _linger(self) -> None:
        """Give the client time to read the last bytes and to close; `_read` drops what it still
        sends. A socket that is closed with bytes unread is reset, and its client may lose what it
        has not read yet."""
        with trio.move_on_after(self.limits.linger_s):
            while self._is_writing:
                await self._has_written.wait()
            self._transport.end()
            await trio.sleep_forever()
        self.cut("the connection has ended, and its client does not close")

    async def _wait_for_change(self) -> None:
        self._change = trio.Event()
        await self._change.wait()

    def _note_change(self) -> None:
        if not self.http2.streams:
            self._idle_since = trio.current_time()
        self._change.set()
        self._shared.on_progress()

    # ---- in

    async def _read(self) -> None:
        """Read until the client closes or is lost, or sends `Limits.linger_bytes` after the end."""
        num_dropped = 0
        try:
            while num_dropped < self.limits.linger_bytes:
                data = await self._receive()
                if not data:
                    return
                if self._is_over:
                    num_dropped += len(data)
                    continue
                try:
                    await self._handle(data)
                except ProtocolError as error:
                    self._break_off(error)
                self._heard_at = trio.current_time()  # nothing was read during `_handle`
        except OSError as error:
            log.debug("%s: %s", self.peer, error)

    async def _receive(self) -> bytes:
        """Wait for bytes. The rest of an incomplete frame must come in `Limits.frame_timeout_s`,
        without the time in which the server does not read."""
        began_at = self._heard_at
        if self._frame_left_s < math.inf:
            began_at = trio.current_time()
            self._scope.deadline = began_at + self._frame_left_s
        data = await self._transport.receive()
        self._scope.deadline = math.inf
        self._heard_at = trio.current_time()
        self._frame_left_s -= self._heard_at - began_at
        return data

    def _break_off(self, error: ProtocolError) -> None:
        """Send which rule of the protocol the client broke, and end the connection."""
        log.debug("%s: %s", self.peer, error)
        if isinstance(error, TooCostlyError):
            self._shared.addresses.note_offence(self.address)
        num_calls = len(self.http2.streams)
        self.account.owe(accounts.BROKEN_CONNECTION + accounts.EVICTED_CALL * num_calls)
        self._is_over = True
        self.flush()
        self._to_end += self.http2.cut()  # nothing can be sent after a protocol error
        self._nursery.start_soon(self._end_calls)
        self._nursery.start_soon(self._linger)

    async def _end_calls(self) -> None:
        """End all calls: those with a request at once, the others a few in each turn of the loop,
        because a client may begin a thousand of them at no cost.

        Cancellation: safe, as all calls are cancelled.
        """
        self._to_end += self.http2.cut()
        while self._to_end:
            await self._shared.start_limiter.enter(self.address)
            if self._to_end:
                self._to_end.pop().on_reset(is_lost=True)

    async def _handle(self, data: bytes) -> None:
        """Handle received bytes in parts that take about `Limits.part_s` each."""
        limits, share = self.limits, self._shared.share
        while data:
            await share.enter(self.address)
            began_at = thread_time()
            num_before = self.http2.splitter.num_whole
            self.http2.receive(data[: self._part_bytes])
            took = thread_time() - began_at
            self._limit_frame(num_before)
            self.flusher.touch(self)
            data = data[self._part_bytes :]
            if took > limits.part_s:
                self._part_bytes = max(self._part_bytes // 2, limits.part_bytes_min)
            elif took < limits.part_s / 4:
                self._part_bytes = min(self._part_bytes * 2, limits.part_bytes_max)
            share.spend(took)
            while self.to_decompress:
                await self._decompress(self.to_decompress.popleft())
                self.flusher.touch(self)
            if owed_s := self.account.take_owed_s():
                await self._shared.overhead.enter(self.address, owed_s)
            while len(self._unsent) >= limits.clogged_bytes:
                await self._has_written.wait()
            await self._calls.wait_for_room(limits)
            if self.http2.is_ending:
                self._change.set()
            if data:
                await trio.lowlevel.checkpoint()

    async def _decompress(self, body: RequestBody) -> None:
        """Decompress a request's large message in parts, between which other tasks run. Nothing
        more is read from the connection meanwhile.

        Cancellation: safe, as the connection ends.
        """
        share, is_left = self._shared.share, True
        async with self._shared.decompressing.hold(self.address):
            while is_left:
                await share.enter(self.address)
                began_at = thread_time()
                is_left = body.decompress_part()
                share.spend(thread_time() - began_at)
                await trio.lowlevel.checkpoint()

    def _limit_frame(self, num_before: int) -> None:
        """Begin the time limit of an incomplete frame. If the number of complete frames is still
        ``num_before``, the incomplete frame is the same, and its time runs already."""
        splitter = self.http2.splitter
        if not splitter.is_amid:
            self._frame_left_s = math.inf
        elif self._frame_left_s == math.inf or splitter.num_whole != num_before:
            self._frame_left_s = self.limits.frame_timeout_s
            return
        if splitter.num_whole == num_before:
            self.account.owe(accounts.FRAGMENT)

    async def _ping_if_silent(self) -> None:
        """Ping a client that is silent, and cut its connection if it stays silent."""
        limits = self.limits
        while True:
            heard_at = self._heard_at
            await trio.sleep_until(heard_at + limits.keepalive_time_s)
            if self._heard_at != heard_at:
                continue
            if self._is_over:
                return
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
        data = self.http2.output.take()
        if not data:
            return
        if self._is_writing:
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
            self._is_writing = True
            self._has_written = trio.Event()
            self._may_write.set()
        self.held.set_bytes(self._output, len(self._unsent))
        if len(self._unsent) >= self.limits.clogged_bytes:
            self.http2.is_clogged = True

    def _give_up(self) -> None:
        """End the connection, as its client does not take what the server keeps for it."""
        self.account.owe(accounts.EVICTED_CALL)
        self.cut("the client does not read, and the server keeps too much output")

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
                        num_sent = min(begin + SEND_BYTES, len(data))
                        self.held.set_bytes(self._output, len(self._unsent) - num_sent)
                    self._unsent = self._unsent[len(data) :]
            except OSError as error:
                self.cut(str(error))
                return
            self._is_writing = False
            self._has_written.set()
            self._note_change()
            if self.http2.is_clogged:
                self.http2.unclog()
                self.flush()

    # ---- calls

    def note_taken(self, call: Call) -> None:
        """Note that a call's handler has its request, so that the server would finish the call even
        if it refused new ones; or that the call has ended. A server that leaves waits until each
        call is noted (`RpcServer.settle`). Idempotent."""
        if call in self.arrivals:
            self.arrivals.remove(call)
            if not self.arrivals:
                self._shared.on_progress()

    def _on_stream(self, stream: Stream) -> Call:
        call = Call(stream, self)
        self.arrivals.add(call)
        self._calls.start(call)
        return call


class Flusher:
    """Sends the output of many connections, with one system call for each: at once or, between
    `hold` and `release`, at `release`. Each connection is then flushed once, whatever was written
    for it."""

    def __init__(self) -> None:
        self.touched: dict[Connection, None] = {}
        self._is_holding = False

    def touch(self, connection: Connection) -> None:
        """Note that ``connection`` has output."""
        if self._is_holding:
            self.touched[connection] = None
        else:
            connection.flush()

    def hold(self) -> None:
        """Collect output until `release`. Must not be nested."""
        self._is_holding = True

    def release(self) -> None:
        """Send the output that was collected since `hold`. Never raises."""
        self._is_holding = False
        touched, self.touched = self.touched, {}
        for connection in touched:
            connection.flush()
