"""Between the two event worlds: grpc.aio's asyncio thread and the engine's Trio thread.

Rule 1: no other file knows both. Rule 2: each direction is one queue with at most one wake-up
under way, however much is posted: commands go over in posting order, and everything the engine
made in a step comes back in one batch. Rule 3: nothing here waits for a reader or a writer.

What bounds the queues: a stream's messages by its credit, which counts what is in its channel,
handed over and unwritten together (D1); commands by the calls that are open, each posting one
submit, at most one cancel, and a credit note per batch it was handed, if it is short of credit.

When the other side has ended: a call gets ShuttingDown; the engine sees its readers gone.
Measured (128 streams, 5 ms steps): a wake-up per token on both sides costs 20-30 µs a token,
one per step on each about 7. So the courier fetches credit when it brings events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from engine.core.types import EndReason
from engine.errors import EngineBug, Overloaded, ShuttingDown, TrioletError
from engine.quota import NOWHERE, Origin
from grpc_service.rpc import current
from grpc_service.straight import StraightWriter
from grpc_service.zombies import Zombies, address_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from engine.api import Engine
    from engine.core.credit import Credit
    from engine.encode_requests import AnyRequest, EncodeRequests
    from engine.generation import Lifetime
    from engine.requests import GenerateRequest
    from engine.status import EngineStatistics
    from engine.telemetry import EngineTelemetry
    from grpc_service.straight import Write

    Batch = list[tuple["BridgeCall", list[Any], bool, TrioletError | None]]

T = TypeVar("T")

log = logging.getLogger(__name__)

# Until credit is looked at when nothing else led anybody to look: a stream began to wait for slots
# just as its last message was written. `python -m tools.bench front`: a note a message costs 2 µs.
CREDIT_DELAY_S = 0.050


class BridgeCall:
    """One request, seen from the asyncio side (`grpc_service.front.Call`)."""

    def __init__(self, bridge: Bridge, request: AnyRequest, address: str) -> None:
        self._bridge = bridge
        self._address = address
        self._events: list[Any] = []
        self._is_closed = False
        self._is_cancelled = False
        self._is_left = False
        self._cancelled_at = 0.0
        self._error: TrioletError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._straight: StraightWriter | None = None
        self._num_written = 0  # credited events, ever; set on the asyncio thread alone
        self.num_released = 0  # of those, credit given back; set on the Trio thread alone
        self.request = request
        self.origin = NOWHERE
        self.posted_at = bridge.clock()
        self.generation: Lifetime[Any] | None = None  # the Trio side's, touched there alone

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def credited(self) -> tuple[type, ...]:
        generation = self.generation  # there is one, once there are events
        return () if generation is None else generation.credited

    async def receive(self) -> Sequence[Any]:
        while not self._events:
            if self._is_closed:
                if self._error is not None:
                    raise self._error
                return ()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        return events

    def write_straight(self, start: Callable[[Any], Write | None]) -> None:
        self._straight = StraightWriter(start, self._wrote_straight, self._failed_straight)

    def written(self, num_events: int) -> None:
        """Most credit is fetched by the courier when it looks at the stream anyway. A stream that
        waits for slots, or has few left, is looked at now; any other within `CREDIT_DELAY_S`."""
        if not num_events:
            return
        self._num_written += num_events
        if log.isEnabledFor(logging.DEBUG):
            log.debug("results sent: %d", self._num_written)  # in the call's own context (R157)
        credit = self._credit  # the Trio thread's; a look at it may be a moment late
        if credit.starved or 2 * (self._num_written - self.num_released) >= credit.capacity:
            self._bridge.post(self.release_written)
        else:
            self._bridge.look_soon(self)

    def cancel(self) -> None:
        if not self._is_closed and not self._is_cancelled:
            self._is_cancelled, self._cancelled_at = True, self._bridge.clock()
            self._bridge.post(self._close_reader)

    def leave(self) -> None:
        self.cancel()
        if not self._is_left:
            self._is_left = True
            self._straight = None  # they know each other; a write under way goes on
            self._bridge.zombies.gone(self)
            if self._error is not None:
                self._error.__traceback__ = None  # its frames know this call

    # ---- on the asyncio thread, by the bridge

    def take(self, events: list[Any], is_closed: bool, error: TrioletError | None) -> None:
        """More events, and perhaps the end."""
        if self._events:
            self._events += events
        else:
            self._events = events
        if is_closed:
            self._is_closed, self._error = True, error
            if not self._is_left:
                self._bridge.zombies.ended(self, self._address)
        self._advance()

    def _advance(self) -> None:
        """Have an event that came alone written, or wake the task that waits."""
        waiter, straight = self._waiter, self._straight
        if waiter is None or waiter.done():
            return
        if straight is not None:
            if straight.is_writing:
                return
            if len(self._events) == 1 and not self._is_closed:
                events, self._events = self._events, []
                if straight.begin(events[0]):
                    return
                self._events = events
        if self._events or self._is_closed:
            waiter.set_result(None)

    def _wrote_straight(self) -> None:
        self.written(1)
        self._advance()

    def _failed_straight(self, error: BaseException) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    @property
    def _credit(self) -> Credit:
        assert self.generation is not None, "nothing can be written before there is a generation"
        return self.generation.credit

    @property
    def is_starved(self) -> bool:
        """Somebody waits for slots."""
        return self._credit.starved

    @property
    def owes(self) -> bool:
        """Something was written whose credit has not come back."""
        return self._num_written > self.num_released

    # ---- on the Trio thread

    def release_written(self) -> None:
        """Give the generation the credit of what was written since the last time."""
        count = self._num_written - self.num_released
        if count and self.generation is not None:
            self.num_released += count
            self.generation.release(count)

    def _close_reader(self) -> None:
        if self.generation is not None:
            age = max(0.0, self._bridge.clock() - self._cancelled_at)
            self.generation.close_reader(trio.current_time() - age)


class Bridge:
    """`grpc_service.front.Front` over an engine. Made on the Trio thread; `attach` gives it the
    asyncio loop. ``run`` is its part on the Trio thread and ends when cancelled. ``clock`` gives
    seconds, alike on both threads."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.zombies = Zombies(clock)
        self._engine = engine
        self._buffer = engine.config.stream_buffer
        self._token = trio.lowlevel.current_trio_token()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commands: deque[Callable[[], object]] = deque()
        self._is_posted = False
        # the asyncio side's: whose credit to look at, and what had been given back of it
        self._written: dict[BridgeCall, int] = {}
        self._credit_timer: asyncio.TimerHandle | None = None
        self._ready: dict[BridgeCall, None] = {}
        self._wake = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._is_holding = False  # a loop hands events out, and says when it is done
        self._bug: Exception | None = None
        engine.deliveries.on_begin = self._hold
        engine.deliveries.on_end = self._carry_held

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the asyncio loop that the `Front` methods are called on. On that loop's thread."""
        self._loop = loop

    # ---- asyncio side: the front

    def generate(self, request: GenerateRequest, peer: str = "") -> BridgeCall:
        return self._open(request, peer)

    def encode(self, request: EncodeRequests, peer: str = "") -> BridgeCall:
        return self._open(request, peer)

    def _open(self, request: AnyRequest, peer: str) -> BridgeCall:
        call = BridgeCall(self, request, address := address_of(peer))
        if (rpc := current.get()) is not None:
            rpc.call, call.origin = call, Origin(rpc.request_id, rpc.quota)
        try:
            self.zombies.check_room(address)
        except Overloaded as error:
            call.take([], True, error)
            return call
        if not self.post(lambda: self._submit(call)):
            call.take([], True, ShuttingDown("the engine has ended", retry_after_s=5.0))
        return call

    async def call(self, job: Callable[[Engine], Awaitable[T]]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        scope = trio.CancelScope()

        def start() -> None:
            if self._nursery is None:
                self._reply(future, None, ShuttingDown("the engine has ended"))
            else:
                self._nursery.start_soon(self._run_job, job, scope, future)

        self._require_engine(start)
        try:
            return await future
        except asyncio.CancelledError:
            self.post(lambda: scope.cancel(reason="the client cancelled"))
            raise

    async def statistics(self) -> EngineStatistics:
        statistics = await self.ask(lambda engine: engine.statistics())
        totals = replace(statistics.totals, zombies=self.zombies.count())
        return replace(statistics, totals=totals)

    async def telemetry(self) -> EngineTelemetry:
        """`Engine.telemetry`, the front's own zombies among it."""
        telemetry = await self.ask(lambda engine: engine.telemetry())
        totals = replace(telemetry.statistics.totals, zombies=self.zombies.count())
        return replace(telemetry, statistics=replace(telemetry.statistics, totals=totals))

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """Run a function that does not wait on the Trio thread, between its tasks."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def answer() -> None:
            try:
                self._reply(future, question(self._engine), None)
            except Exception as error:
                self._reply(future, None, error)

        self._require_engine(answer)
        return await future

    def _require_engine(self, command: Callable[[], object]) -> None:
        if not self.post(command):
            raise ShuttingDown("the engine has ended", retry_after_s=5.0)

    def post(self, command: Callable[[], object]) -> bool:
        """Run ``command`` on the Trio thread, after those posted before. False: it has ended."""
        self._commands.append(command)
        if not self._is_posted:
            self._is_posted = True
            try:
                self._token.run_sync_soon(self._run_commands)
            except trio.RunFinishedError:
                self._commands.clear()
                self._is_posted = False
                return False
        return True

    def look_soon(self, call: BridgeCall) -> None:
        """See to it that what ``call`` has written is looked at, if no step's courier does."""
        self._written.setdefault(call, call.num_released)
        if self._credit_timer is None:
            self._start_credit_timer()

    def _start_credit_timer(self) -> None:
        assert self._loop is not None
        self._credit_timer = self._loop.call_later(CREDIT_DELAY_S, self._look)

    def _look(self) -> None:
        """Post the credit of the calls that the courier has not come to since they were noted.
        While steps go on it has come to all, and the Trio thread is not woken."""
        calls, self._written = self._written, {}
        due = []
        for call, num_released in calls.items():
            if not call.owes:
                continue
            if call.is_starved or call.num_released == num_released:
                due.append(call)
            else:
                self._written[call] = call.num_released
        self._credit_timer = None
        if self._written:
            self._start_credit_timer()
        if not due:
            return

        def release() -> None:
            for call in due:
                call.release_written()

        self.post(release)

    def _take_batch(self, batch: Batch) -> None:
        for call, events, is_closed, error in batch:
            call.take(events, is_closed, error)

    # ---- Trio side

    def _run_commands(self) -> None:
        """Everything posted so far. A command that raises is a bug; the others still run."""
        self._is_posted = False  # before the first look: a later post wakes us again
        commands = self._commands
        while commands:
            try:
                commands.popleft()()
            except Exception:
                log.exception("a command from the front failed")

    def _submit(self, call: BridgeCall) -> None:
        age = max(0.0, self.clock() - call.posted_at)
        try:
            generation = self._engine.submit(
                call.request,
                buffer=self._buffer,
                arrived_at=trio.current_time() - age,
                origin=call.origin,
            )
        except Exception as error:
            bug = EngineBug(repr(error))
            self._send(lambda: call.take([], True, bug))
            raise
        call.generation = generation
        generation.on_ready = partial(self._mark, call)
        self._mark(call)

    def _mark(self, call: BridgeCall) -> None:
        """The call has news. All news of a step go over at once: at the end of its delivery, or
        by the courier's task."""
        if not self._ready and not self._is_holding:
            self._wake.set()
        self._ready[call] = None

    def _hold(self) -> None:
        self._is_holding = True

    def _carry_held(self) -> None:
        """A bug here is not the loop's, which calls this: the courier's task raises it."""
        self._is_holding = False
        if not self._ready:
            return
        try:
            self._carry()
        except Exception as error:
            self._bug = error
            self._wake.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry events over, and own the jobs of `call`, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                while True:
                    await self._wake.wait()
                    self._wake = trio.Event()
                    if self._bug is not None:
                        raise self._bug
                    self._carry()
            finally:
                self._nursery = None

    def _carry(self) -> None:
        ready, self._ready = self._ready, {}
        batch: Batch = []
        for call in ready:
            generation = call.generation
            assert generation is not None
            call.release_written()
            events = generation.take_ready()
            is_closed = generation.is_closed
            if events or is_closed:
                batch.append((call, events, is_closed, generation.error))
            if is_closed:
                generation.on_ready = None  # no more news; and they need not know each other
        if batch and not self._send(lambda: self._take_batch(batch)):
            for call, _events, _is_closed, _error in batch:
                assert call.generation is not None
                call.generation.cancel(EndReason.CANCELLED)

    def _send(self, callback: Callable[[], object]) -> bool:
        """Run ``callback`` on the asyncio thread. False: it has ended."""
        try:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed
            return False
        return True

    async def _run_job(
        self,
        job: Callable[[Engine], Awaitable[Any]],
        scope: trio.CancelScope,
        future: asyncio.Future[Any],
    ) -> None:
        error: Exception | None = ShuttingDown("the engine has ended", retry_after_s=5.0)
        result = None
        try:
            with scope:
                result, error = await job(self._engine), None
        except Exception as raised:
            error = raised if isinstance(raised, TrioletError) else EngineBug(repr(raised))
            if error is not raised:
                log.exception("a job of the front failed")
        finally:
            self._reply(future, result, error)

    def _reply(self, future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._send(settle)
