"""How a server with connections in memory stops."""

import math

import pytest
import trio
import trio.testing

from grpc_service.rpc.limits import Limits
from grpc_service.rpc.status import StatusCode
from grpc_service.rpc.streams import ErrorCodes
from tests.support.rpc_calls import MINUTE, echo, serving, wait
from tests.support.rpc_memory import Client, Wire


async def test_a_server_that_stops_sends_goaway_lets_calls_finish_and_cuts_the_rest(autojump_clock):
    async def handler(call):
        await call.read()
        await trio.sleep(float(call.metadata[-1][1]))
        await call.end(StatusCode.OK)

    async with serving(handler) as running:
        client = await running.connect()
        soon, never = (
            client.call(b"", headers={"x-wait": "3"}),
            client.call(b"", headers={"x-wait": "1000"}),
        )
        await client.settle()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.server.stop, 10)
            await client.settle()
            assert client.has_goaway
            assert len(client.ends) == 0
            began_at = trio.current_time()
            await trio.sleep(4)
            await client.settle()
            assert client.ends == {soon: "0"}
            assert not client.wire.is_closed
        assert trio.current_time() - began_at == pytest.approx(10)
        await trio.testing.wait_all_tasks_blocked()
        assert client.wire.is_closed
        assert never not in client.ends
        assert running.num_running == len(running.connections) == 0


@pytest.mark.parametrize("patience_s", [0, Limits().leave_patience_s])
async def test_a_server_without_calls_stops_once_its_clients_know(autojump_clock, patience_s):
    """Clients that do not answer are waited for during `Limits.leave_patience_s`."""
    async with serving(wait) as running:
        clients = [await running.connect() for _ in range(3)]
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.server.stop, MINUTE)
            await trio.testing.wait_all_tasks_blocked()
            if not patience_s:
                for client in clients:
                    await client.settle()
        await trio.testing.wait_all_tasks_blocked()
        assert trio.current_time() == began_at + patience_s
        assert running.has_ended
        assert all(client.wire.is_closed for client in clients)
        assert not running.connections


async def test_a_call_on_its_way_is_served_by_a_server_that_stops(autojump_clock):
    async with serving(echo) as running:
        client = await running.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.server.stop, MINUTE)
            await trio.testing.wait_all_tasks_blocked()
            call = client.call()  # before the client has read that the server stops
            await client.settle()
        assert client.ends == {call: "0"}


@pytest.mark.parametrize("is_ready", [False, True])
async def test_a_server_that_stops_waits_for_no_handshake(autojump_clock, is_ready):
    """A client whose handshake ends in time gets GOAWAY; any other is cut."""
    async with serving(wait) as running:
        holder = await running.connect()
        holder.call()
        await holder.settle()
        client = Client(Wire())
        client.wire.ready = trio.Event()
        running.listener.arrive(client.wire)
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.server.stop, 10)
            await trio.sleep(5)
            if is_ready:
                client.wire.ready.set()
                await client.settle()
                assert client.has_goaway
        await trio.testing.wait_all_tasks_blocked()
        assert running.has_ended
        assert client.wire.is_closed
        assert not running.connections
        assert not running.num_running


@pytest.mark.parametrize("calls", [True, False])
async def test_a_client_whose_handshake_ends_after_the_leave_repeats_its_calls(
    autojump_clock, calls
):
    """Nobody waits for such calls. A call that has arrived is refused by REFUSED_STREAM, not by a
    status; later calls have ids above the last one in the GOAWAY."""
    async with serving(wait) as running:
        client = Client(Wire())
        client.wire.ready = trio.Event()
        running.listener.arrive(client.wire)
        # This call does not wait for the server's SETTINGS.
        refused = {client.call(b""): ErrorCodes.REFUSED_STREAM} if calls else {}
        await trio.testing.wait_all_tasks_blocked()
        running.server.leave()
        await running.server.settle()
        client.wire.ready.set()
        await client.settle()
        assert client.ends == refused
        assert calls or client.last_served == 0
        assert not running.calls


