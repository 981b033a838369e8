"""How one Trio loop is shared between clients: how much of their work one turn of the loop may do.

While a server answers clients, its other work waits, such as delivering the results of a step. Both
limiters bound the time for clients in one turn of Trio's loop, however many clients send. Work
beyond the bound waits for the next turn, first come, first served.
"""

from __future__ import annotations

import trio


class StartLimiter:
    """Lets ``per_turn`` tasks go on in each turn of Trio's loop, so that a burst of new calls
    delays other work by no more than the starts of so many calls. Made and used inside
    `trio.run`."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._num_passed = 0  # in this turn
        self._waiting = trio.lowlevel.ParkingLot()
        self._token = trio.lowlevel.current_trio_token()

    async def enter(self) -> None:
        """Wait until this task may go on.

        Cancellation: safe; the task leaves the queue.
        """
        if not self._num_passed:
            self._token.run_sync_soon(self._begin_turn)
        self._num_passed += 1
        if self._num_passed > self._per_turn:
            await self._waiting.park()

    def _begin_turn(self) -> None:
        self._num_passed = len(self._waiting.unpark(count=self._per_turn))
        if self._num_passed:
            self._token.run_sync_soon(self._begin_turn)


class FairShareLimiter:
    """Bounds the time that clients' bytes may take of each turn of Trio's loop, to about
    ``share_s``. At most ``per_turn`` waiting clients go on when a turn begins. Made and used inside
    `trio.run`."""

    def __init__(self, share_s: float, per_turn: int) -> None:
        self._share_s = share_s
        self._per_turn = per_turn
        self._spent_s = 0.0  # in this turn
        self._waiting = trio.lowlevel.ParkingLot()
        self._token = trio.lowlevel.current_trio_token()

    async def enter(self) -> None:
        """Wait until this turn's share has time left.

        Cancellation: safe; the task leaves the queue.
        """
        while self._spent_s >= self._share_s:
            await self._waiting.park()

    def spend(self, seconds: float) -> None:
        """Take ``seconds`` from this turn's share."""
        if not self._spent_s:
            self._token.run_sync_soon(self._begin_turn)
        self._spent_s += seconds

    def _begin_turn(self) -> None:
        self._spent_s = 0.0
        self._waiting.unpark(count=self._per_turn)
        if self._waiting:  # the woken tasks may have been cancelled, and then spend nothing
            self._token.run_sync_soon(self._begin_turn)
