"""Between the engine's requests and the calls that they are for.

What the engine made in a step goes out at the end of its delivery: every call's news first, then
one write for each connection (`grpc_service.connections.Flusher`). A token that comes alone is
written from there, and its call's task sleeps on; a task wake-up for each costs 20 µs.

Rule 1: nothing here waits for a reader. Rule 2: what is written gives its credit back at once, and
what cannot be written holds it: its stream is parked by the core when it has no more (D1).
Rule 3: a bug here is its call's, and neither the loop's that delivers nor another call's.
"""

from __future__ import annotations

import logging
import time
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from engine.quota import NOWHERE, Origin
from grpc_service.connections import Flusher
from grpc_service.rpc import current
from grpc_service.zombies import Zombies, address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.api import Engine
    from engine.encode_requests import AnyRequest, EncodeRequests
    from engine.generation import Lifetime
    from engine.requests import GenerateRequest
    from engine.status import EngineStatistics
    from engine.telemetry import EngineTelemetry

log = logging.getLogger(__name__)


class BridgeCall:
    """One request, as its handler sees it (`grpc_service.front.Call`)."""

    def __init__(self, bridge: Bridge, generation: Lifetime[Any], address: str) -> None:
        self._bridge = bridge
        self._address = address
        self._events: list[Any] = []  # taken, and not handed out
        self._waiter: trio.Event | None = None  # the task waits in `receive`
        self._straight: Callable[[Any], bool] | None = None
        self._failure: Exception | None = None  # of `advance`
        self._has_ended = False  # it was told to `Zombies`
        self._num_written = 0
        self._context = copy_context()  # of its log's lines
        self.generation = generation

    @property
    def request_id(self) -> str:
        return self.generation.request_id

    @property
    def credited(self) -> tuple[type, ...]:
        return self.generation.credited

    async def receive(self) -> Sequence[Any]:
        await trio.lowlevel.checkpoint_if_cancelled()
        generation = self.generation
        while True:
            if self._failure is not None:
                raise self._failure
            if events := self._take():
                return events
            if generation.is_closed:
                if generation.error is not None:
                    raise generation.error
                return ()
            self._waiter = trio.Event()
            try:
                await self._waiter.wait()
            finally:
                self._waiter = None

    def _take(self) -> list[Any]:
        events, self._events = self._events, []
        return events + self.generation.take_ready() if events else self.generation.take_ready()

    def write_straight(self, write: Callable[[Any], bool]) -> None:
        self._straight = write

    def written(self, num_events: int) -> None:
        if not num_events:
            return
        self._num_written += num_events
        if log.isEnabledFor(logging.DEBUG):  # in the call's own context (R157)
            self._context.run(log.debug, "results sent: %d", self._num_written)
        self.generation.release(num_events)

    def cancel(self) -> None:
        if not self.generation.is_closed:
            self.generation.close_reader(trio.current_time())

    def leave(self) -> None:
        self.cancel()
        self._straight = None
        self._failure = None  # its frames know this call, as the error's below
        self.generation.on_ready = None
        self._bridge.zombies.gone(self)
        if self.generation.error is not None:
            self.generation.error.__traceback__ = None

    # ---- by the bridge

    def advance(self) -> None:
        """There is news: have an event that came alone written, or wake the task that waits. Never
        raises: what fails, `receive` raises."""
        try:
            if self._is_served():
                return
        except Exception as error:
            self._failure = error
        if self._waiter is not None:
            self._waiter.set()

    def _is_served(self) -> bool:
        """Whether the task need not be woken."""
        generation, waiter = self.generation, self._waiter
        if generation.is_closed and not self._has_ended:
            self._has_ended = True
            self._bridge.zombies.ended(self, self._address)
        if waiter is None or waiter.is_set():
            return True  # it looks by itself when it comes back
        if self._straight is None or generation.is_closed:
            return False
        self._events = generation.take_ready()
        if len(self._events) != 1 or not self._straight(self._events[0]):
            return False
        self._events = []
        self.written(1)
        return True


class Bridge:
    """`grpc_service.front.Front` over an engine. ``flusher`` holds what is written back while the
    engine delivers a step. ``clock`` gives seconds and never goes back."""

    def __init__(
        self,
        engine: Engine,
        flusher: Flusher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.zombies = Zombies(clock)
        self._flusher = flusher or Flusher()
        self._ready: dict[BridgeCall, None] = {}
        self._is_holding = False  # a loop hands events out, and says when it is done
        engine.deliveries.on_begin = self._hold
        engine.deliveries.on_end = self._release

    def generate(self, request: GenerateRequest, peer: str = "") -> BridgeCall:
        return self._open(request, peer)

    def encode(self, request: EncodeRequests, peer: str = "") -> BridgeCall:
        return self._open(request, peer)

    def statistics(self) -> EngineStatistics:
        return self._with_zombies(self.engine.statistics())

    def telemetry(self) -> EngineTelemetry:
        """`Engine.telemetry`, the front's own zombies among it."""
        telemetry = self.engine.telemetry()
        return replace(telemetry, statistics=self._with_zombies(telemetry.statistics))

    def _with_zombies(self, statistics: EngineStatistics) -> EngineStatistics:
        totals = replace(statistics.totals, zombies=self.zombies.count())
        return replace(statistics, totals=totals)

    def _open(self, request: AnyRequest, peer: str) -> BridgeCall:
        address = address_of(peer)
        self.zombies.check_room(address)
        rpc = current.get()
        origin = NOWHERE if rpc is None else Origin(rpc.request_id, rpc.quota)
        generation = self.engine.submit(
            request, buffer=self.engine.config.stream_buffer, origin=origin
        )
        call = BridgeCall(self, generation, address)
        if rpc is not None:
            rpc.generation = generation
        generation.on_ready = partial(self._mark, call)
        self._mark(call)
        return call

    # ---- news

    def _mark(self, call: BridgeCall) -> None:
        """The call has news. All news of a step are looked at together, once it is handed out."""
        if self._is_holding:
            self._ready[call] = None
        else:
            call.advance()

    def _hold(self) -> None:
        self._is_holding = True
        self._flusher.hold()

    def _release(self) -> None:
        """End `_hold`: let every call with news advance, then send what was written. Never raises,
        as what it calls does not."""
        self._is_holding = False
        ready, self._ready = self._ready, {}
        try:
            for call in ready:
                call.advance()
        finally:
            self._flusher.release()
