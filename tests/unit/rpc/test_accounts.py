"""What a connection may cost the server, and what becomes of connections that cost more."""

import gzip
import itertools
import math

import hypothesis.strategies as st
import pytest
import trio
import trio.testing
from h2.errors import ErrorCodes
from hypothesis import given

from grpc_service.rpc import accounts
from grpc_service.rpc.accounts import (
    ADDRESSES_MAX,
    DEBT_MAX_S,
    OWED_MIN,
    Account,
    Addresses,
)
from grpc_service.rpc.fairness import TURN_S, OverheadLimiter
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.sockets import TlsTransport, address_of
from grpc_service.rpc.status import StatusCode
from tests.support.raw_http2 import frame
from tests.support.rpc_calls import echo, serving, wait
from tests.support.rpc_memory import PEER, Client, Wire, framed

LIMITS = Limits(budget=1000.0, budget_per_s=100.0)

GZIP = {"grpc-encoding": "gzip"}
CANCEL = ErrorCodes.CANCEL.to_bytes(4, "big")


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 5.0

    def __call__(self):
        return self.now


def test_a_budget_is_spent_earned_and_refilled_by_time():
    clock = Clock()
    account = Account(LIMITS, clock)
    account.charge(1000)
    assert not account.is_empty()
    account.charge(1)
    assert account.is_empty()
    account.earn(2)
    assert not account.is_empty()
    account.charge(101)
    assert account.is_empty()
    clock.now += 1
    assert not account.is_empty()


def test_no_more_is_saved_than_the_budget():
    clock = Clock()
    account = Account(LIMITS, clock)
    account.earn(10_000)
    account.charge(1001)
    assert account.is_empty()
    clock.now += 3600
    assert not account.is_empty()
    account.charge(1000 + 1)
    assert account.is_empty()


def test_what_was_earned_is_not_owed():
    account = Account(LIMITS, Clock())
    account.charge(OWED_MIN - accounts.OPENING - 1)
    assert account.take_owed_s() == 0
    account.owe(1)
    assert account.take_owed_s() == OWED_MIN * accounts.POINT_S
    assert account.take_owed_s() == 0
    account.charge(500)
    account.earn(500)
    assert account.take_owed_s() == 0


def test_an_address_pays_what_its_clients_left_unpaid_as_far_as_time_has_not():
    clock = Clock()
    addresses = Addresses(LIMITS, clock)
    addresses.add_debt_s("a", 0.05)
    addresses.add_debt_s("a", 0.06)
    addresses.add_debt_s("b", 10)
    clock.now += 1
    assert addresses.take_debt_s("a") == pytest.approx(0.01)
    assert addresses.take_debt_s("b") == pytest.approx(DEBT_MAX_S - 0.1)
    assert addresses.take_debt_s("a") == addresses.take_debt_s("b") == 0
    addresses.add_debt_s("c", 0.1)
    clock.now += 1
    assert addresses.take_debt_s("c") == 0


def test_the_addresses_that_are_remembered_are_bounded():
    addresses = Addresses(LIMITS, Clock())
    for number in range(ADDRESSES_MAX + 10):
        addresses.note_offence(f"{number}")
        addresses.add_debt_s(f"{number}", 1)
    assert len(addresses._offences) == len(addresses._debts) == ADDRESSES_MAX
    assert addresses.budget_share("0") == 1
    assert addresses.budget_share("10") == LIMITS.offender_share


async def test_who_connects_anew_waits_for_what_is_owed_and_others_do_not(autojump_clock):
    async with serving(wait) as running:
        bad = await running.connect()
        for _ in range(500):
            bad.call()
        await bad.settle()
        bad.leave()
        await bad.settle()
        assert not running.connections
        owed_s = (accounts.OPENING + 500 * accounts.LOST_CALL) * accounts.POINT_S
        again = Client(Wire())
        running.listener.arrive(again.wire)
        await again.settle()
        assert not running.connections
        waits_s = (owed_s - Limits().overhead_burst_s) / Limits().overhead_share
        await trio.sleep(0.95 * waits_s)
        assert not running.connections
        await trio.sleep(0.1 * waits_s)
        assert running.connections


