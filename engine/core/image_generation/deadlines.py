"""Which drawings cannot be done by their deadlines, on arrival or after some time in the queue.

Rule: a decision has no effects, except that `LeastTimes` notes each refused deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.phases import Phase
from engine.errors import DeadlineInfeasible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.core.common.waiting_queue import WaitingQueue
    from engine.core.image_generation.least_times import LeastTimes
    from engine.core.image_generation.live_request import LiveDrawing
    from engine.core.image_generation.types import ImageGenerationRequest
    from engine.errors import TrioletError

LATE_S = 1e-6  # added to the latest time to start: far less than a step, more than rounding


class Deadlines:
    """Decides which drawings can be done in time. ``queue`` has the waiting drawings."""

    def __init__(self, queue: WaitingQueue[LiveDrawing], times: LeastTimes) -> None:
        self._queue = queue
        self._times = times

    def too_late(self, now: float) -> Iterator[tuple[LiveDrawing, TrioletError]]:
        """Yield the drawings in the queue that cannot be done by their deadlines, each with its
        error, in the order of their submission. The caller ends each before it takes the next."""
        for live in sorted(self._queue.items, key=lambda live: live.rank[2]):
            if (error := self.infeasible(live.request, now)) is not None:
                yield live, error

    def next_too_late(self, now: float) -> float | None:
        """Return when the next drawing in the queue is `too_late`, at least ``now``; None if none
        will be before its deadline."""
        latest = [
            self._latest_start(live.request, live.request.deadline)
            for live in self._queue.items
            if live.request.deadline is not None and not live.is_late(now)
        ]
        return max(now, min(latest) + LATE_S) if latest else None

    def infeasible(self, request: ImageGenerationRequest, now: float) -> DeadlineInfeasible | None:
        """Return the error of a drawing that cannot be done by its deadline (D18), or None."""
        if request.deadline is None or request.deadline <= now:
            return None  # the deadline has passed, and the request's scope is about to end it
        if now <= self._latest_start(request, request.deadline):
            return None
        left, seconds = request.deadline - now, self._times.seconds_for(request)
        self._times.note_refusal(request)
        return DeadlineInfeasible(
            f"the drawing takes at least {seconds:.3g} s, of which {left:.3g} s are left",
            phase=Phase.QUEUED.value,
        )

    def _latest_start(self, request: ImageGenerationRequest, deadline: float) -> float:
        return deadline - self._times.seconds_for(request)
