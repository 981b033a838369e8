"""The server: it accepts connections, serves them, and ends them gracefully.

Life of a connection: accepted, opened (with TLS: after a handshake), read from until the client
closes or does not answer a ping; then its calls are cancelled, and it is closed. A server that
stops asks its clients first to open no more calls.
"""

from __future__ import annotations

import logging
import math
import ssl
from typing import TYPE_CHECKING

import trio

from grpc_service.rpc.accounts import (
    BROKEN_CONNECTION,
    CONNECTION,
    LEFT_CONNECTION,
    OPENING,
    POINT_S,
    Addresses,
)
from grpc_service.rpc.connection import Connection, Flusher, Shared
from grpc_service.rpc.entrance import Entrance, Pass
from grpc_service.rpc.fairness import (
    FairLock,
    FairShareLimiter,
    OverheadLimiter,
    StartLimiter,
)
from grpc_service.rpc.held_bytes import LOOK_S, HeldBytes
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.sockets import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grpc_service.rpc.call_tasks import ServeCall
    from grpc_service.rpc.sockets import PlainTransport, SocketListener

log = logging.getLogger(__name__)

WARNING_PAUSE_S = 10.0  # between warnings of refused connections


class RpcServer:
    """Serves the calls of all clients that connect. Made and used inside `trio.run`.

    ``serve_call`` serves each call from its beginning to its end, in a task of its own, and raises
    nothing but cancellation; `grpc_service.rpc.methods.Dispatcher.serve` is an example. Code that
    writes to many calls at once shares ``flusher`` with the server and holds it meanwhile.
    """

    def __init__(
        self,
        serve_call: ServeCall,
        limits: Limits | None = None,
        flusher: Flusher | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._shared = Shared(
            limits=self.limits,
            flusher=flusher or Flusher(),
            start_limiter=StartLimiter(self.limits.starts_per_turn),
            share=FairShareLimiter(self.limits.share_s, self.limits.parts_per_turn),
            overhead=OverheadLimiter(self.limits.overhead_share, self.limits.overhead_burst_s),
            held=HeldBytes(self.limits, trio.current_time, self._on_short),
            decompressing=FairLock(),
            serve_call=serve_call,
            on_progress=self._on_progress,
            addresses=Addresses(self.limits, trio.current_time),
        )
        self._connections: dict[Connection, None] = {}
        self._entrance = Entrance(self.limits)
        self._warned_at = -math.inf  # when refused connections were last logged
        self._reported: set[str] = set()  # reasons of failed handshakes that were logged
        self._listeners: Sequence[SocketListener] = ()
        self._listening = trio.CancelScope()
        self._serving = trio.CancelScope()
        # The server keeps too many bytes, or a request waits for room.
        self._is_short = trio.Event()
        self._progress = trio.Event()  # a call or a connection has ended, or output was sent

    @property
    def connections(self) -> Sequence[Connection]:
        """The connections that are open."""
        return tuple(self._connections)

    async def run(self, listeners: Sequence[SocketListener]) -> None:
        """Serve the clients of ``listeners`` until `stop`; close the listeners at the end.

        Cancellation: every call is cancelled, and every connection closed.
        """
        self._listeners = listeners
        with self._serving:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._shared.overhead.run)
                nursery.start_soon(self._make_room)
                try:
                    with self._listening:
                        async with trio.open_nursery() as accepting:
                            for listener in listeners:
                                accepting.start_soon(self._accept, listener, nursery)
                finally:
                    for listener in listeners:
                        listener.close()

    def leave(self) -> None:
        """Accept no more connections, and ask all clients to open no more calls here. Calls that
        run, or were sent before clients knew, are served, and so are `Limits.lasting_methods` on
        connections that their clients keep open. Idempotent."""
        self._listening.cancel(reason="the server leaves")
        for listener in self._listeners:  # before clients are asked to leave and connect anew
            listener.close()
        for connection in self.connections:
            connection.drain(stays=True)

    async def settle(self) -> None:
        """After `leave`: wait until all clients know of it, and handlers have all requests sent
        before (`Connection.note_taken`); at most for `Limits.settle_patience_s`.

        Cancellation: safe.
        """
        with trio.move_on_after(self.limits.settle_patience_s):
            await self._wait_for_all(lambda c: not c.arrivals and (c.http2.is_ending or c.is_done))

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections and calls, wait up to ``grace_s`` seconds until all calls,
        also those already sent, have ended and their output was sent; then end the other calls and
        let `run` return.

        Cancellation: the server goes on without accepting; `stop` may be called again.
        """
        self.leave()
        for connection in self.connections:
            connection.drain()
        with trio.move_on_after(grace_s):
            await self._wait_for_all(lambda connection: connection.is_done)
        self._serving.cancel(reason="the server stops")

    async def _wait_for_all(self, is_so: Callable[[Connection], bool]) -> None:
        while not all(map(is_so, self._connections)):
            if self._progress.is_set():  # another task may still wait for an event that is not set
                self._progress = trio.Event()
            await self._progress.wait()

    def _on_short(self) -> None:
        self._is_short.set()

    async def _make_room(self) -> None:
        """End calls that make no progress, also while nothing else happens."""
        while True:
            await self._is_short.wait()
            self._is_short = trio.Event()
            while self._shared.held.is_short:
                await trio.sleep(LOOK_S)
                self._shared.held.make_room()

    def _on_progress(self) -> None:
        self._progress.set()

    async def _accept(self, listener: SocketListener, nursery: trio.Nursery) -> None:
        while True:
            for transport, peer in await listener.accept():
                given = self._entrance.admit(address_of(peer))
                if given is Pass.REFUSED:
                    await self._refuse(transport, peer)
                else:
                    nursery.start_soon(self._serve, transport, peer, given)

    async def _refuse(self, transport: PlainTransport, peer: str) -> None:
        """Close a connection before it is opened; warn once in `WARNING_PAUSE_S` at most."""
        now = trio.current_time()
        if now >= self._warned_at + WARNING_PAUSE_S:
            self._warned_at = now
            count = self._entrance.num_refused
            log.warning("%s: refused, as there are too many connections (%d so far)", peer, count)
        with trio.CancelScope(shield=True):  # never waits; the other accepted clients are served
            await transport.close()

    async def _serve(self, transport: PlainTransport, peer: str, given: Pass) -> None:
        """Serve a client that `Entrance.admit` has ``given`` a pass."""
        address = address_of(peer)
        with self._entrance.staying(address, given):
            try:
                if not await self._open(transport, address):
                    return
            except OSError as error:
                log.log(self._level_of(error), "%s: %s", peer, error)
                return
            connection = Connection(self._shared, transport, peer)
            connection.http2.is_reserved = given is Pass.RESERVED
            self._connections[connection] = None
            if self._listening.cancel_called:  # the client was accepted just before `leave`
                connection.drain()
                connection.http2.send_goaway(knows=False)  # at once, as it has no calls yet
            try:
                await connection.run()
            except Exception:
                log.exception("a connection met a bug")
            finally:
                del self._connections[connection]
                self._on_progress()

    def _level_of(self, error: OSError) -> int:
        """Return WARNING for the first failed handshake of each reason, and DEBUG otherwise. There
        are few reasons. A client that has left is never a WARNING."""
        is_tls = isinstance(error, ssl.SSLError)
        has_left = isinstance(error, ssl.SSLEOFError) or not (is_tls or error.errno is None)
        reason = getattr(error, "reason", None) or str(error)
        if has_left or reason in self._reported:
            return logging.DEBUG
        self._reported.add(reason)
        return logging.WARNING

    async def _open(self, transport: PlainTransport, address: str) -> bool:
        """Open a transport within `Limits.handshake_timeout_s`; close it if that fails, or if the
        client has left already. A client whose address owes time waits first. Return whether it is
        open.

        Raises:
            OSError: the transport cannot be opened; the address owes for the attempt.
        Cancellation: the transport is closed; the address owes for an opening that had begun.
        """
        shared, is_open, broken_s = self._shared, False, 0.0
        try:
            if not await self._pay(transport, address):
                return False
            await shared.share.enter(address)
            shared.share.spend(CONNECTION * POINT_S + transport.opening_s)
            broken_s = BROKEN_CONNECTION * POINT_S
            with trio.move_on_after(self.limits.handshake_timeout_s) as scope:
                await transport.open()
            if scope.cancelled_caught:
                raise OSError("the TLS handshake took too long")
            is_open = True
            return True
        finally:
            self._entrance.note_opened(address)
            if not is_open:
                shared.addresses.add_debt_s(address, broken_s)
                await transport.close()

    async def _pay(self, transport: PlainTransport, address: str) -> bool:
        """Wait until the address's owed time is paid. Return whether the client is still there:
        clients that have left take little time, so that one behind them is served soon.

        Cancellation: safe; the address owes what it owed.
        """
        addresses, overhead = self._shared.addresses, self._shared.overhead
        debt_s = addresses.take_debt_s(address)
        if debt_s or self._entrance.is_paying(address):
            is_paid = False
            try:
                with self._entrance.paying(address):
                    await overhead.enter(address, LEFT_CONNECTION * POINT_S)
                    if not transport.has_left:
                        await overhead.enter(address, max(debt_s, OPENING * POINT_S))
                        is_paid = True
            finally:
                if not is_paid:
                    addresses.add_debt_s(address, debt_s)
            return is_paid
        if transport.has_left:
            addresses.add_debt_s(address, LEFT_CONNECTION * POINT_S)
            return False
        return True