@pytest.mark.parametrize("num_calls", [0, 10])
async def test_a_handshake_that_brought_no_call_costs_its_address_time(autojump_clock, num_calls):
    """Red if TLS handshakes are free: a client that did nothing else took 0.6 of a core."""
    async with serving(echo) as running:
        client = Client(Wire())
        client.wire.opening_s = TlsTransport.opening_s
        running.listener.arrive(client.wire)
        for _ in range(num_calls):
            assert (await client.request("a.B/C", b"a")).code is StatusCode.OK
        await client.settle()
        client.leave()
        await client.settle()
        debt_s = running.server.shared.addresses.take_debt_s(address_of(PEER))
    assert debt_s == 0 if num_calls else debt_s > TlsTransport.opening_s > 0


async def test_a_failed_call_owes_for_the_bytes_of_its_request(autojump_clock, monkeypatch):
    """Red if a call owes the same for an empty request and one of 12 MiB, which takes 20 ms."""

    async def refuse(call):
        await call.read()
        await call.end(StatusCode.INVALID_ARGUMENT, "no")

    owed = []
    owe = Account.owe
    monkeypatch.setattr(
        Account, "owe", lambda self, points: (owed.append(points), owe(self, points))
    )
    async with serving(refuse) as running:
        client = await running.connect()
        sums = []
        for size in (0, 16_000):
            owed.clear()
            client.call(bytes(size))
            await client.settle()
            sums.append(sum(owed))
    assert sums[1] - sums[0] == pytest.approx(16_000 * accounts.FAILED_BYTE)


@pytest.mark.parametrize("what", ["garbage", "a flood beside running calls"])
async def test_a_connection_that_was_ended_costs_its_address_time(autojump_clock, what):
    async with serving(wait) as running:
        bad = await running.connect()
        num_calls = 0 if what == "garbage" else 10
        for _ in range(num_calls):
            bad.call()
        await bad.settle()
        while not bad.wire.is_closed:
            kind = 0xFA if num_calls else 9
            bad.say(frame(kind, 0, 0, bytes(4)) * 10_000)
            await bad.settle()
            await trio.sleep(0.1)
        bad.leave()
        await bad.settle()
        debt_s = running.server.shared.addresses.take_debt_s(address_of(PEER))
        least = accounts.BROKEN_CONNECTION + num_calls * accounts.EVICTED_CALL
        assert debt_s > 0.9 * least * accounts.POINT_S


# ---- overhead


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()), max_size=12))
def test_the_toll_takes_no_more_than_its_share_and_serves_everybody(payments):
    async def main():
        async def pay(owner, seconds, is_cancelled):
            with trio.move_on_after(0.05 if is_cancelled else math.inf) as scope:
                await limiter.enter(owner, seconds)
            paid.append(0 if scope.cancelled_caught else seconds)

        limiter = OverheadLimiter(0.1, 0.02)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(limiter.run)
            async with trio.open_nursery() as payers:
                for owner, hundredths, is_cancelled in payments:
                    payers.start_soon(pay, owner, hundredths / 100, is_cancelled)
            nursery.cancel_scope.cancel()
        took = trio.current_time()
        assert len(paid) == len(payments)
        assert sum(paid) < 0.02 + 0.1 * took + 2 * TURN_S
        assert not any(limiter._waiting.values())

    paid = []
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_who_owes_little_does_not_wait_for_who_owes_much(autojump_clock):
    ends = {}

    async def pay(owner, seconds):
        await limiter.enter(owner, seconds)
        ends[owner] = trio.current_time()

    limiter = OverheadLimiter(0.1, 0.02)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(limiter.run)
        async with trio.open_nursery() as payers:
            for owner in range(10):
                payers.start_soon(pay, owner, 0.1)
            await trio.sleep(0.5)
            payers.start_soon(pay, "small", TURN_S)
        nursery.cancel_scope.cancel()
    assert ends["small"] < 0.5 + 11 * TURN_S / 0.1 + 0.02
    assert min(ends[owner] for owner in range(10) if owner) > 5


