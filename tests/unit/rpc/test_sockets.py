"""TLS handshakes that fail, over sockets."""

from __future__ import annotations

import contextlib
import socket
import ssl

import trio

from grpc_service.rpc.server import RpcServer
from grpc_service.rpc.sockets import TlsTransport
from tests.support.rpc_calls import MINUTE, wait


@contextlib.contextmanager
def shaking_hands(said=b""):
    """Yield a function that serves a TLS socket whose client has sent ``said``.

    Check at the end that the server has closed the socket.
    """
    server = RpcServer(wait)
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        theirs.send(said)
        transport = TlsTransport(ours, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        yield lambda: server._serve(transport, "unix:")
    assert ours.fileno() == -1


async def test_a_socket_is_closed_when_its_handshake_is_cut(autojump_clock):
    """R160."""
    with shaking_hands() as serve:
        with trio.move_on_after(1):
            await serve()


async def test_a_handshake_that_takes_too_long_is_cut(autojump_clock):
    with shaking_hands() as serve:
        with trio.fail_after(MINUTE):
            await serve()


async def test_garbage_instead_of_a_handshake_is_closed(autojump_clock):
    with shaking_hands(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") as serve:
        await serve()
