"""Counts, by kind, the inputs that encode requests in the queue have still to compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.encode.types import InputKind

if TYPE_CHECKING:
    from engine.core.common.shares import Shares
    from engine.core.common.waiting_queue import WaitingQueue
    from engine.core.encode.live_request import LiveEncode


class WaitingInputs:
    """The inputs of the requests in ``queue``; a request is in it while inputs are left and it is
    not parked.

    ``num`` counts the inputs that are left of all these requests, ``by_kind`` counts them by kind,
    and ``peak`` is the largest ``num`` so far. All are read-only outside. ``shares`` are those of
    the requests' holders.
    """

    def __init__(self, queue: WaitingQueue[LiveEncode], shares: Shares) -> None:
        self.queue = queue
        self.shares = shares
        self.num = self.peak = 0
        self.by_kind = dict.fromkeys(InputKind, 0)

    def add(self, live: LiveEncode, now: float) -> None:
        """Put a request into the queue."""
        self.queue.add(live, now)
        self.shares.activate(live.share)
        self._count_left(live, 1)

    def remove(self, live: LiveEncode) -> None:
        """Take out a request that is in the queue."""
        self.queue.remove(live)
        self.shares.deactivate(live.share)
        self._count_left(live, -1)

    def in_order(self, now: float) -> list[LiveEncode]:
        """Return the requests in the queue, first to last: of several holders, those of the one
        that is furthest behind first."""
        order = self.queue.in_order(now)
        if self.shares.is_contested:
            return sorted(order, key=lambda live: live.share.counter)
        return order

    def by_class(self, now: float) -> tuple[list[LiveEncode], list[LiveEncode]]:
        """Return the requests in the queue as `in_order`, those of background work apart."""
        order = self.in_order(now)
        if not self.queue.num_background:
            return order, []
        return (
            [live for live in order if not live.is_background],
            [live for live in order if live.is_background],
        )

    def take(self, live: LiveEncode, index: int) -> None:
        """Move an input of a request into a step. The caller must `remove` a request that has no
        inputs left, but not while it iterates over the queue."""
        live.take(index)
        if live.parked_since is None:
            self._count(live, index, -1)

    def put_back(self, live: LiveEncode, index: int, now: float) -> None:
        """Move an input out of a step that failed. Its request is then queued, unless parked."""
        was_queued = live.is_queued
        live.put_back(index)
        if was_queued:
            self._count(live, index, 1)
        elif live.is_queued:
            self.add(live, now)

    def _count_left(self, live: LiveEncode, sign: int) -> None:
        """Count all inputs that are left of a request; with ``sign`` -1, count them no more."""
        for kind, same in live.left.items():
            self.by_kind[kind] += sign * len(same)
        self.num += sign * live.num_left
        self.peak = max(self.peak, self.num)

    def _count(self, live: LiveEncode, index: int, sign: int) -> None:
        """Count one input of a request; with ``sign`` -1, count it no more."""
        self.by_kind[live.request.inputs[index].kind] += sign
        self.num += sign
        self.queue.recount(sign * live.length(index))
        self.peak = max(self.peak, self.num)

    def check(self) -> None:
        """Check that every input is counted once.

        Raises:
            AssertionError: One is not.
        """
        for kind, number in self.by_kind.items():
            assert number == sum(len(live.left.get(kind, ())) for live in self.queue.items), kind
        assert self.num == sum(self.by_kind.values())