USELESS = {
    "unknown frames": frame(0xFA, 0, 0),
    "priorities": frame(2, 0, 3, b"\0\0\0\0\x10"),
    "pings": frame(6, 0, 0, bytes(8)),
    "window updates": frame(8, 0, 0, (1).to_bytes(4, "big")),
    "settings": frame(4, 0, 0),
    "resets of a closed stream": frame(3, 0, 1, CANCEL),
    "empty data": frame(0, 0, 3),
    "data on a closed stream": frame(0, 0, 1, b"\0"),
    "headers on a closed stream": frame(1, 4, 1, b"\x83"),
    "acknowledgements of settings": frame(4, 1, 0),
    "announcements of the end": frame(7, 0, 0, bytes(8)),
}


@pytest.mark.parametrize("name", USELESS)
async def test_a_flood_ends_with_enhance_your_calm_and_others_are_served(autojump_clock, name):
    async with serving(echo) as running:
        good, bad = await running.connect(), await running.connect()
        kept = good.call(is_last=False)
        bad.reset(bad.call(is_last=False))
        open_call = bad.call(is_last=False)
        await bad.settle()
        assert open_call == 3
        sent = 0
        while not bad.wire.is_closed:
            bad.say(USELESS[name] * 1000)
            sent += 1000
            await bad.settle()
            await trio.sleep(0.1)
            assert sent < 100_000
        await bad.settle()
        assert bad.has_goaway
        assert bad.goaway_code == ErrorCodes.ENHANCE_YOUR_CALM
        good.send(kept, framed(b"a"), is_last=True)
        await good.settle()
        assert good.ends == {kept: "0"}
        await trio.sleep(5)
        assert running.num_running == 0


async def test_a_client_that_reads_much_and_answers_every_message_never_pays(autojump_clock):
    """The client sends two window updates and a ping for each small message, as a busy one does."""

    async def handler(call):
        for _ in range(10_000):
            await call.write(bytes(25))
        await call.end(StatusCode.OK)

    async with serving(handler) as running:
        client = await running.connect()
        began_at = trio.current_time()
        call = client.call()
        while call not in client.ends:
            await client.settle()
            taken = len(client.messages[call]) * 30
            for _ in range(len(client.messages[call])):
                if call not in client.ends:
                    client.open_window(30, call)
                client.open_window(30)
                client.ping()
            client.messages[call].clear()
            assert taken or call in client.ends
        assert client.ends == {call: "0"}
        assert trio.current_time() == began_at, "it waited for the limiter"


async def test_a_client_that_cancels_whatever_it_asks_is_served(autojump_clock):
    async with serving(wait) as running:
        client = await running.connect()
        for _ in range(100):
            calls = [client.call() for _ in range(10)]
            await client.settle()
            for call in calls:
                client.reset(call)
            await client.settle()
            await trio.sleep(0.05)
        assert not client.wire.is_closed
        running.check_idle()


def zeros_in_gzip(size):
    """Return a message of zeros, compressed."""
    return b"\1" + framed(gzip.compress(bytes(size)))[1:]


async def test_messages_are_read_in_their_order_however_they_are_compressed(autojump_clock):
    large, small = zeros_in_gzip(2**20), zeros_in_gzip(10)
    bodies = {large: bytes(2**20), small: bytes(10), framed(b"plain"): b"plain"}

    async def handler(call):
        while (message := await call.read()) is not None:
            seen.append(message)
        await call.end(StatusCode.OK)

    async with serving(handler, Limits(budget=math.inf, overhead_burst_s=math.inf)) as running:
        for order in itertools.product(bodies, repeat=3):
            seen = []
            client = await running.connect()
            send(client, b"".join(order), headers=GZIP)
            await client.settle()
            assert seen == [bodies[one] for one in order]
            assert set(client.ends.values()) == {"0"}


