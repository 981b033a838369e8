"""TLS over sockets: handshakes, what is sent, and how a connection ends."""

import contextlib
import itertools
import os
import re
import socket
import ssl
import time

import pytest
import trio
import trustme

from grpc_service.rpc.connection import SEND_BYTES
from grpc_service.rpc.server import RpcServer
from grpc_service.rpc.sockets import TlsTransport, address_of, listen_tcp, listen_unix
from tests.support.rpc_calls import MINUTE, wait


async def serve_one(server, transport, peer="unix:"):
    """Serve one client as if it had just been accepted."""
    reception = server._reception
    given = reception._entrance.admit(address_of(peer))
    await reception._serve(transport, peer, given, server._serve)


@contextlib.contextmanager
def shaking_hands(said=b""):
    """Yield a function that serves a TLS socket whose client has already sent the bytes ``said``.

    Check at the end that the server has closed the socket.
    """
    server = RpcServer(wait)
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        theirs.send(said)
        transport = TlsTransport(ours, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        yield lambda: serve_one(server, transport)
    assert transport._socket.fileno() == -1


async def test_a_socket_is_closed_when_its_handshake_is_cut(autojump_clock):
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


@pytest.fixture
async def serving_tls(tls_context, authority):
    """Return a function that serves a client with these ALPN protocols until it has left."""
    server = RpcServer(wait)

    async def serve(protocols=(), said=b""):
        theirs, ours = socket.socketpair()
        ours.setblocking(False)
        client = TlsClient(theirs, authority, protocols)

        def talk():
            with client.sock, contextlib.suppress(OSError):
                if said:
                    socket.socket.send(client.sock, said)
                else:
                    client.sock.do_handshake()
                client.sock.read(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, talk)
            await serve_one(server, TlsTransport(ours, tls_context), "ipv4:10.0.0.7:5")

    return serve


FAILED_HANDSHAKES = {
    "no ALPN": ({}, "does not offer h2"),
    "ALPN of HTTP/1": ({"protocols": ["http/1.1"]}, "does not offer h2"),
    "no TLS": ({"said": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"}, "WRONG_VERSION_NUMBER|HTTP_REQUEST"),
}


@pytest.mark.parametrize(("client", "why"), FAILED_HANDSHAKES.values(), ids=FAILED_HANDSHAKES)
async def test_why_a_handshake_failed_is_told_at_warning_once(serving_tls, caplog, client, why):
    caplog.set_level("DEBUG", "grpc_service.rpc.reception")
    for _ in range(3):
        await serving_tls(**client)
    told = [(one.levelname, one.getMessage()) for one in caplog.records]
    assert [level for level, _ in told] == ["WARNING", "DEBUG", "DEBUG"]
    assert all(re.search(f"^ipv4:10.0.0.7:5: .*({why})", message) for _, message in told), told


async def test_each_reason_of_a_failed_handshake_is_told(serving_tls, caplog):
    for client, _ in FAILED_HANDSHAKES.values():
        await serving_tls(**client)
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == 2


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), ssl.SSLEOFError(8, "EOF")])
async def test_a_client_that_leaves_during_its_handshake_is_no_warning(caplog, error):
    class Leaving(TlsTransport):
        async def open(self):
            raise error

    caplog.set_level("DEBUG", "grpc_service.rpc.reception")
    theirs, ours = socket.socketpair()
    with theirs, ours:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        await serve_one(RpcServer(wait), Leaving(ours, context))
    assert [one.levelname for one in caplog.records] == ["DEBUG"]


# ---- addresses


async def test_a_connection_that_is_refused_costs_two_system_calls(monkeypatch):
    """No socket option is set: a client may be refused thousands of times a second."""
    calls = []
    for name in ("setblocking", "setsockopt", "getsockopt"):
        original = getattr(socket.socket, name)
        monkeypatch.setattr(
            socket.socket,
            name,
            lambda *args, name=name, original=original: (calls.append(name), original(*args))[1],
        )
    [listener] = listen_tcp("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", listener.port)):
        calls.clear()
        [(transport, _)] = await listener.accept()
        await transport.close()
    listener.close()
    assert calls == []


async def test_a_client_of_a_unix_socket_counts_by_its_user(tmp_path):
    path = str(tmp_path / "socket")
    [listener] = listen_unix(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        [(transport, peer)] = await listener.accept()
        await transport.close()
    listener.close()
    assert peer == f"unix:uid={os.getuid()}"
    assert address_of(peer) == peer


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:5123", "ipv4:10.0.0.7"),
        ("ipv6:[2001:db8::1]:5123", "ipv6:2001:db8::/64"),
        ("ipv6:[2001:db8::2%eth0]:5124", "ipv6:2001:db8::/64"),
        ("unix:", "unix:"),
    ],
)
def test_whom_a_client_counts_as(peer, address):
    assert address_of(peer) == address


