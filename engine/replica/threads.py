"""The one way into a worker thread.

Rule 1: nothing else calls `trio.to_thread` or `trio.lowlevel.start_thread_soon`. Rule 2: a job is
never abandoned: a cancelled caller waits for the job's end, so the loop knows that a step is over
(R11, R202). Rule 3: a descriptor that a thread may still write to is not closed.

`Threads` is a protocol because virtual time cannot overtake a real thread (Trio issue 456): the
simulator injects an implementation that runs the job inline and sleeps its virtual cost.
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
    """A job that has been started. The task that started it must wait for it; no other task may."""

    async def wait_begun(self) -> None:
        """Wait until the thread has begun the job.

        Cancellation: is ignored until then, as the thread begins within microseconds.
        """
        ...

    async def wait(self) -> T_co:
        """Wait for the job's end, and return its result or raise its exception. Called once.

        Cancellation: is ignored until the job has ended; its result is returned all the same.
        """
        ...


class Threads(Protocol):
    """Runs blocking jobs beside the event loop."""

    async def run(self, job: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        """Run ``job`` in a thread that ``limiter`` admits, and return its result or raise its
        exception.

        Cancellation: possible only before the job starts. Once started, the job is waited for, and
        its result is returned without a checkpoint after it; store it before you await anything.
        """
        ...

    def start(self, job: Callable[[], T], *, reports_begin: bool) -> Job[T]:
        """Start ``job`` in a thread now. `Job.wait_begun` may be called only with
        ``reports_begin``, which costs another wake-up. The caller bounds how many jobs run at once.
        """
        ...


class WorkerThreads:
    """`Threads` with Trio's thread cache. Wake-up descriptors of past jobs are kept until `close`.

    `start` is `trio.to_thread.run_sync`, split where it begins to wait, because between a step's
    start and its end the loop delivers and plans. The end comes over an eventfd on which the task
    itself waits, instead of over Trio's token, which sends to a socket whose reader, a task of
    Trio's own, wakes ours. A hop with a job of 2 ms takes 170-185 µs of processor time; the eventfd
    saves 35-40 of them (in turn in one run), and with one gRPC stream 46 of the 463 µs that a step
    takes (R26, R32). Shielding each wait from cancellation would cost 25 µs; a thread of our own
    would save another 10.
    """

    def __init__(self) -> None:
        self._descriptors = _WakeupDescriptors()

    def close(self) -> None:
        """Close the descriptors. No job may be running; more may be started later. A thread whose
        job has just ended may hold its descriptor open for some microseconds more (rule 3)."""
        self._descriptors.clear()

    async def run(self, job: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        """Run a job as `Threads.run` says."""
        return await trio.to_thread.run_sync(job, abandon_on_cancel=False, limiter=limiter)

    def start(self, job: Callable[[], T], *, reports_begin: bool) -> Job[T]:
        """Start a job as `Threads.start` says."""
        return _ThreadJob(job, self._descriptors, reports_begin=reports_begin)


class _WakeupDescriptors:
    """Wake-up eventfds that no running job is using. A running job has one of its own, because only
    one task at a time may wait for a descriptor. So there are as many as jobs ever ran at once."""

    def __init__(self) -> None:
        self._free: list[_EventfdWakeup] = []

    def take(self) -> _EventfdWakeup | _TokenWakeup:
        if self._free:
            return self._free.pop()
        try:
            return _EventfdWakeup()
        except (AttributeError, OSError):  # not on Linux, or no descriptor is left
            return _TokenWakeup()

    def put(self, wakeup: _EventfdWakeup | _TokenWakeup) -> None:
        """Take a wake-up back for the next job. Its thread has sent every signal, and its task has
        received them all."""
        if isinstance(wakeup, _EventfdWakeup):
            wakeup.num_received = 0
            self._free.append(wakeup)

    def clear(self) -> None:
        self._free.clear()


class _EventfdWakeup:
    """Signals from a thread to a task, counted by an eventfd. The descriptor is closed with the
    last reference to this object, and the thread that is to send holds one of them."""

    __slots__ = ("__weakref__", "_fd", "num_received")

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self.num_received = 0

    def send(self) -> None:
        os.eventfd_write(self._fd, 1)

    async def wait_received(self, count: int) -> None:
        """Wait until ``count`` signals have come in all.

        Cancellation: changes nothing here and comes at the next checkpoint, as Trio's own waits for
        threads do it. Ctrl-C, which is raised in Trio's main task, is raised after the wait.
        """
        try:
            while self.num_received < count:
                await wait_readable(self._fd)
                try:
                    self.num_received += os.eventfd_read(self._fd)
                except BlockingIOError:  # a spurious wake-up
                    continue
        except (trio.Cancelled, KeyboardInterrupt) as error:
            with trio.CancelScope(shield=True):  # lasts as long as the job, which is not abandoned
                await self.wait_received(count)
            if isinstance(error, KeyboardInterrupt):
                raise


class _TokenWakeup:
    """Signals from a thread to a task over Trio's token, without a descriptor, for one job."""

    __slots__ = ("_num_received", "_task", "_token")

    def __init__(self) -> None:
        self._token = current_trio_token()
        self._task: trio.lowlevel.Task | None = None  # the task that waits, if it does
        self._num_received = 0

    def send(self) -> None:
        with suppress(trio.RunFinishedError):  # Trio itself has crashed, so no task waits
            self._token.run_sync_soon(self._receive)

    def _receive(self) -> None:
        self._num_received += 1
        if self._task is not None:
            task, self._task = self._task, None
            reschedule(task)

    async def wait_received(self, count: int) -> None:
        while self._num_received < count:
            self._task = current_task()
            await wait_task_rescheduled(lambda _: Abort.FAILED)


class _ThreadJob(Generic[T]):
    """A job in a thread of Trio's cache.

    Life: 1. made, which starts it; 2. a thread begins it; 3. its outcome is stored; 4. the thread
    sends its last signal; 5. the task has waited for it. The thread owns the outcome until 4, the
    task afterwards.
    """

    __slots__ = ("_descriptors", "_job", "_num_signals", "_outcome", "_wakeup")

    def __init__(
        self, job: Callable[[], T], descriptors: _WakeupDescriptors, *, reports_begin: bool
    ) -> None:
        self._job = job
        self._descriptors = descriptors
        self._num_signals = 2 if reports_begin else 1
        self._outcome: Outcome[T] | None = None
        self._wakeup = descriptors.take()
        try:
            start_thread_soon(self._run, self._deliver)
        except BaseException:  # the system has no thread left
            self._release()
            raise

    # ---- in the thread

    def _run(self) -> T:
        if self._num_signals == 2:
            self._wakeup.send()
        return self._job()

    def _deliver(self, outcome: Outcome[T]) -> None:
        self._outcome = outcome
        self._wakeup.send()

    # ---- in the task

    async def wait_begun(self) -> None:
        await self._wakeup.wait_received(1)

    async def wait(self) -> T:
        await self._wakeup.wait_received(self._num_signals)
        self._release()
        assert self._outcome is not None
        return self._outcome.unwrap()

    def _release(self) -> None:
        self._descriptors.put(self._wakeup)
        # An exception of the job's refers to this object, which must not keep the descriptor.
        del self._wakeup
