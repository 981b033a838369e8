"""Explains what a live drawing does and waits for, from the scheduler's state alone.

Rule: an explanation changes nothing and never asks the worker. Its time is bounded by the length of
the waiting queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.events import PauseMode
from engine.core.common.types import Explanation

if TYPE_CHECKING:
    from engine.core.image.live_drawing import LiveDrawing
    from engine.core.image.seats import Seats
    from engine.core.image.waiting_queue import WaitingQueue


def explain(
    live: LiveDrawing,
    queue: WaitingQueue,
    seats: Seats,
    now: float,
    *,
    pause: PauseMode | None,
    steps_per_s: float,
) -> Explanation:
    """Return what a live drawing does and waits for. ``steps_per_s`` is the recent rate
    of denoising steps (`RecentRate`). A drawing holds no blocks, so these fields are 0."""
    if live.parked_since is not None:
        since = live.parked_s + now - live.parked_since
        return Explanation("PARKED", "reader: it has not read what was sent", parked_s=since)
    pausing = ""
    if pause is PauseMode.KEEP or (pause is not None and not live.num_done):
        pausing = f"resume: the model is paused ({pause.value})"
    if live.started_at is not None:
        others = len(seats) - len(seats.parked) - 1
        turn = f"its turn: drawings take one step each, and {others} more go on"
        reason = pausing or (turn if others and not live.in_step else "")
        return Explanation("RUNNING", reason, parked_s=live.parked_s)
    before = queue.in_order(now)
    place = before.index(live)
    ahead = sum(one.request.num_steps for one in before[:place])
    ahead += sum(one.request.num_steps - one.steps_done for one in seats)
    is_known = not pausing and steps_per_s > 0
    reason = f"a seat: {len(seats)} drawings take turns" if len(seats) else "a step"
    estimate_s = ahead / steps_per_s if is_known else None
    return Explanation("WAITING", pausing or reason, place + 1, estimate_s)
