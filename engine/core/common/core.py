"""The base of the schedulers of all kinds of work: input events in, output events and plans out.

A kind of work (text, encoders, drawing) is a request, a plan and a result. The loop, the replica
and the supervisor know each kind's scheduler as a `Core`. The kind's runner turns a plan into a
result.

Rule 1: two methods drive a core. `apply(event, now)` takes everything that happens and returns the
events that it caused, in order; `plan(now)` returns the next step, whose `StepDone` or `StepFailed`
must be applied before the next `plan` (D2, D4). Rule 2: time comes as ``now``, in seconds of
the engine's one clock; nothing here reads a clock, and decisions depend only on the inputs. Rule 3:
each accepted choice emits exactly one `Finished`.

Source: etcd raft's Ready/Advance for the shape; docs/decisions.md, D17–D19, for the contents.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from engine.core.common import refusals
from engine.core.common.events import (
    Admitted,
    Cancel,
    Journaled,
    Pause,
    PauseMode,
    ReaderDrained,
    Refused,
    RequestT,
    ResultT,
    Resume,
    StepDone,
    StepFailed,
    Submit,
    Tick,
)
from engine.core.common.live_requests import LiveRequests, LiveT
from engine.core.common.rate import RecentRate
from engine.core.common.shares import Shares
from engine.core.common.types import EndReason, PlanId
from engine.core.common.waiting_queue import BACKGROUND_FROM
from engine.errors import EngineBug

if TYPE_CHECKING:
    from collections.abc import Sized

    from engine.core.common.credit import Credit
    from engine.core.common.events import InputEvent, OutputEvent
    from engine.core.common.steps import StepFailure
    from engine.errors import FieldViolation, TrioletError
    from engine.settings import QueueLimits


class Plan(Journaled, Protocol):
    """One step that a runner executes."""

    @property
    def plan_id(self) -> PlanId:
        """The plan's number, which its result repeats."""

    @property
    def rows(self) -> Sized:
        """One entry for each sequence or input that the step computes."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""


PlanT = TypeVar("PlanT", bound=Plan)


class Step(Protocol):
    """A step in flight, as its scheduler keeps it."""

    @property
    def plan(self) -> Any:
        """The plan that the worker executes; each kind of work has a class of plans."""


StepT = TypeVar("StepT", bound=Step)


class PrefixLookup(Protocol):
    """What the pool asks a core's prefix cache when it chooses among replicas."""

    def keys_of(self, request: Any) -> list[bytes]:
        """Return the keys of the parts of a prompt that may be cached. The request need not be
        submitted."""

    def cached_tokens(self, keys: list[bytes]) -> int:
        """Return how many tokens of the prefix with these keys this core need not compute."""


