"""What the kinds of work whose requests have one choice do alike: ends, readers, explanations."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, TypeVar

from engine.core.common.core import Core, PlanT, StepT
from engine.core.common.events import Finished, RequestT, ResultT
from engine.core.common.live_requests import (
    HELD_BY_NONE,
    HELD_WHILE_RUNNING,
    HELD_WHILE_WAITING,
    NOT_READ,
    Live,
)
from engine.core.common.phases import Phase
from engine.core.common.types import Explanation, Usage
from engine.core.common.waiting_queue import aged_priority

if TYPE_CHECKING:
    from collections.abc import Set
    from typing import Any

    from engine.core.common.credit import Credit
    from engine.core.common.events import PauseMode
    from engine.core.common.types import EndReason, Timings
    from engine.core.common.waiting_queue import Key
    from engine.errors import FieldViolation


class OneChoice(Live[RequestT]):
    """A live request of one choice, which starts once, and ends as a whole.

    ``rank`` is its priority, its arrival and its number. ``is_ended``: its `Finished` event was
    emitted, and what a step still computes for it is dropped. Times are seconds of the engine's
    clock.
    """

    __slots__ = ("is_ended", "parked_s", "rank", "started_at", "submitted_at", "waiting_key")

    def __init__(self, request: RequestT, credit: Credit, now: float, number: int) -> None:
        super().__init__(request, credit)
        self.rank = (request.priority, request.arrival, number)
        self.submitted_at = now
        self.started_at: float | None = None
        self.parked_s = 0.0
        self.is_ended = False
        self.waiting_key: Key = ()

    @property
    def phase(self) -> Phase:
        """What the request does."""
        if self.parked_since is not None:
            return Phase.PARKED
        return Phase.QUEUED if self.started_at is None else self.running_phase

    @property
    @abstractmethod
    def running_phase(self) -> Phase:
        """What the request does once it has started, unless it is parked."""

    @property
    def queued_tokens(self) -> int:
        """The tokens that are to be computed."""
        return self.request.num_tokens

    def key_in_queue(self, now: float, aging_s: float) -> Key:
        """Return its key in the queue: its priority after aging, then its arrival."""
        return (aged_priority(self.request, now, aging_s), *self.rank[1:])

    def park(self, now: float) -> None:
        """Start counting the time that the request waits for its reader."""
        self.parked_since = now

    def unpark(self, now: float) -> None:
        """Stop counting the time that the request waits for its reader."""
        assert self.parked_since is not None
        self.parked_s += now - self.parked_since
        self.parked_since = None

    @abstractmethod
    def timings(self, now: float) -> Timings:
        """Return the seconds by phase of a request that ends now."""


OneT = TypeVar("OneT", bound="OneChoice[Any]")


class OneChoiceCore(Core[RequestT, PlanT, ResultT, OneT, StepT]):
    """A `Core` for requests of one choice."""

    def _end(
        self,
        live: OneT,
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
    def _leave(self, live: OneT) -> None:
        """Take a request that ends out of its place, and give back what it holds."""

    # ---- readers

    def _park(self, live: OneT, now: float) -> None:
        """Let a request wait until its reader has taken what was sent."""
        live.park(now)
        live.credit.mark_starved()
        self._parked[live.request.request_id] = live

    def _unpark(self, live: OneT, now: float) -> None:
        live.unpark(now)
        del self._parked[live.request.request_id]

    def _reader_drained(self, live: OneT, now: float) -> None:
        """Let a parked request go on, because its reader has taken something."""
        self._unpark(live, now)

    # ---- explaining

    def _explain(self, live: OneT, now: float) -> tuple[Explanation, Set[PauseMode]]:
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
        rate = self._tokens_per_s
        estimate_s = ahead / rate if rate > 0 else None
        return Explanation("WAITING", self._why_waiting(ahead), position, estimate_s), held_by

    @abstractmethod
    def _tokens_begun(self) -> int:
        """Return how many tokens are left of requests that have begun and left the queue."""

    @abstractmethod
    def _why_left_out(self, live: OneT) -> str:
        """Return what a request that has started waits for; empty if it waits for nothing."""

    @abstractmethod
    def _why_waiting(self, ahead: int) -> str:
        """Return what a request waits for that has ``ahead`` tokens before it."""
