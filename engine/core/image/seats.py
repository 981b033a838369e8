"""The drawings that have begun, and whose turn it is.

Rule 1: drawings take turns in the order of their ranks (priority, arrival), one step each. One that
cannot go on is passed over. So between two steps of a drawing that could go on all the time, no
other drawing gets two. Rule 2: a drawing keeps its seat until its end, because the worker keeps its
state. One that is parked, or late and about to be cancelled, does not count against
``max_drawings``, so that clients which do not read hold up nobody, until `HELD_SHARE` times as many
drawings have seats.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from engine.core.common.types import SequenceId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.core.common.waiting_queue import WaitingQueue
    from engine.core.image.live_drawing import LiveDrawing

HELD_SHARE = 4  # guess: a drawing's state is small beside the model's workspace


class Seats:
    """Lets at most ``max_drawings`` drawings take turns. ``park`` parks a drawing whose reader has
    no room."""

    def __init__(self, max_drawings: int, park: Callable[[LiveDrawing, float], None]) -> None:
        self._max_drawings = max_drawings
        self._park = park
        self._seated: list[LiveDrawing] = []  # sorted by rank
        self._last_rank: tuple[float, ...] = ()  # of the drawing that took the last step
        self._sequence_ids = count(1)

    def __len__(self) -> int:
        return len(self._seated)

    def __iter__(self) -> Iterator[LiveDrawing]:
        return iter(self._seated)

    def fill(self, queue: WaitingQueue[LiveDrawing], now: float) -> bool:
        """Give free seats to the first in the queue. Return whether anyone got one."""
        num_before = len(self._seated)
        while self._has_room(now):
            ready = (live for live in queue.in_order(now) if not live.is_late(now))
            if (live := next(ready, None)) is None:
                break
            queue.remove(live)
            live.sequence, live.started_at = SequenceId(next(self._sequence_ids)), now
            self._seated.append(live)
            self._seated.sort(key=lambda one: one.rank)
        return len(self._seated) > num_before

    def _has_room(self, now: float) -> bool:
        if len(self._seated) >= HELD_SHARE * self._max_drawings:
            return False
        going_on = [x for x in self._seated if x.parked_since is None and not x.is_late(now)]
        return len(going_on) < self._max_drawings

    def next_in_turn(self, now: float, *, only_begun: bool = False) -> LiveDrawing | None:
        """Return the drawing whose turn it is, with the slot of its step's message reserved. Park
        those whose readers have no room. ``only_begun`` passes over those without a step so far."""
        after = [live for live in self._seated if live.rank > self._last_rank]
        before = [live for live in self._seated if live.rank <= self._last_rank]
        for live in (*after, *before):
            is_held = only_begun and not live.num_done
            if is_held or live.parked_since is not None or live.is_late(now):
                continue
            if not live.part.needs_slot or live.credit.try_reserve():
                self._last_rank = live.rank
                return live
            self._park(live, now)
        return None

    def remove(self, live: LiveDrawing) -> None:
        """Take the seat of a drawing that has ended."""
        self._seated.remove(live)

    def check(self) -> None:
        """Check that the seats are sorted, and not too many.

        Raises:
            AssertionError: They are not.
        """
        ranks = [live.rank for live in self._seated]
        assert ranks == sorted(set(ranks)), "the seats are not in the order of ranks"
        assert len(ranks) <= HELD_SHARE * self._max_drawings, "too many drawings have seats"
        for live in self._seated:
            assert live.sequence is not None, f"{live} has a seat and no sequence"
