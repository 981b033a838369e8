"""The server: it accepts connections, serves them, and ends them gracefully.

Life of a connection: accepted, opened (with TLS: after a handshake), read from until the client
closes or does not answer a ping; then its calls are cancelled, and it is closed. A server that
stops asks its clients first to open no more calls.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from grpc_service.rpc.accounts import Addresses
from grpc_service.rpc.connection import Connection, Flusher, Shared
from grpc_service.rpc.entrance import Pass
from grpc_service.rpc.fairness import (
    FairLock,
    FairShareLimiter,
    OverheadLimiter,
    StartLimiter,
)
from grpc_service.rpc.held_bytes import LOOK_S, HeldBytes
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.reception import Reception

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grpc_service.rpc.call_tasks import ServeCall
    from grpc_service.rpc.sockets import PlainTransport, SocketListener

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
        self.shared = Shared(
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
        self._reception = Reception(self.shared)
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
        with self._serving:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.shared.overhead.run)
                nursery.start_soon(self._make_room)
                await self._reception.run(listeners, nursery, self._serve)

    def leave(self) -> None:
        """Accept no more connections, and ask all clients to open no more calls here. Calls that
        run, or were sent before clients knew, are served, and so are `Limits.lasting_methods` on
        connections that their clients keep open. Idempotent."""
        self._reception.close()  # before clients are asked to leave and connect anew
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
            while self.shared.held.is_short:
                await trio.sleep(LOOK_S)
                self.shared.held.make_room()

    def _on_progress(self) -> None:
        self._progress.set()

    async def _serve(self, transport: PlainTransport, peer: str, given: Pass) -> None:
        """Serve a client whose transport is open, and which was given a pass."""
        connection = Connection(self.shared, transport, peer)
        connection.http2.is_reserved = given is Pass.RESERVED
        self._connections[connection] = None
        if self._reception.is_closed:  # the client was accepted just before `leave`
            connection.drain()
            connection.http2.send_goaway(knows=False)  # at once, as it has no calls yet
        try:
            await connection.run()
        except Exception:
            log.exception("a connection met a bug")
        finally:
            del self._connections[connection]
            self._on_progress()
