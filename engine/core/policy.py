"""Decisions without effects: who goes first, how much, who gives way.

Rule: pure functions of their arguments; the planner acts on what they return.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.core.sequence import Rank, Sequence
    from engine.core.types import Request

RETRY_AFTER_S = (1.0, 30.0)  # api.md: the queue's estimate is clamped to this


def waiting_key(request: Request, now: float, aging_s: float, tie: int) -> tuple[float, ...]:
    """Admission order: priority after aging (one level per ``aging_s`` waited), then the
    earliest deadline, then arrival. Slack and deadline order alike at one instant; the deadline
    does not need re-sorting as time passes."""
    level = request.priority - math.floor(max(0.0, now - request.arrival) / aging_s)
    deadline = math.inf if request.deadline is None else request.deadline
    return (level, deadline, request.arrival, tie)


def order_victims(
    parked: Iterable[Sequence], running: Iterable[Sequence], rank: Rank
) -> list[Sequence]:
    """Who may lose its blocks so that a sequence of ``rank`` gets them, the first to go first.

    Parked ones first, newest first: whoever does not read costs nobody else anything, so a
    parked sequence gives way even to a newer one (D6 lets a sequence preempt only what comes
    after it; parked counts as after every running one). Then the running ones that come after
    ``rank`` by (priority, arrival), the last first: the oldest always goes on. ``running`` is
    sorted by rank.
    """
    later = [seq for seq in running if seq.rank > rank]
    return sorted(parked, key=lambda seq: seq.rank, reverse=True) + later[::-1]


def retry_after(queued_tokens: int, tokens_per_s: float) -> float:
    """Seconds after which a place in the queue is likely, within `RETRY_AFTER_S`."""
    low, high = RETRY_AFTER_S
    if tokens_per_s <= 0:
        return low
    return min(high, max(low, queued_tokens / tokens_per_s))


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)
