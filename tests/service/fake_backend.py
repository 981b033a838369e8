"""A backend without an engine: its streams do what a test scripted, on a server in a thread."""

import asyncio
import atexit
import contextlib
import functools
import threading
from types import SimpleNamespace

import grpc
import trio

from engine.core.common.types import DraftCounts, Explanation
from engine.core.text.types import Tokens
from engine.errors import InvalidRequest, ModelNotFound, RequestNotFound
from engine.requests.text.values import validate_tokenize
from engine.requests.usage import Usage, UsageSums
from engine.status import (
    AbortOutcome,
    Counts,
    EngineStatistics,
    ModelState,
    ModelStatus,
    RequestsTotal,
)
from engine.worker.interface import TokenSpan
from grpc_service.access.interceptor import Interceptor
from grpc_service.app.health import SERVICE_NAME as HEALTH_NAME
from grpc_service.app.health import HealthServicer, health_methods
from grpc_service.rpc.server import RpcServer
from grpc_service.rpc.sockets import listen_tcp
from grpc_service.services.error_status import status_of
from grpc_service.services.methods import SERVICE_NAMES, methods
from grpc_service.services.reflection import reflection_methods

TEST_TIMEOUT_S = 30
# A client whose window closes after a few KB. The receiver chooses the window's size.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))


class Left:
    """An event that the server's thread sets and the test's loop waits for."""

    def __init__(self):
        self._event = threading.Event()
        self.set = self._event.set

    async def wait(self):
        """Wait until the event is set. Cancellation: ends only the waiting."""
        assert await asyncio.to_thread(self._event.wait, TEST_TIMEOUT_S)


class FakeStream:
    """A stream with a script.

    It pushes ``batches`` to its reader in turn, each once the batch before was read. Then it waits
    for ever (``hangs``), or ends, with ``error`` or without. After its reader has left, it still
    pushes ``afterwards``, as a careless stream would.
    """

    request_id = "r1"
    wants_progress = makes_tokens = False
    result_types = ()
    bill = SimpleNamespace(record=lambda stream: UsageSums())

    def __init__(
        self,
        request,
        reader,
        *,
        batches,
        error=None,
        hangs=False,
        afterwards=None,
        credited=(Tokens,),
    ):
        self.request = request
        self.credited = credited
        self.batches, self.hangs, self.afterwards = batches, hangs, afterwards
        self.credit = self
        self.error = None
        self.is_closed = False
        self.num_pushed = self.num_written = self.num_received = self.num_leaves = 0
        self.left = Left()
        self._reader = reader
        self._outcome = error
        self._has_left = False
        trio.lowlevel.spawn_system_task(self._feed)

    def note_taken(self):
        """Do nothing: nothing waits until a reader has taken the stream."""

    async def _feed(self):
        for batch in self.batches:
            for event in batch:
                self.num_pushed += isinstance(event, self.credited)
                self._reader.push(event)
            self.num_received += 1
            await trio.lowlevel.checkpoint()
            while self.num_written < self.num_pushed:
                if self._has_left:
                    return
                await trio.sleep(0.001)
            if not any(isinstance(event, self.credited) for event in batch):
                await trio.sleep(0.02)  # time to write events that give no credit back
        if not self.hangs and not self._has_left:
            self.error, self.is_closed = self._outcome, True
            self._reader.end(self.error)

    def release(self, num_events):
        self.num_written += num_events
        return False

    def report_drained(self):
        raise AssertionError("nobody waits for this stream's credit")

    def leave(self, reader, left_at, gone):
        if not self.is_closed:
            self.close_reader(left_at)

    def close_reader(self, left_at=None):
        self._has_left = True
        for event in self.afterwards or ():
            self._reader.push(event)

    def account(self, elapsed_s):
        return {}


