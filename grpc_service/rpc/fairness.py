"""How one Trio loop is shared between clients: how much of their work one turn of the loop may do.

While a server answers clients, its other work waits, such as delivering the results of a step. The
limiters bound the time for clients in one turn of Trio's loop, or in a second, however many clients
send. Work beyond the bound waits. Owners, such as clients' addresses, are served by round robin,
and what waits for one owner is first come, first served.
"""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable


# Seconds of the loop's time that `OverheadLimiter` grants one owner before the next one, so that
# small needs do not wait for large ones. Guess.
TURN_S = 1e-3
WAIT_MIN_S = 1e-4  # the shortest sleep: a clock may not show a shorter one


class _Turns:
    """Tasks that wait, each for an owner. Owners take turns, and an owner's tasks go on in the
    order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, trio.lowlevel.ParkingLot] = {}  # the next owner first

    def __len__(self) -> int:
        return sum(len(tasks) for tasks in self._waiting.values())

    async def wait(self, owner: Hashable) -> None:
        """Wait for a turn of ``owner``.

        Cancellation: safe; the task leaves the queue.
        """
        await self._waiting.setdefault(owner, trio.lowlevel.ParkingLot()).park()

    def wake(self, count: int) -> int:
        """Wake up to ``count`` tasks, and return how many."""
        num_woken = 0
        while self._waiting and num_woken < count:
            owner = next(iter(self._waiting))
            tasks = self._waiting.pop(owner)
            num_woken += len(tasks.unpark())  # no task, if all were cancelled
            if tasks:
                self._waiting[owner] = tasks
        return num_woken


class FairLock:
    """A lock that one task holds at a time; the owners of waiting tasks take turns. Made and
    used inside `trio.run`."""

    def __init__(self) -> None:
        self._waiting = _Turns()
        self._is_held = False

    @asynccontextmanager
    async def hold(self, owner: Hashable) -> AsyncIterator[None]:
        """Hold the lock while the block runs.

        Cancellation: safe; the task leaves the queue.
        """
        if self._is_held:
            await self._waiting.wait(owner)  # the task that wakes this one hands the lock over
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = bool(self._waiting.wake(1))


class StartLimiter:
    """Lets ``per_turn`` tasks go on in each turn of Trio's loop, so that a burst of new calls
    delays other work by no more than ``per_turn`` starts. Made and used inside
    `trio.run`."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._num_passed = 0  # in this turn
        self._waiting = _Turns()
        self._token = trio.lowlevel.current_trio_token()

    async def enter(self, owner: Hashable) -> None:
        """Wait until this task may go on.

        Cancellation: safe; the task leaves the queue.
        """
        if not self._num_passed:
            self._token.run_sync_soon(self._begin_turn)
        self._num_passed += 1
        if self._num_passed > self._per_turn:
            await self._waiting.wait(owner)

    def _begin_turn(self) -> None:
        self._num_passed = self._waiting.wake(self._per_turn)
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
        self._is_watching = False  # `_begin_turn` will be called
        self._waiting = _Turns()
        self._token = trio.lowlevel.current_trio_token()

    async def enter(self, owner: Hashable) -> None:
        """Wait until this turn's share has time left.

        Cancellation: safe; the task leaves the queue.
        """
        while self._spent_s >= self._share_s:
            await self._waiting.wait(owner)

    def spend(self, seconds: float) -> None:
        """Take ``seconds`` from this turn's share."""
        self._spent_s += seconds
        if not self._is_watching and self._spent_s >= self._share_s / 8:  # waking it takes time
            self._is_watching = True
            self._token.run_sync_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._spent_s, self._is_watching = 0.0, False
        # The woken tasks may have been cancelled, and then spend nothing.
        if self._waiting.wake(self._per_turn):
            self._is_watching = True
            self._token.run_sync_soon(self._begin_turn)


class _Waiter:
    """A task that waits in an `OverheadLimiter`, and the seconds that it still needs."""

    __slots__ = ("is_done", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_done = trio.Event()


class OverheadLimiter:
    """Bounds the share of the loop's time that overhead may take, for all clients together: a token
    bucket, shared between waiting owners by round robin. Overhead is work for clients that serves
    no call, such as opening connections. ``share`` is in seconds per second, ``burst_s`` the
    bucket's size in seconds. Made and used inside `trio.run`."""

    def __init__(self, share: float, burst_s: float) -> None:
        self._share, self._burst_s = share, burst_s
        self._level_s = burst_s  # seconds in the bucket; negative if more were taken
        self._filled_at = trio.current_time()
        self._waiting: dict[Hashable, deque[_Waiter]] = {}
        self._has_waiting = trio.Event()

    async def enter(self, owner: Hashable, seconds: float) -> None:
        """Wait until the share has room for ``seconds``, which are taken in this owner's turns.

        Cancellation: safe; the remaining seconds are not taken.
        """
        self._fill()
        if self._level_s >= seconds and not self._waiting:
            self._level_s -= seconds
            return
        waiter = _Waiter(seconds)
        waiters = self._waiting.setdefault(owner, deque())
        waiters.append(waiter)
        self._has_waiting.set()
        try:
            await waiter.is_done.wait()
        finally:
            if not waiter.is_done.is_set():
                waiters.remove(waiter)

    async def run(self) -> None:
        """Give turns to the owners of waiting tasks.

        Cancellation: no waiting task gets a turn any more.
        """
        while True:
            await self._has_waiting.wait()
            self._has_waiting = trio.Event()
            while self._waiting:
                self._fill()
                if self._level_s < 0:
                    await trio.sleep(max(-self._level_s / self._share, WAIT_MIN_S))
                else:
                    self._give_turn()

    def _give_turn(self) -> None:
        """Give the first waiter of the first owner up to `TURN_S` of the seconds that it waits for;
        the owner's next turn comes after those of all others."""
        owner = next(iter(self._waiting))
        waiters = self._waiting.pop(owner)
        if waiters:  # every waiter may have been cancelled
            part_s = min(TURN_S, waiters[0].seconds)
            self._level_s -= part_s
            waiters[0].seconds -= part_s
            if waiters[0].seconds <= 0:
                waiters.popleft().is_done.set()
        if waiters:
            self._waiting[owner] = waiters

    def _fill(self) -> None:
        now = trio.current_time()
        gained = self._share * (now - self._filled_at)
        self._level_s = min(self._burst_s, self._level_s + gained)
        self._filled_at = now
