"""The sequences that wait for their start, in the order in which they are admitted.

Rule: the queue orders sequences and counts their tokens; who may start is decided elsewhere
(`engine.core.text.admission`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.common.events import CoreRequest
    from engine.core.text.sequence import Sequence

AGING_RESORT_S = 1.0  # guess: aging moves in steps of 10 s, so a second's delay does not matter


def waiting_key(request: CoreRequest, now: float, aging_s: float, tie: int) -> tuple[float, ...]:
    """Return the request's key in the admission order: its priority after aging (one level for
    each ``aging_s`` waited), then the earliest deadline, then arrival. At any one time, slack and
    deadline give the same order; with deadlines, it need not be sorted again as time passes."""
    level = request.priority - math.floor(max(0.0, now - request.arrival) / aging_s)
    deadline = math.inf if request.deadline is None else request.deadline
    return (level, deadline, request.arrival, tie)


class WaitingQueue:
    """WAITING sequences, sorted by `waiting_key`. Not thread-safe.

    ``sequences`` is sorted by the keys as they were at the last sorting; ``num_tokens`` is the sum
    of their tokens; ``peak`` is how many there have been at most. All are read-only outside.
    """

    def __init__(self, aging_s: float) -> None:
        self.sequences: list[Sequence] = []
        self.num_tokens = 0
        self.peak = 0
        self._aging_s = aging_s
        self._sorted_at = 0.0

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, seq: Sequence, now: float) -> None:
        """Put a sequence in its place."""
        seq.waiting_key = self.key_of(seq, now)
        insort(self.sequences, seq, key=_waiting_key)
        self.num_tokens += seq.num_tokens
        self.peak = max(self.peak, len(self.sequences))

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of the queue."""
        self.sequences.remove(seq)
        self.num_tokens -= seq.num_tokens

    def in_order(self, now: float) -> list[Sequence]:
        """Return the queue itself in admission order. Aging is applied at most a second late."""
        if now - self._sorted_at >= AGING_RESORT_S:
            for seq in self.sequences:
                seq.waiting_key = self.key_of(seq, now)
            self.sequences.sort(key=_waiting_key)
            self._sorted_at = now
        return self.sequences

    def key_of(self, seq: Sequence, now: float) -> tuple[float, ...]:
        """Return the key that the sequence has, or would have, in the queue."""
        return waiting_key(seq.live.request, now, self._aging_s, seq.sequence_id)

    def position_of(self, seq: Sequence) -> int:
        """Return the place of a sequence in the queue; the first has 1."""
        return 1 + bisect_left(self.sequences, seq.waiting_key, key=_waiting_key)

    def check(self) -> None:
        """Check the order and the count of tokens.

        Raises:
            AssertionError: One of them is wrong.
        """
        assert self.sequences == sorted(self.sequences, key=_waiting_key)
        assert self.num_tokens == sum(seq.num_tokens for seq in self.sequences)


def _waiting_key(seq: Sequence) -> tuple[float, ...]:
    return seq.waiting_key
