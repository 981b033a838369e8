"""Turns at a resource that one task at a time may use."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable


class Turns:
    """Lets one task at a time have its turn. The tasks that wait belong to parties, which take
    turns; the tasks of one party go on in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, trio.lowlevel.ParkingLot] = {}  # the next party first
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, party: Hashable) -> AsyncIterator[None]:
        """Have a turn while the block runs.

        Cancellation: safe; the task waits no more.
        """
        if self._is_taken:  # the task that wakes this one leaves `_is_taken` set
            await self._waiting.setdefault(party, trio.lowlevel.ParkingLot()).park()
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = self._wake_next()

    def _wake_next(self) -> bool:
        while self._waiting:
            party = next(iter(self._waiting))
            tasks = self._waiting.pop(party)
            has_woken = bool(tasks.unpark())  # none, if all were cancelled
            if tasks:
                self._waiting[party] = tasks
            if has_woken:
                return True
        return False
