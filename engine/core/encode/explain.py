"""Explains what a live encode request does and waits for, from the scheduler's state alone.

Rule: an explanation changes nothing and never asks the worker. Its time is bounded by the length of
the waiting queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.events import PauseMode
from engine.core.common.types import Explanation

if TYPE_CHECKING:
    from engine.core.encode.live_request import LiveEncode
    from engine.core.encode.waiting_queue import WaitingQueue


def explain(
    live: LiveEncode,
    queue: WaitingQueue,
    now: float,
    *,
    pause: PauseMode | None,
    tokens_per_s: float,
) -> Explanation:
    """Return what a live request does and waits for. ``tokens_per_s`` is the recent rate
    (`RecentRate`). An encoder holds no blocks and keeps no KV values, so these fields are 0."""
    if live.parked_since is not None:
        since = live.parked_s + now - live.parked_since
        return Explanation("PARKED", "reader: it has not read what was sent", parked_s=since)
    has_begun, pausing = live.started_at is not None, ""
    if pause is not None and (pause is PauseMode.KEEP or not has_begun):
        pausing = f"resume: the model is paused ({pause.value})"
    if has_begun:
        is_left_out = bool(live.left) and not live.in_step
        reason = pausing or ("token budget: the next steps have others" if is_left_out else "")
        return Explanation("RUNNING", reason, parked_s=live.parked_s)
    position = ahead = 0
    for other in queue.in_order(now):
        position += 1
        if other is live:
            break
        ahead += other.tokens_left
    is_known = not pausing and tokens_per_s > 0
    reason = "token budget: the next steps compute what is ahead" if ahead else "a step"
    estimate_s = ahead / tokens_per_s if is_known else None
    return Explanation("WAITING", pausing or reason, position, estimate_s)
