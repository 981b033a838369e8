"""Sockets: bound, accepted, read and written, with TLS or without.

A write is one system call, made at once: no task has to wake for it, which saves most of the time
that a token takes to the client.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import ssl
from ipaddress import IPv6Address, IPv6Network
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

H2, HTTP1 = "h2", "http/1.1"  # names of TLS's application protocols
RECORD_BYTES = 2**14  # The largest TLS record (RFC 8446, 5.1). OpenSSL sends records one by one.
RECEIVE_BYTES = 2**16  # upper bound of one read. Guess.
# Connections that wait to be accepted: as many as Linux allows by default. Beyond them, clients try
# again after a second and more.
BACKLOG = 4096
BUSY_PAUSE_S = 0.01  # reading pauses while a writer waits for room in the socket. Guess.
HANDSHAKE_S = 1.2e-3  # processor time of a TLS handshake, with RSA and 2048 bits, on an AMD EPYC
ACCEPTS_MAX = 64  # connections that are taken in one turn of the loop: some 2 ms
DROPS_MAX = 64  # reads of what a client sent in vain: 4 MiB. Guess.
ACCEPT_PAUSE_S = 0.1  # until a file descriptor may be free again. Guess.
_LINGER = Struct("ii")  # on, and for no second: what was not sent is dropped
_CREDENTIALS = Struct("3i")  # process, user and group of a Unix socket's client
HANG_UP = getattr(select, "POLLRDHUP", 0)  # only Linux has it
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

# The types of names that tell clients apart, as `ssl` and as OpenSSL's settings call them. Of other
# types `ssl` gives no text, or the same for all names.
NAME_TYPES = {"DNS": "DNS", "URI": "URI", "email": "email", "IP Address": "IP"}

# ---- listening ---------------------------------------------------------------------------------


class SocketListener:
    """A listening socket, whose clients speak TLS if ``tls`` is given. ``port`` is 0 for a Unix
    socket. ``alpn`` is the protocol that TLS clients must offer; one that offers none speaks
    HTTP/1.1."""

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLContext | None = None, alpn: str = H2
    ) -> None:
        self._socket = sock
        self._tls = tls
        self._alpn = alpn
        address = sock.getsockname()
        self.port = int(address[1]) if isinstance(address, tuple) else 0

    async def accept(self) -> Sequence[tuple[PlainTransport, str]]:
        """Wait for clients. Return at least one of those that are there: its transport, not opened
        yet, and its address as grpc writes it: ``ipv4:127.0.0.1:5``, ``ipv6:[::1]:5``, or
        ``unix:uid=1000`` with the id of the client's user, where the system reports it.

        Up to `ACCEPTS_MAX` are taken at once: one in each turn of the loop would leave a crowd in
        the system's queue, and new clients behind it. Clients that leave before they are accepted
        are skipped; without a free file descriptor it tries again after `ACCEPT_PAUSE_S`.

        Cancellation: safe; no client is lost.
        """
        taken: list[tuple[PlainTransport, str]] = []
        while not taken:
            if self._socket.fileno() < 0:  # it was closed while this task was about to run
                await trio.sleep_forever()
            await trio.lowlevel.wait_readable(self._socket)
            for _ in range(ACCEPTS_MAX):
                try:
                    client, address = self._socket.accept()
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        continue
                    if not taken:
                        log.warning("cannot take a connection now: %s", error.strerror)
                        await trio.sleep(ACCEPT_PAUSE_S)
                    break
                taken.append(self._transport_of(client, address))
        return taken

    def _transport_of(self, client: socket.socket, address: object) -> tuple[PlainTransport, str]:
        peer = _peer_of(client, address)
        if self._tls is None:
            return PlainTransport(client), peer
        return TlsTransport(client, self._tls, self._alpn), peer

    def close(self) -> None:
        """Accept no more. Idempotent."""
        self._socket.close()


def listen_tcp(
    host: str, port: int, tls: ssl.SSLContext | None = None, alpn: str = H2
) -> list[SocketListener]:
    """Listen on every address of ``host`` that this machine has; ``port`` 0 takes any free one,
    the same for all addresses. ``tls`` and ``alpn`` are those of `SocketListener`.

    Raises:
        OSError: another program has the port on one of the addresses, or none could be bound.
    """
    return [SocketListener(sock, tls, alpn) for sock in _bind_tcp(host.strip("[]"), port)]


def _bind_tcp(host: str, port: int) -> list[socket.socket]:
    """Bind all addresses of ``host``. An address that this machine does not have, such as
    localhost's of IPv6, is left out."""
    listening: list[socket.socket] = []
    failure: OSError | None = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in addresses:
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


