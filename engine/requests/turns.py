"""Turns at a resource that one task at a time may use."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from engine.requests.quota import Quota

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable


class Turns:
    """Lets one task at a time have its turn. The tasks that wait belong to parties, which share the
    time by weight; the tasks of one party go on in the order in which they came.

    Rule: the next turn is that of the waiting party which has had the least time for its weight. A
    party that begins to wait is lifted to the least, so that nobody saves up time. So between two
    parties that wait all the time the difference is one turn of each at most.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, trio.lowlevel.ParkingLot] = {}  # the first to come first
        # Seconds for its weight that each party has had: of those that wait or have the turn, and
        # of those ahead of them.
        self._had: dict[Hashable, float] = {}
        self._is_taken = False
        self._party: Hashable = None  # of the present turn

    @asynccontextmanager
    async def turn(self, party: Hashable) -> AsyncIterator[None]:
        """Have a turn while the block runs.

        Cancellation: safe; the task waits no more.
        """
        if self._is_taken:  # the task that wakes this one leaves `_is_taken` set
            await self._lot_of(party).park()
        self._is_taken, self._party = True, party
        began = trio.current_time()
        try:
            yield
        finally:
            self._count(party, trio.current_time() - began)
            self._is_taken = self._wake_next()

    def _lot_of(self, party: Hashable) -> trio.lowlevel.ParkingLot:
        """Return where the tasks of a party wait, which has waited from now on if it did not."""
        if party not in self._waiting:
            there = (self._party, *self._waiting)
            least = min([self._had.get(one, 0.0) for one in there])
            self._had[party] = max(self._had.get(party, 0.0), least)
            self._waiting[party] = trio.lowlevel.ParkingLot()
        return self._waiting[party]

    def _count(self, party: Hashable, seconds: float) -> None:
        weight = party.weight if isinstance(party, Quota) else 1
        self._had[party] = self._had.get(party, 0.0) + seconds / weight

    def _wake_next(self) -> bool:
        while self._waiting:
            party = min(self._waiting, key=self._had.__getitem__)
            tasks = self._waiting.pop(party)
            has_woken = bool(tasks.unpark())  # none, if all were cancelled
            if has_woken:
                self._party, least = party, self._had[party]
                self._had = {one: had for one, had in self._had.items() if had >= least}
            if tasks:
                self._waiting[party] = tasks
            if has_woken:
                return True
        self._had.clear()
        return False
