"""The encode requests that have inputs left, in the order in which they go on.

Rule: `WaitingQueue` only decides the order: priority after aging, then arrival. Within one priority
this is the order of arrival, so each priority's list stays sorted as time passes, and only the
heads of the lists are compared.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import merge
from math import floor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.core.encode.live_request import LiveEncode


class WaitingQueue:
    """Requests in the order in which they go on. A request gains one level of priority for each
    ``aging_s`` seconds that it waits, so that no request starves.

    ``num_inputs`` are the inputs that are left of all requests in the queue, ``num_tokens`` the
    tokens of these inputs, and ``peak_inputs`` is how many inputs there have been at most. All are
    read-only outside.
    """

    def __init__(self, aging_s: float) -> None:
        self.num_inputs = self.num_tokens = self.peak_inputs = 0
        self._aging_s = aging_s
        self._by_priority: dict[int, list[LiveEncode]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, live: LiveEncode) -> None:
        """Put a request in its place."""
        insort(self._by_priority.setdefault(live.request.priority, []), live, key=_rank)
        self._size += 1
        self._count(len(live.left), live.tokens_left)

    def remove(self, live: LiveEncode) -> None:
        """Take out a request that is in the queue."""
        priority = live.request.priority
        same = self._by_priority[priority]
        place = bisect_left(same, live.rank, key=_rank)
        assert same[place] is live, f"{live} is not where it should be"
        del same[place]
        if not same:
            del self._by_priority[priority]
        self._size -= 1
        self._count(-len(live.left), -live.tokens_left)

    def take(self, live: LiveEncode, index: int, now: float) -> None:
        """Move an input of a request into a step. The caller must `remove` a request that has no
        inputs left, but not while it iterates over `in_order`."""
        live.take(index, now)
        if live.parked_since is None:
            self._count(-1, -live.length(index))

    def put_back(self, live: LiveEncode, index: int) -> None:
        """Move an input out of a step that failed. Its request is then in the queue again, unless
        it is parked."""
        was_queued = live.is_queued
        live.put_back(index)
        if was_queued:
            self._count(1, live.length(index))
        elif live.is_queued:
            self.add(live)

    def _count(self, inputs: int, tokens: int) -> None:
        self.num_inputs += inputs
        self.num_tokens += tokens
        self.peak_inputs = max(self.peak_inputs, self.num_inputs)

    def in_order(self, now: float) -> Iterator[LiveEncode]:
        """Yield the requests, first to last. The queue must not change meanwhile."""

        def key(live: LiveEncode) -> tuple[float, ...]:
            waited = max(0.0, now - live.request.arrival)
            return (live.request.priority - floor(waited / self._aging_s), *live.rank)

        return merge(*self._by_priority.values(), key=key)

    def check(self) -> None:
        """Check that every list is sorted and counted.

        Raises:
            AssertionError: One of them is not.
        """
        assert self._size == sum(map(len, self._by_priority.values()))
        assert self.num_tokens == sum(live.tokens_left for live in self.in_order(0.0))
        assert self.num_inputs == sum(len(live.left) for live in self.in_order(0.0))
        for priority, same in self._by_priority.items():
            assert same, f"the list of priority {priority} is empty"
            assert all(live.request.priority == priority for live in same)
            assert same == sorted(same, key=_rank)


def _rank(live: LiveEncode) -> tuple[float, int]:
    return live.rank
