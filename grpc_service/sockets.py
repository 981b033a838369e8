"""Sockets of the server: bound, accepted, read and written, with TLS or without.

Without TLS a write is one system call where it is made, and no task has to wake for it: that is
most of what a token's way out costs (`grpc_service.connections`). With TLS a task of the connection
writes.
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

from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpc_service.config import ServerConfig

T = TypeVar("T")

log = logging.getLogger(__name__)

RECEIVE_BYTES = 2**16  # guess: of a read
# a TLS record; a client that takes any bytes takes so many within the patience for a ping
SEND_BYTES = 2**14
BACKLOG = 1024  # guess: a burst of clients that connect
HANDSHAKE_TIMEOUT_S = 20.0  # guess: a phone on a bad line
ACCEPT_PAUSE_S = 0.1  # guess: until a descriptor is free again
LATER_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


# ---- listening ---------------------------------------------------------------------------------


def check_free(config: ServerConfig) -> None:
    """Find out early, before models load, that the address cannot be had.

    Raises:
        ConfigError: as `listen`.
    """
    if config.uds:
        _refuse_path(config)
    else:
        _close(_listen_tcp(config))


def listen(config: ServerConfig) -> list[socket.socket]:
    """Sockets that listen at the configured address, every one of the host's that this machine has.

    Raises:
        ConfigError: the address is in use, or not this machine's; or no socket can be made there.
    """
    if not config.uds:
        return _listen_tcp(config)
    _refuse_path(config)
    path = Path(config.uds)
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)  # a socket that nobody has: one was left behind
        listener.bind(config.uds)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(config, error) from None
    listener.setblocking(False)
    return [listener]


def _refuse_path(config: ServerConfig) -> None:
    try:
        _check_path(Path(config.uds))
    except OSError as error:
        raise _cannot_listen(config, error) from None


def _check_path(path: Path) -> None:
    """Raise OSError if a running server has this socket, or none can be made."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as client:
            if client.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, "a running server has it")
    elif path.exists():
        raise OSError(errno.EEXIST, "it is there and no socket")
    elif not path.parent.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    elif not os.access(path.parent, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def _listen_tcp(config: ServerConfig) -> list[socket.socket]:
    """Raise if another program has the port on one of the host's addresses, or all of them fail;
    an address that this machine has not, as localhost's of IPv6 may be, is done without."""
    host, port = config.host.strip("[]"), config.port
    listeners: list[socket.socket] = []
    failure: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in found:
            try:
                listeners.append(_listen_at(family, address[0], port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
                failure = error
            else:
                port = port or listeners[0].getsockname()[1]  # one port for all of them
        if not listeners and failure is not None:
            raise failure
    except OSError as error:
        _close(listeners)
        raise _cannot_listen(config, error) from None
    return listeners


def _listen_at(family: int, host: object, port: int) -> socket.socket:
    is_any = family == socket.AF_INET6 and host == "::"
    listener = socket.create_server(
        (str(host), port),
        family=family,
        backlog=BACKLOG,
        dualstack_ipv6=is_any and socket.has_dualstack_ipv6(),
    )
    listener.setblocking(False)
    return listener


def _close(listeners: list[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def _cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
    flag = "--uds" if config.uds else "--port" if is_port else "--host"
    # of a failed bind, Python's text has the address once more
    own = os.strerror(error.errno) if error.errno and error.errno > 0 else None
    reason = (error.strerror if config.uds else own or error.strerror) or str(error)
    return ConfigError(f"cannot listen on {config.address}: {reason}; choose another with {flag}")


async def accept(listener: socket.socket) -> tuple[socket.socket, str]:
    """The next client, and how grpc names it: ``ipv4:127.0.0.1:5``, ``ipv6:[::1]:5``, ``unix:``."""
    while True:
        await trio.lowlevel.wait_readable(listener)
        try:
            client, address = listener.accept()
        except BlockingIOError:
            continue
        except OSError as error:  # a client that left before it was accepted, or no room
            if error.errno in LATER_ERRORS:
                log.warning("cannot take a connection now: %s", error.strerror)
                await trio.sleep(ACCEPT_PAUSE_S)
            continue
        client.setblocking(False)
        if client.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client, _peer_of(client.family, address)


def _peer_of(family: int, address: object) -> str:
    if family == socket.AF_UNIX or not isinstance(address, tuple):
        return "unix:"
    host, port = str(address[0]), address[1]
    if host.startswith("::ffff:") and "." in host:  # IPv4, on a socket that takes both
        return f"ipv4:{host.removeprefix('::ffff:')}:{port}"
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


# ---- connections -------------------------------------------------------------------------------


class Transport(Protocol):
    """A connection's bytes. One task reads and one writes; what fails raises OSError."""

    async def receive(self) -> bytes:
        """What has come, at least a byte; b"" when the client has closed. A checkpoint."""
        ...

    def send_now(self, data: bytes | memoryview) -> int:
        """How many bytes could be sent without waiting."""
        ...

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of it."""
        ...

    async def close(self) -> None: ...


class PlainTransport:
    """A socket, and nothing between."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def receive(self) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            with contextlib.suppress(BlockingIOError, InterruptedError):
                return self._socket.recv(RECEIVE_BYTES)

    def send_now(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    async def send(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            await trio.lowlevel.wait_writable(self._socket)
            rest = rest[self.send_now(rest) :]

    async def close(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


class TlsTransport:
    """TLS over a socket. Not Trio's `SSLStream`: that one keeps to itself what TLS says to a client
    whose certificate it does not take, and the client cannot tell why it is shut out."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._plain = PlainTransport(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._sending = trio.Lock()  # what TLS makes goes out in the order it was made in

    async def handshake(self) -> None:
        """Agree with the client, within `HANDSHAKE_TIMEOUT_S`.

        Raises:
            OSError: there is no agreement.
        """
        with trio.move_on_after(HANDSHAKE_TIMEOUT_S):
            await self._run(self._tls.do_handshake)
            return
        raise OSError("the TLS handshake took too long")

    async def receive(self) -> bytes:
        try:
            return await self._run(lambda: self._tls.read(RECEIVE_BYTES))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    def send_now(self, data: bytes | memoryview) -> int:
        return 0

    async def send(self, data: bytes | memoryview) -> None:
        self._tls.write(data)
        await self._flush()

    async def close(self) -> None:
        await self._plain.close()

    async def _run(self, act: Callable[[], T]) -> T:
        """What TLS makes of what has come, once enough has."""
        while True:
            try:
                return act()
            except ssl.SSLWantReadError:
                pass
            finally:
                await self._flush()  # the reason of a refusal, too
            if data := await self._plain.receive():
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    async def _flush(self) -> None:
        if self._outgoing.pending:
            async with self._sending:
                await self._plain.send(self._outgoing.read())
