"""Which connections a server accepts; no address can keep the clients of other addresses out."""

import socket
import time

import pytest
import trio
import trio.testing

from grpc_service.rpc.accounts import BROKEN_CONNECTION, CONNECTION, POINT_S
from grpc_service.rpc.entrance import Entrance, Pass
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.places import Places
from grpc_service.rpc.sockets import ACCEPTS_MAX, address_of, listen_tcp
from grpc_service.rpc.streams import ErrorCodes
from tests.support.rpc_calls import MINUTE, echo, serving
from tests.support.rpc_memory import Client, Wire
from tests.support.wire import wait_until

NOISY, OTHER, SAME = "ipv4:10.0.0.9:1", "ipv4:10.0.0.7:1", "ipv4:10.0.0.9:2"
HEALTH = "/a.Health/Check"


def test_an_address_has_so_many_connections_that_are_being_opened():
    entrance = Entrance(Limits(openings_per_address_max=3))
    assert [entrance.admit("a") for _ in range(4)] == [Pass.FULL] * 3 + [Pass.REFUSED]
    assert entrance.admit("b") is Pass.FULL
    entrance.note_opened("a")
    assert entrance.admit("a") is Pass.FULL
    assert entrance.num_refused == 1


def test_an_address_that_owes_time_has_few_connections_that_wait_for_it():
    entrance = Entrance(Limits(openings_in_debt_max=2))
    assert [entrance.admit("a") for _ in range(2)] == [Pass.FULL] * 2
    with entrance.paying("a"):
        assert entrance.admit("a") is Pass.REFUSED
        assert entrance.admit("b") is Pass.FULL
    assert entrance.admit("a") is Pass.FULL
    assert not entrance.is_paying("a")


def test_a_crowd_is_let_in_quickly_however_many_addresses_are_connected():
    """Red if the server counts the connections of all addresses again for each new connection."""
    entrance = Entrance(Limits())
    for number in range(15_000):
        entrance.admit(f"{number}")
        entrance.note_opened(f"{number}")

    def seconds():
        begin = time.thread_time()
        for _ in range(ACCEPTS_MAX):
            assert entrance.admit("a") is Pass.FULL
        return time.thread_time() - begin

    assert min(seconds() for _ in range(3)) < 2e-3


async def test_what_is_beyond_the_limits_comes_into_the_reserve():
    entrance = Entrance(Limits(connections_max=3, connections_per_address_max=2))
    assert [entrance.admit("a") for _ in range(3)] == [Pass.FULL] * 2 + [Pass.RESERVED]
    assert [entrance.admit("b") for _ in range(2)] == [Pass.FULL, Pass.RESERVED]
    with entrance.staying("a", Pass.RESERVED):
        pass
    assert entrance.admit("c") is Pass.RESERVED
    assert entrance._open == {"a": 2, "b": 1}, "nothing is kept for others"
    with entrance.staying("a", Pass.FULL):
        assert entrance.admit("c") is Pass.RESERVED
    assert entrance.admit("c") is Pass.FULL


async def test_who_holds_the_most_places_loses_the_oldest():
    places, ends = Places(3), []

    async def stay(owner, name):
        with places.hold(owner):
            await trio.sleep_forever()
        ends.append(name)

    async with trio.open_nursery() as nursery:
        for owner, name in ("a", "a1"), ("b", "b1"), ("a", "a2"), ("c", "c1"), ("d", "d1"):
            nursery.start_soon(stay, owner, name)
            await trio.testing.wait_all_tasks_blocked()
            assert len(places) <= 3
        assert ends == ["a1", "a2"], "a has the most, and then the first of as many"
        nursery.cancel_scope.cancel()
    assert ends == ["a1", "a2"]
    assert len(places) == 0


async def test_a_full_server_answers_what_lasts_and_refuses_the_rest_by_name(autojump_clock):
    """A health probe hears that a full server is alive, and gRPC repeats other calls elsewhere.

    Red if a full server closes each connection: a probe would think that the server hangs.
    """
    limits = Limits(connections_max=2, reserved_max=2, lasting_methods=(b"/a.Health/",))
    async with serving(echo, limits) as running:
        holders = [await running.connect(peer=NOISY) for _ in range(2)]
        idle = [await running.connect(peer=NOISY) for _ in range(2)]
        probe = await running.connect(peer=OTHER)
        health = probe.call(b"x", path=HEALTH)
        other = probe.call(b"x", path="/a.Other/Call")
        await probe.settle()
        assert probe.ends == {health: "0", other: ErrorCodes.REFUSED_STREAM}
        assert [one.wire.is_closed for one in idle] == [True, False], "the oldest gives way"
        assert len(running.connections) == 4
        await trio.sleep(2 * limits.reserved_s)
        await probe.settle()
        assert probe.wire.is_closed, "its client is to try again, as there may be room"
        assert not any(one.wire.is_closed for one in holders)
        holders[0].leave()
        await trio.testing.wait_all_tasks_blocked()
        fresh = await running.connect(peer=OTHER)
        call = fresh.call(b"x", path="/a.Other/Call")
        await fresh.settle()
        assert fresh.ends == {call: "0"}


