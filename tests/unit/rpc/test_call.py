"""One call over a connection in memory, in virtual time: its messages, and how it ends."""

import pytest
import trio
import trio.testing
from h2.errors import ErrorCodes

from grpc_service.rpc.errors import Disconnected, InvalidMessage, MessageTooLarge
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.status import StatusCode
from tests.support.rpc_calls import echo, serving, wait
from tests.support.rpc_memory import framed

LIMITS = Limits()


async def test_messages_come_and_go_and_a_status_ends_them(autojump_clock):
    async with serving(echo) as running:
        client = await running.connect()
        call = client.call(b"one", b"", is_last=False)
        await client.settle()
        assert client.messages[call] == [b"one", b""]
        assert call not in client.ends
        big = bytes(range(256)) * 200
        for begin in range(0, len(framed(big)), 1000):
            client.send(call, framed(big)[begin : begin + 1000])
            await client.settle()
        client.end(call)
        await client.settle()
        assert client.messages[call] == [b"one", b"", big]
        assert client.ends == {call: "0"}
        assert running.calls[0].code is StatusCode.OK
        assert running.calls[0].method == "a.B/C"
        assert running.calls[0].peer == "ipv4:127.0.0.1:5"
        running.check_idle()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (framed(b"broken")[:-1], InvalidMessage),
        (b"\0\0", InvalidMessage),
        (b"\0\xff\xff\xff\xff", MessageTooLarge),
        (b"", None),
    ],
)
async def test_a_faulty_body_raises_where_it_is_read(autojump_clock, body, error):
    raised = []

    async def handler(call):
        try:
            raised.append(await call.read())
        except (InvalidMessage, MessageTooLarge) as found:
            raised.append(type(found))
        await call.end(StatusCode.INVALID_ARGUMENT, "tölpel 100%")

    async with serving(handler) as running:
        client = await running.connect()
        call = client.call(is_last=False)
        await client.settle()
        client.send(call, body, is_last=True)
        await client.settle()
        assert raised == [error]
        assert client.ends == {call: "3"}
        assert client.headers[call]["grpc-message"] == "t%C3%B6lpel 100%25"
        running.check_idle()


async def test_a_call_is_reset_if_the_rest_of_a_message_is_not_taken_in_time(autojump_clock):
    took = []

    async def handler(call):
        with trio.move_on_after(5):
            await call.write(bytes(100_000))
        before = trio.current_time()
        await call.end(StatusCode.INTERNAL)
        took.append(trio.current_time() - before)

    async with serving(handler) as running:
        client = await running.connect()
        call = client.call()
        await client.settle()
        await trio.sleep(10)
        await client.settle()
        assert took == [pytest.approx(LIMITS.end_patience_s)]
        assert client.ends == {call: ErrorCodes.CANCEL}
        running.check_idle()


async def test_a_status_follows_a_message_whose_rest_goes_in_time(autojump_clock):
    async def handler(call):
        with trio.move_on_after(5):
            await call.write(bytes(100_000))
        await call.end(StatusCode.INTERNAL)

    async with serving(handler) as running:
        client = await running.connect()
        call = client.call()
        await client.settle()
        await trio.sleep(5 + LIMITS.end_patience_s / 2)
        client.open_window(2**20)
        client.open_window(2**20, call)
        await client.settle()
        assert client.messages[call] == [bytes(100_000)]
        assert client.ends == {call: "13"}
        running.check_idle()


async def test_a_message_that_waits_whole_is_dropped_and_the_status_follows_at_once(autojump_clock):
    async def handler(call):
        await call.write(bytes(900))
        with trio.move_on_after(5):
            await call.write(bytes(200))
        await call.end(StatusCode.ABORTED)

    async with serving(handler) as running:
        client = await running.connect(window=1024)
        call = client.call()
        await client.settle()
        await trio.sleep(5)
        await client.settle()
        assert client.ends == {call: "10"}
        assert client.messages[call] == [bytes(900)]
        assert not client.readers[call].is_amid_message
        running.check_idle()


