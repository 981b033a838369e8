"""The table of a scheduler's live requests, with a record of each, and the queries about them.

Rule: a query changes nothing and never waits, so it is answered while a step is in flight, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from engine.core.common.events import PauseMode, RequestT
from engine.core.common.types import CoreStatistics
from engine.core.common.waiting_queue import BACKGROUND_FROM, WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Set

    from engine.core.common.credit import Credit
    from engine.core.common.meter import Meter
    from engine.core.common.phases import Phase
    from engine.core.common.types import Explanation, RequestId
    from engine.settings import QueueLimits

NOT_READ = "reader: it has not read what was sent"

# The pauses that hold up a request. Under WAIT, requests that have begun go on.
HELD_BY_NONE: Set[PauseMode] = frozenset()
HELD_WHILE_RUNNING: Set[PauseMode] = frozenset({PauseMode.KEEP})
HELD_WHILE_WAITING: Set[PauseMode] = frozenset({PauseMode.KEEP, PauseMode.WAIT})


class LiveRequest(ABC, Generic[RequestT]):
    """A request that was accepted. ``credit`` counts the message slots of its stream, ``meter``
    what it costs, and ``parked_since`` is set while it is parked, in seconds of the engine's
    clock."""

    __slots__ = ("credit", "meter", "parked_since", "request")

    def __init__(self, request: RequestT, credit: Credit) -> None:
        self.request = request
        self.credit = credit
        self.meter: Meter  # set by `Core`, when the request is admitted
        self.parked_since: float | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.request.request_id}>"

    @property
    @abstractmethod
    def phase(self) -> Phase | None:
        """The phase in which the request is; None once it only waits for the end of a step."""

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """Whether the worker knows of the request, because a step with a row of it has begun."""

    @property
    def is_background(self) -> bool:
        """Whether the request is computed only while nothing else is to be."""
        return self.request.priority >= BACKGROUND_FROM

    def is_late(self, now: float) -> bool:
        """Return whether the deadline has passed; the request is then about to be cancelled."""
        return self.request.deadline is not None and self.request.deadline <= now

    def stalls_at(self, timeout_s: float) -> float:
        """Return when a parked request stalls, if it may be parked for ``timeout_s`` seconds.
        Infinity if it is not parked, or if its reader has taken a message since then."""
        if self.parked_since is None or not self.credit.starved:
            return math.inf
        return max(self.parked_since, self.credit.waits_until) + timeout_s


LiveT = TypeVar("LiveT", bound=LiveRequest[Any])


class Places(NamedTuple):
    """How many sequences, encoder inputs or drawings are in each state (`CoreStatistics`)."""

    running: int
    waiting: int
    parked: int
    ending: int


@dataclass(slots=True)
class Counters:
    """The counts since the scheduler's start (`CoreStatistics`)."""

    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    late_results: int = 0


class LiveRequests(ABC, Generic[LiveT]):
    """The live requests of one scheduler, in the order of their admission.

    ``_waiting`` is the queue of the requests, or parts of requests, that have not started.
    ``_parked`` are the parked requests, the one that has been parked longest first.
    """

    aging_late_s = 0.0  # by how many seconds the queue may apply aging too late

    def __init__(self, config: QueueLimits) -> None:
        self.config = config
        self._requests: dict[RequestId, LiveT] = {}
        self._parked: dict[RequestId, LiveT] = {}
        self._waiting: WaitingQueue[Any] = WaitingQueue(config.aging_s, self.aging_late_s)
        self._pause: PauseMode | None = None
        self._counters = Counters()

    def is_live(self, request_id: RequestId) -> bool:
        """Return whether the request holds anything: a place in the queue, memory, a row."""
        return request_id in self._requests

    def phase_of(self, request_id: RequestId) -> Phase | None:
        """Return the phase of a live request, or None if it is not live."""
        live = self._requests.get(request_id)
        return None if live is None else live.phase

    def has_begun(self, request_id: RequestId) -> bool:
        """Return whether the worker knows of a live request (`LiveRequest.has_begun`)."""
        live = self._requests.get(request_id)
        return live is not None and live.has_begun

    def explain(self, request_id: RequestId, now: float) -> Explanation | None:
        """Return what a live request does and waits for, or None if it is not live. The time is
        bounded by the number of live requests."""
        live = self._requests.get(request_id)
        if live is None:
            return None
        explained, held_by = self._explain(live, now)
        if self._pause is None or self._pause not in held_by:
            return explained
        why = f"resume: the model is paused ({self._pause.value})"
        prompt = explained.prompt and explained.prompt._replace(first_token_s=None)
        return replace(explained, waiting_for=why, estimate_s=None, prompt=prompt)

    @abstractmethod
    def _explain(self, live: LiveT, now: float) -> tuple[Explanation, Set[PauseMode]]:
        """Return what a live request does, what it waits for unless the model is paused, and the
        pauses that hold it up."""

    # `next_wakeup` and `_stalled` both compare times. If one of them compared a difference, it
    # would round differently: the loop would wake up when nothing is stalled yet, again and again.

    def next_wakeup(self, now: float) -> float | None:
        """Return the time, at least ``now``, at which a `Tick` will have something to do if nothing
        else happens before: the first stall. None if nothing is parked."""
        timeout_s = self.config.stall_timeout_s
        stalls = [live.stalls_at(timeout_s) for live in self._parked.values()]
        first = min(stalls, default=math.inf)
        return None if first == math.inf else max(now, first)

    def _stalled(self, now: float) -> list[LiveT]:
        """Return the requests whose readers have taken nothing for the stall timeout, in the order
        in which they end."""
        timeout_s = self.config.stall_timeout_s
        return [live for live in self._parked.values() if now >= live.stalls_at(timeout_s)]

    def statistics(self) -> CoreStatistics:
        """Return the counters as they stand."""
        return CoreStatistics(**self._counts())

    def _counts(self) -> dict[str, int]:
        """Return the counters that every kind has, by their names in `CoreStatistics`."""
        counters = self._counters
        return {
            **self._places()._asdict(),
            "queued_tokens": self._waiting.num_tokens,
            "peak_waiting": self._waiting.peak,
            "step_count": counters.steps,
            "step_rows_total": counters.rows,
            "prompt_tokens_total": counters.prompt_tokens,
            "late_results": counters.late_results,
        }

    @abstractmethod
    def _places(self) -> Places:
        """Return how many sequences, encoder inputs or drawings are in each state."""

    def check(self) -> None:
        """Check that the queue is sorted and counted, and that the parked requests are live.

        Raises:
            AssertionError: The message names the condition that does not hold.
        """
        self._waiting.check()
        for name, live in self._parked.items():
            assert self._requests.get(name) is live, f"{live} is parked and not live"
            assert live.parked_since is not None, f"{live}: parked or not?"
        for name, live in self._requests.items():
            credit = live.credit
            assert min(credit.free, credit.filled) >= 0, f"{name}: {credit} has too few slots"
