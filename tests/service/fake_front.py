"""A front without an engine: calls hand out what a test scripted, on a server in a thread."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import threading
from dataclasses import dataclass, field

import grpc
import trio

from engine.core.events import Tokens
from engine.core.plan import TokenSpan
from engine.core.types import Explanation
from engine.errors import ModelNotFound, RequestNotFound
from engine.status import (
    AbortOutcome,
    Counts,
    EngineStatistics,
    ModelState,
    ModelStatus,
    RequestsTotal,
)
from grpc_service.config import ServerConfig
from grpc_service.connections import Flusher, RpcServer
from grpc_service.health import SERVICE_NAME as HEALTH_NAME
from grpc_service.health import HealthServicer, health_methods
from grpc_service.reception import Reception
from grpc_service.reflection import reflection_methods
from grpc_service.servicer import SERVICE_NAMES, methods
from grpc_service.sockets import listen

TEST_TIMEOUT_S = 30
# A client whose window closes after a few KB: the window is the receiver's to set.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))


class Left:
    """Set in the server's thread, waited for in the test's loop."""

    def __init__(self):
        self._event = threading.Event()
        self.set = self._event.set

    async def wait(self):
        assert await asyncio.to_thread(self._event.wait, TEST_TIMEOUT_S)


@dataclass
class FakeCall:
    """Hands out ``batches`` in turn, then waits for ever (``hangs``), raises ``error`` or ends.
    A hanging one that is cancelled hands out ``afterwards``, if there is any: a careless front.
    """

    request: object
    batches: list
    error: BaseException | None = None
    hangs: bool = False
    afterwards: list | None = None
    request_id: str = "r1"
    credited: tuple = (Tokens,)
    num_written: int = 0
    num_received: int = 0
    num_leaves: int = 0
    left: Left = field(default_factory=Left)

    async def receive(self):
        await trio.lowlevel.checkpoint()
        if self.num_received < len(self.batches):
            self.num_received += 1
            return self.batches[self.num_received - 1]
        if self.hangs:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                if self.afterwards is None:
                    raise
                return self.afterwards
        if self.error is not None:
            raise self.error
        return ()

    def write_straight(self, write):
        """It hands everything to the task."""

    def written(self, num_events):
        self.num_written += num_events

    def cancel(self):
        pass

    def leave(self):
        self.num_leaves += 1
        self.left.set()


class FakeEngine:
    """A character is a token; two models, one of which failed."""

    def __init__(self):
        self.asked = []

    async def tokenize(self, model, *, text, chat, add_special_tokens):
        self.asked.append((model, text, chat, add_special_tokens))
        text = text if chat is None else chat.messages[0]["content"]
        return tuple(TokenSpan(ord(c), c, i, i + 1) for i, c in enumerate(text)), 2048

    async def detokenize(self, model, ids, *, skip_special_tokens):
        self.asked.append((model, ids, skip_special_tokens))
        return "".join(map(chr, ids))

    def list_models(self):
        return [
            ModelStatus("stories", ModelState.READY, aliases=("s",), last_used=1.5),
            ModelStatus("broken", ModelState.FAILED, error="no such file"),
        ]

    def get_model(self, name):
        for status in self.list_models():
            if name in (status.name, *status.aliases):
                return status
        raise ModelNotFound(f"no model is called {name!r}")

    def pause(self, mode, model=""):
        self.asked.append(("pause", mode, model))

    def resume(self, model=""):
        self.asked.append(("resume", model))

    def reset_prefix_cache(self, model=""):
        self.asked.append(("reset", model))

    def abort(self, request_id):
        self.asked.append(("abort", request_id))
        return AbortOutcome.REMEMBERED

    def explain(self, request_id):
        if request_id != "r1":
            raise RequestNotFound(f"no live request has the id {request_id!r}")
        return Explanation("WAITING", "seats: 1 of 1 sequences run", 2, 1.25, 0, 0, 0.5)

    async def drain_in_background(self, timeout_s=None):
        self.asked.append(("drain", timeout_s))


STATISTICS = EngineStatistics(
    totals=Counts(running=3, requests_total=RequestsTotal(finished=7)), replicas=()
)


class FakeFront:
    """Every generation is the one scripted; ``calls`` keeps them."""

    def __init__(self, *batches, **script):
        self.script = {"batches": list(batches), **script}
        self.calls = []
        self.engine = FakeEngine()

    @property
    def last(self):
        return self.calls[-1]

    def generate(self, request, peer=""):
        self.calls.append(FakeCall(request, **self.script))
        return self.last

    encode = generate

    def statistics(self):
        return STATISTICS


@contextlib.contextmanager
def serving(front, health=None):
    """The address of a server of ``front``, gone when the block is left, and Trio's token there."""
    started, told, found = threading.Event(), trio.Event(), []

    async def main():
        config = ServerConfig(port=0)
        served = [*methods(front), *reflection_methods([*SERVICE_NAMES, HEALTH_NAME])]
        served += health_methods(health or HealthServicer())
        server = RpcServer(config, Flusher(), Reception(served, None).serve)
        [listener] = listen(config)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run, [listener])
            found.append((listener.getsockname()[1], trio.lowlevel.current_trio_token()))
            started.set()
            await told.wait()
            await server.stop(0)

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    started.wait()
    [(port, token)] = found
    try:
        yield f"127.0.0.1:{port}", token
    finally:
        token.run_sync_soon(told.set)
        thread.join()


@functools.cache
def runner():
    """One asyncio loop for every test of this process: grpc's poller knows one at a time, and an
    event that comes late for a loop that is closed makes noise in another's test."""
    one = asyncio.Runner()
    atexit.register(one.close)
    return one


def complaints(caplog):
    """What was logged, but for grpc's poller about loops that other tests closed."""
    return [r for r in caplog.records if "PollerCompletionQueue" not in r.getMessage()]


def run(front, main, *, health=None, options=()):
    """Runs ``main(channel)`` against a server of ``front``, on asyncio; ``channel.tell`` runs a
    function on the server's side."""

    async def bounded(address, token):
        async with (
            asyncio.timeout(TEST_TIMEOUT_S),
            grpc.aio.insecure_channel(address, options=options) as channel,
        ):
            channel.address = address  # for clients of another kind
            channel.tell = lambda function, *args: trio.from_thread.run_sync(
                function, *args, trio_token=token
            )
            return await main(channel)

    with serving(front, health) as (address, token):
        return runner().run(bounded(address, token))
