"""The drawings that wait for a seat, in the order in which they start.

Rule: the queue orders requests and counts their steps; who may start is decided by the scheduler.
"""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.core.common.types import RequestId
    from engine.core.image.live_drawing import LiveDrawing


class WaitingQueue:
    """Requests in the order in which they start: by priority, then by arrival. A request gains one
    level of priority for each ``aging_s`` seconds that it waits, so that no request starves.

    ``num_steps`` are the denoising steps of all requests in the queue, ``peak`` is how many
    requests there have been at most. Both are read-only outside.
    """

    def __init__(self, aging_s: float) -> None:
        self.num_steps = self.peak = 0
        self._aging_s = aging_s
        self._waiting: dict[RequestId, LiveDrawing] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[LiveDrawing]:
        return iter(self._waiting.values())

    def add(self, live: LiveDrawing) -> None:
        """Put a request into the queue."""
        self._waiting[live.request.request_id] = live
        self.num_steps += live.request.num_steps
        self.peak = max(self.peak, len(self._waiting))

    def remove(self, live: LiveDrawing) -> None:
        """Take a request out that is in the queue."""
        del self._waiting[live.request.request_id]
        self.num_steps -= live.request.num_steps

    def first(self, now: float) -> LiveDrawing | None:
        """Return the request that starts next, or None if all those in the queue are late."""
        ready = [live for live in self._waiting.values() if not live.is_late(now)]
        return min(ready, key=lambda live: self._key(live, now), default=None)

    def in_order(self, now: float) -> list[LiveDrawing]:
        """Return the requests, first to last."""
        return sorted(self._waiting.values(), key=lambda live: self._key(live, now))

    def _key(self, live: LiveDrawing, now: float) -> tuple[float, ...]:
        waited = max(0.0, now - live.request.arrival)
        return (live.request.priority - floor(waited / self._aging_s), *live.rank[1:])
