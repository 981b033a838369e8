"""Requests and connections over HTTP: what they leave behind, what they cost their clients, and
when a connection without a request is closed."""

import gc
import re
import time
import tracemalloc
from functools import partial
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError, InvalidRequest
from engine.worker.fakes.text import FakeRunner
from grpc_service.app import openai_port
from grpc_service.app.application import serve
from grpc_service.app.server_config import ServerConfig
from grpc_service.openai import call as http_call
from grpc_service.openai import door
from grpc_service.openai import server as http_server
from grpc_service.openai.call import HttpCall, HttpRecord
from grpc_service.openai.connection import DoorStream, HttpConnection
from grpc_service.rpc import server as rpc_server
from grpc_service.rpc.accounts import POINT_S, Addresses
from grpc_service.rpc.fairness import OverheadLimiter
from grpc_service.rpc.held_bytes import Holding
from grpc_service.rpc.server import RpcServer
from tests.support.early_answers import BEARER, EARLY, KEY, LIMITS, early
from tests.support.openai_calls import TEXT, Connection, request

OURS = (HttpCall, HttpRecord, HttpConnection, DoorStream, Holding, InvalidRequest)
STREAM = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "stream": True}
REQUESTS = {
    "stream": (TEXT, STREAM),
    "whole": (TEXT, STREAM | {"stream": False}),
    "refused": (TEXT, {"prompt": 1.5}),
    "unknown path": ("/x", {}),
    "large and refused": (TEXT, {"prompt": 1.5, "user": "a" * 2**16}),
    "large and no JSON": (TEXT, b'{"prompt": ' + b"a" * 2**16),
}
STATUSES = {"refused": 400, "large and refused": 400, "large and no JSON": 400, "unknown path": 404}
COUNT = 4


def run_beside(client, **settings):
    """Run a server in this process, and ``client(port)`` in a thread; return what that returned,
    and the names of our classes of which objects are left."""

    async def main():
        async with trio.open_nursery() as nursery:
            config = EngineConfig(models=(ModelConfig("fake"),), drain_timeout_s=0.1)
            ports = ServerConfig(port=0, openai_port=0, **settings)
            make = partial(serve, make_runner=lambda model, config: FakeRunner())
            server = await nursery.start(make, config, ports)
            await server.engine.wait_ready()
            found = await trio.to_thread.run_sync(client, server.openai_port)
            await trio.testing.wait_all_tasks_blocked(0.05)
            left = [type(one).__name__ for one in gc.get_objects() if type(one) in OURS]
            nursery.cancel_scope.cancel()
        return found, left

    return trio.run(main)


@pytest.mark.parametrize("is_kept", [True, False], ids=["one connection", "connections"])
@pytest.mark.parametrize("what", REQUESTS)
def test_what_has_ended_leaves_nothing_to_the_garbage_collector(what, is_kept):
    """A server runs it so seldom that the garbage of a flood would take tens of megabytes."""

    def client(port):
        statuses = set()
        connection = Connection(port)
        for _ in range(COUNT):
            answer = connection.ask(*REQUESTS[what])
            statuses.add(answer.status)
            if not is_kept or answer.headers.get("connection") == "close":
                connection.close()
                connection = Connection(port)
        connection.close()
        gc.disable()
        return statuses

    gc.collect()
    gc.disable()
    try:
        statuses, left = run_beside(client)
    finally:
        gc.enable()
    assert statuses == {STATUSES.get(what, 200)}
    assert left == []


def test_a_kept_connection_is_closed_when_no_request_follows(monkeypatch):
    """The end of an answer starts its clock, and must not be taken for the client's leaving."""
    monkeypatch.setattr(http_server, "IDLE_S", 0.3)

    def client(port):
        with Connection(port) as connection:
            assert connection.ask(TEXT, STREAM).events[-1] == "[DONE]"
            connection.socket.settimeout(10)
            return connection.socket.recv(1)

    assert run_beside(client)[0] == b""


@pytest.fixture
def costs(monkeypatch):
    """Return the seconds for which clients are to wait for their turns, in order; none waits."""
    found = []

    async def enter(self, owner, seconds):
        await trio.lowlevel.checkpoint()
        found.append(seconds)

    monkeypatch.setattr(OverheadLimiter, "enter", enter)
    return found


@pytest.fixture
def strict(tmp_path):
    """Return the settings of a server for `EARLY`."""
    keys = tmp_path / "keys"
    keys.write_text(f"ours {KEY} max_requests=1\n")
    return LIMITS | {"api_key_file": str(keys)}


@pytest.mark.parametrize("name", EARLY)
def test_a_request_that_is_no_work_costs_its_client_time(costs, strict, name):
    """Whatever is answered without the engine waits for its client's turn once."""

    def client(port):
        with Connection(port) as connection:
            costs.clear()
            connection.send(early(name, 40))
            assert connection.read().status == EARLY[name][3]
        return sum(costs)

    paid = run_beside(client, **strict)[0]
    assert door.USELESS_S <= paid < 1.5 * door.USELESS_S


