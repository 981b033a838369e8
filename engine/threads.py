"""The one way into a worker thread.

Rule 1: nothing else calls `trio.to_thread` or `trio.lowlevel.start_thread_soon`. Rule 2: a job is
never abandoned: cancelling the caller waits for the job's end, so whoever runs a step knows that it
is over (R11, R202). Rule 3: a descriptor that a thread may still write to is not closed.

`Threads` is a protocol because virtual time cannot overtake a real thread (Trio issue 456): the
simulator injects one that runs the job inline and sleeps its virtual cost.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import trio
from trio.lowlevel import (
    Abort,
    current_task,
    current_trio_token,
    reschedule,
    start_thread_soon,
    wait_readable,
    wait_task_rescheduled,
)

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
        """Wait for the job's end, once, and give its result or raise its exception.

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

    def start(self, job: Callable[[], T], *, tells_begin: bool) -> Job[T]:
        """Start ``job`` in a thread now. `Job.wait_begun` is for those that were asked to tell,
        which costs another wake-up. How many run at once is the caller's to bound."""
        ...


class WorkerThreads:
    """`Threads` by Trio's thread cache. It keeps the bells of jobs that are over until `close`.

    `start` is `trio.to_thread.run_sync` taken apart at the point where it begins to wait: between a
    step's start and its end the loop delivers and plans. And it has the end told by an eventfd, on
    which the task itself waits, and not by Trio's token: that sends to a socket whose reader, a
    task of Trio's own, wakes ours. Of 170-185 µs of processor time for a hop with a job of 2 ms, in
    turn in one run, that saves 35-40, and with one gRPC stream 46 of the 463 a step takes (R26,
    R32). To shield each wait from cancels would cost 25, a thread of our own save 10 more.
    """

    def __init__(self) -> None:
        self._bells = _Bells()

    def close(self) -> None:
        """Give the descriptors back. No job is running; more may be started."""
        self._bells.clear()

    async def run(self, job: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        return await trio.to_thread.run_sync(job, abandon_on_cancel=False, limiter=limiter)

    def start(self, job: Callable[[], T], *, tells_begin: bool) -> Job[T]:
        return _ThreadJob(job, self._bells, tells_begin=tells_begin)


class _Bells:
    """Those that are not lent. A job has one of its own, as one task at a time may wait for it:
    there are as many as jobs ever ran at once."""

    def __init__(self) -> None:
        self._free: list[_EventBell] = []

    def take(self) -> _EventBell | _TokenBell:
        if self._free:
            return self._free.pop()
        try:
            return _EventBell()
        except (AttributeError, OSError):  # not on Linux, or out of descriptors
            return _TokenBell()

    def put(self, bell: _EventBell | _TokenBell) -> None:
        """Take one back that will not ring any more, and was heard as often as it rang."""
        if isinstance(bell, _EventBell):
            bell.num_heard = 0
            self._free.append(bell)

    def clear(self) -> None:
        self._free.clear()


class _EventBell:
    """Rung in a thread, heard by a task, as often as it was rung: by an eventfd. It is closed with
    its last reference, of which the thread that is to ring it has one."""

    __slots__ = ("__weakref__", "_fd", "num_heard")

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self.num_heard = 0

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    async def wait_heard(self, count: int) -> None:
        """Wait until it has rung so often in all. A cancel changes nothing, and comes again at the
        next checkpoint, as Trio's do; Ctrl-C, which is raised in Trio's main task, comes after."""
        try:
            while self.num_heard < count:
                await wait_readable(self._fd)
                try:
                    self.num_heard += os.eventfd_read(self._fd)
                except BlockingIOError:  # it was for nothing
                    continue
        except (trio.Cancelled, KeyboardInterrupt) as error:
            with trio.CancelScope(shield=True):  # as long as the job, which is not abandoned
                await self.wait_heard(count)
            if isinstance(error, KeyboardInterrupt):
                raise


class _TokenBell:
    """The same without a descriptor: by Trio's token, and for one job."""

    __slots__ = ("_num_heard", "_task", "_token")

    def __init__(self) -> None:
        self._token = current_trio_token()
        self._task: trio.lowlevel.Task | None = None  # the one that waits, if it does
        self._num_heard = 0

    def ring(self) -> None:
        with suppress(trio.RunFinishedError):  # Trio itself has crashed: nobody waits
            self._token.run_sync_soon(self._hear)

    def _hear(self) -> None:
        self._num_heard += 1
        if self._task is not None:
            task, self._task = self._task, None
            reschedule(task)

    async def wait_heard(self, count: int) -> None:
        while self._num_heard < count:
            self._task = current_task()
            await wait_task_rescheduled(lambda _: Abort.FAILED)


class _ThreadJob(Generic[T]):
    """Life: made, which starts it → taken up by a thread → its outcome is there → its bell rings →
    waited for. The outcome is the thread's until then, and the task's afterwards."""

    __slots__ = ("_bell", "_bells", "_job", "_num_rings", "_outcome")

    def __init__(self, job: Callable[[], T], bells: _Bells, *, tells_begin: bool) -> None:
        self._job = job
        self._bells = bells
        self._num_rings = 2 if tells_begin else 1
        self._outcome: Outcome[T] | None = None
        self._bell = bells.take()
        try:
            start_thread_soon(self._run, self._deliver)
        except BaseException:  # no thread is to be had
            self._let_go()
            raise

    # ---- in the thread

    def _run(self) -> T:
        if self._num_rings == 2:
            self._bell.ring()
        return self._job()

    def _deliver(self, outcome: Outcome[T]) -> None:
        self._outcome = outcome
        self._bell.ring()

    # ---- in the task

    async def wait_begun(self) -> None:
        await self._bell.wait_heard(1)

    async def wait(self) -> T:
        await self._bell.wait_heard(self._num_rings)
        self._let_go()
        assert self._outcome is not None
        return self._outcome.unwrap()

    def _let_go(self) -> None:
        self._bells.put(self._bell)
        del self._bell  # what a job raised refers to the job, and so would to the descriptor
