"""Answers over HTTP on their way: whatever their size, a client that reads gets the whole, however
slowly; one that does not read keeps little of the server's memory and delays nobody; and an answer
whose writing is cancelled ends whole or with its connection.

The server is real, its door answers at once, and its limits are small, so that every size from
nothing to several times `Limits.held_bytes` is cheap.
"""

import contextlib
import logging
import random
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import trio
import trustme

from engine.errors import StepFailed
from grpc_service.openai import call as http_call
from grpc_service.openai.call import HttpCall
from grpc_service.openai.server import HttpServer
from grpc_service.rpc.errors import Disconnected
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.server import RpcServer
from grpc_service.rpc.sockets import HTTP1, listen_tcp
from tests.support.openai_calls import Connection, request
from tests.support.wire import wait_until

HELD = 2**20
PART = 2**14
SIZES = (0, 1, PART - 1, PART, PART + 1, HELD // 4, HELD, 2 * HELD + 1, 5 * HELD)
WINDOW = 4096
EVENTS = (b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Send answers in small parts, and take little of what is sent into the sockets' buffers."""
    monkeypatch.setattr(http_call, "SENT_BYTES", PART)
    listen = socket.create_server

    def create_server(*given, **options):
        made = listen(*given, **options)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WINDOW)
        return made

    monkeypatch.setattr(socket, "create_server", create_server)


def body_of(size):
    """Return an answer's body, no part of which is like another."""
    return random.Random(size).randbytes(size)


class Served:
    """A server of answers. ``held`` are the bytes that it keeps; ``failed`` what ended answers."""

    def __init__(self, shared, port):
        self.held = shared.held
        self.port = port
        self.failed = []

    async def serve(self, scope, receive, send, connection):
        """Answer with as many bytes as the path says, whole or as a stream."""
        call = HttpCall(scope, receive, send, connection)
        _, kind, size = call.method.split("/")
        connection.arrivals.add(call)
        connection.num_calls += 1
        try:
            with call.scope:
                await call.read_body(100)
                call.free_body()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(call.watch)
                    await self.answer(call, kind, int(size))
                    nursery.cancel_scope.cancel()
        finally:
            connection.num_calls -= 1

    async def be_cancelled(self, call, kind, at):
        """Send an answer in steps, of which one is cancelled, and end as the door does."""
        if kind == "streamed":
            call.begin_events()
        steps = [call.finish]
        steps[:0] = [
            partial(call.write, part) for part in (EVENTS if call._is_stream else EVENTS[:1])
        ]
        for number, step in enumerate(steps):
            with trio.CancelScope() as scope:
                if number == at:
                    scope.cancel()
                await step()
            if scope.cancelled_caught:
                await call.fail(StepFailed("it was cancelled"))
                await call.finish()
                return

    async def answer(self, call, kind, size):
        """Send an answer."""
        try:
            if kind in ("streamed", "whole_at"):
                await self.be_cancelled(call, kind, size)
                return
            if kind == "stream":
                call.begin_events()
            await call.write(body_of(size))
            await call.finish()
        except Disconnected:
            self.failed.append("left")
        except Exception as error:
            self.failed.append(type(error).__name__)
            await call.fail(error)
            await call.finish()


def run_beside(client, tls=None, **limits):
    """Run a server of answers in this process, and ``client(served)`` in a thread."""

    async def main():
        made = RpcServer(None, Limits(**{"held_bytes": HELD, "held_stall_s": 0.5} | limits))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run, [])
            [listener] = listen_tcp("127.0.0.1", 0, tls, HTTP1)
            served = Served(made.shared, listener.port)
            nursery.start_soon(HttpServer(served.serve, made.shared).run, [listener])
            found = await trio.to_thread.run_sync(client, served)
            nursery.cancel_scope.cancel()
        return found

    return trio.run(main)


