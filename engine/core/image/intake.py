"""Which drawings are accepted, and which of the accepted ones cannot be done in time any more.

Rule: a decision has no effects, except that `LeastTimes` notes each refused deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common import refusals
from engine.core.common.phases import Phase
from engine.errors import DeadlineInfeasible

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from engine.config import ImageConfig
    from engine.core.common.events import PauseMode
    from engine.core.common.rate import RecentRate
    from engine.core.common.types import RequestId
    from engine.core.image.least_times import LeastTimes
    from engine.core.image.live_drawing import LiveDrawing
    from engine.core.image.types import ImageRequest
    from engine.core.image.waiting_queue import WaitingQueue
    from engine.errors import TrioletError

LATE_S = 1e-6  # far less than a step, and more than the rounding of times


class Intake:
    """Accepts or refuses the drawings of one scheduler."""

    def __init__(
        self, config: ImageConfig, queue: WaitingQueue, times: LeastTimes, rate: RecentRate
    ) -> None:
        self._config = config
        self._queue = queue
        self._times = times
        self._rate = rate

    def refusal(
        self,
        request: ImageRequest,
        live: Container[RequestId],
        pause: PauseMode | None,
        now: float,
    ) -> TrioletError | None:
        """Return why a request is refused, or None if it is accepted. ``live`` are the ids in
        use."""
        queue = self._queue
        return (
            refusals.duplicate_or_paused(request.request_id, live, pause)
            or refusals.queue_full(
                self._config,
                len(queue),
                request.num_steps,
                queued_tokens=queue.num_steps,
                tokens_per_s=self._rate.tokens_per_s,
                unit="denoising steps",
            )
            or self._infeasible(request, now)
        )

    def too_late(self, now: float) -> Iterator[tuple[LiveDrawing, TrioletError]]:
        """Yield the drawings in the queue that cannot be done by their deadlines, each with its
        error. The caller ends each before it takes the next."""
        for live in list(self._queue):
            if (error := self._infeasible(live.request, now)) is not None:
                yield live, error

    def next_too_late(self, now: float) -> float | None:
        """Return when the next drawing in the queue is `too_late`, at least ``now``; None if none
        will be before its deadline."""
        latest = [
            self._latest_start(live.request, live.request.deadline)
            for live in self._queue
            if live.request.deadline is not None and not live.is_late(now)
        ]
        return max(now, min(latest) + LATE_S) if latest else None

    def _infeasible(self, request: ImageRequest, now: float) -> DeadlineInfeasible | None:
        """Return the error of a drawing that cannot be done by its deadline, whatever else runs
        (D18)."""
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

    def _latest_start(self, request: ImageRequest, deadline: float) -> float:
        return deadline - self._times.seconds_for(request)
