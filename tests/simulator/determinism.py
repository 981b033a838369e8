"""Repeat a run exactly by its seed: the seed orders Trio's tasks, and time costs nothing.

Rule: the two private names of Trio used here are used nowhere else. A canary test fails when Trio
drops them. Without Trio's deterministic scheduling, one seed gives different journals.
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
    """Run `trio.run` with a task order drawn from ``seed`` and a clock that jumps."""
    previous = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True
    trio_run._r = random.Random(seed)
    try:
        return trio.run(main, clock=MockClock(autojump_threshold=0))
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r = previous


class VirtualThreads:
    """`engine.replica.threads.Threads` in virtual time (D3).

    A job runs inline. Afterwards Trio's clock advances by what the job slept by `note_sleep` or
    waited for by `note_wait`, even if the job failed, and no cancel interrupts this.
    """

    def __init__(self) -> None:
        self._slept_s = 0.0
        self._wait: Callable[[], Awaitable[None]] | None = None

    def note_sleep(self, seconds: float) -> None:
        """Add to the time that the running job takes."""
        self._slept_s += seconds

    def note_wait(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Add a wait to the running job's end."""
        self._wait = wait

    async def run(self, job: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        """Run a job. Cancellation: takes effect after the job."""
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

    def start(self, job: Callable[[], T], *, reports_begin: bool) -> VirtualJob[T]:
        """Start a job, whose result `VirtualJob.wait` returns."""
        return VirtualJob(self, job)


class VirtualJob(Generic[T]):
    """`engine.replica.threads.Job` in virtual time.

    The job runs at `wait`, after all that its starter does in between. `wait_begun` gives every
    other task a turn.
    """

    def __init__(self, threads: VirtualThreads, job: Callable[[], T]) -> None:
        self._threads, self._job = threads, job

    async def wait_begun(self) -> None:
        """Give every other task a turn. Cancellation: as in `trio.lowlevel.checkpoint`."""
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()

    async def wait(self) -> T:
        """Run the job and return its result. Cancellation: takes effect after the job."""
        with trio.CancelScope(shield=True):
            return await self._threads.run(self._job, trio.CapacityLimiter(1))
