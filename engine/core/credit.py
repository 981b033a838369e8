"""How many messages a stream may still hold: the arithmetic of backpressure (D1).

Rule 1: one `Credit` per stream counts messages wherever they are between the step that makes
them and the reader that takes them: reserved by a plan, in the channel, handed to the front,
unwritten. Their sum never exceeds ``capacity``.
Rule 2: nothing here waits or wakes. `starved` tells the reader's side that somebody would like
to hear of the next release.

Lifecycle of a slot: `try_reserve` (a plan includes the row) → `fill` (the row gave a message)
or `cancel` (it gave none) → `release` (the reader took the message).
"""

from __future__ import annotations

from engine.errors import EngineBug


class Credit:
    """Message slots of one stream. Not thread-safe: lives on the engine's thread.

    ``capacity`` is at least 1. ``free``, ``reserved`` and ``filled`` are read-only outside, except
    that the two loops over a step's decodes reserve and fill a slot in place, for the calls' cost.
    ``starved`` is set by `mark_starved` when a reservation failed and cleared by the first
    `release` after it, which returns True.
    """

    __slots__ = ("beside", "capacity", "free", "reserved", "starved")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a stream's buffer holds at least 1 message")
        self.capacity = capacity
        self.beside = 0  # slots of the capacity that no plan ever gets
        self.free = capacity  # slots that neither hold a message nor are promised to a plan
        self.reserved = 0  # slots promised to plans in flight
        self.starved = False

    def __repr__(self) -> str:
        return f"<Credit {self.filled}+{self.reserved}/{self.capacity}>"

    @property
    def filled(self) -> int:
        """Messages made and not yet taken by the reader."""
        return self.capacity - self.free - self.reserved

    def widen(self, count: int) -> None:
        """Add ``count`` slots for messages that come beside those of plans: as if they were made
        already, and waited for the reader."""
        self.capacity += count
        self.beside += count

    def try_reserve(self, count: int = 1) -> bool:
        """Promise ``count`` slots to a plan, all or none."""
        if self.free < count:
            return False
        self.free -= count
        self.reserved += count
        return True

    def cancel(self, count: int = 1) -> None:
        """Give promised slots back: their rows made no message."""
        if count > self.reserved:
            raise EngineBug(f"{count} slots cancelled of {self.reserved} reserved")
        self.reserved -= count
        self.free += count

    def fill(self, count: int = 1) -> None:
        """Turn promised slots into messages that wait for the reader."""
        if count > self.reserved:
            raise EngineBug(f"{count} slots filled of {self.reserved} reserved")
        self.reserved -= count

    def mark_starved(self) -> None:
        """Ask the reader's side to report its next release."""
        self.starved = True

    def release(self, count: int = 1) -> bool:
        """The reader took ``count`` messages. True: somebody waits to hear of it (once)."""
        if count > self.filled:
            raise EngineBug(f"{count} messages released of {self.filled} filled")
        self.free += count
        was_starved = self.starved
        if count:
            self.starved = False
        return was_starved and count > 0
