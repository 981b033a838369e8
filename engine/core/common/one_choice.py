"""A scheduler for requests with one answer (a "choice"): embeddings, rankings, generated images.

A kind chooses the parts of requests that the next step computes, makes the worker's plan of them,
and emits the event of each part's result.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from engine.core.common.core import Core, PlanT
from engine.core.common.events import Finished, PauseMode, RequestT, ResultT
from engine.core.common.live_requests import (
    HELD_BY_NONE,
    HELD_WHILE_RUNNING,
    HELD_WHILE_WAITING,
    NOT_READ,
    LiveRequest,
    Places,
)
from engine.core.common.meter import EqualSteps, divide
from engine.core.common.phases import Phase
from engine.core.common.steps import RowFailure
from engine.core.common.types import EndReason, Explanation, Timings, Usage
from engine.core.common.waiting_queue import aged_priority
from engine.errors import EngineBug

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from engine.core.common.credit import Credit
    from engine.core.common.steps import StepFailure
    from engine.core.common.types import PlanId
    from engine.core.common.waiting_queue import Key
    from engine.errors import FieldViolation
    from engine.settings import QueueLimits


class OneChoice(LiveRequest[RequestT]):
    """A live request of one choice, which starts once, has its parts computed, and ends as a whole.

    ``rank`` is its priority, arrival and serial number. ``num_done`` of its parts are done, and
    ``in_step`` of them are in flight. ``is_ended``: its `Finished` event was emitted, and what a
    step still computes for it is dropped. ``prefilled_at`` is when the work before its first
    result was done; None where there is no such work. Times are seconds of the engine's clock.
    """

    __slots__ = (
        "in_step",
        "is_ended",
        "num_done",
        "parked_s",
        "prefilled_at",
        "rank",
        "started_at",
        "submitted_at",
        "waiting_key",
    )

    def __init__(self, request: RequestT, credit: Credit, now: float, number: int) -> None:
        super().__init__(request, credit)
        self.rank = (request.priority, request.arrival, number)
        self.submitted_at = now
        self.started_at: float | None = None
        self.prefilled_at: float | None = None
        self.parked_s = 0.0
        self.num_done = self.in_step = 0
        self.is_ended = False
        self.waiting_key: Key = ()

    @property
    def phase(self) -> Phase:
        """The phase in which the request is."""
        if self.parked_since is not None:
            return Phase.PARKED
        return Phase.QUEUED if self.started_at is None else self.running_phase

    @property
    @abstractmethod
    def running_phase(self) -> Phase:
        """The phase of the request once it has started, unless it is parked."""

    @property
    @abstractmethod
    def num_parts(self) -> int:
        """How many parts the request has."""

    @property
    def has_begun(self) -> bool:
        """Whether a row of the request has been in a step."""
        return self.started_at is not None

    def needs_slot(self, part: Any) -> bool:
        """Return whether a part gives the reader a message."""
        return True

    @property
    def queued_tokens(self) -> int:
        """The tokens that are to be computed."""
        return self.request.num_tokens

    def key_in_queue(self, now: float, aging_s: float) -> Key:
        """Return the request's key in the queue: its priority after aging, then its arrival."""
        return (aged_priority(self.request, now, aging_s), *self.rank[1:])

    def park(self, now: float) -> None:
        """Start counting the time that the request waits for its reader."""
        self.parked_since = now

    def unpark(self, now: float) -> None:
        """Stop counting the time that the request waits for its reader."""
        assert self.parked_since is not None
        self.parked_s += now - self.parked_since
        self.parked_since = None

    def timings(self, now: float) -> Timings:
        """Return the seconds by phase of a request that ends now."""
        started_at = now if self.started_at is None else self.started_at
        queue_s, parked_s = started_at - self.submitted_at, self.parked_s
        if self.prefilled_at is None:
            computed_s = max(0.0, now - started_at - parked_s)
            return Timings(queue_s=queue_s, prefill_s=computed_s, parked_s=parked_s)
        return Timings(
            queue_s=queue_s,
            prefill_s=self.prefilled_at - started_at,
            decode_s=max(0.0, now - self.prefilled_at - parked_s),
            parked_s=parked_s,
        )


