"""Requests and connections over HTTP that have ended: what they leave behind, and when a connection
without a request is closed."""

import gc
from functools import partial

import pytest
import trio
import trio.testing

from engine.config import EngineConfig, ModelConfig
from engine.errors import InvalidRequest
from engine.worker.fakes.text import FakeRunner
from grpc_service.app.application import serve
from grpc_service.app.server_config import ServerConfig
from grpc_service.openai import server as http_server
from grpc_service.openai.call import HttpCall, HttpRecord
from grpc_service.openai.connection import DoorStream, HttpConnection
from grpc_service.rpc import server as rpc_server
from grpc_service.rpc.accounts import Addresses
from grpc_service.rpc.held_bytes import Holding
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


def run_beside(client):
    """Run a server in this process, and ``client(port)`` in a thread; return what that returned,
    and the names of our classes of which objects are left."""

    async def main():
        async with trio.open_nursery() as nursery:
            config = EngineConfig(models=(ModelConfig("fake"),), drain_timeout_s=0.1)
            ports = ServerConfig(port=0, openai_port=0)
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
