"""Calls and connections that have ended leave nothing to Python's garbage collector, which a server
runs so seldom that the garbage of thousands of calls would take tens of megabytes (issue 19)."""

import gc

import pytest
import trio

from grpc_service.rpc.call import Call
from grpc_service.rpc.connection import Connection
from grpc_service.rpc.errors import RpcError
from grpc_service.rpc.h2_overrides import ServerH2, UncountedStream
from grpc_service.rpc.held_bytes import Holding
from grpc_service.rpc.http2 import Http2Connection
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.request_body import RequestBody
from grpc_service.rpc.status import StatusCode
from grpc_service.rpc.streams import Stream
from tests.support.rpc_calls import MemoryServer, serving

OF_CALLS = (Call, RequestBody, Holding, Stream, UncountedStream)
OF_CONNECTIONS = (Connection, Http2Connection, ServerH2)
HALF = b"\0\0\0\0\x09half"  # a message of which five bytes are missing
OLDER = []  # objects that earlier tests in this process keep alive


@pytest.fixture(autouse=True)
def _no_collector():
    gc.collect()
    OLDER[:] = instances(*OF_CALLS, *OF_CONNECTIONS)
    gc.disable()
    yield
    gc.enable()
    OLDER.clear()


def instances(*classes):
    # `isinstance` would ask some of torch's objects for their class, which warn of that.
    return [one for one in gc.get_objects() if type(one) in classes]


def alive(*classes):
    older = set(map(id, OLDER))
    return sorted(type(one).__name__ for one in instances(*classes) if id(one) not in older)


async def handler(call):
    """Handle a call in the way that its header ``x-do`` names."""
    what = dict(call.metadata).get("x-do", "")
    try:
        if what == "close":
            call.request.close()
        while await call.read() is not None:
            await call.write(b"an answer")
    except RpcError as error:
        await call.end(*error.status)
        return
    if what == "sleep":
        await trio.sleep_forever()
    if what == "evict":
        call.evict()
        await trio.sleep_forever()
    await call.end(StatusCode.OK)


async def reset(client):
    client.reset(client.call(b"", headers={"x-do": "sleep"}))


async def reset_later(client):
    call = client.call(b"", headers={"x-do": "sleep"})
    await client.settle()
    client.reset(call)


async def half(client):
    client.send(client.call(is_last=False), HALF, is_last=True)


async def half_and_reset(client):
    call = client.call(is_last=False)
    client.send(call, HALF)
    await client.settle()
    client.reset(call)


def a_call(*messages, **headers):
    async def begin(client):
        client.call(
            *messages, headers={name.replace("_", "-"): text for name, text in headers.items()}
        )

    return begin


async def not_compressed(client):
    call = client.call(headers={"grpc-encoding": "gzip"}, is_last=False)
    client.send(call, b"\1\0\0\0\4none", is_last=True)


async def unusual_path(client):
    client.call(b"", path="no/slash")


async def get(client):
    client.call(headers={":method": "GET"})


WAYS = {
    "OK": a_call(b"", b""),
    "reset by the client": reset_later,
    "reset with its request": reset,
    "half a message": half,
    "half a message and a reset": half_and_reset,
    "a message that cannot be decompressed": not_compressed,
    "malformed deadline": a_call(b"", grpc_timeout="soon"),
    "deadline": a_call(b"", grpc_timeout="1S", x_do="sleep"),
    "deadline before the request": a_call(grpc_timeout="1S"),
    "headers too large": a_call(b"", x_a="a" * 50_000),
    "no gRPC call": get,
    "a path without a slash": unusual_path,
    "given up by the server": a_call(b"", x_do="evict"),
    "closed by the handler": a_call(b"", x_do="close"),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_that_has_ended_is_freed_without_the_collector(way, autojump_clock):
    async with serving(handler, kind=MemoryServer) as running:
        client = await running.connect()
        await WAYS[way](client)
        await client.settle()
        await trio.sleep(2)
        await client.settle()
        assert len(client.ends) == 1
        assert alive(*OF_CALLS) == ["Holding"]  # that of the connection's own output
        assert len(alive(*OF_CONNECTIONS)) == len(OF_CONNECTIONS)


@pytest.mark.parametrize("is_window_closed", [False, True])
async def test_a_call_that_opens_no_window_or_sends_no_request_is_freed(
    is_window_closed, autojump_clock
):
    limits = Limits(request_timeout_s=3)
    async with serving(handler, limits, MemoryServer) as running:
        client = await running.connect(window=0 if is_window_closed else 65_535)
        client.call(is_last=False)
        await client.settle()
        await trio.sleep(4)
        await client.settle()
        assert len(client.ends) == is_window_closed
        if not is_window_closed:
            client.reset(1)
            await client.settle()
        assert alive(*OF_CALLS) == ["Holding"]


async def leaves(client):
    client.leave()


async def breaks_the_protocol(client):
    client.say(b"\0\0\1\6\0\0\0\0\1x")  # a PING on a stream


@pytest.mark.parametrize("end", [leaves, breaks_the_protocol])
@pytest.mark.parametrize("way", [None, *WAYS])
async def test_a_connection_that_has_ended_is_freed_without_the_collector(way, end, autojump_clock):
    """A connection's calls are freed with the connection, whatever state they are in."""
    async with serving(handler, kind=MemoryServer) as running:
        client = await running.connect()
        if way is not None:
            await WAYS[way](client)
            client.call(b"", headers={"x-do": "sleep"})
            client.call(is_last=False)
            await client.settle()
        await end(client)
        await trio.sleep(Limits().linger_s + 2)
        assert not running.server.connections
        assert alive(*OF_CALLS, *OF_CONNECTIONS) == []
