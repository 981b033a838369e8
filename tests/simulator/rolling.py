"""Rolling restarts in virtual time: servers that drain in turn, under clients that know them all.

A server is whole but for sockets and threads: an engine with a fake model, the services, and the
RPC library. The clients behave like gRPC's with pick_first or round_robin; some are simple, and
ignore GOAWAY. Bytes take a drawn time each way, and a request comes in two pieces. Every call must
give all its tokens. Source of a call's repetition: gRFC A6, "Transparent Retries".
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from engine.api.engine import Engine, open_engine
from engine.config import EngineConfig, ModelConfig
from engine.worker.fakes.text import FakeRunner, FakeScript
from grpc_service.access.interceptor import Interceptor
from grpc_service.access.unread_calls import UnreadCalls
from grpc_service.app.application import LASTING
from grpc_service.client import messages as pb
from grpc_service.rpc.connection import Flusher
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.server import RpcServer
from grpc_service.rpc.streams import ErrorCodes
from grpc_service.services.backend import Backend
from grpc_service.services.error_status import status_of
from grpc_service.services.methods import methods
from tests.simulator.determinism import VirtualThreads, run_deterministically
from tests.simulator.watch import Violation
from tests.support.core_driver import expected_tokens
from tests.support.rpc_memory import Client, Wire, WireListener, framed

GENERATE, GET_STATS = "/triolet.v1.Inference/Generate", "/triolet.v1.Control/GetStats"
POLICIES = ("pick_first", "round_robin", "simple")
DRAIN_S = 60.0  # longer than any request
LATENCY_MAX_S = 0.2  # a ping is answered within `Limits.leave_patience_s`
PIECES_MAX_S = 2.0  # a request comes within `Limits.settle_patience_s`
PATIENCE_S = 1000.0  # longer than a world lasts
WINDOW = 2**24


class Place:
    """An address, at which servers follow each other."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._listener = WireListener()
        self._is_to_end = trio.Event()

    def connect(self) -> Wire:
        """Return a connection that the server may accept.

        Raises:
            ConnectionRefusedError: no server listens.
        """
        wire = Wire()
        try:
            self._listener.arrive(wire)
        except trio.BrokenResourceError:
            raise ConnectionRefusedError from None
        return wire

    async def restart(self, nursery: trio.Nursery) -> None:
        """End the server in order, and start another one in ``nursery``. Cancellation: ends it."""
        await self.end()
        await nursery.start(self.serve)

    async def end(self) -> None:
        """Wait until the server has drained. Cancellation: safe."""
        self._has_ended = trio.Event()
        self._is_to_end.set()
        await self._has_ended.wait()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `end`. Cancellation: cuts everything."""
        threads, flusher = VirtualThreads(), Flusher()
        script = FakeScript(step_s=self._step_s, load_s=0.5, sleep=threads.note_sleep)
        parts: list[tuple[Engine, RpcServer]] = []

        def on_change() -> None:
            for engine, server in parts:
                if engine.is_draining:
                    server.leave()

        async def take_leave() -> None:
            for _, server in parts:
                await server.settle()

        async with open_engine(
            EngineConfig(models=(ModelConfig("fake"),), check_level=2),
            make_runner=lambda *_: FakeRunner(script=script),
            threads=threads,
            on_change=on_change,
            take_leave=take_leave,
            batch=flusher,
        ) as engine:
            await engine.wait_ready()
            served = methods(Backend(engine, UnreadCalls(trio.current_time)), 2**22)
            limits = Limits(lasting_methods=LASTING)
            server = RpcServer(Interceptor(served, None, status_of).serve, limits, flusher)
            parts.append((engine, server))
            self._listener, self._is_to_end = WireListener(), trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run, [self._listener])
                task_status.started()
                await self._is_to_end.wait()
                if num_cut := await engine.drain(DRAIN_S):
                    raise Violation(f"a drain of {DRAIN_S} s cut {num_cut} requests")
                await server.stop(1.0)
        self._has_ended.set()


class Link:
    """A client's connection to a ``place``. ``change`` is set when bytes come or it is lost."""

    def __init__(self, place: Place, wire: Wire, latency_s: float) -> None:
        self.place = place
        self._near, self._far = Wire(), wire
        self._latency_s = latency_s
        self.client = Client(self._near)
        self.client.open_window(WINDOW)
        self.has_heard = self.is_lost = False
        self.change = trio.Event()

    @property
    def is_usable(self) -> bool:
        """Whether a client that obeys GOAWAY may open calls."""
        return not (self.is_lost or self.client.has_goaway)

    async def run(self) -> None:
        """Carry bytes both ways. Cancellation: ends the connection."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._carry, self._near.receive, self._deliver)
            nursery.start_soon(self._carry, self._output, self._hear)

    async def _carry(
        self, take: Callable[[], Awaitable[bytes]], give: Callable[[bytes], None]
    ) -> None:
        """Carry bytes one way, up to b"", which is their end."""
        data = b"x"
        while data:
            data = await take()
            await trio.sleep(self._latency_s)
            give(data)

    async def _output(self) -> bytes:
        await self._far.wait_written()
        data = bytes(self._far.outgoing)
        self._far.outgoing.clear()
        return data

    def _deliver(self, data: bytes) -> None:
        self._far.incoming += data
        self._far.has_left = not data
        self._far.change()

    def _hear(self, data: bytes) -> None:
        if self.is_lost:
            return
        self._near.outgoing += data
        self.client.hear()
        self.has_heard = True
        if data:
            self._note_change()
        else:
            self.break_off()

    def break_off(self) -> None:
        """Lose the connection."""
        self.is_lost = True
        self.client.leave()
        self._note_change()

    def _note_change(self) -> None:
        self.change.set()
        self.change = trio.Event()


@dataclass
class Answer:
    """How one call ended. ``crossed``: it was opened before its client knew of the drain."""

    crossed: bool
    end: str | ErrorCodes | None = None  # None: the connection was lost
    is_unserved: bool = False  # the server says that it did not process the call
    tokens: list[int] = field(default_factory=list)


class Caller:
    """One client, with a connection to each address. It calls until ``is_stopping`` is set."""

    def __init__(
        self, number: int, rng: random.Random, places: Sequence[Place], seen: Counter[str]
    ) -> None:
        self._number, self._rng, self._places, self._seen = number, rng, places, seen
        self._policy = POLICIES[number % len(POLICIES)]
        self._latency_s = rng.uniform(0.0, LATENCY_MAX_S)
        self._links: dict[Place, Link] = {}
        self._turn = 0
        self._nursery: trio.Nursery
        self.is_stopping = False

    async def run(self) -> None:
        """Call again and again. Cancellation: ends the calls."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while not self.is_stopping:
                await trio.sleep(self._rng.expovariate(4.0))
                await self._ask()
            nursery.cancel_scope.cancel(reason="the world ends")

    async def _ask(self) -> None:
        """Have one request answered: repeat a call once if no server processed it, and continue a
        stream that breaks off."""
        self._turn += 1
        prompt = (self._number + 5, self._turn % 50 + 5)
        count = self._rng.randint(1, 12)
        wanted, got = expected_tokens(prompt, count=count), list[int]()
        breaks_after = self._rng.randint(0, count) if self._rng.random() < 0.1 else None
        is_again, last = False, None
        while True:
            link = await self._pick(last)
            asked = _request(prompt, count, got)
            answer = await self._call(link, asked, breaks_after)
            got += answer.tokens
            if answer.end == "0":
                break
            if answer.is_unserved:
                self._seen["repeated"] += 1
                if answer.crossed:
                    raise Violation("a call that crossed the server's leave was not served")
                if is_again:
                    raise Violation("gRPC repeats a call once, and it was refused twice")
                is_again, last = True, link.place
            elif breaks_after is not None and answer.end is None:
                self._seen["continued"] += 1
                breaks_after, is_again, last = None, False, link.place  # a new call continues it
            else:
                raise Violation(f"a call was lost: {answer.end}, after {len(got)} tokens")
        if got != wanted:
            raise Violation(f"{got} came, and not {wanted}")
        self._seen["served"] += 1

    async def _call(self, link: Link, message: bytes, breaks_after: int | None) -> Answer:
        """Make a call; break its connection off after ``breaks_after`` tokens."""
        client = link.client
        answer = Answer(crossed=not client.has_goaway)
        call = client.call(path=GENERATE, is_last=False)
        with trio.move_on_after(self._rng.choice([0.0, self._rng.uniform(0.0, PIECES_MAX_S)])):
            while not (link.is_lost or call in client.ends):
                await link.change.wait()
        if not (link.is_lost or call in client.ends):
            client.send(call, framed(message), is_last=True)
        while not (link.is_lost or call in client.ends):
            if breaks_after is not None and len(_tokens(client.messages[call])) >= breaks_after:
                link.break_off()
            else:
                await link.change.wait()
        answer.end = client.ends.get(call)
        is_refused = answer.end is ErrorCodes.REFUSED_STREAM
        answer.is_unserved = is_refused or (answer.end is None and call > client.last_served)
        answer.tokens = _tokens(client.messages[call])
        if answer.end == "0" and answer.crossed and client.has_goaway:
            self._seen["crossed"] += 1
        return answer

    # ---- connections

    async def _pick(self, last: Place | None) -> Link:
        """Return a connection for the next call, at another place than ``last`` if there is one."""
        order = list(self._places)
        if self._policy == "round_robin" and self._turn % 2:
            order.reverse()
        if self._policy == "pick_first":
            order.sort(
                key=lambda place: not (place in self._links and self._links[place].is_usable)
            )
        order.sort(key=lambda place: place is last)
        for place in order:
            link = self._links.get(place)
            if link is not None and not link.is_lost:
                if link.client.has_goaway:
                    await self._look(link)
                if link.is_usable or (self._policy == "simple" and not link.is_lost):
                    return link
            with suppress(ConnectionRefusedError):
                return await self._connect(place)
            self._seen["went elsewhere"] += 1
        raise Violation("no server accepts connections")

    async def _connect(self, place: Place) -> Link:
        """Connect to a place.

        Raises:
            ConnectionRefusedError: nobody listens there, or the connection was reset at once.
        """
        self._links.pop(place, None)
        await trio.sleep(self._latency_s)
        link = Link(place, place.connect(), self._latency_s)
        self._nursery.start_soon(link.run)
        with trio.move_on_after(20.0) as patience:
            while not link.has_heard:
                await link.change.wait()
        if patience.cancelled_caught:
            raise Violation("nobody answers a client that was accepted")
        if not link.is_usable:
            raise ConnectionRefusedError
        self._links[place] = link
        return link

    async def _look(self, link: Link) -> None:
        """Call GetStats on an open connection to a server that leaves."""
        call = link.client.call(b"", path=GET_STATS)
        while not (link.is_lost or call in link.client.ends):
            await link.change.wait()
        end = link.client.ends.get(call)
        if end not in ("0", None):
            raise Violation(f"a server that leaves refuses its operator: {end}")
        self._seen["looked at"] += end == "0"


