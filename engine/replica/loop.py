"""The step loop of one replica: commands in, plan, step in a thread, commit, events out.

Rule 1: the loop never waits for a reader. A stream whose credit is used up is parked by the core.
Rule 2: no lock of ours is held or taken around a step.
Rule 3: an idle or paused engine makes no wake-ups.

Phases of a turn, each of which is timed: apply commands · plan · start the step · deliver the
events of the last step · prepare the next plan · wait for the step · commit. Between two steps, the
loop does only the work that the next plan depends on; delivering the tokens of 128 readers takes
0.3 ms and preparing takes 0.1 ms (`python -m tools.lab.bench gap`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias

import trio

from engine.core.common.core import PlanT
from engine.core.common.events import Cancel, RequestT, ResultT, StepDone, StepFailed, Submit, Tick
from engine.core.common.steps import FailureKind, StepFailure
from engine.core.common.types import Explanation
from engine.errors import EngineBug, Overloaded, ShuttingDown, WorkerLost
from engine.replica.watchdog import StepWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.common.core import Core
    from engine.core.common.events import InputEvent, Journaled, OutputEvent
    from engine.core.common.phases import Phase
    from engine.core.common.types import EndReason, RequestId
    from engine.errors import TrioletError
    from engine.replica.telemetry import ReplicaTelemetry
    from engine.replica.threads import Threads
    from engine.worker.interface import Runner


OnEvent: TypeAlias = "Callable[[Journaled], None]"

log = logging.getLogger(__name__)


# From this many events on, the loop waits until the step's thread has begun before it delivers
# them: the thread needs the GIL to begin, and delivering holds the GIL. Waiting costs a
# wake-up of about 45 µs, and fewer events are delivered within that time.
EVENTS_TO_HOLD_BACK = 32
# With no more events and rows than this, the loop delivers the events and prepares the next plan
# before the step starts. The two threads then do not compete for the GIL: that saves half of their
# switches and 5 % of the time of a single stream's token, and the token leaves sooner. The gap
# between two steps is 0.1 ms longer.
EVENTS_TO_SEND_FIRST = 4

# The least time between two checks of the invariants by an idle loop, in seconds. A check of
# 100,000 blocks takes 0.4 ms, for which a new request would wait.
CHECK_INTERVAL_S = 1.0


class EventStream(Protocol):
    """Where a request's events go (`engine.requests.stream.RequestStream`). Nothing here waits."""

    def push(self, event: OutputEvent) -> None:
        """Take the next event of the request."""

    def lose_replica(self, error: TrioletError, *, has_begun: bool) -> None:
        """Take note that the loop has died. ``has_begun``: the request was in a step before."""


class WriteBatch(Protocol):
    """Holds back the readers' writes while the loop delivers a step's events, and sends them
    together at the end. Neither method raises."""

    def hold(self) -> None:
        """Hold back every write from now on."""

    def release(self) -> None:
        """Send the writes that were held back, and from now on send each write at once."""