@pytest.mark.parametrize("window", [1, 31, 38, 39, 64, 150])
async def test_a_window_smaller_than_a_small_message_does_not_hold_it_back(autojump_clock, window):
    """The client opens its flow-control window again only by as many bytes as it has received."""

    async def handler(call):
        for number in range(5):
            await call.write(bytes([number]) * 34)
        await call.end(StatusCode.OK)

    async with serving(handler) as running:
        client = await running.connect(window=window)
        call, allowed = client.call(), 0
        while True:
            await client.settle()
            taken = sum(map(len, client.messages[call])) + 5 * len(client.messages[call])
            taken += client.readers[call].num_bytes - allowed
            if call in client.ends:
                break
            assert taken, "nothing comes, and nothing more will be allowed"
            allowed += taken
            client.open_window(taken, call)
        assert client.messages[call] == [bytes([number]) * 34 for number in range(5)]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_deadline_ends_a_call_with_its_status(autojump_clock, has_begun):
    async def handler(call):
        assert call.time_remaining() == pytest.approx(2)
        if has_begun:
            await call.write(b"a")
        await trio.sleep_forever()

    async with serving(handler) as running:
        client = await running.connect()
        call = client.call(headers={"grpc-timeout": "2S"})
        await client.settle()
        await trio.sleep(1.9)
        await client.settle()
        assert not client.ends
        await trio.sleep(0.2)
        await client.settle()
        assert client.ends == {call: "4"}
        assert running.cancelled == running.calls
        running.check_idle()


async def test_a_reset_ends_the_call_alone(autojump_clock):
    async with serving(wait) as running:
        client = await running.connect()
        first, second = client.call(), client.call()
        await client.settle()
        client.reset(first)
        await client.settle()
        assert [one.code for one in running.cancelled] == [None]
        assert running.cancelled[0]._stream.is_over
        assert not running.cancelled[0].try_write(b"late")
        with pytest.raises(Disconnected):
            await running.cancelled[0].write(b"late")
        await running.cancelled[0].end(StatusCode.OK)
        assert running.num_running == 1
        client.reset(second)
        await client.settle()
        running.check_idle()


@pytest.mark.parametrize("is_blocked", [False, True])
async def test_a_reset_ends_a_write(autojump_clock, is_blocked):
    async def handler(call):
        while True:
            await call.write(bytes(1000))
            if not is_blocked:
                await trio.sleep(1)

    async with serving(handler) as running:
        client = await running.connect(window=5000)
        call = client.call()
        await client.settle()
        client.reset(call)
        await client.settle()
        await trio.sleep(10)
        running.check_idle()
        assert not running.connections[0]._unsent


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_call_is_late_if_its_deadline_ended_it(autojump_clock, is_reset):
    found = []

    async def serve(call):
        try:
            await wait(call)
        finally:
            found.append(call.is_late)

    async with serving(serve) as running:
        client = await running.connect()
        call = client.call(b"a", headers={"grpc-timeout": "100m"})
        await trio.testing.wait_all_tasks_blocked()
        if is_reset:
            client.reset(call)
        await trio.sleep(1)
        await client.settle()
        assert found == [not is_reset]
        assert client.ends == {call: "reset by the client" if is_reset else "4"}


@pytest.mark.parametrize("how", ["reset", "connection", "server"])
async def test_a_lost_connection_is_told_from_a_reset(autojump_clock, how):
    async with serving(wait) as running:
        client = await running.connect()
        calls = [client.call(b"a") for _ in range(2)]
        await client.settle()
        client.reset(calls[0])
        await client.settle()
        if how == "connection":
            client.leave()
        elif how == "server":
            running.connections[0].cut("a test")
        await trio.sleep(1)
        assert not running.cancelled[0].is_lost
        assert sorted([call.is_lost for call in running.calls]) == [False, how != "reset"]


@pytest.mark.parametrize("is_deaf", [False, True])
async def test_what_was_written_is_received_when_the_client_has_answered_a_ping(
    autojump_clock, is_deaf
):
    took = []

    async def handler(call):
        await call.write(b"one")
        began = trio.current_time()
        await call.wait_received()
        took.append(trio.current_time() - began)
        assert not call.connection.http2.marks
        await call.end(StatusCode.OK)

    async with serving(handler) as running:
        client = await running.connect(is_deaf=is_deaf)
        call = client.call(b"a")
        await client.settle()
        await trio.sleep(LIMITS.keepalive_timeout_s)
        await client.settle()
        assert client.messages[call] == [b"one"]
        assert client.ends == {call: "0"}
        assert took == [LIMITS.keepalive_timeout_s if is_deaf else 0.0]