@pytest.mark.parametrize("knows", ["after its calls", "not within the patience", "comes late"])
async def test_no_call_is_served_that_its_client_repeats_elsewhere(autojump_clock, knows):
    """gRPC's clients repeat calls whose stream ids are above the last one in a GOAWAY. Red if a
    lasting call that arrives after the GOAWAY is served here, too."""
    limits = Limits(lasting_methods=(b"/a.Lasting/",))
    async with serving(echo, limits) as running:
        client = Client(Wire(), is_deaf=knows == "not within the patience")
        if knows == "comes late":
            client.wire.ready = trio.Event()
        running.listener.arrive(client.wire)
        await trio.testing.wait_all_tasks_blocked()
        if knows == "comes late":
            client.call(b"x", path="/a.Lasting/Call")
        running.server.leave()
        if knows != "after its calls":
            await running.server.settle()
        client.wire.ready.set()
        await trio.testing.wait_all_tasks_blocked()
        for name in ("Lasting", "Other") * 2:
            client.call(b"x", path=f"/a.{name}/Call")
        if knows == "after its calls":
            client.is_deaf = False
        await client.settle()
        served = [call._stream.id for call in running.calls]
        assert served
        assert max(served) <= client.last_served
        refused = {call for call, end in client.ends.items() if end == ErrorCodes.REFUSED_STREAM}
        assert refused == client.ends.keys() - set(served)


async def test_a_stop_does_not_wait_for_a_refused_call(autojump_clock):
    async with serving(wait) as running:
        client = await running.connect()
        client.call(headers={":method": "GET"})
        began_at = trio.current_time()
        client.wire.room = 0
        await client.settle()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.server.stop, MINUTE)
            await trio.sleep(1)
            client.wire.room = math.inf
            client.wire.change()
        assert trio.current_time() - began_at == pytest.approx(1)


async def test_a_server_that_leaves_settles_when_every_handler_has_what_it_needs(autojump_clock):
    """A call is on its way until its handler calls `note_taken`, and may run on after that."""

    async def handler(call):
        await call.read()
        await trio.sleep(2)
        call.connection.note_taken(call)
        await trio.sleep(10)
        await call.end(StatusCode.OK)

    async with serving(handler) as running:
        client = await running.connect()
        call = client.call(b"")
        await client.settle()
        began_at = trio.current_time()
        running.server.leave()
        await client.settle()
        with pytest.raises(trio.BrokenResourceError):
            running.listener.arrive(Wire())
        await running.server.settle()
        assert trio.current_time() == pytest.approx(began_at + 2)
        await trio.sleep(20)
        await client.settle()
        assert client.ends == {call: "0"}


@pytest.mark.parametrize("is_deaf", [False, True])
async def test_a_server_that_leaves_does_not_wait_for_ever(autojump_clock, is_deaf):
    """The server waits for a handler or a silent client only for a limited time."""
    limits = Limits()
    async with serving(wait) as running:
        client = await running.connect(is_deaf=is_deaf)
        if not is_deaf:
            client.call(b"")
            await client.settle()
        began_at = trio.current_time()
        running.server.leave()
        if not is_deaf:
            await client.settle()
        await running.server.settle()
        patience_s = limits.leave_patience_s if is_deaf else limits.settle_patience_s
        assert trio.current_time() == pytest.approx(began_at + patience_s)


async def test_a_connection_that_is_open_keeps_what_lasts_when_the_server_leaves(autojump_clock):
    """Other calls than those of `Limits.lasting_methods` are refused, and repeated elsewhere."""
    limits = Limits(lasting_methods=(b"/a.Lasting/",))
    async with serving(echo, limits) as running:
        client = await running.connect()
        running.server.leave()
        await client.settle()
        await trio.sleep(30)
        lasting = client.call(b"x", headers={":path": "/a.Lasting/Call"})
        other = client.call(b"x", headers={":path": "/a.Other/Call"})
        await client.settle()
        assert client.ends == {lasting: "0", other: ErrorCodes.REFUSED_STREAM}
        assert not client.wire.is_closed
        await running.server.stop(MINUTE)
        await trio.testing.wait_all_tasks_blocked()
        assert client.wire.is_closed