# ---- TLS


class TlsClient:
    """A client's end of a TLS connection over ``sock``, which blocks for a second at most."""

    def __init__(self, sock, authority, protocols=("h2",)):
        context = ssl.create_default_context()
        authority.configure_trust(context)
        if protocols:
            context.set_alpn_protocols(protocols)
        sock.settimeout(5)
        self.sock = context.wrap_socket(
            sock, server_hostname="localhost", do_handshake_on_connect=False
        )

    def read_all(self):
        """Read until the server closes the TLS connection properly; return the bytes."""
        found = b""
        while data := self.sock.recv(2**16):
            found += data
        return found


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def tls_context(authority):
    """Return a server's context with a certificate for localhost."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    return context


@contextlib.asynccontextmanager
async def tls_pair(context, authority, **options):
    """Yield both ends of a TLS connection, after the handshake."""
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    client = TlsClient(theirs, authority, **options)
    transport = TlsTransport(ours, context)
    refusal = None
    with client.sock:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, client.sock.do_handshake)
                try:
                    await transport.open()
                except OSError as error:
                    refusal = error
            if refusal is not None:
                raise refusal
            yield transport, client
        finally:
            await transport.close()


async def test_a_small_write_over_tls_leaves_at_once(tls_context, authority):
    async with tls_pair(tls_context, authority) as (transport, client):
        assert transport.send_now(b"token") == 5
        assert client.sock.recv(100) == b"token"


@pytest.mark.parametrize("size", [100, SEND_BYTES, 50_000])
async def test_what_tls_has_not_sent_is_sent_later_with_what_came_meanwhile(
    tls_context, authority, size
):
    """OpenSSL encrypts a record before it knows whether the socket has room for it."""
    async with tls_pair(tls_context, authority) as (transport, client):
        numbers = itertools.count()
        sent, rest = b"", b""
        while not rest:
            data = b"".join(b"%07d." % next(numbers) for _ in range(size // 8))
            num_sent = transport.send_now(data)
            sent, rest = sent + data, data[num_sent:]
        assert transport.send_now(rest + b"more") == 0
        found = []

        def read():
            data = b""
            while not data.endswith(b"the end"):
                data += client.sock.recv(2**16)
            found.append(data)

        rest += b"the end"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, read)
            for begin in range(0, len(rest), SEND_BYTES):
                await transport.send(memoryview(rest)[begin : begin + SEND_BYTES])
        assert found == [sent + b"the end"]


async def test_bytes_that_openssl_has_read_already_are_received(tls_context, authority):
    async with tls_pair(tls_context, authority) as (transport, client):
        data = bytes(range(256)) * 4096
        found = b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, client.sock.sendall, data)
            while len(found) < len(data):
                found += await transport.receive()
        assert found == data


async def test_a_tls_connection_ends_in_order(tls_context, authority):
    async with tls_pair(tls_context, authority) as (transport, client):
        transport.send_now(b"last")
        transport.end()
        assert await trio.to_thread.run_sync(client.read_all) == b"last"


@pytest.mark.parametrize("protocols", [(), ("http/1.1",)])
async def test_a_tls_client_without_http2_is_refused(tls_context, authority, protocols):
    with pytest.raises(OSError, match="does not offer h2"):
        async with tls_pair(tls_context, authority, protocols=protocols):
            raise AssertionError("the connection was opened")


def tcp_pair():
    """Return both ends of a TCP connection over loopback; the second is non-blocking."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    ours.setblocking(False)
    return theirs, ours


@pytest.mark.parametrize("number", range(10))
async def test_a_tls_client_that_breaks_the_protocol_reads_why(tls_context, authority, number):
    """Closing a socket with unread bytes resets the connection, and the GOAWAY would be lost."""
    server = RpcServer(wait)
    theirs, ours = tcp_pair()
    garbage = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\1\0\0\0\0\0\0x" + bytes(number * 1000)

    def talk():
        client = TlsClient(theirs, authority)
        with client.sock:
            client.sock.do_handshake()
            client.sock.sendall(garbage)
            time.sleep(0.02)
            for _ in range(5):  # bytes that follow the protocol error
                client.sock.sendall(bytes(10_000))
                time.sleep(0.002)
            return client.read_all()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_one, server, TlsTransport(ours, tls_context))
        found = await trio.to_thread.run_sync(talk)
    assert b"\0\0\x08\x07" in found, "no GOAWAY came"
