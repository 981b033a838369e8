"""Sockets: bound, accepted, read and written, with TLS or without.

Without TLS a write is one system call, made at once: no task has to wake for it, which saves most
of the time that a token takes to the client. With TLS a task of the connection writes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

log = logging.getLogger(__name__)

RECEIVE_BYTES = 2**16  # upper bound of one read. Guess.
BACKLOG = 1024  # connections that wait to be accepted. Guess: a burst of clients
ACCEPT_PAUSE_S = 0.1  # until a file descriptor may be free again. Guess.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Transport(Protocol):
    """The bytes of one connection. One task reads and one writes. A failure raises OSError."""

    async def open(self) -> None:
        """Make the transport ready; bytes may flow only after this.

        Raises:
            OSError: client and server do not agree on how to talk.
        Cancellation: the transport can only be closed then.
        """
        ...

    async def receive(self) -> bytes:
        """Wait for bytes and return at least one; b"" when the client has closed.

        Cancellation: safe; no byte is lost.
        """
        ...

    def send_now(self, data: bytes | memoryview) -> int:
        """Send what can be sent without waiting; return its number of bytes."""
        ...

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``.

        Cancellation: part of it may have been sent, and the connection is of no use then.
        """
        ...

    async def close(self) -> None:
        """Close the transport. Idempotent.

        Cancellation: it is closed all the same.
        """
        ...


class Listener(Protocol):
    """Accepts the clients of one address."""

    async def accept(self) -> tuple[Transport, str]:
        """Wait for the next client; return its transport, not opened yet, and its address as grpc
        writes it: ``ipv4:127.0.0.1:5``, ``ipv6:[::1]:5`` or ``unix:``.

        Cancellation: safe; no client is lost.
        """
        ...

    def close(self) -> None:
        """Accept no more. Idempotent."""
        ...


# ---- listening ---------------------------------------------------------------------------------


