"""The step loop of one replica: commands in, plan, step in a thread, commit, events out.

Rule 1: the loop never waits for a reader: `send_nowait` only; a full stream is parked by the
core long before its channel is full. Rule 2: no lock of ours is held or taken around a step
(R35, R66). Rule 3: an idle or paused engine makes no wake-ups.

Phases of a turn (R172): drain commands · plan · start the step · deliver what the last one caused ·
prepare the next plan · wait for the step · commit. Between two steps stands only what decides the
second: of 128 readers' tokens the delivery takes 0.3 ms, the preparing 0.1 (`python -m tools.bench
gap`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from engine.core.encode_types import Encoded
from engine.core.events import (
    Admitted,
    Cancel,
    Finished,
    Refused,
    StepDone,
    StepFailed,
    Submit,
    Tick,
    Tokens,
)
from engine.core.plan import FailureKind, StepFailure
from engine.core.types import Explanation
from engine.errors import EngineBug, Overloaded, ShuttingDown, WorkerLost
from engine.watchdog import StepWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.encode_scheduler import EncodeScheduler
    from engine.core.encode_types import EncodePlan, EncodeRunner
    from engine.core.events import InputEvent, OutputEvent
    from engine.core.plan import Runner, StepPlan
    from engine.core.scheduler import Scheduler
    from engine.core.types import EndReason, RequestId
    from engine.errors import TrioletError
    from engine.telemetry import ReplicaTelemetry
    from engine.threads import Threads

log = logging.getLogger(__name__)


# From so many events on, the step's thread is waited for before they are delivered: it needs
# Python's lock to begin, which delivering holds. Hearing of its begin costs a wake-up, about 45 µs,
# and fewer events hold it up for no longer than that.
EVENTS_TO_HOLD_BACK = 32
# So few, of as few rows, are delivered, and the next plan prepared, before the step starts: the two
# threads then do not compete for the lock, which spares half of their switches and 5 % of what one
# stream's token costs, and the token leaves sooner; the gap between two steps is 0.1 ms longer.
EVENTS_TO_SEND_FIRST = 4


# Of 100,000 blocks they take 12 ms, for which the next request would wait.
CHECK_INTERVAL_S = 1.0


@dataclass(slots=True)
class Deliveries:
    """Told by every loop of an engine when events go out to their sinks, so that whoever carries
    them on may take what comes between the two as one batch."""

    on_begin: Callable[[], None] = lambda: None
    on_end: Callable[[], None] = lambda: None


class Sink(Protocol):
    """Where a request's events go; every method is synchronous and never waits."""

    def on_admitted(self, event: Admitted) -> None: ...
    def on_tokens(self, event: Tokens) -> None: ...
    def on_encoded(self, event: Encoded) -> None: ...
    def on_finished(self, event: Finished) -> None: ...
    def on_refused(self, event: Refused) -> None: ...
    def on_lost(self, error: TrioletError, *, has_begun: bool) -> None: ...


