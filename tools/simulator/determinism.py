"""Same seed, same run: Trio's task order from the seed, and time that costs nothing.

Rule: the two private names of Trio used here are used nowhere else; a canary test fails when
they go (measured: without the flag, the same seed gave different journals).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Generic, TypeVar

import trio
import trio._core._run as trio_run
import trio.lowlevel
from trio.testing import MockClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


def run_deterministically(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """`trio.run` with the task order drawn from ``seed`` and a clock that jumps."""
    previous = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True
    trio_run._r = random.Random(seed)
    try:
        return trio.run(main, clock=MockClock(autojump_threshold=0))
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r = previous


class VirtualThreads:
    """`engine.threads.Threads` in virtual time: the job runs inline, and what it slept by
    `note_sleep`, or waits for by `note_wait`, comes afterwards on Trio's clock, whether it failed
    or not, and beyond the reach of cancels (D3)."""

    def __init__(self) -> None:
        self._slept_s = 0.0
        self._wait: Callable[[], Awaitable[None]] | None = None

    def note_sleep(self, seconds: float) -> None:
        self._slept_s += seconds

    def note_wait(self, wait: Callable[[], Awaitable[None]]) -> None:
        self._wait = wait

    async def run(self, job: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        async with limiter:
            self._slept_s, self._wait = 0.0, None
            try:
                return job()
            finally:
                wait = self._wait
                with trio.CancelScope(shield=True):
                    await trio.sleep(self._slept_s)
                    if wait is not None:
                        await wait()

    def start(self, job: Callable[[], T], *, tells_begin: bool) -> VirtualJob[T]:
        return VirtualJob(self, job)


class VirtualJob(Generic[T]):
    """`engine.threads.Job` in virtual time: what is done between its start and `wait` comes
    before the job, and `wait_begun` lets every other task have a turn."""

    def __init__(self, threads: VirtualThreads, job: Callable[[], T]) -> None:
        self._threads, self._job = threads, job

    async def wait_begun(self) -> None:
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()

    async def wait(self) -> T:
        with trio.CancelScope(shield=True):
            return await self._threads.run(self._job, trio.CapacityLimiter(1))