async def test_a_call_may_be_reset_while_its_message_is_decompressed(autojump_clock):
    async with serving(echo) as running:
        client = await running.connect()
        call = client.call(headers=GZIP, is_last=False)
        client.send(call, zeros_in_gzip(2**22), is_last=True)
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        [connection] = running.connections
        assert connection.held.num_bytes > 2**18, "it is being decompressed"
        assert not connection.held._stalled(math.inf), "it waits for the server"
        client.reset(call)
        await client.settle()
        running.check_idle()
        answer = await client.request("a.B/C", b"a")
        assert answer.messages == [b"a"]


async def test_others_are_served_while_a_large_message_is_decompressed(autojump_clock):
    async def read(call):
        sizes.append(len(await call.read()))
        await call.end(StatusCode.OK)

    sizes = []  # of the requests, in the order in which they became complete
    async with serving(read) as running:
        bad, good = await running.connect(), await running.connect()
        send(bad, zeros_in_gzip(2**22), headers=GZIP)
        for _ in range(10):
            await trio.lowlevel.checkpoint()
        good.call(b"a")
        await good.settle()
        await trio.sleep(1)
    assert sizes == [1, 2**22]


def send(client, body, *, headers=None, is_last=True):
    call = client.call(headers=headers, is_last=False)
    client.send(call, body, is_last=is_last)


def call_often(client, headers):
    for _ in range(10):
        client.call(b"a", headers=headers)


