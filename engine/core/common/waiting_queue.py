"""The waiting queue, sorted by a key that each kind of work computes.

Rule: the queue sorts its items and counts their tokens; the scheduler decides which of them start.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from engine.core.common.events import CoreRequest

Key: TypeAlias = "tuple[float, ...]"

# What is added to the priority of a background request: a level that no other request has, however
# long it waits. Seconds times levels of a clock fit in between.
BACKGROUND = 2**40
BACKGROUND_FROM = BACKGROUND // 2  # the least level of background work, aged or not


class Queued(Protocol):
    """An item of the queue: a request, or a part of a request that starts by itself.

    ``waiting_key`` is written by the queue: the key by which the item was last sorted.
    """

    waiting_key: Key

    @property
    def request(self) -> CoreRequest:
        """The item's request."""

    @property
    def queued_tokens(self) -> int:
        """The item's tokens to compute. After a change in the queue, call
        `WaitingQueue.recount`."""

    def key_in_queue(self, now: float, aging_s: float) -> Key:
        """Return the key of the item's place: its `aged_priority` first, a tie-breaker last."""


QueuedT = TypeVar("QueuedT", bound=Queued)


def aged_priority(request: CoreRequest, now: float, aging_s: float) -> int:
    """Return the priority of a waiting request, which gains one level for each ``aging_s`` seconds
    that it has waited, so that no request starves."""
    return request.priority - math.floor(max(0.0, now - request.arrival) / aging_s)


class WaitingQueue(Generic[QueuedT]):
    """The items that wait, sorted by `Queued.key_in_queue`. Not thread-safe.

    Aging is applied at most ``late_s`` seconds late. ``items`` is sorted by the keys that the items
    had when aging was last applied; ``num_tokens`` is the sum of the items' tokens; ``peak`` is the
    most items that there have been. All are read-only outside.
    """

    def __init__(self, aging_s: float, late_s: float = 0.0) -> None:
        self.items: list[QueuedT] = []
        self.num_tokens = 0
        self.peak = 0
        self._aging_s = aging_s
        self._late_s = late_s
        self._sorted_at = 0.0

    def __len__(self) -> int:
        return len(self.items)

    def add(self, item: QueuedT, now: float) -> None:
        """Put an item in its place."""
        item.waiting_key = self.key_of(item, now)
        insort(self.items, item, key=_waiting_key)
        self.num_tokens += item.queued_tokens
        self.peak = max(self.peak, len(self.items))

    def remove(self, item: QueuedT) -> None:
        """Take out an item that is in the queue."""
        place = bisect_left(self.items, item.waiting_key, key=_waiting_key)
        assert self.items[place] is item, f"{item} is not where it should be"
        del self.items[place]
        self.num_tokens -= item.queued_tokens

    def recount(self, tokens: int) -> None:
        """Count ``tokens`` more of an item in the queue, or fewer if that is negative."""
        self.num_tokens += tokens

    def in_order(self, now: float) -> list[QueuedT]:
        """Apply aging, and return the queue itself, first to last."""
        if now - self._sorted_at >= self._late_s:
            for item in self.items:
                item.waiting_key = self.key_of(item, now)
            self.items.sort(key=_waiting_key)
            self._sorted_at = now
        return self.items

    def key_of(self, item: QueuedT, now: float) -> Key:
        """Return the key that an item has, or would have, in the queue."""
        return item.key_in_queue(now, self._aging_s)

    def position_of(self, item: QueuedT) -> int:
        """Return the place of an item in the queue; the first has 1."""
        return 1 + bisect_left(self.items, item.waiting_key, key=_waiting_key)

    @property
    def num_background(self) -> int:
        """Number of items of background requests; they are the last ones."""
        items = self.items
        if not items or items[-1].waiting_key[0] < BACKGROUND_FROM:
            return 0
        return len(items) - bisect_left(items, float(BACKGROUND_FROM), key=_level)

    def size_of(self, *, background: bool) -> tuple[int, int]:
        """Return how many items of background requests, or of others, wait, and their tokens."""
        if not (number := self.num_background):
            return (0, 0) if background else (len(self.items), self.num_tokens)
        tokens = sum([item.queued_tokens for item in self.items[-number:]])
        if background:
            return number, tokens
        return len(self.items) - number, self.num_tokens - tokens

    def check(self) -> None:
        """Check the order and the count of tokens.

        Raises:
            AssertionError: One of them is wrong.
        """
        assert self.items == sorted(self.items, key=_waiting_key), "the queue is not sorted"
        assert self.num_tokens == sum(item.queued_tokens for item in self.items)


def _waiting_key(item: Queued) -> Key:
    return item.waiting_key


def _level(item: Queued) -> float:
    return item.waiting_key[0]