def test_work_that_is_answered_costs_no_time(costs):
    def client(port):
        with Connection(port) as connection:
            costs.clear()
            assert {connection.ask(TEXT, STREAM).status for _ in range(20)} == {200}
        return costs[:]

    assert run_beside(client)[0] == []


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "read"])
@pytest.mark.parametrize("size", [1, 2, 63, 256, 1024, 2**14])
def test_small_parts_of_a_body_cost_their_client_time(costs, size, is_refused):
    """Each takes about as long as a large one, also where it is read only to be dropped."""
    count = 200

    def client(port):
        kind = "text/plain" if is_refused else "application/json"
        headers = {"Transfer-Encoding": "chunked", "Content-Length": None, "Content-Type": kind}
        body = b'{"prompt": [1], "max_tokens": 1}'.ljust(count * size)
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
        with Connection(port) as connection:
            costs.clear()
            connection.send(request(TEXT, b"", headers=headers) + b"".join(chunks) + b"0\r\n\r\n")
            assert connection.read().status == (415 if is_refused else 200)
            if is_refused:
                connection.read_until(b"never")  # the server reads what comes, and closes
        return len(parts), sum(costs)

    num_parts, paid = run_beside(client)[0]
    owed_s = 0.0 if size >= 1024 else num_parts * http_call.SMALL_PART * POINT_S
    assert 0.9 * owed_s <= paid <= 1.1 * owed_s + 2 * door.USELESS_S


def test_small_parts_of_a_body_take_its_memory_once():
    """Red if each of them is kept as an object."""
    num_left = 30_000

    async def receive():
        nonlocal num_left
        num_left -= 1
        body = bytes(bytearray(b"ab"))  # a new object
        return {"type": "http.request", "body": body, "more_body": num_left > 0}

    async def main():
        transport = SimpleNamespace(limit_unsent=lambda num_bytes: None, certified="")
        connection = HttpConnection(RpcServer(None).shared, transport, "ipv4:127.0.0.1:5")
        connection.go_on, connection.pay_owed = lambda: None, trio.lowlevel.checkpoint
        scope = {"method": "POST", "path": "/", "query_string": b"", "headers": []}
        call = HttpCall(scope, receive, None, connection)
        tracemalloc.start()
        try:
            body = await call.read_body(2**20)
            return len(body), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    size, peak = trio.run(main)
    assert peak < 4 * size + 2**16


REFUSED = {
    "by its model": {"model": "none"},
    "by its length": {"prompt": [1] * 5000},
    "by a field": {"temperature": -1},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_a_refused_request_leaves_its_key_to_others_while_it_waits(monkeypatch, strict, fields):
    async def never(self, call):
        await trio.sleep_forever()

    monkeypatch.setattr(door.Door, "_pay", never)

    def client(port):
        with Connection(port) as refused, Connection(port) as other:
            refused.send(request(TEXT, STREAM | fields, headers=BEARER))
            time.sleep(0.2)
            return other.ask(TEXT, STREAM, headers=BEARER).status

    assert run_beside(client, **strict)[0] == 200


@pytest.mark.parametrize("is_kept", [True, False], ids=["one connection", "connections"])
def test_requests_that_fail_cost_their_client_time(monkeypatch, costs, is_kept):
    """On a kept connection the next request waits; else the address's next connection does."""
    count, debts = 4, []
    late = {"X-Request-Timeout": "0.05"}

    class Debts(Addresses):
        def add_debt_s(self, address, seconds):
            debts.append(seconds)

    monkeypatch.setattr(rpc_server, "Addresses", Debts)

    def client(port):
        connection = Connection(port)
        costs.clear()
        for _ in range(count):
            body = STREAM | {"max_tokens": 2000, "stream": False}
            assert connection.ask(TEXT, body, headers=late).status == 504
            if not is_kept:
                connection.close()
                connection = Connection(port)
        connection.ask("/health", verb="GET")
        connection.close()
        return sum(costs) - door.USELESS_S

    paid = run_beside(client)[0]
    least_s = count * door.LOST_WORK * POINT_S
    assert (paid if is_kept else sum(debts)) >= least_s


@pytest.mark.parametrize("is_left", [False, True], ids=["answered", "left"])
def test_work_that_is_left_costs_its_address_time_and_answered_work_pays(monkeypatch, is_left):
    debts = []

    class Debts(Addresses):
        def add_debt_s(self, address, seconds):
            debts.append(seconds)

    monkeypatch.setattr(rpc_server, "Addresses", Debts)

    def client(port):
        with Connection(port) as connection:
            connection.send(request(TEXT, STREAM | {"max_tokens": 500} if is_left else STREAM))
            if is_left:
                connection.read_until(b"data: ")
            else:
                connection.read()

    run_beside(client)
    [debt_s] = debts
    assert (debt_s > 0) == is_left


def test_without_the_extra_the_server_says_what_to_install(monkeypatch):
    monkeypatch.setattr(openai_port, "find_spec", lambda name: None)
    with pytest.RaisesGroup(
        pytest.RaisesExc(ConfigError, match=re.escape("pip install 'triolet[openai]'")),
        flatten_subgroups=True,
    ):
        run_beside(lambda port: None)
