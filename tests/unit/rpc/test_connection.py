"""Connections in memory, in virtual time: when output is sent, slow clients, and lost ones."""

import math

import trio
import trio.testing

from grpc_service.rpc.connection import Flusher
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.status import StatusCode
from tests.support.rpc_calls import GOAWAY, echo, serving, wait
from tests.support.rpc_memory import Wire

LIMITS = Limits()
SILENCE_S = LIMITS.keepalive_time_s + LIMITS.keepalive_timeout_s


class Flushed:
    """A connection that records when it is flushed."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def flush(self):
        self.log.append(self.name)


def test_output_that_was_held_is_flushed_once_for_each_connection():
    log, flusher = [], Flusher()
    one, two = Flushed(log, 1), Flushed(log, 2)
    flusher.touch(one)
    assert log == [1]
    flusher.hold()
    for _ in range(3):
        flusher.touch(two)
        flusher.touch(one)
    assert log == [1]
    flusher.release()
    assert log == [1, 2, 1]
    flusher.release()
    flusher.touch(two)
    assert log == [1, 2, 1, 2]


async def test_tokens_of_a_step_go_out_in_one_write(autojump_clock):
    async with serving(wait) as running:
        client = await running.connect()
        calls = [client.call(b"") for _ in range(20)]
        await client.settle()
        for call in running.calls:
            assert not call.try_write(b"too early")
            await call.write(b"first")
        await client.settle()
        sizes = []
        send_now = client.wire.send_now
        client.wire.send_now = lambda data: sizes.append(len(data)) or send_now(data)
        running.flusher.hold()
        assert all(call.try_write(b"token") for call in running.calls)
        assert not sizes
        running.flusher.release()
        assert len(sizes) == 1
        await client.settle()
        assert [client.messages[call] for call in calls] == [[b"first", b"token"]] * 20


async def test_a_lost_connection_ends_its_calls_alone(autojump_clock):
    async with serving(wait) as running:
        lost, other = await running.connect(), await running.connect()
        for _ in range(5):
            lost.call()
        other.call()
        await lost.settle()
        await other.settle()
        lost.leave()
        await lost.settle()
        assert len(running.cancelled) == 5
        assert lost.wire.is_closed
        assert running.num_running == 1
        assert len(running.connections) == 1
        assert not other.wire.is_closed


async def test_a_message_of_a_step_to_a_client_that_has_left_ends_its_connection(autojump_clock):
    async with serving(wait) as running:
        client = await running.connect()
        client.call()
        await client.settle()
        await running.calls[0].write(b"a")
        client.wire.has_left = True  # the task that reads from the connection does not notice
        running.flusher.hold()
        assert running.calls[0].try_write(b"b")
        running.flusher.release()
        await trio.testing.wait_all_tasks_blocked()
        assert client.wire.is_closed
        assert running.num_running == len(running.connections) == 0


async def test_a_client_that_answers_no_ping_is_cut(autojump_clock):
    async with serving(wait) as running:
        client = await running.connect(is_deaf=True)
        client.call()
        await client.settle()
        await trio.sleep(SILENCE_S - 1)
        assert not client.wire.is_closed
        await trio.sleep(2)
        assert client.wire.is_closed
        assert running.num_running == 0
        assert len(running.cancelled) == 1


async def test_a_client_that_says_nothing_at_all_is_cut(autojump_clock):
    async with serving(wait) as running:
        wire = Wire()
        running.listener.arrive(wire)
        await trio.sleep(SILENCE_S + 1)
        assert wire.is_closed
        assert not running.connections


async def test_a_client_that_answers_pings_stays(autojump_clock):
    async with serving(wait) as running:
        client = await running.connect()
        client.call()
        for _ in range(20):
            await client.settle()
            await trio.sleep(LIMITS.keepalive_timeout_s - 1)
        assert not client.wire.is_closed
        assert running.num_running == 1


async def test_for_a_client_that_takes_no_bytes_little_is_buffered_and_nothing_is_read(
    autojump_clock,
):
    async def handler(call):
        for _ in range(1000):
            await call.write(bytes(1000))
        await call.end(StatusCode.OK)

    async with serving(handler, Limits(budget=math.inf, overhead_burst_s=math.inf)) as running:
        client = await running.connect(window=2**30)
        client.open_window(2**30)
        await client.settle()
        client.wire.room = 0
        calls = [client.call() for _ in range(10)]
        await client.settle()
        connection = running.connections[0]
        assert LIMITS.clogged_bytes <= len(connection._unsent) < LIMITS.clogged_bytes + 20_000
        assert connection.http2.is_clogged
        assert len(connection.http2.blocked_by_connection) == 10
        assert not connection.http2.blocked_by_stream
        client.ping(10_000)
        await client.settle()
        assert len(client.wire.incoming) == 170_000 - 2**14  # the server has read 2**14 bytes
        assert len(connection._unsent) < LIMITS.clogged_bytes + 20_000 + 2**14
        assert not connection.http2.output.take()
        client.wire.room = math.inf
        client.wire.change()
        await client.settle()
        assert [client.messages[call] for call in calls] == [[bytes(1000)] * 1000] * 10
        assert client.ends == dict.fromkeys(calls, "0")
        assert client.num_pings == 10_000
        assert not connection.http2.is_clogged
        running.check_idle()


async def test_a_client_that_takes_no_bytes_for_long_is_cut(autojump_clock):
    async def handler(call):
        await call.write(bytes(2**20))

    async with serving(handler) as running:
        client = await running.connect(window=2**30)
        client.open_window(2**30)
        await client.settle()
        client.wire.room = 0
        client.call()
        await client.settle()
        await trio.sleep(SILENCE_S + 1)
        assert client.wire.is_closed
        assert running.num_running == 0


async def test_a_client_that_takes_bytes_slowly_gets_them_all(autojump_clock):
    """Meanwhile nothing is read from the client, not even its answers to pings."""

    async def handler(call):
        await call.write(bytes(2**20))
        await call.end(StatusCode.OK)

    async with serving(handler) as running:
        client = await running.connect(window=2**30)
        client.open_window(2**30)
        await client.settle()
        client.wire.room = 0
        call = client.call()
        for _ in range(150):
            await client.settle()
            await trio.sleep(4)
            client.wire.room = 10_000
            client.wire.change()
        assert client.ends == {call: "0"}
        assert client.messages[call] == [bytes(2**20)]
        assert not client.wire.is_closed


async def test_calls_go_on_after_their_client_has_sent_goaway(autojump_clock):
    async def handler(call):
        await trio.sleep(10)
        await call.write(b"late")
        await call.end(StatusCode.OK)

    async with serving(handler) as running:
        client = await running.connect()
        call = client.call(b"")
        await client.settle()
        client.say(GOAWAY)
        await client.settle()
        await trio.sleep(100)
        await client.settle()
        assert client.messages[call] == [b"late"]
        assert client.ends == {call: "0"}


async def test_a_client_whose_bytes_take_long_is_read_a_little_at_a_time(
    autojump_clock, monkeypatch
):
    sizes = []
    limits = Limits(part_s=-1.0)  # every part of the input takes longer than this
    async with serving(echo, limits) as running:
        client = await running.connect()
        http2 = running.connections[0].http2
        receive = http2.receive
        monkeypatch.setattr(http2, "receive", lambda data: (sizes.append(len(data)), receive(data)))
        call = client.call(bytes(16_000))
        await client.settle()
        assert client.messages[call] == [bytes(16_000)]
        assert client.ends == {call: "0"}
    assert sizes[20:]
    assert max(sizes[20:]) <= limits.part_bytes_min


async def test_a_drain_beside_a_client_that_broke_the_protocol(autojump_clock):
    async with serving(wait) as running:
        bad, good = await running.connect(), await running.connect()
        bad.say(b"\0\0\0\x09\x04\0\0\0\x01")  # CONTINUATION
        await trio.testing.wait_all_tasks_blocked()
        assert len(running.connections) == 2, "it lingers"
        running.server.leave()  # h2 would refuse a ping: SEND_PING in state CLOSED
        await good.settle()
        assert good.has_goaway


async def test_a_short_body_and_a_reset_in_one_read_end_that_call_alone(autojump_clock):
    async with serving(wait) as running:
        client = await running.connect()
        other = client.call()
        await client.settle()
        bad = client.call(headers={"content-length": "10"})
        client.reset(bad)
        await client.settle()
        client.ping()
        await client.settle()
        assert client.num_pings == 1
        assert not client.wire.is_closed
        assert other not in client.ends