class FakeEngine:
    """An engine with two models, one of which failed to load; a token is a character.

    Every request's stream is a `FakeStream`; ``streams`` keeps them.
    """

    config = SimpleNamespace(stream_buffer=64)
    detached = None  # nobody attaches to these streams

    def __init__(self, script):
        self.usage = Usage(0.0)
        self.asked = []
        self.script = script
        self.streams = []

    def submit(self, request, *, buffer, reader, awaits_reader, arrived_at, origin):
        try:
            request.validate()
        except InvalidRequest as error:
            return FakeStream(request, reader, batches=[], error=error)
        self.streams.append(FakeStream(request, reader, **self.script_of(request)))
        return self.streams[-1]

    def script_of(self, request):
        """Return the arguments of the `FakeStream` for a request."""
        return self.script

    async def tokenize(self, model, *, text=None, chat=None, add_special_tokens=None, origin):
        validate_tokenize(text, chat)
        self.asked.append((model, text, chat, add_special_tokens))
        text = text if chat is None else str(chat.messages[0]["content"])
        return tuple(TokenSpan(ord(c), c, i, i + 1) for i, c in enumerate(text)), 2048

    async def detokenize(self, model, ids, *, skip_special_tokens=True, origin):
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

    def abort_all(self, request_ids, only_of=None):
        self.asked += [("abort", request_id) for request_id in request_ids]
        return [AbortOutcome.REMEMBERED for _ in request_ids]

    def explain(self, request_id, only_of=None):
        if request_id != "r1":
            raise RequestNotFound(f"no live request has the id {request_id!r}")
        drafts = (DraftCounts("constraint"), DraftCounts("lookup", 3, 9, 7))
        waits = "seats: 1 of 1 sequences run"
        return Explanation("WAITING", waits, 2, 1.25, 0, 0, 0.5, 9, 7, drafts)

    async def drain_in_background(self, timeout_s=None):
        self.asked.append(("drain", timeout_s))


STATISTICS = EngineStatistics(
    totals=Counts(running=3, requests_total=RequestsTotal(finished=7)), replicas=()
)


class FakeUnreadCalls:
    """Records which calls' handlers have returned."""

    def __init__(self, engine):
        self._engine = engine

    def ended(self, call, connection):
        pass

    def gone(self, call):
        for stream in self._engine.streams[-1:]:  # the stream of a refused request is not kept
            stream.num_leaves += 1
            stream.left.set()


class FakeBackend:
    """The engine of a server whose streams all have the same script."""

    def __init__(self, *batches, **script):
        self.engine = FakeEngine({"batches": list(batches), **script})
        self.unread_calls = FakeUnreadCalls(self.engine)

    @property
    def streams(self):
        """Return the streams, in the order of their requests."""
        return self.engine.streams

    @property
    def last(self):
        """Return the last request's stream."""
        return self.streams[-1]

    def statistics(self):
        return STATISTICS


@contextlib.contextmanager
def serving(backend, health=None):
    """Yield the address of a server of ``backend``, and its Trio token."""
    started, told, found = threading.Event(), trio.Event(), []

    async def main():
        served = [*methods(backend, 4 * 2**20), *reflection_methods([*SERVICE_NAMES, HEALTH_NAME])]
        served += health_methods(health or HealthServicer())
        server = RpcServer(Interceptor(served, None, status_of).serve)
        [listener] = listen_tcp("127.0.0.1", 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run, [listener])
            found.append((listener.port, trio.lowlevel.current_trio_token()))
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
    """Return one asyncio loop for every test of this process.

    grpc's poller knows one loop at a time: an event that comes late for a closed loop logs an error
    in another test.
    """
    one = asyncio.Runner()
    atexit.register(one.close)
    return one


def complaints(caplog):
    """Return the log, without messages of grpc's poller about loops that other tests closed."""
    return [r for r in caplog.records if "PollerCompletionQueue" not in r.getMessage()]


def run(backend, main, *, health=None, options=()):
    """Run ``main(channel)`` on asyncio against a server of ``backend``.

    ``channel.tell`` runs a function on the server's thread.
    """

    async def bounded(address, token):
        async with (
            asyncio.timeout(TEST_TIMEOUT_S),
            grpc.aio.insecure_channel(address, options=options) as channel,
        ):
            channel.address = address  # for clients other than grpcio's
            channel.tell = lambda function, *args: trio.from_thread.run_sync(
                function, *args, trio_token=token
            )
            return await main(channel)

    with serving(backend, health) as (address, token):
        return runner().run(bounded(address, token))