def _request(prompt: Sequence[int], count: int, got: Sequence[int]) -> bytes:
    """Return the message of a request, which continues after the tokens ``got``."""
    request = pb.GenerateRequest(
        token_ids={"ids": prompt},
        sampling={"max_tokens": count, "temperature": 0.0},
        output={"token_ids": True},
    )
    if got:
        request.continuation.choices.add(token_ids=got)
    return request.SerializeToString()


def _tokens(answers: Sequence[bytes]) -> list[int]:
    return [
        token for one in answers for token in pb.GenerateResponse.FromString(one).delta.token_ids
    ]


def simulate(seed: int, *, num_clients: int = 6, num_restarts: int = 4) -> Counter[str]:
    """Draw and run one world; return the number of its events by kind, such as "looked at".

    Raises:
        Violation, or whatever a server raised.
    """
    rng, seen = random.Random(f"rolling {seed}"), Counter[str]()

    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            places = [Place(step_s=rng.choice([0.001, 0.02, 0.2])) for _ in range(2)]
            async with trio.open_nursery() as nursery:
                for place in places:
                    await nursery.start(place.serve)
                callers = [
                    Caller(number, random.Random(rng.random()), places, seen)
                    for number in range(num_clients)
                ]
                async with trio.open_nursery() as calling:
                    for one in callers:
                        calling.start_soon(one.run)
                    for number in range(num_restarts):
                        await trio.sleep(rng.uniform(1.0, 4.0))
                        await places[number % 2].restart(nursery)
                    for one in callers:
                        one.is_stopping = True
                for place in places:
                    await place.end()

    run_deterministically(main, seed)
    return seen