class SocketListener:
    """A listening socket, whose clients speak TLS if ``tls`` is given. ``port`` is 0 for a Unix
    socket."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        self._socket = sock
        self._tls = tls
        address = sock.getsockname()
        self.port = int(address[1]) if isinstance(address, tuple) else 0

    async def accept(self) -> tuple[Transport, str]:
        """Wait for a client (`Listener.accept`). Clients that leave before they are accepted are
        skipped; without a free file descriptor it tries again after `ACCEPT_PAUSE_S`.

        Cancellation: safe; no client is lost.
        """
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                client, address = self._socket.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno in NO_ROOM:
                    log.warning("cannot take a connection now: %s", error.strerror)
                    await trio.sleep(ACCEPT_PAUSE_S)
                continue
            client.setblocking(False)
            if client.family != socket.AF_UNIX:
                with contextlib.suppress(OSError):
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = _peer_of(client.family, address)
            if self._tls is None:
                return PlainTransport(client), peer
            return TlsTransport(client, self._tls), peer

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def listen_tcp(host: str, port: int, tls: ssl.SSLContext | None = None) -> list[SocketListener]:
    """Listen on every address of ``host`` that this machine has; ``port`` 0 takes any free one,
    the same for all addresses.

    Raises:
        OSError: another program has the port on one of the addresses, or none could be bound.
    """
    return [SocketListener(sock, tls) for sock in _bind_tcp(host.strip("[]"), port)]


def _bind_tcp(host: str, port: int) -> list[socket.socket]:
    """Bind all addresses of ``host``. An address that this machine does not have, such as
    localhost's of IPv6, is left out."""
    listening: list[socket.socket] = []
    failure: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in found:
            try:
                listening.append(_bind_address(family, address[0], port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
                failure = error
            else:
                port = port or listening[0].getsockname()[1]
        if not listening and failure is not None:
            raise failure
    except OSError:
        for sock in listening:
            sock.close()
        raise
    return listening


def _bind_address(family: int, host: object, port: int) -> socket.socket:
    is_any = family == socket.AF_INET6 and host == "::"
    sock = socket.create_server(
        (str(host), port),
        family=family,
        backlog=BACKLOG,
        dualstack_ipv6=is_any and socket.has_dualstack_ipv6(),
    )
    sock.setblocking(False)
    return sock


def listen_unix(path: str, tls: ssl.SSLContext | None = None) -> list[SocketListener]:
    """Listen on a Unix socket, and replace one that no process listens on.

    Raises:
        OSError: as `check_unix`, or the socket cannot be made.
    """
    check_unix(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        Path(path).unlink(missing_ok=True)
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return [SocketListener(sock, tls)]


def check_unix(path: str) -> None:
    """Check that a Unix socket can be made at ``path``, and make none.

    Raises:
        OSError: a running server has the socket, a file is in its place, or the folder is missing
            or not writable.
    """
    place = Path(path)
    if place.is_socket():
        with socket.socket(socket.AF_UNIX) as client:
            if client.connect_ex(path) == 0:
                raise OSError(errno.EADDRINUSE, "a running server has it")
    elif place.exists():
        raise OSError(errno.EEXIST, "the path exists and is no socket")
    elif not place.parent.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    elif not os.access(place.parent, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def _peer_of(family: int, address: object) -> str:
    if family == socket.AF_UNIX or not isinstance(address, tuple):
        return "unix:"
    host, port = str(address[0]), address[1]
    if host.startswith("::ffff:") and "." in host:  # IPv4, on a socket that takes both
        return f"ipv4:{host.removeprefix('::ffff:')}:{port}"
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


# ---- connections -------------------------------------------------------------------------------


class PlainTransport:
    """A socket without TLS (`Transport`)."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def open(self) -> None:
        """Do nothing: the socket is ready."""

    async def receive(self) -> bytes:
        """Wait for bytes; b"" when the client has closed.

        Cancellation: safe; no byte is lost.
        """
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            with contextlib.suppress(BlockingIOError, InterruptedError):
                return self._socket.recv(RECEIVE_BYTES)

    def send_now(self, data: bytes | memoryview) -> int:
        """Send what the socket's buffer has room for; return its number of bytes."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``.

        Cancellation: part of it may have been sent.
        """
        rest = memoryview(data)
        while rest:
            await trio.lowlevel.wait_writable(self._socket)
            rest = rest[self.send_now(rest) :]

    async def close(self) -> None:
        """Close the socket. Never waits."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


class TlsTransport:
    """TLS over a socket (`Transport`). Trio's `SSLStream` does not send TLS's alert to a client
    whose certificate is refused, so that the client could not know why; this one does."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._plain = PlainTransport(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._sending = trio.Lock()  # TLS's records leave in the order in which they were made

    async def open(self) -> None:
        """Do the handshake.

        Raises:
            OSError: client and server do not agree.
        Cancellation: the transport can only be closed then.
        """
        await self._run(self._tls.do_handshake)

    async def receive(self) -> bytes:
        """Wait for bytes; b"" when the client has closed.

        Cancellation: safe; no byte is lost.
        """
        try:
            return await self._run(lambda: self._tls.read(RECEIVE_BYTES))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    def send_now(self, data: bytes | memoryview) -> int:
        """Send nothing: a record must leave whole, which may need waiting."""
        return 0

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``.

        Cancellation: part of it may have been sent.
        """
        self._tls.write(data)
        await self._flush()

    async def close(self) -> None:
        """Close the socket. Never waits."""
        await self._plain.close()

    async def _run(self, act: Callable[[], T]) -> T:
        """Repeat ``act``, feeding it what arrives, until it has enough; return its result."""
        while True:
            try:
                return act()
            except ssl.SSLWantReadError:
                pass
            finally:
                await self._flush()  # also the alert that says why a handshake failed
            if data := await self._plain.receive():
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    async def _flush(self) -> None:
        if self._outgoing.pending:
            async with self._sending:
                await self._plain.send(self._outgoing.read())
