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

from engine.core.encode.types import InputKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.core.encode.live_request import LiveEncode


class WaitingQueue:
    """Requests in the order in which they go on. A request gains one level of priority for each
    ``aging_s`` seconds that it waits, so that no request starves.

    ``num_inputs`` are the inputs that are left of all requests in the queue, ``num_by_kind`` how
    many of them are of which kind, ``num_tokens`` the tokens of these inputs, and ``peak_inputs``
    is how many inputs there have been at most. All are read-only outside.
    """

    def __init__(self, aging_s: float) -> None:
        self.num_inputs = self.num_tokens = self.peak_inputs = 0
        self.num_by_kind = dict.fromkeys(InputKind, 0)
        self._aging_s = aging_s
        self._by_priority: dict[int, list[LiveEncode]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, live: LiveEncode) -> None:
        """Put a request in its place."""
        insort(self._by_priority.setdefault(live.request.priority, []), live, key=_rank)
        self._size += 1
        self._count_left(live, 1)

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
        self._count_left(live, -1)

    def take(self, live: LiveEncode, index: int, now: float) -> None:
        """Move an input of a request into a step. The caller must `remove` a request that has no
        inputs left, but not while it iterates over `in_order`."""
        live.take(index, now)
        if live.parked_since is None:
            self._count(live, index, -1)

    def put_back(self, live: LiveEncode, index: int) -> None:
        """Move an input out of a step that failed. Its request is then in the queue again, unless
        it is parked."""
        was_queued = live.is_queued
        live.put_back(index)
        if was_queued:
            self._count(live, index, 1)
        elif live.is_queued:
            self.add(live)

    def _count_left(self, live: LiveEncode, sign: int) -> None:
        """Count all inputs that are left of a request; with ``sign`` -1, count them no more."""
        for kind, same in live.left.items():
            self.num_by_kind[kind] += sign * len(same)
        self.num_inputs += sign * live.num_left
        self.num_tokens += sign * live.tokens_left
        self.peak_inputs = max(self.peak_inputs, self.num_inputs)

    def _count(self, live: LiveEncode, index: int, sign: int) -> None:
        """Count one input of a request; with ``sign`` -1, count it no more."""
        self.num_by_kind[live.request.inputs[index].kind] += sign
        self.num_inputs += sign
        self.num_tokens += sign * live.length(index)
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
        for kind, number in self.num_by_kind.items():
            assert number == sum(len(live.left.get(kind, ())) for live in self.in_order(0.0)), kind
        assert self.num_inputs == sum(self.num_by_kind.values())
        for priority, same in self._by_priority.items():
            assert same, f"the list of priority {priority} is empty"
            assert all(live.request.priority == priority for live in same)
            assert same == sorted(same, key=_rank)


def _rank(live: LiveEncode) -> tuple[float, int]:
    return live.rank
