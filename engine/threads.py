"""The one way into a worker thread.

Rule 1: nothing else calls `trio.to_thread` or `trio.lowlevel.start_thread_soon`. Rule 2: a job is
never abandoned: cancelling the caller waits for the job's end, so whoever runs a step knows that it
is over (R11, R202).

`Threads` is a protocol because virtual time cannot overtake a real thread (Trio issue 456): the
simulator injects one that runs the job inline and sleeps its virtual cost.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import trio
from trio.lowlevel import Abort, current_task, reschedule, start_thread_soon, wait_task_rescheduled

if TYPE_CHECKING:
    from collections.abc import Callable

    from outcome import Outcome

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Job(Protocol[T_co]):
    """A job that has been started, for the one task that started it. It must be waited for."""

    async def wait_begun(self) -> None:
        """Wait until the thread has taken it up.

        Cancellation: no checkpoint for it, as the thread comes within microseconds.
        """
        ...

    async def wait(self) -> T_co:
        """Wait for the job's end and give its result or raise its exception.

        Cancellation: the job is waited for all the same, and its result returned.
        """
        ...


class Threads(Protocol):
    """Runs blocking jobs beside the event loop."""

    async def run(self, job: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        """Run ``job`` in a thread of ``limiter`` and give its result or raise its exception.

        Cancellation: looked at before the job starts; a started job is waited for, and its
        result is returned without a checkpoint after it. Store it before awaiting anything.
        """
        ...

    def start(
        self, job: Callable[[], T], limiter: trio.CapacityLimiter, *, tells_begin: bool
    ) -> Job[T]:
        """Start ``job`` in a thread of ``limiter`` now. `Job.wait_begun` is for those that were
        asked to tell, which costs another wake-up.

        Raises:
            trio.WouldBlock: the limiter has no room; nothing was started.
        """
        ...


class WorkerThreads:
    """`Threads` by Trio's thread cache.

    A hop costs about 0.1 ms (R26, R32). `start` is `trio.to_thread.run_sync` taken apart at the
    point where it begins to wait: between a step's start and its end the loop delivers and plans.
    In turn in one run, a hop by `run` takes 170-230 µs of processor time, one by `start` 115-150,
    as much as sleeping in Trio for that long: it names no thread, and needs no round of Trio's to
    take the limiter.
    """

    async def run(self, job: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        return await trio.to_thread.run_sync(job, abandon_on_cancel=False, limiter=limiter)

    def start(
        self, job: Callable[[], T], limiter: trio.CapacityLimiter, *, tells_begin: bool
    ) -> Job[T]:
        return _ThreadJob(job, limiter, tells_begin=tells_begin)


class _ThreadJob(Generic[T]):
    """Life: made, which starts it → taken up by a thread → its outcome comes by Trio's token."""

    __slots__ = ("_has_begun", "_job", "_limiter", "_outcome", "_task", "_tells_begin", "_token")

    def __init__(
        self, job: Callable[[], T], limiter: trio.CapacityLimiter, *, tells_begin: bool
    ) -> None:
        self._job = job
        self._limiter = limiter
        self._tells_begin = tells_begin
        self._token = trio.lowlevel.current_trio_token()
        self._task: trio.lowlevel.Task | None = None  # the one that waits, if it does
        self._has_begun = False
        self._outcome: Outcome[T] | None = None
        limiter.acquire_on_behalf_of_nowait(self)
        try:
            start_thread_soon(self._run, self._deliver)
        except BaseException:  # no thread is to be had
            limiter.release_on_behalf_of(self)
            raise

    # ---- in the thread

    def _run(self) -> T:
        if self._tells_begin:
            self._post(self._note_begun)
        return self._job()

    def _deliver(self, outcome: Outcome[T]) -> None:
        self._post(self._note_outcome, outcome)

    def _post(self, callback: Callable[..., object], *args: Any) -> None:
        with suppress(trio.RunFinishedError):  # Trio itself has crashed: nobody waits
            self._token.run_sync_soon(callback, *args)

    # ---- on the Trio thread

    def _note_begun(self) -> None:
        self._has_begun = True
        self._wake()

    def _note_outcome(self, outcome: Outcome[T]) -> None:
        self._limiter.release_on_behalf_of(self)
        self._outcome = outcome
        self._wake()

    def _wake(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            reschedule(task)

    async def _sleep(self) -> None:
        self._task = current_task()
        await wait_task_rescheduled(lambda _: Abort.FAILED)

    async def wait_begun(self) -> None:
        while not self._has_begun and self._outcome is None:
            await self._sleep()

    async def wait(self) -> T:
        while self._outcome is None:
            await self._sleep()
        return self._outcome.unwrap()
