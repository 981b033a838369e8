"""The mutable state of a live encode request, and the line that they wait in.

Rule: `Line` decides who goes first and nothing else: priority after aging, then arrival. Within
one priority that is arrival alone, so each priority's line stays sorted as time passes, and only
their heads are compared.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from heapq import merge
from math import floor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.core.credit import Credit
    from engine.core.encode_types import EncodeRequest


class LiveEncode:
    """A request that was accepted. Each of its inputs is in ``left``, or in the step in flight
    (``in_step``), or done.

    It stands in the line while something is left and it is not parked. ``is_ended``: its end was
    told; rows of it that are still in a step are computed for nobody.
    """

    __slots__ = (
        "credit",
        "in_step",
        "is_ended",
        "left",
        "num_done",
        "num_tokens",
        "parked_s",
        "parked_since",
        "rank",
        "request",
        "started_at",
        "submitted_at",
        "tokens_left",
    )

    def __init__(self, request: EncodeRequest, credit: Credit, now: float, tie: int) -> None:
        self.request = request
        self.credit = credit
        self.rank = (request.arrival, tie)
        self.submitted_at = now
        self.started_at: float | None = None  # its first row was planned
        self.parked_since: float | None = None
        self.parked_s = 0.0
        self.in_step = 0
        self.num_done = 0
        self.is_ended = False
        # longest first: neighbours in a batch are then alike, and memory runs out early or never
        lengths = [len(one.token_ids) for one in request.inputs]
        self.left = deque(sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)))
        self.num_tokens = self.tokens_left = sum(lengths)

    def __repr__(self) -> str:
        return (
            f"<LiveEncode {self.request.request_id} {self.phase} {len(self.left)} left, "
            f"{self.in_step} in the step, {self.num_done} done>"
        )

    @property
    def phase(self) -> str:
        """Where it is: queued, encode or parked."""
        if self.parked_since is not None:
            return "parked"
        return "queued" if self.started_at is None else "encode"

    def length(self, index: int) -> int:
        """Tokens of one of its inputs."""
        return len(self.request.inputs[index].token_ids)

    def is_late(self, now: float) -> bool:
        """Its deadline has passed: whoever owns it is about to end it."""
        return self.request.deadline is not None and self.request.deadline <= now

    def take(self, index: int, now: float) -> None:
        """An input that was left goes into a step."""
        if self.left[0] == index:
            self.left.popleft()
        else:
            self.left.remove(index)
        self.tokens_left -= self.length(index)
        self.in_step += 1
        if self.started_at is None:
            self.started_at = now

    def put_back(self, index: int) -> None:
        """An input comes back from a step that failed; shortest first keeps the order."""
        self.in_step -= 1
        self.left.appendleft(index)
        self.tokens_left += self.length(index)

    def park(self, now: float) -> None:
        self.parked_since = now

    def unpark(self, now: float) -> None:
        assert self.parked_since is not None
        self.parked_s += now - self.parked_since
        self.parked_since = None


class Line:
    """Requests in the order in which they go on; a level of priority is gained per ``aging_s``
    waited (so that nobody starves)."""

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._by_priority: dict[int, list[LiveEncode]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, live: LiveEncode) -> None:
        insort(self._by_priority.setdefault(live.request.priority, []), live, key=_rank)
        self._size += 1

    def remove(self, live: LiveEncode) -> None:
        """Take one out that is in the line."""
        priority = live.request.priority
        same = self._by_priority[priority]
        place = bisect_left(same, live.rank, key=_rank)
        assert same[place] is live, f"{live} is not where it should be"
        del same[place]
        if not same:
            del self._by_priority[priority]
        self._size -= 1

    def in_order(self, now: float) -> Iterator[LiveEncode]:
        """First to last. The line must not change before the iteration is over."""

        def key(live: LiveEncode) -> tuple[float, ...]:
            waited = max(0.0, now - live.request.arrival)
            return (live.request.priority - floor(waited / self._aging_s), *live.rank)

        return merge(*self._by_priority.values(), key=key)

    def check(self) -> None:
        """Raise AssertionError unless every line is sorted and counted."""
        assert self._size == sum(map(len, self._by_priority.values()))
        for priority, same in self._by_priority.items():
            assert same, f"the line of priority {priority} is empty"
            assert all(live.request.priority == priority for live in same)
            assert same == sorted(same, key=_rank)


def _rank(live: LiveEncode) -> tuple[float, int]:
    return live.rank
