"""Counts how many messages a stream may still hold: the arithmetic of backpressure (D1).

Rule 1: one `Credit` for each stream counts its messages, wherever they are between the step that
makes them and the reader that takes them: reserved by a plan, in the channel, or handed to the gRPC
side and not written yet. Their sum never exceeds ``capacity``.
Rule 2: nothing here waits or wakes a task. While ``starved`` is set, the reader's side has to
report the next release to the scheduler.

Lifecycle of a slot: `try_reserve` (a plan includes the row) → `fill` (the row gave a message) or
`cancel` (it gave none); after `fill`: `release` (the reader took the message).
"""

from __future__ import annotations

import math

from engine.errors import EngineBug


class Credit:
    """The message slots of one stream. Not thread-safe: it belongs to the engine's thread.

    ``capacity`` is at least 1. ``free``, ``reserved`` and ``filled`` are read-only outside, with
    one exception: the two loops over a step's decodes reserve and fill a slot in place, to save the
    cost of a call. `mark_starved` sets ``starved`` when a reservation failed; the first `release`
    after that clears it and returns True. ``waits_until``, on the engine's clock, is set by the
    reader's side: before this time the request is not ended as stalled.
    """

    __slots__ = ("again", "capacity", "free", "reserved", "starved", "waits_until")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a stream's buffer holds at least 1 message")
        self.capacity = capacity
        self.free = capacity  # slots that neither hold a message nor are promised to a plan
        self.reserved = 0  # slots promised to plans in flight
        self.again = 0  # messages without slots, sent again to a new reader
        self.starved = False
        self.waits_until = -math.inf  # until when a reader that has left may come back

    def __repr__(self) -> str:
        return f"<Credit {self.filled}+{self.reserved}/{self.capacity}>"

    @property
    def filled(self) -> int:
        """Messages that were made and that the reader has not taken yet."""
        return self.capacity - self.free - self.reserved

    def try_reserve(self, count: int = 1) -> bool:
        """Promise ``count`` slots to a plan, all or none. Return whether they were free."""
        if self.free < count:
            return False
        self.free -= count
        self.reserved += count
        return True

    def send_again(self, count: int, num_undelivered: int = 0) -> bool:
        """Let a new reader take ``count`` messages that were delivered to the former one. After
        them it gets ``num_undelivered`` messages that were made and not delivered to any reader
        yet. The former reader may have freed slots of the ``count`` messages, or may have taken
        further messages without freeing their slots: these are freed now. Return as `release`."""
        delivered = self.filled - num_undelivered
        self.again = max(0, count - delivered)
        return self.release(max(0, delivered - count))

    def cancel(self, count: int = 1) -> None:
        """Give promised slots back, because their rows made no message.

        Raises:
            EngineBug: Fewer slots are promised.
        """
        if count > self.reserved:
            raise EngineBug(f"{count} slots cancelled of {self.reserved} reserved")
        self.reserved -= count
        self.free += count

    def fill(self, count: int = 1) -> None:
        """Turn promised slots into messages that wait for the reader.

        Raises:
            EngineBug: Fewer slots are promised.
        """
        if count > self.reserved:
            raise EngineBug(f"{count} slots filled of {self.reserved} reserved")
        self.reserved -= count

    def mark_starved(self) -> None:
        """Ask the reader's side to report its next release to the scheduler."""
        self.starved = True

    def release(self, count: int = 1) -> bool:
        """Free the slots of ``count`` messages that the reader took. Return whether this has to be
        reported to the scheduler: True for the first release after `mark_starved`.

        Raises:
            EngineBug: Fewer messages wait.
        """
        if count > self.filled + self.again:
            raise EngineBug(f"{count} messages released of {self.filled} filled")
        if self.again:
            without = min(self.again, count)
            self.again -= without
            count -= without
        self.free += count
        if not self.starved or not count:
            return False
        self.starved = False
        return True