@pytest.mark.parametrize("stays_s", [0.0, 0.5], ids=["leaves at once", "waits for an answer"])
async def test_an_address_that_connects_over_and_over_delays_no_other(autojump_clock, stays_s):
    """The share of overhead (`Limits.overhead_share`) bounds how much time of the event loop the
    connections of one address take, and how many of them wait for that share. A later client of the
    same address is served, as the connections before it have closed and cost little.

    Red if one connection of an address may wait, or if closed ones cost as much as served ones.
    """
    limits = Limits()
    seconds, num_opened, slowest_s = 5, 0, 0.0

    async def churn(nursery):
        while trio.current_time() < ends_at:
            for _ in range(5):
                nursery.start_soon(come_and_go)
            await trio.sleep(0.01)

    async def come_and_go():
        nonlocal num_opened
        one = Client(Wire(NOISY))
        running.listener.arrive(one.wire)
        await trio.sleep(stays_s)
        num_opened += bool(one.wire.outgoing)
        one.leave()

    async def probe(peer):
        nonlocal slowest_s
        while trio.current_time() < ends_at:
            began = trio.current_time()
            other = Client(Wire(peer))
            running.listener.arrive(other.wire)
            answer = await other.request("a.B/C", b"x")
            assert answer.messages == [b"x"]
            slowest_s = max(slowest_s, trio.current_time() - began)
            if peer == OTHER:
                assert trio.current_time() == began
            other.leave()
            await trio.sleep(0.3)

    async with serving(echo, limits) as running:
        ends_at = trio.current_time() + seconds
        async with trio.open_nursery() as nursery:
            nursery.start_soon(churn, nursery)
            nursery.start_soon(probe, OTHER)
            if not stays_s:
                nursery.start_soon(probe, SAME)
        share = num_opened * CONNECTION * POINT_S / seconds
        assert bool(share) == bool(stays_s)
        assert share < 1.5 * limits.overhead_share
        assert slowest_s < 0.5
        await trio.sleep(MINUTE)
        assert running.server.shared.addresses.take_debt_s(address_of(NOISY)) == 0
        assert not running.server._reception._entrance._opening
        assert not running.server._reception._entrance._open


async def test_a_connection_leaves_a_debt_of_what_it_took(autojump_clock):
    async with serving(echo) as running:
        client = await running.connect(peer=NOISY)
        client.leave()
        await trio.testing.wait_all_tasks_blocked()
        debt_s = running.server.shared.addresses.take_debt_s(address_of(NOISY))
        assert debt_s >= CONNECTION * POINT_S


@pytest.mark.parametrize("begins", [False, True], ids=["it waits", "in a handshake"])
async def test_who_loses_its_place_while_it_is_opened_still_owes(begins, autojump_clock):
    """Red if an address loses its debt when its connections come into the reserve again and
    again."""
    async with serving(echo, Limits(connections_max=0, reserved_max=1)) as running:
        addresses, owed_s = running.server.shared.addresses, BROKEN_CONNECTION * POINT_S
        if not begins:
            addresses.add_debt_s(address_of(NOISY), owed_s)
        first = Client(Wire(NOISY))
        first.wire.ready = trio.Event()
        for one in (first, Client(Wire(OTHER))):
            running.listener.arrive(one.wire)
            await trio.testing.wait_all_tasks_blocked()
        assert first.wire.is_closed
        assert addresses.take_debt_s(address_of(NOISY)) == pytest.approx(owed_s)


@pytest.fixture
async def listener():
    [listener] = listen_tcp("127.0.0.1", 0)
    yield listener
    listener.close()


async def test_a_crowd_is_accepted_in_few_turns(listener):
    """Red if a listener accepts one client in each turn of the loop."""
    clients = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(100)]
    taken = [await listener.accept() for _ in range(2)]
    assert [len(batch) for batch in taken] == [ACCEPTS_MAX, 100 - ACCEPTS_MAX]
    for client in clients:
        client.close()
    for batch in taken:
        for transport, _ in batch:
            await transport.close()


@pytest.mark.parametrize("said", [b"", b"x"], ids=["silent", "after bytes"])
async def test_it_is_known_whether_a_client_has_left(listener, said):
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.sendall(said)
        [(transport, _)] = await listener.accept()
        assert not transport.has_left
    await trio.to_thread.run_sync(wait_until, lambda: transport.has_left)
    await transport.close()


async def test_a_crowd_of_one_address_is_served_at_once(autojump_clock):
    """New clients owe nothing, however many of them share an address."""
    async with serving(echo) as running:
        clients = [Client(Wire(OTHER)) for _ in range(300)]
        for one in clients:
            running.listener.arrive(one.wire)
        for one in clients:
            call = one.call(b"x")
            await one.settle()
            assert one.ends == {call: "0"}
