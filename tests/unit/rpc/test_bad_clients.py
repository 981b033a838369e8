"""Clients in memory that break the rules: they harm only themselves."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import trio
import trio.testing
from google.protobuf.wrappers_pb2 import StringValue
from h2.errors import ErrorCodes

from grpc_service.rpc.limits import Limits
from grpc_service.rpc.methods import Method, read_request
from tests.support.rpc_calls import GOAWAY, echo, serving, wait
from tests.support.rpc_memory import Wire, framed

LIMITS = Limits()
PATIENT = Limits(budget=math.inf, overhead_burst_s=math.inf)  # no client costs too much


async def linger(call):
    """Serve a call that takes a second to be cancelled."""
    with trio.CancelScope(shield=True):
        await trio.sleep(1)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({":method": "GET"}, "405"),
        ({":method": "PUT"}, "405"),
        ({"content-type": "application/json"}, "415"),
        ({"content-type": ""}, "415"),
        ({"content-type": "application/grpc-web+proto"}, "415"),
        ({"content-type": "application/grpc+proto"}, "0"),
        ({"content-type": "application/grpc;charset=utf-8"}, "0"),
    ],
)
async def test_a_request_that_is_no_grpc_call_is_refused_by_http_status(
    autojump_clock, headers, status
):
    async with serving(echo) as running:
        client = await running.connect()
        call = client.call(headers=headers)
        await client.settle()
        assert client.ends == {call: status}
        assert len(running.calls) == (status == "0")
        endless = client.call(is_last=False, headers=headers)
        await client.settle()
        assert client.ends.get(endless) == (None if status == "0" else status)
        if status == "0":
            client.reset(endless)
            await client.settle()
        running.check_idle()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        bytes(30),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 40,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + GOAWAY[:9] + b"\0",
    ],
)
async def test_a_connection_without_http2_is_closed_and_harms_nobody_else(autojump_clock, data):
    async with serving(echo) as running:
        client = await running.connect()
        call = client.call(is_last=False)
        await client.settle()
        wire = Wire()
        wire.incoming += data
        running.listener.arrive(wire)
        await trio.testing.wait_all_tasks_blocked()
        if len(data) > 50 or data[:3] != b"PRI":
            assert wire.is_closed
        client.send(call, framed(b"a"), is_last=True)
        await client.settle()
        assert client.ends == {call: "0"}


async def test_a_client_that_breaks_the_protocol_loses_its_calls_and_nobody_elses(autojump_clock):
    async with serving(wait) as running:
        bad, good = await running.connect(), await running.connect()
        bad.call()
        good.call()
        await bad.settle()
        await good.settle()
        bad.say(b"\0\0\1\0\0\0\0\0\0x")  # DATA on stream 0
        await bad.settle()
        assert bad.has_goaway
        assert bad.wire.is_closed
        assert len(running.cancelled) == 1
        assert running.num_running == 1


async def test_a_stream_too_many_is_refused_and_the_others_are_served(autojump_clock):
    async with serving(echo, Limits(overhead_burst_s=math.inf)) as running:
        client = await running.connect()
        calls = [client.call(is_last=False) for _ in range(LIMITS.streams_per_connection + 5)]
        await client.settle()
        refused = {call for call, end in client.ends.items() if end == ErrorCodes.REFUSED_STREAM}
        assert refused == set(calls[LIMITS.streams_per_connection :])
        assert running.num_running == LIMITS.streams_per_connection
        for call in calls[: LIMITS.streams_per_connection]:
            client.send(call, framed(b"a"), is_last=True)
        await client.settle()
        assert Counter(client.ends.values())["0"] == LIMITS.streams_per_connection
        running.check_idle()


async def test_headers_too_large_end_their_connection_alone(autojump_clock):
    async with serving(echo) as running:
        bad, good = await running.connect(), await running.connect()
        bad.call(headers={f"x-{number}": "a" * 1000 for number in range(100)})
        await bad.settle()
        assert bad.wire.is_closed
        assert not running.calls
        call = good.call(b"b")
        await good.settle()
        assert good.ends == {call: "0"}


@pytest.mark.parametrize("handler", [wait, pytest.param(linger, marks=pytest.mark.slow)])
async def test_a_flood_of_resets_leaves_nothing_and_others_are_served_meanwhile(
    autojump_clock, handler
):
    async def serve(call):
        await (echo(call) if call.method == "good/Call" else handler(call))

    async with serving(serve, PATIENT) as running:
        bad, good = await running.connect(), await running.connect()
        connection = running.connections[0]
        for begin in range(0, 5000, 500):
            calls = [bad.call() for _ in range(500)]
            await trio.lowlevel.checkpoint()
            for call in calls:
                bad.reset(call)
            if begin == 2500:
                call = good.call(b"a", path="/good/Call")
                await good.settle()
                assert good.ends == {call: "0"}
            assert connection._calls.num_running < LIMITS.calls_per_connection + 1000
        for _ in range(10):
            await bad.settle()
            await trio.sleep(1)
        assert not bad.wire.is_closed
        assert not bad.wire.incoming
        assert set(bad.ends.values()) == {"reset by the client"}
        running.check_idle()
        assert len(connection.http2.h2._closed_streams) <= connection.http2.h2.MAX_CLOSED_STREAMS
        call = bad.call(b"b", path="/good/Call")
        await bad.settle()
        assert bad.ends[call] == "0"


async def test_calls_that_are_reset_in_the_queue_leave_it(autojump_clock):
    """Red if other clients' calls wait behind them. Reading may take any time here: on a slow
    machine the calls would otherwise begin before their resets are read."""
    async with serving(echo, replace(PATIENT, share_s=math.inf, part_s=math.inf)) as running:
        client = await running.connect()
        calls = [client.call(b"a", is_last=False) for _ in range(900)]
        await trio.lowlevel.checkpoint()
        for call in calls:
            client.reset(call)
        await client.settle()
        assert len(running.calls) < len(calls) / 2
        running.check_idle()


async def test_a_length_that_python_cannot_read_resets_its_call_alone(autojump_clock):
    async with serving(wait) as running:
        client = await running.connect()
        other = client.call()
        client.call(headers={"content-length": "1" * 5000})
        await client.settle()
        assert running.connections
        assert other not in client.ends


async def test_a_long_block_of_headers_is_refused_early(autojump_clock):
    async with serving(echo) as running:
        client = await running.connect()
        client.say(b"\0\0\0\x01\0\0\0\0\x01")
        for _ in range(30):
            client.say(b"\0\x3f\xff\x09\0\0\0\0\x01" + bytes(0x3FFF))
            await trio.testing.wait_all_tasks_blocked()
        assert client.wire.is_closed or not client.hear() or client.goaway_code is not None
        (connection,) = running.connections or (None,)
        assert connection is None or connection._is_over  # h2 alone would keep 480 KiB


@pytest.mark.parametrize("has_requests", [False, True])
async def test_calls_without_requests_come_in_slowly(autojump_clock, has_requests):
    async with serving(echo) as running:
        client = await running.connect(window=100_000)
        began_at = trio.current_time()
        for count in (500, 1):  # the last call waits for what the first 500 owe
            for _ in range(count):
                client.call(*[b"a"] * has_requests, is_last=has_requests)
            await client.settle()
        while len(running.calls) < 501:
            await trio.sleep(0.1)
            await client.settle()
        assert (trio.current_time() - began_at > 0.5) is not has_requests


async def test_what_follows_a_calls_one_request_is_dropped(autojump_clock):
    async def serve(call):
        await read_request(method, call)
        await wait(call)

    method = Method("a.B/C", StringValue, wait)
    async with serving(serve) as running:
        client = await running.connect()
        call = client.call(b"", is_last=False)
        await client.settle()
        for _ in range(30):
            client.send(call, framed(bytes(1000)))
            await client.settle()
        assert running.server.shared.held.num_bytes == 0
        assert client.h2.local_flow_control_window(call) < 40_000, "it gets no larger window"