class EngineLoop:
    """Drives one scheduler and one runner, both a text model's or both an encoder's. All methods
    belong to the Trio thread.

    ``check_level`` is ENGINE_CHECK: at 1 the books are checked at the end and when the loop
    goes idle, but not twice within `CHECK_INTERVAL_S`; at 2 after every commit. ``on_event``
    sees everything that goes into and out of the core. ``watch`` is told when steps begin and
    end, ``telemetry`` what took how long. ``on_death`` is called when the loop ends by an
    error, before any request hears of it (R141).
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler | EncodeScheduler,
        runner: Runner | EncodeRunner,
        threads: Threads,
        *,
        check_level: int = 1,
        on_event: Callable[[InputEvent | OutputEvent | StepPlan | EncodePlan], None] | None = None,
        watch: StepWatch | None = None,
        deliveries: Deliveries | None = None,
        telemetry: ReplicaTelemetry | None = None,
        on_death: Callable[[TrioletError], None] = lambda error: None,
    ) -> None:
        self.name = name
        self._time = trio.lowlevel.current_clock().current_time  # what `trio.current_time` asks
        self.scheduler = scheduler
        self.telemetry = telemetry
        self.busy_s = 0.0
        self.late_events = 0
        self._runner = runner
        self._threads = threads
        self._check_level = check_level
        self._checked_at = -math.inf
        self._on_event = on_event
        self._watch = watch or StepWatch(name)
        self._commands: deque[InputEvent] = deque()
        self._num_submits = 0
        self._sinks: dict[RequestId, Sink] = {}
        self._deliveries = deliveries or Deliveries()
        self._outbox: list[OutputEvent] = []
        self._wake = trio.Event()
        self._went_idle = trio.Event()
        self._is_closing = False
        self._has_ended = False
        self._on_death = on_death
        self._cause: TrioletError | None = None  # of its death
        self._lost: WorkerLost | None = None  # what `lose` said

    # ---- commands: synchronous, in order, applied between steps

    def submit(self, event: Submit, sink: Sink) -> None:
        """Hand a request to the scheduler; its events, a refusal too, go to ``sink``.

        Raises:
            Overloaded: as many submits wait for the step's end as the queue may hold.
            EngineBug, WorkerLost, ShuttingDown: the loop has ended: by a bug, with its worker, or
                in order.
        """
        if self._has_ended:
            raise self._cause or ShuttingDown("the model was closed", retry_after_s=5.0)
        if self._num_submits >= self.scheduler.config.max_queued_requests:
            raise Overloaded("the queue holds its requests", retry_after_s=1.0)
        self._num_submits += 1
        self._sinks[event.request.request_id] = sink
        if self.telemetry is not None:
            self.telemetry.submitted(event)
        self.post(event)

    def post(self, event: InputEvent) -> None:
        """Apply an event as soon as no step is in flight. Commands other than submits are at
        most a few per live request, which bounds the buffer."""
        if self._has_ended:
            return  # nothing is live any more, and nobody would apply it
        self._commands.append(event)
        self._wake.set()

    def cancel(self, request_id: RequestId, reason: EndReason, phase: str, since: float) -> None:
        """`post` a Cancel of a request that was in ``phase`` when it was cancelled at ``since``."""
        if self.telemetry is not None and self.scheduler.is_live(request_id):
            self.telemetry.cancelled(request_id, phase, since)
        self.post(Cancel(request_id, reason))

    def forget(self, request_id: RequestId) -> None:
        """The request's sink wants no more events; what still comes is counted as late."""
        self._sinks.pop(request_id, None)

    def close(self) -> None:
        """End `run` once nothing is live (after a drain) and no step is in flight."""
        self._is_closing = True
        self._wake.set()

    def lose(self, error: WorkerLost) -> None:
        """The worker has died between two steps: end `run` by this."""
        self._lost = error
        self._wake.set()

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Why a request is where it is, whatever step is in flight; None: it is not known."""
        explained = self.scheduler.explain(request_id, trio.current_time())
        if explained is None and any(
            isinstance(event, Submit) and event.request.request_id == request_id
            for event in self._commands
        ):
            return Explanation("WAITING", "the step in flight, after which it gets in line")
        return explained

    def phase_of(self, request_id: RequestId) -> str | None:
        """Where the scheduler has a live request; None: it does not (yet, or any more)."""
        return self.scheduler.phase_of(request_id)

    @property
    def is_hung(self) -> bool:
        """The step that runs takes longer than any should (D17)."""
        return self._watch.is_hung

    @property
    def has_died(self) -> bool:
        """`run` has ended by an error: nothing of what the scheduler says holds any more."""
        return self._cause is not None

    @property
    def is_idle(self) -> bool:
        """Nothing live, nothing posted, no step in flight."""
        return self.scheduler.is_idle and not self._commands

    async def wait_idle(self) -> None:
        """Wait until nothing is live, posted or in flight, or the loop has ended."""
        while not (self.is_idle or self._has_ended):
            if self._went_idle.is_set():
                self._went_idle = trio.Event()
            await self._went_idle.wait()

    # ---- the loop

    async def run(self) -> None:
        """Serve until closed.

        Raises:
            EngineBug, WorkerLost: the bug it is, or how its worker ended; every live request's
                sink has heard of it by `on_lost`, and nothing more is served.
        Cancellation: a step in flight is waited for; its result is dropped.
        """
        try:
            while await self._turn():
                pass
        except Exception as error:
            self._cause = error if isinstance(error, WorkerLost) else EngineBug(repr(error))
            self._has_ended = True
            self._on_death(self._cause)
            self._deliver()
            for request_id, sink in list(self._sinks.items()):
                sink.on_lost(self._cause, has_begun=self._has_begun(request_id))
            if self._cause is error:
                raise
            raise self._cause from error
        finally:
            self._watch.close()
            self._has_ended = True
            self._went_idle.set()

    def _has_begun(self, request_id: RequestId) -> bool:
        """Of a loop that has died: whether the worker knew of the request. Of a scheduler with a
        bug nobody can tell."""
        if not isinstance(self._cause, WorkerLost):
            return True
        return self.scheduler.phase_of(request_id) not in (None, "queued")

    async def _turn(self) -> bool:
        """One step, or one wait for something to do. False: closed, and nothing is live."""
        if self._lost is not None:
            raise self._lost
        self._drain_commands()
        now = self._time()
        if (due := self.scheduler.next_wakeup(now)) is not None and due <= now:
            self._apply(Tick(), now)  # however busy: steps may follow one another for hours
        plan, events = self.scheduler.plan(now)
        self._outbox += events
        if self.telemetry is not None:
            self.telemetry.look_at_cancelled(self.scheduler.is_live, now)
        if plan is not None:
            if self._on_event is not None:
                self._on_event(plan)
            await self._step(plan)
            return True
        self._deliver()
        if self._is_closing and self.is_idle:
            self._check_books(now)
            return False
        await self._wait_for_work(now)
        return True

    def _drain_commands(self) -> None:
        commands = self._commands
        while commands:
            event = commands.popleft()
            if isinstance(event, Submit):
                self._num_submits -= 1
            self._apply(event, self._time())

    def _apply(self, event: InputEvent, now: float) -> None:
        if self._on_event is not None:
            self._on_event(event)
        self._outbox += self.scheduler.apply(event, now)

    async def _step(self, plan: StepPlan | EncodePlan) -> None:
        """Execute one plan in the worker's thread and commit what came of it; meanwhile deliver,
        and prepare the next plan."""
        await trio.lowlevel.checkpoint_if_cancelled()
        started = self._time()
        if self.telemetry is not None:
            self.telemetry.step_begins(len(plan.rows), started)
        is_few = max(len(self._outbox), len(plan.rows)) <= EVENTS_TO_SEND_FIRST
        is_held_back = len(self._outbox) >= EVENTS_TO_HOLD_BACK
        if is_few:
            self._work_ahead()
        job = self._threads.start(lambda: self._execute(plan), tells_begin=is_held_back)
        self._watch.begin(plan.plan_id)
        try:
            if is_held_back:
                await job.wait_begun()
            if not is_few:
                self._work_ahead()
        finally:
            try:
                outcome = await job.wait()
            finally:
                self._watch.end()
        ended = self._time()
        self.busy_s += ended - started
        if self.telemetry is not None:
            self.telemetry.step_ended(started, ended)
        self._apply(outcome, ended)
        if self._check_level >= 2:
            self.scheduler.check()

    def _work_ahead(self) -> None:
        """What is done of a step's time, or right before it: deliver what the last one caused, and
        prepare the next plan."""
        self._deliver()
        self.scheduler.prepare(self._time())

    def _execute(self, plan: StepPlan | EncodePlan) -> StepDone | StepFailed:
        """In the worker's thread: whatever the model raises becomes a value (R51, R140)."""
        try:
            return StepDone(self._runner.execute(plan))  # type: ignore[arg-type]  # its own kind
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
        if self.scheduler.is_idle:
            self._went_idle.set()
        if self.scheduler.is_idle and now >= self._checked_at + CHECK_INTERVAL_S:
            self._check_books(now)
        wakeup = self.scheduler.next_wakeup(now)
        with trio.move_on_at(math.inf if wakeup is None else wakeup) as scope:
            await self._wake.wait()
        if not scope.cancelled_caught:
            self._wake = trio.Event()

    def _check_books(self, now: float) -> None:
        if self._check_level >= 1:
            self.scheduler.check()
            self._checked_at = now

    # ---- delivery

    def _deliver(self) -> None:
        """Hand every event to its request's sink, in order."""
        if not self._outbox:
            return
        events, self._outbox = self._outbox, []
        if self._on_event is not None:
            for event in events:
                self._on_event(event)
        self._deliveries.on_begin()
        try:
            self._hand_out(events)
        finally:
            self._deliveries.on_end()
        if self.telemetry is not None:
            self.telemetry.delivered(events, self._time())

    def _hand_out(self, events: list[OutputEvent]) -> None:
        sinks = self._sinks
        for event in events:
            sink = sinks.get(event.request_id)
            if sink is None:
                self.late_events += 1  # its request was ended from outside (R156)
            elif event.__class__ is Tokens:
                sink.on_tokens(event)
            elif isinstance(event, Encoded):
                sink.on_encoded(event)
            elif isinstance(event, Finished):
                sink.on_finished(event)
            elif isinstance(event, Admitted):
                sink.on_admitted(event)
            elif isinstance(event, Refused):
                sink.on_refused(event)