ChoiceT = TypeVar("ChoiceT", bound="OneChoice[Any]")
Parts: TypeAlias = "Sequence[tuple[ChoiceT, Any]]"  # requests, each with a part of its own


class OneChoiceStep(NamedTuple):
    """A step: ``rows`` are the `Parts`, in the plan's order."""

    plan: Any
    rows: Sequence[tuple[Any, Any]]
    started_at: float


class _Metering(EqualSteps):
    """Divides the time of steps among the requests of their parts, by ``costs_of`` these."""

    __slots__ = ("_costs_of",)

    def __init__(self, costs_of: Callable[[Any], Sequence[float]]) -> None:
        super().__init__()
        self._costs_of = costs_of

    def charge(self, step: OneChoiceStep, seconds: float) -> None:
        """Divide a step's seconds."""
        divide(seconds, [live.meter for live, _ in step.rows], self._costs_of(step.rows))


class OneChoiceCore(Core[RequestT, PlanT, ResultT, ChoiceT, OneChoiceStep]):
    """A `Core` for requests of one choice. ``live_type`` makes the record of a request."""

    live_type: type[ChoiceT]

    def __init__(self, config: QueueLimits) -> None:
        super().__init__(config)
        self._numbers = count()
        self._metering = _Metering(self._costs)

    # ---- requests

    def _admit(self, request: RequestT, credit: Credit, now: float) -> ChoiceT:
        live = self.live_type(request, credit, now, next(self._numbers))
        self._enqueue(live, now)
        return live

    def _enqueue(self, live: ChoiceT, now: float) -> None:
        """Put a request into the queue."""
        self._waiting.add(live, now)

    def _end(
        self,
        live: ChoiceT,
        reason: EndReason,
        now: float,
        detail: str = "",
        violation: FieldViolation | None = None,
    ) -> None:
        """End a request that has not ended. The rows that it has in a step are dropped later."""
        phase = live.phase
        self._leave(live)
        if live.parked_since is not None:
            self._unpark(live, now)
        live.is_ended = True
        name = live.request.request_id
        del self._requests[name]
        usage, timings = Usage(live.request.prompt_tokens, 0, 0), live.timings(now)
        self._events.append(
            Finished(name, 0, reason, usage, timings, None, phase, detail, violation)
        )

    @abstractmethod
    def _leave(self, live: ChoiceT) -> None:
        """Take a request that ends out of the queue, and give back its seat if it has one."""

    # ---- steps

    def _next_step(self, plan_id: PlanId, now: float) -> OneChoiceStep | None:
        rows = [] if self._pause is PauseMode.KEEP else self._choose(now)
        if not rows:
            return None
        plan = self._plan_of(plan_id, rows)
        for live, _ in rows:
            live.in_step += 1
            if live.started_at is None:
                live.started_at = now
        return OneChoiceStep(plan, rows, now)

    @abstractmethod
    def _choose(self, now: float) -> Parts[ChoiceT]:
        """Return the parts for a step. If a part needs a message slot, it is reserved."""

    @abstractmethod
    def _plan_of(self, plan_id: PlanId, rows: Parts[ChoiceT]) -> PlanT:
        """Return the plan of the chosen parts."""

    def _commit(self, step: OneChoiceStep, result: Any, now: float) -> None:
        if now > step.started_at:
            self._note_step(step, result, now - step.started_at)
        for row, (live, part), got in zip(step.plan.rows, step.rows, result.rows, strict=True):
            if got.sequence != row.sequence:
                raise EngineBug(f"a result for {got.sequence} came in the row of {row.sequence}")
            live.in_step -= 1
            if live.is_ended:
                self._counters.late_results += 1
                self._give_up_slot(live, part)
            elif isinstance(got, RowFailure):
                self._give_up_slot(live, part)
                self._end(live, EndReason.FAILED, now, got.cause, got.violation)
            else:
                live.num_done += 1
                if live.needs_slot(part):
                    live.credit.fill()
                self._take_result(live, part, got, now)
                if live.num_done == live.num_parts:
                    self._end(live, EndReason.STOP, now)

    def _costs(self, rows: Parts[ChoiceT]) -> Sequence[float]:
        """Return what each part of a step costs, compared with the others."""
        return (1.0,) * len(rows)

    def _note_step(self, step: OneChoiceStep, result: ResultT, seconds: float) -> None:
        """Update the estimates of speed by how long a step took."""
        self._rate.note(step.plan.num_tokens, seconds)

    @abstractmethod
    def _take_result(self, live: ChoiceT, part: Any, got: Any, now: float) -> None:
        """Emit the event of a part's result, if the reader is to get an event."""

    def _give_up_slot(self, live: ChoiceT, part: Any) -> None:
        if live.needs_slot(part):
            live.credit.cancel()

    def _step_failed(self, step: OneChoiceStep, failure: StepFailure, now: float) -> None:
        """Put back the parts of a step that failed. A part that was alone in its step would fail
        again: end its request."""
        for live, part in step.rows:
            live.in_step -= 1
            self._give_up_slot(live, part)
            if not live.is_ended:
                self._put_back(live, part, now)
        first, _ = step.rows[0]
        if len(step.rows) == 1 and not first.is_ended:
            self._end(first, EndReason.FAILED, now, failure.cause)

    def _put_back(self, live: ChoiceT, part: Any, now: float) -> None:
        """Let a part of a failed step wait again."""

    # ---- readers

    def _park(self, live: ChoiceT, now: float) -> None:
        """Let a request wait until its reader has taken messages."""
        live.park(now)
        live.credit.mark_starved()
        self._parked[live.request.request_id] = live

    def _unpark(self, live: ChoiceT, now: float) -> None:
        live.unpark(now)
        del self._parked[live.request.request_id]

    def _reader_drained(self, live: ChoiceT, now: float) -> None:
        """Let a parked request go on, because its reader has taken something."""
        self._unpark(live, now)

    # ---- explaining

    def _explain(self, live: ChoiceT, now: float) -> tuple[Explanation, Set[PauseMode]]:
        if live.parked_since is not None:
            since = live.parked_s + now - live.parked_since
            return Explanation("PARKED", NOT_READ, parked_s=since), HELD_BY_NONE
        held_by = HELD_WHILE_RUNNING if live.has_begun else HELD_WHILE_WAITING
        if live.started_at is not None:
            why = self._why_left_out(live)
            return Explanation("RUNNING", why, parked_s=live.parked_s), held_by
        before = self._waiting.in_order(now)
        position = self._waiting.position_of(live)
        ahead = sum(other.queued_tokens for other in before[: position - 1])
        ahead += self._tokens_begun()
        rate = self._rate.tokens_per_s
        estimate_s = ahead / rate if rate > 0 else None
        return Explanation("WAITING", self._why_waiting(ahead), position, estimate_s), held_by

    def _tokens_begun(self) -> int:
        """Return how many tokens are left of requests that have begun and left the queue."""
        return 0

    def _why_left_out(self, live: ChoiceT) -> str:
        """Return what a request that has started waits for; empty if it waits for nothing."""
        return ""

    def _why_waiting(self, ahead: int) -> str:
        """Return what a request waits for that has ``ahead`` tokens before it in the queue."""
        return "a step"

    # ---- views

    def _places(self) -> Places:
        """Count the requests that have started, that have not started, that are parked, and that
        have ended while the step in flight still computes them."""
        parked = len(self._parked)
        waiting = sum(live.started_at is None for live in self._requests.values())
        rows = () if self._step is None else self._step.rows
        ending = len({live for live, _ in rows if live.is_ended})
        return Places(len(self._requests) - parked - waiting, waiting, parked, ending)

    def check(self) -> None:
        """Check that each request is live once, and that its slots agree with its rows in the step.

        Raises:
            AssertionError: The message names the first request that breaks this.
        """
        super().check()
        rows = () if self._step is None else self._step.rows
        for name, live in self._requests.items():
            assert not live.is_ended, f"{live} has ended"
            assert live.num_done < live.num_parts, f"{live} is done and has not ended"
            is_parked = name in self._parked
            assert is_parked == (live.parked_since is not None), f"{live}: parked or not?"
        for live in {*self._requests.values(), *(live for live, _ in rows)}:
            own = [part for owner, part in rows if owner is live]
            assert live.in_step == len(own), f"{live} has {len(own)} rows in the step"
            promised = sum(map(live.needs_slot, own))
            assert live.credit.reserved == promised, f"{live}: slots leaked"