def many_headers(size):
    """Return metadata of ``size`` bytes."""
    return {f"x-{number}": "a" * 1000 for number in range(size // 1000)}


@pytest.mark.parametrize(
    ("call", "count", "is_costly"),
    [
        (lambda client: send(client, zeros_in_gzip(2**22), headers=GZIP), 40, True),
        (lambda client: send(client, zeros_in_gzip(2**12), headers=GZIP), 30, False),
        (lambda client: send(client, framed(bytes(2**22))[:16_000], is_last=False), 30, False),
        (lambda client: call_often(client, many_headers(30_000)), 50, True),
        (lambda client: call_often(client, many_headers(1000)), 50, False),
    ],
)
async def test_zeros_that_were_compressed_and_large_headers_cost_their_client_and_usual_ones_do_not(
    autojump_clock, call, count, is_costly
):
    async def read(call):
        await call.read()
        await call.end(StatusCode.OK)

    async with serving(read) as running:
        client = await running.connect()
        for _ in range(count):
            if not client.wire.is_closed:
                call(client)
                await client.settle()
                await trio.sleep(0.1)
        await client.settle()
        assert client.wire.is_closed == is_costly
        code = client.goaway_code if client.has_goaway else None
        assert code == (ErrorCodes.ENHANCE_YOUR_CALM if is_costly else None)


async def test_a_call_with_too_large_headers_ends_alone(autojump_clock):
    async with serving(echo) as running:
        client = await running.connect()
        kept = client.call(is_last=False)
        call = client.call(b"a", headers=many_headers(Limits().header_list_bytes + 1000))
        await client.settle()
        assert client.ends == {call: str(int(StatusCode.RESOURCE_EXHAUSTED))}
        client.send(kept, framed(b"a"), is_last=True)
        await client.settle()
        assert client.ends[kept] == "0"


async def test_an_offender_comes_back_with_a_tenth_of_the_budget(autojump_clock):
    async with serving(echo) as running:

        async def spend():
            client = await running.connect()
            sent = 0
            while not client.wire.is_closed:
                client.say(USELESS["unknown frames"] * 100)
                sent += 100
                await client.settle()
                await trio.sleep(0.01)
            return sent

        first, second = await spend(), await spend()
        assert 0.05 < second / first < 0.2
        await trio.sleep(Limits().offender_time_s)
        assert await spend() > 0.9 * first


@pytest.mark.parametrize(
    "headers",
    [{"X-Upper": "a"}, {":path": ""}, {"te": "gzip"}, {"connection": "close"}],
)
async def test_a_malformed_request_costs_its_stream_alone(autojump_clock, headers):
    async with serving(echo) as running:
        client = await running.connect()
        kept = client.call(is_last=False)
        broken = client.call(headers=headers)
        await client.settle()
        assert client.ends == {broken: ErrorCodes.PROTOCOL_ERROR}
        client.send(kept, framed(b"a"), is_last=True)
        await client.settle()
        assert client.ends[kept] == "0"
        running.check_idle()


@pytest.mark.parametrize(("length", "is_served"), [(6, True), (5, False), (7, False), (0, False)])
async def test_a_body_of_another_length_than_announced_costs_its_stream_alone(
    autojump_clock, length, is_served
):
    async with serving(echo) as running:
        client = await running.connect()
        kept = client.call(is_last=False)
        call = client.call(b"a", headers={"content-length": str(length)})
        await client.settle()
        assert client.ends == {call: "0" if is_served else ErrorCodes.PROTOCOL_ERROR}
        client.reset(kept)
        await client.settle()
        running.check_idle()


@pytest.mark.parametrize("end", ["the client reads", "the client leaves", "the client waits"])
async def test_a_connection_that_ends_lingers_until_its_client_has_read(autojump_clock, end):
    async with serving(echo) as running:
        wire = Wire()
        running.listener.arrive(wire)
        await trio.testing.wait_all_tasks_blocked()
        wire.incoming += b"GET / HTTP/1.1\r\n\r\n" + bytes(100)
        wire.change()
        began_at = trio.current_time()
        await trio.testing.wait_all_tasks_blocked()
        assert wire.is_closed
        assert running.connections
        if end == "the client leaves":
            wire.has_left = True
            wire.change()
        elif end == "the client reads":
            wire.incoming += bytes(Limits().linger_bytes)
            wire.change()
        else:
            await trio.sleep(Limits().linger_s)
        await trio.testing.wait_all_tasks_blocked()
        assert not running.connections
        waited = trio.current_time() - began_at
        assert waited == (Limits().linger_s if end == "the client waits" else 0)


def test_limits_may_be_infinite():
    account = Account(Limits(budget=math.inf), Clock())
    account.charge(1e12)
    assert not account.is_empty()


@pytest.mark.parametrize("count", [90, 2700])
async def test_unknown_settings_are_not_kept_and_many_at_once_end_the_connection(
    autojump_clock, count
):
    async with serving(echo) as running:
        client = await running.connect()
        for begin in range(0x100, 0x100 + 10 * count, count):
            numbers = range(begin, begin + count)
            body = b"".join(number.to_bytes(2, "big") + bytes(4) for number in numbers)
            client.say(frame(4, 0, 0, body))
            await client.settle()
        await trio.sleep(5)
        await client.settle()
        assert client.has_goaway == (count == 2700)
        for connection in running.connections:
            assert len(connection.http2.h2.remote_settings) < 20


@pytest.mark.slow
async def test_failures_of_the_server_do_not_end_a_busy_connection(autojump_clock):
    async def handler(call):
        if call.method == "a.B/Dead":
            await trio.sleep(0.01)
            await call.end(StatusCode.UNAVAILABLE, "the model's worker was lost")
        else:
            await trio.sleep_forever()

    async with serving(handler, Limits(overhead_burst_s=math.inf)) as running:
        client = await running.connect()
        healthy = client.call()
        for _ in range(20):
            for _ in range(200):
                client.call(path="/a.B/Dead")
            await client.settle()
            await trio.sleep(1)
            await client.settle()
        assert not client.has_goaway
        assert healthy not in client.ends


def test_nobody_waits_for_the_opening():
    account = Account(Limits(), lambda: 0.0)
    account.charge(accounts.SETTINGS_FRAME)  # the client's first frame
    account.charge(accounts.NO_OP_FRAME)  # the client's acknowledgement of the server's SETTINGS
    account.charge(accounts.WINDOW_UPDATE)  # for the connection, not for a stream
    assert account.take_owed_s() == 0


async def test_fragments_earn_nothing(autojump_clock):
    async def handler(call):
        await call.answer(bytes(4000))

    async with serving(handler) as running:
        client = await running.connect(window=1)
        call = client.call()
        await client.settle()
        (connection,) = running.connections
        client.open_window(300, call)
        await client.settle()
        connection.account._left = 0.0
        for _ in range(1000):
            client.open_window(1, call)
            await client.settle()
        assert connection.account._left <= 0
