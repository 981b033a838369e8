"""The server: it accepts connections, serves them, and ends them gracefully.

Life of a connection: accepted, opened (with TLS: after a handshake), read from until the client
closes or does not answer a ping; then its calls are cancelled, and it is closed. A server that
stops asks its clients first to open no more calls.
"""

from __future__ import annotations

import logging
import ssl
from collections import Counter
from typing import TYPE_CHECKING

import trio

from grpc_service.rpc.accounts import BROKEN_CONNECTION, OPENING, POINT_S, Addresses
from grpc_service.rpc.connection import Connection, Flusher, Shared
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
    from collections.abc import Sequence

    from grpc_service.rpc.call_tasks import ServeCall
    from grpc_service.rpc.sockets import Listener, Transport

log = logging.getLogger(__name__)


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
        self._num_open: Counter[str] = Counter()  # transports, also before they are ready
        self._told: set[str] = set()  # why handshakes failed
        self._listening = trio.CancelScope()
        self._serving = trio.CancelScope()
        # The server keeps too many bytes, or a request waits for room.
        self._is_short = trio.Event()
        self._progress = trio.Event()  # a call or a connection has ended, or output was sent

    @property
    def connections(self) -> Sequence[Connection]:
        """The connections that are open."""
        return tuple(self._connections)

    async def run(self, listeners: Sequence[Listener]) -> None:
        """Serve the clients of ``listeners`` until `stop`; close the listeners at the end.

        Cancellation: every call is cancelled, and every connection closed.
        """
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

    def drain_connections(self) -> None:
        """Ask all clients that are connected to connect anew. Calls that run, or are on their way,
        go on; each connection is closed after its last one."""
        for connection in self.connections:
            connection.drain()

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections and calls, wait up to ``grace_s`` seconds until all calls,
        also those on their way, have ended and their output was sent; then end the rest and let
        `run` return.

        Cancellation: the server goes on without accepting; `stop` may be called again.
        """
        self._listening.cancel(reason="the server stops")
        self.drain_connections()
        with trio.move_on_after(grace_s):
            while not all(connection.is_done for connection in self._connections):
                self._progress = trio.Event()
                await self._progress.wait()
        self._serving.cancel(reason="the server stops")

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

    async def _accept(self, listener: Listener, nursery: trio.Nursery) -> None:
        while True:
            transport, peer = await listener.accept()
            nursery.start_soon(self._serve, transport, peer)

    async def _serve(self, transport: Transport, peer: str) -> None:
        """Serve one client, unless there are too many."""
        limits, address = self.limits, address_of(peer)
        is_full = self._num_open.total() >= limits.connections_max
        if is_full or self._num_open[address] >= limits.connections_per_address_max:
            log.warning("%s: the client is refused; there are too many connections", peer)
            await transport.close()
            return
        self._num_open[address] += 1
        try:
            await self._serve_client(transport, peer)
        finally:
            self._num_open[address] -= 1
            if not self._num_open[address]:
                del self._num_open[address]

    async def _serve_client(self, transport: Transport, peer: str) -> None:
        try:
            await self._open(transport, address_of(peer))
        except OSError as error:
            log.log(self._level_of(error), "%s: %s", peer, error)
            debt_s = BROKEN_CONNECTION * POINT_S
            self._shared.addresses.add_debt_s(address_of(peer), debt_s)
            return
        connection = Connection(self._shared, transport, peer)
        self._connections[connection] = None
        if self._listening.cancel_called:  # the client was accepted just before `stop`
            connection.drain()
        try:
            await connection.run()
        except Exception:
            log.exception("a connection met a bug")
        finally:
            del self._connections[connection]
            self._on_progress()

    def _level_of(self, error: OSError) -> int:
        """Return WARNING for the first handshake that fails for a reason that is not known yet.
        There are few reasons, and a client that leaves has none."""
        is_tls = isinstance(error, ssl.SSLError)
        has_left = isinstance(error, ssl.SSLEOFError) or not (is_tls or error.errno is None)
        reason = getattr(error, "reason", None) or str(error)
        if has_left or reason in self._told:
            return logging.DEBUG
        self._told.add(reason)
        return logging.WARNING

    async def _open(self, transport: Transport, address: str) -> None:
        """Open a transport within `Limits.handshake_timeout_s`; close it if that fails. A client
        whose address owes time waits first.

        Raises:
            OSError: there is no connection.
        Cancellation: the transport is closed.
        """
        try:
            if debt_s := self._shared.addresses.take_debt_s(address):
                await self._shared.overhead.enter(address, debt_s)
            await self._shared.share.enter(address)
            self._shared.share.spend(OPENING * POINT_S)
            with trio.move_on_after(self.limits.handshake_timeout_s) as scope:
                await transport.open()
            if scope.cancelled_caught:
                raise OSError("the TLS handshake took too long")
        except BaseException:
            await transport.close()
            raise
