"""One connection of the server: its socket, its HTTP/2, and a task for each of its calls.

A call is a task in its connection's nursery: a reset or a lost connection cancels it. Bytes leave
where they are made, with one system call for all streams of a connection (`Flusher`).

Rule 1: nothing of one connection waits for another, and nothing of one stream waits for another's
window. Rule 2: a client that accepts no bytes is not read from either, once `Limits.clogged_bytes`
wait for it. Rule 3: a client that costs more than it brings is read from as the `OverheadLimiter`
has room, and its connection ends when its budget is empty. Rule 4: a call is not served before its
client can take a byte of the answer.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import TYPE_CHECKING

import trio

from grpc_service.rpc import accounts
from grpc_service.rpc.accounts import Account
from grpc_service.rpc.call import Call
from grpc_service.rpc.errors import RpcError
from grpc_service.rpc.held_bytes import Holder
from grpc_service.rpc.http2 import Http2Connection, ProtocolError, TooCostlyError
from grpc_service.rpc.sockets import address_of
from grpc_service.rpc.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from grpc_service.rpc.accounts import Addresses
    from grpc_service.rpc.fairness import FairShareLimiter, OverheadLimiter, StartLimiter
    from grpc_service.rpc.flusher import Flusher
    from grpc_service.rpc.held_bytes import HeldBytes
    from grpc_service.rpc.limits import Limits
    from grpc_service.rpc.request_body import RequestBody
    from grpc_service.rpc.sockets import Transport
    from grpc_service.rpc.streams import Stream

    ServeCall = Callable[[Call], Awaitable[None]]

log = logging.getLogger(__name__)

# Bytes sent in one piece while a client is slow: one TLS record. A client that accepts anything at
# all accepts so many within `Limits.keepalive_timeout_s`.
SEND_BYTES = 2**14
# Statuses that blame the request, and those of calls that their clients did not wait for.
CLIENTS_FAULTS = {
    *(StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND, StatusCode.PERMISSION_DENIED),
    *(StatusCode.OUT_OF_RANGE, StatusCode.UNIMPLEMENTED, StatusCode.UNAUTHENTICATED),
}
UNFINISHED = {None, StatusCode.CANCELLED, StatusCode.DEADLINE_EXCEEDED}


@dataclass(frozen=True, slots=True)
class Shared:
    """What the connections of one server share.

    ``decompressing`` is held by the one that decompresses a large message. ``serve_call`` serves a
    call from start to end. ``on_progress`` is called when a call has ended, and when waiting output
    was sent.
    """

    limits: Limits
    flusher: Flusher
    start_limiter: StartLimiter
    share: FairShareLimiter
    overhead: OverheadLimiter
    held: HeldBytes
    decompressing: trio.Lock
    serve_call: ServeCall
    on_progress: Callable[[], None]
    addresses: Addresses


class Connection:
    """One client's connection, over an open ``transport``.

    ``peer`` is the client's address as grpc writes it, and ``address`` the same without a port. For
    its calls it has the ``limits``, the ``held`` bytes with this connection's ``holder``, and its
    ``account``; they call ``touch`` after making output, and append to ``to_decompress`` a request
    with a large compressed message.
    """

    def __init__(self, shared: Shared, transport: Transport, peer: str) -> None:
        self._shared = shared
        self.limits = shared.limits
        self._transport = transport
        self._unsent = b""  # output that the transport did not accept at once
        self._is_writing = False  # the transport did not accept or send everything at once
        self._may_write = trio.Event()  # `_is_writing` is set
        self._has_written = trio.Event()  # it is not set any more
        self._heard_at = trio.current_time()  # when the client last showed that it is alive
        self._part_bytes = shared.limits.part_bytes_max  # the size of the next part to be handled
        self._calls: trio.Nursery
        self._num_calls = 0  # tasks of calls that have not ended
        self._num_useless = 0  # those that wait to be refused
        self._has_room = trio.Event()  # a call has ended or started
        self._is_asked_to_leave = trio.Event()
        self._is_over = False  # what the client still sends is dropped
        self._frame_left_s = math.inf  # for the rest of what is incomplete
        self._scope = trio.CancelScope()
        self.touch = partial(shared.flusher.touch, self)
        self._idle_since = trio.current_time()  # while there are no calls
        self._change = trio.Event()  # a call has ended, or output was sent, or no calls may come
        self.peer = peer
        self.address = address_of(peer)
        self.held = shared.held
        self.holder = Holder(self.address)
        self.to_decompress: deque[RequestBody] = deque()
        budget_share = shared.addresses.budget_share(self.address)
        self.account = Account(shared.limits, trio.current_time, budget_share)
        self.http2 = Http2Connection(self._on_stream, shared.limits, self.account)

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
                    nursery.start_soon(self._leave)
                    nursery.start_soon(self._retire)
                    await self._read()
                    nursery.cancel_scope.cancel(reason="the connection has ended")
        finally:
            self.http2.cut()
            self._shared.addresses.add_debt_s(self.address, self.account.take_debt_s())
            with trio.CancelScope(shield=True):
                await self._transport.close()

    def cut(self, reason: str) -> None:
        """End the connection and its calls."""
        self._scope.cancel(reason=reason)

    def drain(self) -> None:
        """Ask the client to begin no more calls, and close the connection after those that run and
        those on their way. Idempotent."""
        if not (self._is_asked_to_leave.is_set() or self._is_over):
            self._is_asked_to_leave.set()
            self.http2.drain()
            self.flush()

    @property
    def is_quiet(self) -> bool:
        """Whether no call runs and no output waits."""
        return not (self.http2.num_streams or self._is_writing)

    async def _leave(self) -> None:
        """When the client is asked to leave: take no more calls once it knows, and close the
        connection after the last one."""
        await self._is_asked_to_leave.wait()
        with trio.move_on_after(self.limits.leave_patience_s):
            while not self.http2.is_ending:
                await self._wait_for_change()
        self.http2.send_goaway()
        self.flush()
        while not self.is_quiet:
            await self._wait_for_change()
        self._is_over = True
        await self._linger()

    async def _retire(self) -> None:
        """Ask the client to connect anew after `Limits.connection_age_s`, and to leave after
        `Limits.connection_idle_s` without a call."""
        limits = self.limits
        # Clients that came together do not leave together.
        old_at = self._idle_since + limits.connection_age_s * random.uniform(0.9, 1.1)
        while True:
            is_idle = not self.http2.num_streams
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
        if not self.http2.num_streams:
            self._idle_since = trio.current_time()
        self._change.set()
        self._shared.on_progress()

    # ---- in

    async def _read(self) -> None:
        """Read until the client closes or is lost, or sends too much after the end."""
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
                self._heard_at = trio.current_time()  # no time to hear of it before
        except OSError as error:
            log.debug("%s: %s", self.peer, error)

    async def _receive(self) -> bytes:
        """Wait for bytes; what is incomplete has no more than its time for that. The time in which
        the server does not read does not count."""
        began_at = trio.current_time()
        self._scope.deadline = began_at + self._frame_left_s
        data = await self._transport.receive()
        self._scope.deadline = math.inf
        self._heard_at = trio.current_time()
        self._frame_left_s -= self._heard_at - began_at
        return data

    def _break_off(self, error: ProtocolError) -> None:
        """Send why the client has broken the protocol, and end the connection."""
        log.debug("%s: %s", self.peer, error)
        if isinstance(error, TooCostlyError):
            self._shared.addresses.note_offence(self.address)
        num_calls = self.http2.num_streams
        self.account.owe(accounts.BROKEN_CONNECTION + accounts.EVICTED_CALL * num_calls)
        self._is_over = True
        self.flush()
        self.http2.cut()  # nothing can be sent after a protocol error
        self._calls.start_soon(self._linger)

    async def _handle(self, data: bytes) -> None:
        """Handle received bytes in parts that take about `Limits.part_s` each."""
        limits, share = self.limits, self._shared.share
        while data:
            await share.enter()
            began_at = thread_time()
            num_before = self.http2.num_whole_frames
            self.http2.receive(data[: self._part_bytes])
            took = thread_time() - began_at
            self._limit_frame(num_before)
            self.touch()
            data = data[self._part_bytes :]
            if took > limits.part_s:
                self._part_bytes = max(self._part_bytes // 2, limits.part_bytes_min)
            elif took < limits.part_s / 4:
                self._part_bytes = min(self._part_bytes * 2, limits.part_bytes_max)
            share.spend(took)
            while self.to_decompress:
                await self._decompress(self.to_decompress.popleft())
                self.touch()
            if owed_s := self.account.take_owed_s():
                await self._shared.overhead.enter(self.address, owed_s)
            await self._wait_for_room()
            if self.http2.is_ending:
                self._change.set()
            if data:
                await trio.lowlevel.checkpoint()

    async def _decompress(self, body: RequestBody) -> None:
        """Decompress a request's large message in parts, between which others run. Nothing more is
        read before the client has paid for it.

        Cancellation: safe, as the connection ends.
        """
        share, is_left = self._shared.share, True
        async with self._shared.decompressing:
            while is_left:
                await share.enter()
                began_at = thread_time()
                is_left = body.decompress_part()
                share.spend(thread_time() - began_at)
                await trio.lowlevel.checkpoint()

    def _limit_frame(self, num_before: int) -> None:
        """Give what is incomplete a time to become complete; it had its time already if nothing
        became complete since there were ``num_before`` frames."""
        if not self.http2.is_amid_frame:
            self._frame_left_s = math.inf
        elif self._frame_left_s == math.inf or self.http2.num_whole_frames != num_before:
            self._frame_left_s = self.limits.frame_timeout_s
            return
        if self.http2.num_whole_frames == num_before:
            self.account.owe(accounts.FRAGMENT)

    async def _wait_for_room(self) -> None:
        """Wait while too much output waits, or too many calls wait to be refused, or have not
        ended: a client may reset every call as soon as it has begun it."""
        while len(self._unsent) >= self.limits.clogged_bytes:
            await self._has_written.wait()
        while self._has_too_many_calls:
            self._has_room = trio.Event()
            await self._has_room.wait()

    @property
    def _has_too_many_calls(self) -> bool:
        limits = self.limits
        is_full = self._num_calls > limits.calls_per_connection
        return is_full or self._num_useless > limits.refusals_queued_max

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
        if len(self._unsent) >= self.limits.clogged_bytes:
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
            self._is_writing = False
            self._has_written.set()
            self._note_change()
            if self.http2.is_clogged:
                self.http2.unclog()
                self.flush()

    # ---- calls

    def _on_stream(self, stream: Stream) -> Call:
        call = Call(stream, self)
        self._num_calls += 1
        self._calls.start_soon(self._serve, call)
        return call

    async def _serve(self, call: Call) -> None:
        try:
            with call.scope:
                await self._begin(call)  # a call that is reset leaves the queue
                if call.refusal:
                    call.refuse()
                elif call.fault is not None:
                    await call.end(*call.fault.status)
                elif not call.is_late:
                    await self._shared.serve_call(call)
            # By the deadline, before or after the call's start; or by a reset, and `end` does
            # nothing.
            if call.scope.cancelled_caught or call.is_late:
                await call.end(StatusCode.DEADLINE_EXCEEDED, "the deadline passed")
        finally:
            self._settle(call)
            call.release()
            self._num_calls -= 1
            self._has_room.set()
            self._note_change()

    async def _begin(self, call: Call) -> None:
        """Wait until the call may be served: nobody could read the answer of one without a window,
        and not too many begin at once.

        Cancellation: safe.
        """
        if not call.refusal and call.fault is None:
            call.scope.deadline = call.deadline
            try:
                await call.wait_for_window()
            except RpcError as fault:
                call.fault = fault
        is_useless = bool(call.refusal or call.fault)
        self._num_useless += is_useless
        try:
            await self._shared.start_limiter.enter()
        finally:
            self._num_useless -= is_useless
            self._has_room.set()

    def _settle(self, call: Call) -> None:
        """Charge a call that has ended, or give back points for it. What the server is to blame for
        costs the client nothing."""
        account, code = self.account, call.code
        if code is StatusCode.OK:
            account.earn(accounts.GOOD_CALL)
        elif call.refusal or call.is_faulty or code in CLIENTS_FAULTS:
            account.charge(accounts.FAILED_CALL)
        elif code in UNFINISHED and not call.has_answered:
            account.owe(accounts.LOST_CALL)