def get(served, kind, size, **options):
    """Return a client that has sent its request."""
    one = Connection(served.port, **options)
    one.send(request(f"/{kind}/{size}", b""))
    return one


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("kind", ["whole", "stream"])
def test_a_client_that_reads_gets_an_answer_of_any_size(kind, is_tls):
    """Red if the whole answer counts as unsent: beyond twice the limit its client is cut."""
    authority = trustme.CA()
    context, tls = ssl.create_default_context(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.configure_trust(context)
    authority.issue_cert("localhost").configure_cert(tls)

    def client(served):
        for size in SIZES:
            with Connection(served.port, window=WINDOW) as one:
                if is_tls:
                    one.socket = context.wrap_socket(one.socket, server_hostname="localhost")
                one.send(request(f"/{kind}/{size}", b""))
                answer = one.read()
                assert not answer.is_cut, size
                assert answer.body == body_of(size)
        wait_until(lambda: not (served.held.num_bytes or served.held.unsent), 5, "the end")

    run_beside(client, tls if is_tls else None)


def test_clients_that_read_at_drawn_speeds_get_their_answers_and_no_one_is_cut():
    """Together they ask for far more than may wait: some are refused, and ask again."""

    def read(served, number):
        draw = random.Random(number)
        kind, size = draw.choice(["whole", "stream"]), draw.choice(SIZES)
        while True:
            with get(served, kind, size, window=draw.choice([WINDOW, None, None, None])) as one:
                if draw.random() < 0.5:  # the first bytes are taken after a while
                    time.sleep(draw.random() * 0.3)
                answer = one.read()
            is_refused = answer.status == 429 or b'"memory_exhausted"' in answer.body[:200]
            if answer.is_cut or not is_refused:
                return size, answer.is_cut, answer.body == body_of(size)

    def client(served):
        with ThreadPoolExecutor(12) as threads:
            return list(threads.map(partial(read, served), range(24)))

    found = run_beside(client)
    assert [one for one in found if one[1] or not one[2]] == []


def test_clients_that_do_not_read_keep_little_and_delay_no_other_address():
    """Each would keep three times the limit."""
    size, address = 3 * HELD, "127.0.0.2"

    def client(served):
        with contextlib.ExitStack() as stack:
            many = [stack.enter_context(get(served, "whole", size, window=1)) for _ in range(6)]
            time.sleep(0.2)
            assert served.held.unsent.total() <= http_call.WAITING_SHARES * HELD
            assert served.held.num_bytes <= 2 * HELD
            heads = [one.read_head() for one in many]
            for one, (status, headers) in zip(many, heads, strict=True):
                if status != 200:
                    refused = one.read_body(status, headers)
                    assert (status, refused.error["code"]) == (429, "memory_exhausted")
            for _ in range(10):
                with get(served, "whole", size, source=address) as one:
                    assert one.read().body == body_of(size)
            return [status for status, _ in heads]

    assert sorted(run_beside(client, held_stall_s=60.0)) == [200] * 2 + [429] * 4


def test_a_client_that_does_not_read_loses_its_answer_when_another_waits(monkeypatch):
    monkeypatch.setattr(http_call, "COUNTED_SHARE", 1)  # so that one answer fills the room

    def client(served):
        with contextlib.ExitStack() as stack:
            many = [stack.enter_context(get(served, "whole", 2 * HELD, window=1)) for _ in range(3)]
            time.sleep(0.2)
            with get(served, "whole", HELD) as one:
                answer = one.read()
            return answer.body == body_of(HELD), [one.read().is_cut for one in many]

    assert run_beside(client) == (True, [True] * 3)


@pytest.mark.parametrize("kind", ["streamed", "whole_at"])
@pytest.mark.parametrize("at", range(5))
def test_an_answer_whose_writing_is_cancelled_is_whole_or_cut(kind, at, caplog):
    """Red if what h11 has framed, and the socket has not got, is taken for sent: then an error
    follows a head that never came, or h11 refuses it."""

    def client(served):
        with get(served, kind, at) as one:
            answer = one.read()
            return answer.is_cut, answer.status, answer.is_cut or answer.body

    is_cut, status, body = run_beside(client)
    assert is_cut or status in (200, 500)
    if not is_cut and status == 200:
        whole = EVENTS[0] if kind == "whole_at" else b"".join(EVENTS)
        assert body == whole or b'"error"' in body
    assert [one.message for one in caplog.records if one.levelno >= logging.WARNING] == []