def _peer_of(client: socket.socket, address: object) -> str:
    if client.family == socket.AF_UNIX or not isinstance(address, tuple):
        if not hasattr(socket, "SO_PEERCRED"):  # only Linux has it
            return "unix:"
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        return f"unix:uid={user}"
    host, port = str(address[0]), address[1]
    if host.startswith("::ffff:") and "." in host:  # an IPv4 address, on a socket that takes both
        return f"ipv4:{host.removeprefix('::ffff:')}:{port}"
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def address_of(peer: str) -> str:
    """Return the address by which a client's use is counted: ``ipv4:10.0.0.7`` for
    ``ipv4:10.0.0.7:5123``; for IPv6 the network of 64 bits, as one host has all of its addresses;
    for a Unix socket ``peer`` itself, which names the user."""
    if peer.startswith("unix:"):
        return peer
    host = peer.rpartition(":")[0]
    if not host.startswith("ipv6:["):
        return host
    address = IPv6Address(host.removeprefix("ipv6:[").rstrip("]").partition("%")[0])
    return f"ipv6:{IPv6Network((address, 64), strict=False)}"


# ---- connections -------------------------------------------------------------------------------


class PlainTransport:
    """The bytes of one connection, without TLS. One task reads and one writes. A failure raises
    OSError. No system call is made before `open`, so that a connection that is refused takes two:
    one to accept it and one to close it.

    ``opening_s`` is about how many seconds of the processor `open` takes.
    """

    opening_s = 0.0

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @property
    def has_left(self) -> bool:
        """Whether the client has closed the connection, as far as the system tells."""
        look = select.poll()
        look.register(self._socket, HANG_UP)
        return bool(look.poll(0))

    @property
    def certified(self) -> str:
        """The first subject alternative name of the client's certificate of a type in `NAME_TYPES`,
        once the transport is open: ``type:value``, such as ``DNS:a.example``. "" without a
        certificate or such a name."""
        return ""

    async def open(self) -> None:
        """Make the transport ready; bytes may flow only after this."""
        self._socket.setblocking(False)
        if self._socket.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def receive(self, max_bytes: int = RECEIVE_BYTES) -> bytes:
        """Wait for bytes and return at least one; b"" when the client has closed.

        Cancellation: safe; no byte is lost.
        """
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            with contextlib.suppress(BlockingIOError, InterruptedError):
                return self._socket.recv(max_bytes)

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        """Send what the socket's buffer has room for; return its number of bytes. What is sent next
        must begin with the rest of ``data``."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``.

        Cancellation: part of it may have been sent, and the connection is of no use then.
        """
        rest = memoryview(data)
        while rest:
            await self.wait_writable()
            rest = rest[self.send_now(rest) :]

    async def wait_writable(self) -> None:
        """Wait until the socket's buffer has room.

        Cancellation: safe.
        """
        await trio.lowlevel.wait_writable(self._socket)

    @property
    def raw(self) -> socket.socket:
        """The socket itself, to ask it for its addresses."""
        return self._socket

    def limit_unsent(self, num_bytes: int) -> None:
        """Let the system keep about ``num_bytes`` that it cannot send yet, where it can be told."""
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, num_bytes)

    def end(self) -> None:
        """Announce that nothing more will be sent. Never waits or raises; bytes that
        `send_now` has not taken are lost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def drop_received(self) -> None:
        """Drop what has come: a socket that is closed with bytes unread is reset, and its client
        may lose what it has not read yet. Never waits or raises."""
        with contextlib.suppress(OSError):
            for _ in range(DROPS_MAX):
                if not socket.socket.recv(self._socket, RECEIVE_BYTES):
                    break

    def reset(self) -> None:
        """Break the connection, so that both sides notice: the client by a reset, when the socket
        is closed, and `receive` at once. Never waits or raises."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))
            socket.socket.shutdown(self._socket, socket.SHUT_RD)

    async def close(self) -> None:
        """Close the socket. Never waits. Idempotent."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


def name_of(certificate: Mapping[str, Any] | None) -> str:
    """Return `PlainTransport.certified` of a certificate, as an SSL socket of Python returns it."""
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind in NAME_TYPES:
            return f"{NAME_TYPES[kind]}:{value}"
    return ""


class TlsTransport(PlainTransport):
    """TLS over a socket. OpenSSL writes to the socket itself: a write is one system
    call here, too, and a client whose certificate is refused gets TLS's alert."""

    opening_s = HANDSHAKE_S

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, alpn: str = H2) -> None:
        super().__init__(sock)
        self._context = context
        self._alpn = alpn
        self._tls: ssl.SSLSocket  # the socket, from `open` on
        self._has_ended = False

    @property
    def certified(self) -> str:
        """The name, as the authority of `--client-ca` has signed it."""
        return name_of(self._tls.getpeercert())

    async def open(self) -> None:
        """Do the handshake.

        Raises:
            OSError: client and server do not agree, or the client does not offer the protocol.
        Cancellation: the transport can only be closed then.
        """
        await super().open()
        self._socket = self._tls = self._context.wrap_socket(
            self._socket, server_side=True, do_handshake_on_connect=False
        )
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await trio.lowlevel.wait_readable(self._tls)
            except ssl.SSLWantWriteError:
                await self.wait_writable()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._tls, socket.SHUT_WR)
                self.drop_received()  # else the client may lose the alert that says why
                raise
        chosen = self._tls.selected_alpn_protocol()
        if chosen != self._alpn and not (self._alpn == HTTP1 and chosen is None):
            raise OSError(f"the client does not offer {self._alpn} in TLS's application protocols")

    async def receive(self, max_bytes: int = RECEIVE_BYTES) -> bytes:
        """Wait for bytes and return at least one; b"" when the client has closed.

        Cancellation: safe; no byte is lost.
        """
        while True:
            if not self._tls.pending():
                await trio.lowlevel.wait_readable(self._tls)
            try:
                if self._has_ended:
                    return socket.socket.recv(self._tls, max_bytes)  # dropped by the caller
                return self._tls.recv(max_bytes)
            except (ssl.SSLWantReadError, BlockingIOError, InterruptedError):
                continue
            except ssl.SSLWantWriteError:  # OpenSSL wants to answer the client by itself
                with contextlib.suppress(trio.BusyResourceError):  # another task waits to write
                    await self.wait_writable()
                    continue
                await trio.sleep(BUSY_PAUSE_S)
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        """Send what the socket's buffer has room for; return its number of bytes. The next call
        must begin with the rest of ``data``, as OpenSSL may have encrypted that."""
        num_sent = 0
        try:
            while num_sent < len(data):
                num_sent += self._tls.send(data[num_sent : num_sent + RECORD_BYTES])
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        return num_sent

    def end(self) -> None:
        """Send TLS's announcement, and shut the socket down for writing. What `receive` returns
        from now on is not decrypted."""
        if not self._has_ended:
            self._has_ended = True
            with contextlib.suppress(OSError):
                self._tls.unwrap()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._tls, socket.SHUT_WR)
