"""Takes the connections of a listening port: decides about each, opens it, and has it served.

Rule: a connection that is refused, or whose client has left, costs next to nothing, and what
opening it costs is charged to its address (`grpc_service.rpc.accounts`).
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
)
from grpc_service.rpc.entrance import Entrance, Pass
from grpc_service.rpc.sockets import address_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from grpc_service.rpc.connection import Shared
    from grpc_service.rpc.sockets import PlainTransport, SocketListener

    Serve = Callable[[PlainTransport, str, Pass], Awaitable[None]]

log = logging.getLogger(__name__)

WARNING_PAUSE_S = 10.0  # between warnings of refused connections


class Reception:
    """Takes connections of one port. Ports share ``shared``, and so what an address may cost; each
    has a reception of its own, and so its own count of connections."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._limits = shared.limits
        self._entrance = Entrance(shared.limits)
        self._listening = trio.CancelScope()
        self._listeners: Sequence[SocketListener] = ()
        self._warned_at = -math.inf  # when refused connections were last logged
        self._reported: set[str] = set()  # reasons of failed handshakes that were logged

    @property
    def is_closed(self) -> bool:
        """Whether no more connections are taken."""
        return self._listening.cancel_called

    def close(self) -> None:
        """Take no more connections, and close the listeners at once. Idempotent."""
        self._listening.cancel(reason="no more connections are taken")
        for listener in self._listeners:
            listener.close()

    async def run(
        self, listeners: Sequence[SocketListener], nursery: trio.Nursery, serve: Serve
    ) -> None:
        """Take connections until `close`; close the listeners at the end. ``serve`` serves each in
        a task of ``nursery``: an open transport, its client's address as grpc writes it, and its
        pass. Its place is freed when ``serve`` returns.

        Cancellation: safe; no connection is lost.
        """
        self._listeners = listeners
        try:
            with self._listening:
                async with trio.open_nursery() as accepting:
                    for listener in listeners:
                        accepting.start_soon(self._take, listener, nursery, serve)
        finally:
            self.close()

    async def _take(self, listener: SocketListener, nursery: trio.Nursery, serve: Serve) -> None:
        while True:
            for transport, peer in await listener.accept():
                given = self._entrance.admit(address_of(peer))
                if given is Pass.REFUSED:
                    await self._refuse(transport, peer)
                else:
                    nursery.start_soon(self._serve, transport, peer, given, serve)

    async def _serve(self, transport: PlainTransport, peer: str, given: Pass, serve: Serve) -> None:
        """Serve a client that `Entrance.admit` has ``given`` a pass."""
        address = address_of(peer)
        with self._entrance.staying(address, given):
            try:
                if not await self._open(transport, address):
                    return
            except OSError as error:
                log.log(self._level_of(error), "%s: %s", peer, error)
                return
            await serve(transport, peer, given)

    async def _refuse(self, transport: PlainTransport, peer: str) -> None:
        """Close a connection before it is opened; warn once in `WARNING_PAUSE_S` at most."""
        now = trio.current_time()
        if now >= self._warned_at + WARNING_PAUSE_S:
            self._warned_at = now
            count = self._entrance.num_refused
            log.warning("%s: refused, as there are too many connections (%d so far)", peer, count)
        with trio.CancelScope(shield=True):  # never waits; the other accepted clients are served
            await transport.close()

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
            with trio.move_on_after(self._limits.handshake_timeout_s) as scope:
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
        """Wait until the time is paid that the address owes. Return whether the client is still
        there: clients that have left take little time, so that one behind them is served soon.

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