class Unbatched:
    """A `WriteBatch` for readers that write nothing."""

    def hold(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The checks and the observers of a loop.

    ``check_level`` is the environment's ENGINE_CHECK: at 1 the core's invariants are checked at the
    loop's end and when it goes idle, at most each `CHECK_INTERVAL_S`; at 2 after every commit.
    ``on_event`` is called with every event and plan that goes into or out of the core, ``watch``
    when steps begin and end; ``telemetry`` takes times. ``on_death`` is called when the loop ends
    by an error, before any request gets the error. ``batch`` holds back the writes of a delivery.
    """

    check_level: int = 1
    on_event: OnEvent | None = None
    watch: StepWatch | None = None
    telemetry: ReplicaTelemetry | None = None
    on_death: Callable[[TrioletError], None] = lambda error: None
    batch: WriteBatch = field(default_factory=Unbatched)


class EngineLoop(Generic[RequestT, PlanT, ResultT]):
    """Drives one core and the runner that executes its plans. All methods belong to the Trio
    thread. ``busy_s`` is how long steps have taken in all."""

    def __init__(
        self,
        name: str,
        core: Core[RequestT, PlanT, ResultT, Any, Any],
        runner: Runner[PlanT, ResultT, Any],
        threads: Threads,
        settings: LoopSettings | None = None,
    ) -> None:
        settings = settings or LoopSettings()
        self.name = name
        self.core = core
        self.telemetry = settings.telemetry
        self.busy_s = 0.0
        self._time = trio.lowlevel.current_clock().current_time  # faster than `trio.current_time`
        self._runner = runner
        self._threads = threads
        self._check_level = settings.check_level
        self._checked_at = -math.inf
        self._on_event = settings.on_event
        self._watch = settings.watch or StepWatch(name)
        self._commands: deque[InputEvent[RequestT, ResultT]] = deque()
        self._num_submits = 0
        self._streams: dict[RequestId, EventStream] = {}
        self._rests: dict[RequestId, EventStream] = {}  # of requests whose streams take no more
        self._batch = settings.batch
        self._outbox: list[OutputEvent] = []
        self._wake = trio.Event()
        self._went_idle = trio.Event()
        self._is_closing = False
        self._has_ended = False
        self._on_death = settings.on_death
        # The error that ended `run`, or None. After an error, the core's state is not valid.
        self.cause_of_death: TrioletError | None = None
        self._lost: WorkerLost | None = None  # the error that `lose` was given

    # ---- commands: synchronous, in order, applied between steps

    def submit(self, event: Submit[RequestT], stream: EventStream) -> None:
        """Hand a request to the core; its events, and a refusal too, go to ``stream``.

        Raises:
            Overloaded: as many submits wait for the step's end as the queue may hold.
            EngineBug, WorkerLost, ShuttingDown: the loop has ended by a bug, with its worker, or
                because it was closed.
        """
        if self._has_ended:
            raise self._end_cause
        if self._num_submits >= self.core.config.max_queued_requests:
            raise Overloaded("the queue holds as many requests as it may", retry_after_s=1.0)
        self._num_submits += 1
        self._streams[event.request.request_id] = stream
        if self.telemetry is not None:
            self.telemetry.submitted(event)
        self.post(event)

    def post(self, event: InputEvent[RequestT, ResultT]) -> None:
        """Apply an event as soon as no step is in flight.

        The buffer needs no bound: live requests are bounded, and each posts only a few events.
        """
        if self._has_ended:
            return  # nothing is live any more, and the event would never be applied
        self._commands.append(event)
        self._wake.set()

    def cancel(self, request_id: RequestId, reason: EndReason, phase: Phase, since: float) -> None:
        """Post a `Cancel` of a request that was in ``phase`` when it was cancelled at ``since``."""
        if self.telemetry is not None and self.core.is_live(request_id):
            self.telemetry.cancelled(request_id, phase, since)
        self.post(Cancel(request_id, reason))

    def forget(self, request_id: RequestId, rest: EventStream | None = None) -> None:
        """Send the request's stream no more events. Those that are still to come go to ``rest``,
        until it is forgotten, too; if the loop has ended, it gets the cause at once."""
        self._streams.pop(request_id, None)
        self._rests.pop(request_id, None)
        if rest is None:
            return
        if self._has_ended:
            rest.lose_replica(self._end_cause, has_begun=True)
        else:
            self._rests[request_id] = rest

    @property
    def _end_cause(self) -> TrioletError:
        return self.cause_of_death or ShuttingDown("the model was closed", retry_after_s=5.0)

    def close(self) -> None:
        """End `run` once nothing is live (after a drain) and no step is in flight."""
        self._is_closing = True
        self._wake.set()

    def lose(self, error: WorkerLost) -> None:
        """End `run` by ``error``: the worker has died between two steps."""
        self._lost = error
        self._wake.set()

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Return what a request does and waits for, even during a step; None if it is unknown."""
        explained = self.core.explain(request_id, trio.current_time())
        if explained is None and any(
            isinstance(event, Submit) and event.request.request_id == request_id
            for event in self._commands
        ):
            return Explanation("WAITING", "the step in flight, after which it enters the queue")
        return explained

    def phase_of(self, request_id: RequestId) -> Phase | None:
        """Return the phase of a request; None if it is not live yet, or not any more."""
        return self.core.phase_of(request_id)

    @property
    def is_hung(self) -> bool:
        """Whether the running step takes longer than the step timeout (D17)."""
        return self._watch.is_hung

    @property
    def is_idle(self) -> bool:
        """Whether no request is live, no event waits to be applied, and no step is in flight."""
        return self.core.is_idle and not self._commands

    def num_undelivered(self, request_id: RequestId, kind: type[OutputEvent]) -> int:
        """Return how many events of one kind a request has in the loop: the core has made these
        events, and the next delivery pushes them into the request's stream."""
        return sum(isinstance(e, kind) and e.request_id == request_id for e in self._outbox)

    async def wait_idle(self) -> None:
        """Wait until the loop is idle (`is_idle`) or has ended.

        Cancellation: ends only the waiting.
        """
        while not (self.is_idle or self._has_ended):
            if self._went_idle.is_set():
                self._went_idle = trio.Event()
            await self._went_idle.wait()

    # ---- the loop

    async def run(self) -> None:
        """Serve until closed.

        Raises:
            EngineBug, WorkerLost: a bug, or the end of the worker. Every live request's stream has
                got the error by `lose_replica`, and nothing more is served.
        Cancellation: a step in flight is waited for; its result is dropped.
        """
        try:
            now: float | None = self._time()
            while now is not None:
                now = await self._turn(now)
        except Exception as error:
            self.cause_of_death = error if isinstance(error, WorkerLost) else EngineBug(repr(error))
            self._has_ended = True
            self._on_death(self.cause_of_death)
            self._deliver(self._time())
            self.core.settle_meters()
            for request_id, stream in list(self._streams.items()):
                stream.lose_replica(self.cause_of_death, has_begun=self._has_begun(request_id))
            if self.cause_of_death is error:
                raise
            raise self.cause_of_death from error
        finally:
            self._watch.close()
            self._has_ended = True
            self._went_idle.set()
            self.core.settle_meters()
            for rest in list(self._rests.values()):
                rest.lose_replica(self._end_cause, has_begun=True)

    def _has_begun(self, request_id: RequestId) -> bool:
        """Return whether a request had been in a step when the loop died; True if a bug ended the
        loop, because the core's state is then unreliable."""
        return not isinstance(self.cause_of_death, WorkerLost) or self.core.has_begun(request_id)

    async def _turn(self, began: float) -> float | None:
        """Do one step, or wait once for something to do. Return the time afterwards; None once the
        loop is closed and nothing is live. ``began`` is the present time."""
        if self._lost is not None:
            raise self._lost
        now = self._drain_commands(began)
        if (due := self.core.next_wakeup(now)) is not None and due <= now:
            self._apply(Tick(), now)  # a busy loop must end stalled requests, too
        plan, events = self.core.plan(now)
        self._outbox += events
        planned = self._time()
        if self.telemetry is not None:
            self.telemetry.loop_s["plan"] += planned - now
            self.telemetry.look_at_cancelled(self.core.is_live, now)
        if plan is not None:
            if self._on_event is not None:
                self._on_event(plan)
            return await self._step(plan, planned)
        self._deliver(planned)
        if self._is_closing and self.is_idle:
            self._check_invariants(now)
            return None
        await self._wait_for_work(now)
        return self._time()

    def _drain_commands(self, began: float) -> float:
        """Apply every posted command, and return the time afterwards."""
        commands = self._commands
        if not commands:
            return began
        while commands:
            event = commands.popleft()
            if isinstance(event, Submit):
                self._num_submits -= 1
            self._apply(event, self._time())
        now = self._time()
        if self.telemetry is not None:
            self.telemetry.loop_s["commands"] += now - began
        return now

    def _apply(self, event: InputEvent[RequestT, ResultT], now: float) -> None:
        if self._on_event is not None:
            self._on_event(event)
        self._outbox += self.core.apply(event, now)

    async def _step(self, plan: PlanT, started: float) -> float:
        """Execute one plan in the worker's thread, commit its result, and return the time
        afterwards. Meanwhile deliver the last events and prepare a plan. ``started`` is the present
        time."""
        await trio.lowlevel.checkpoint_if_cancelled()
        is_few = max(len(self._outbox), len(plan.rows)) <= EVENTS_TO_SEND_FIRST
        is_held_back = len(self._outbox) >= EVENTS_TO_HOLD_BACK
        if is_few:
            self._work_ahead(started)
        job = self._threads.start(partial(self._execute, plan), reports_begin=is_held_back)
        self._watch.begin(plan.plan_id)
        try:
            if is_held_back:
                await job.wait_begun()
            if not is_few:
                self._work_ahead(self._time())
        finally:
            try:
                outcome = await job.wait()
            finally:
                self._watch.end()
        ended = self._time()
        self.busy_s += ended - started
        self.core.charge(ended - started)
        self._apply(outcome, ended)
        if self._check_level >= 2:
            self.core.check()
        if self.telemetry is None:
            return self._time()
        self.telemetry.step_ended(len(plan.rows), started, ended)
        committed = self._time()
        self.telemetry.loop_s["commit"] += committed - ended
        return committed

    def _work_ahead(self, now: float) -> None:
        """Do what can be done while a step runs: deliver the last step's events, prepare a plan."""
        delivered = self._deliver(now)
        self.core.prepare(delivered)
        if self.telemetry is not None:
            self.telemetry.loop_s["prepare"] += self._time() - delivered

    def _execute(self, plan: PlanT) -> StepDone[ResultT] | StepFailed:
        """Execute the plan, in the worker's thread. The model's exceptions become values."""
        try:
            return StepDone(self._runner.execute(plan))
        except WorkerLost:
            raise
        except MemoryError as error:
            return StepFailed(StepFailure(plan.plan_id, FailureKind.OUT_OF_MEMORY, repr(error)))
        except BaseException as error:
            log.exception("step %d of %s failed", plan.plan_id, self.name)
            return StepFailed(StepFailure(plan.plan_id, FailureKind.ERROR, repr(error)))

    async def _wait_for_work(self, now: float) -> None:
        if self.telemetry is not None:
            self.telemetry.idles()
        if self.core.is_idle:
            self._went_idle.set()
        if self.core.is_idle and now >= self._checked_at + CHECK_INTERVAL_S:
            self._check_invariants(now)
        wakeup = self.core.next_wakeup(now)
        with trio.move_on_at(math.inf if wakeup is None else wakeup) as scope:
            await self._wake.wait()
        if not scope.cancelled_caught:
            self._wake = trio.Event()

    def _check_invariants(self, now: float) -> None:
        if self._check_level >= 1:
            self.core.check()
            self._checked_at = now

    # ---- delivery

    def _deliver(self, began: float) -> float:
        """Push every event into its request's stream, in order; then send what readers wrote.
        Return the time afterwards."""
        if not self._outbox:
            return began
        events, self._outbox = self._outbox, []
        if self._on_event is not None:
            for event in events:
                self._on_event(event)
        streams, rests = self._streams, self._rests
        self._batch.hold()
        try:
            for event in events:
                stream = streams.get(event.request_id) or rests.get(event.request_id)
                if stream is not None:  # None: `forget` was called for the request
                    stream.push(event)
        finally:
            self._batch.release()
        now = self._time()
        if self.telemetry is not None:
            self.telemetry.loop_s["deliver"] += now - began
            self.telemetry.delivered(events, now)
        return now