class Core(LiveRequests[LiveT], Generic[RequestT, PlanT, ResultT, LiveT, StepT]):
    """One replica's scheduler: synchronous, not thread-safe, and never waits.

    Each kind of work has a subclass, which decides which requests it refuses, what the next step
    computes, what a row's result means, and which memory a request holds.
    """

    prefixes: PrefixLookup | None = None  # set by a kind that has a prefix cache
    token_word = "tokens"  # what error messages call `CoreRequest.num_tokens`

    def __init__(self, config: QueueLimits) -> None:
        super().__init__(config)
        self.shares = Shares()  # of the requests' holders
        self._events: list[OutputEvent] = []  # the events of the call in progress
        self._step: StepT | None = None
        self._metering: Any  # each kind has its own, with `charge`; `EqualSteps` has `settle`
        self._rate = RecentRate()  # in the unit of `CoreRequest.num_tokens`

    # ---- the two verbs

    def apply(self, event: InputEvent[RequestT, ResultT], now: float) -> list[OutputEvent]:
        """Take one input event and return the output events that it caused, in order.

        Raises:
            EngineBug: The result is not of the plan in flight; nothing changed.
        """
        match event:
            case StepDone():
                self._commit(self._take_step(event.result.plan_id), event.result, now)
            case Submit():
                self._submit(event, now)
            case Cancel():
                if (live := self._requests.get(event.request_id)) is not None:
                    self._end(live, event.reason, now)
            case ReaderDrained():
                if (live := self._parked.get(event.request_id)) is not None:
                    self._reader_drained(live, now)
            case StepFailed():
                self._step_failed(self._take_step(event.failure.plan_id), event.failure, now)
            case Tick():
                self._end_due(now)
            case Pause():
                self._pause = event.mode
                if event.mode is PauseMode.ABORT:
                    for live in list(self._requests.values()):
                        self._end(live, EndReason.ABORTED, now, "paused")
            case Resume():
                self._pause = None
            case _:
                self._apply_own(event, now)
        return self._take_events()

    def plan(self, now: float) -> tuple[PlanT | None, list[OutputEvent]]:
        """Return the next step to execute, or None if there is nothing to compute; and the events
        that planning caused.

        Raises:
            EngineBug: A plan is in flight already.
        """
        if self._step is not None:
            raise EngineBug(f"plan {self._step.plan.plan_id} is still in flight")
        counters = self._counters
        step = self._step = self._next_step(PlanId(counters.steps + 1), now)
        if step is None:
            return None, self._take_events()
        counters.steps += 1
        counters.rows += len(step.plan.rows)
        return step.plan, self._take_events()

    def charge(self, seconds: float) -> None:
        """Divide the ``seconds`` that the step in flight has taken among the meters of the requests
        that it computes, by what their parts usually cost. To be called before its result is
        applied; a step that nobody measured charges nothing."""
        self._metering.charge(self._step, seconds)

    def settle_meters(self) -> None:
        """Make the meters of live requests right. Those of ended ones are right anyway."""
        self._metering.settle()

    def prepare(self, now: float) -> None:
        """Make the next plan while a step runs, so that `plan` only has to return it. A kind whose
        planning takes microseconds does nothing."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is live and no step is in flight."""
        return not self._requests and self._step is None

    def _take_events(self) -> list[OutputEvent]:
        if not self._events:
            return []
        events = self._events.copy()
        self._events.clear()
        return events

    def _take_step(self, plan_id: PlanId) -> StepT:
        step = self._step
        if step is None or step.plan.plan_id != plan_id:
            raise EngineBug(f"plan {plan_id} is not in flight")
        self._step = None
        return step

    # ---- requests

    def _submit(self, event: Submit[RequestT], now: float) -> None:
        request = event.request
        refused = self._refusal(request, event.credit, now)
        if refused is not None:
            self._events.append(Refused(request.request_id, refused))
            return
        live = self._requests[request.request_id] = self._admit(request, event.credit, now)
        live.meter = event.meter
        self._counters.prompt_tokens += request.prompt_tokens
        self._events.append(Admitted(request.request_id, request.prompt_tokens))

    def _refusal(self, request: RequestT, credit: Credit, now: float) -> TrioletError | None:
        """Return why a request is refused, or None if it is accepted."""
        return (
            refusals.duplicate_or_paused(request.request_id, self._requests, self._pause)
            or self._misfit(request, credit)
            or refusals.queue_full(
                self.config,
                self._queued(request),
                request,
                self._rate.tokens_per_s,
                self.token_word,
                self._waiting.items,
            )
            or self._infeasible(request, now)
        )

    def _end_due(self, now: float) -> None:
        """End the requests that have stalled. A kind may have others to end."""
        for live in self._stalled(now):
            self._end(live, EndReason.STALLED, now)

    # ---- what a kind adds

    def _queued(self, request: RequestT) -> tuple[int, int]:
        """Return how many requests and tokens the queue holds that count for a new one: background
        work leaves the queue to the others."""
        return self._waiting.size_of(background=request.priority >= BACKGROUND_FROM)

    def _misfit(self, request: RequestT, credit: Credit) -> TrioletError | None:
        """Return the error of a request that can never be computed here, or None."""
        return None

    def _infeasible(self, request: RequestT, now: float) -> TrioletError | None:
        """Return the error of a request that cannot be computed by its deadline (D18), or None."""
        return None

    @abstractmethod
    def _admit(self, request: RequestT, credit: Credit, now: float) -> LiveT:
        """Put an accepted request into the queue, and return its record."""

    @abstractmethod
    def _end(
        self,
        live: LiveT,
        reason: EndReason,
        now: float,
        detail: str = "",
        violation: FieldViolation | None = None,
    ) -> None:
        """End every choice of a live request that has not ended, and emit its `Finished`."""

    @abstractmethod
    def _reader_drained(self, live: LiveT, now: float) -> None:
        """Let a parked request go on, because its reader has taken something."""

    @abstractmethod
    def _next_step(self, plan_id: PlanId, now: float) -> StepT | None:
        """Return the next step, with its plan and message slots; None if there is nothing to
        compute."""

    @abstractmethod
    def _commit(self, step: StepT, result: ResultT, now: float) -> None:
        """Take the result of a step that succeeded."""

    @abstractmethod
    def _step_failed(self, step: StepT, failure: StepFailure, now: float) -> None:
        """Undo a step that failed, and decide what becomes of its rows."""

    def _apply_own(self, event: InputEvent[RequestT, ResultT], now: float) -> None:
        """Take an event that only some kinds of work handle; the other kinds ignore it."""


AnyCore: TypeAlias = Core[Any, Any, Any, Any, Any]
