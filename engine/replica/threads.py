"""The one way into a worker thread.

Rule 1: nothing else calls `trio.to_thread` or `trio.lowlevel.start_thread_soon`. Rule 2: a job is
never abandoned: a cancelled caller waits for the job's end, so the loop knows that a step is over.
Rule 3: a descriptor that a thread may still write to is not closed.

`Threads` is a protocol because virtual time cannot overtake a real thread (Trio issue 456): the
simulator injects an implementation that runs the job inline and sleeps its virtual cost.
"""

from __future__ import annotations

import os
import sys
import weakref
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

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
    from collections.abc import Callable, Iterator

# The longest time, in seconds, for which a job keeps the GIL from the loop or from a step, which
# need it several times for a token. A guess: a tenth of Python's default interval.
SHORT_TURN_S = 5e-4

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Job(Protocol[T_co]):
    """A job that has been started. The task that started it must wait for it; no other task may."""

    async def wait_begun(self) -> None:
        """Wait until the thread has begun the job.

        Cancellation: is ignored until then, as the thread begins within microseconds.
        """

    async def wait(self) -> T_co:
        """Wait for the job's end, and return its result or raise its exception. Called once.

        Cancellation: is ignored until the job has ended; its result is returned all the same.
        """


class Threads(Protocol):
    """Runs blocking jobs beside the event loop."""

    async def run(self, job: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        """Run ``job`` in a thread that ``limiter`` admits, and return its result or raise its
        exception.

        Cancellation: possible only before the job starts. Once started, the job is waited for, and
        its result is returned without a checkpoint after it; store it before you await anything.
        """

    def start(self, job: Callable[[], T], *, reports_begin: bool) -> Job[T]:
        """Start ``job`` in a thread now. `Job.wait_begun` may be called only with
        ``reports_begin``, which costs another wake-up. The caller bounds how many jobs run at once.
        """


class WorkerThreads:
    """`Threads` on Trio's threads. Threads and their wake-ups are kept until `close`.

    `start` is `trio.to_thread.run_sync`, split where it begins to wait, because between a step's
    start and its end the loop delivers and plans. It differs in two ways. The end is signalled by
    an eventfd on which the task itself waits, instead of over Trio's token, which sends to a socket
    whose reader, a task of Trio's own, wakes ours. Of the 170-185 µs of processor time that it
    takes to run a job of 2 ms in a thread, this saves 35-40 µs. A thread waits for its next job
    here, instead of in Trio's cache, which saves about 10 µs. To shield each wait would cost 25 µs.
    """

    def __init__(self) -> None:
        # Threads that no running job is using. There are as many threads as jobs ever ran at once.
        self._idle: list[_JobThread] = []

    def close(self) -> None:
        """End the threads and close their descriptors. No job may be running; further jobs may be
        started later. A thread whose job has just ended may hold its descriptor open for some
        microseconds more (rule 3)."""
        self._idle.clear()

    async def run(self, job: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        """Run a job as `Threads.run` says."""
        return await trio.to_thread.run_sync(
            _short_turns.run, job, abandon_on_cancel=False, limiter=limiter
        )

    def start(self, job: Callable[[], T], *, reports_begin: bool) -> Job[T]:
        """Start a job as `Threads.start` says."""
        return _ThreadJob(job, self._idle, 2 if reports_begin else 1)


class _ShortTurns:
    """Shortens Python's switch interval, which all threads have in common, while jobs run."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_jobs = 0
        self._usual_s = 0.0  # the interval outside of jobs

    def run(self, job: Callable[[], T]) -> T:
        """Return ``job()``, or raise its exception."""
        with self._beside_others():
            return job()

    @contextmanager
    def _beside_others(self) -> Iterator[None]:
        with self._lock:
            self._num_jobs += 1
            if self._num_jobs == 1:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, SHORT_TURN_S))
        try:
            yield
        finally:
            with self._lock:
                self._num_jobs -= 1
                if not self._num_jobs:
                    # Python cuts off fractions of a microsecond, so half of one is added.
                    sys.setswitchinterval(self._usual_s + 5e-7)


_short_turns = _ShortTurns()


class _JobThread:
    """A thread that runs one job after another, and the wake-up of the task that waits for the job.
    The thread ends with the last reference to this object; a running job holds a reference."""

    __slots__ = ("__weakref__", "inbox", "wakeup")

    def __init__(self) -> None:
        self.wakeup = _new_wakeup()
        self.inbox = _Inbox()
        start_thread_soon(self.inbox.run_jobs, lambda outcome: outcome.unwrap())
        weakref.finalize(self, self.inbox.put, None).atexit = False


class _Inbox:
    """The next job of a thread. The lock is free while there is a next job."""

    __slots__ = ("_job", "_lock")

    def __init__(self) -> None:
        self._job: _ThreadJob[Any] | None = None
        self._lock = Lock()
        self._lock.acquire()

    def put(self, job: _ThreadJob[Any] | None) -> None:
        """Give the thread its next job, which it begins once it has ended the last job; or None,
        which ends the thread."""
        self._job = job
        self._lock.release()

    def run_jobs(self) -> None:
        """Run every job, in the thread."""
        while True:
            self._lock.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            job.run()
            del job  # an idle thread must not keep what a job refers to


def _new_wakeup() -> _EventfdWakeup | _TokenWakeup:
    try:
        return _EventfdWakeup()
    except (AttributeError, OSError):  # no Linux, or no descriptor is left
        return _TokenWakeup()


class _EventfdWakeup:
    """Signals from a thread to a task, counted by an eventfd. The descriptor is closed with the
    last reference to this object; a thread that still has to send holds a reference."""

    __slots__ = ("__weakref__", "_fd", "num_received")

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self.num_received = 0

    def send(self) -> None:
        os.eventfd_write(self._fd, 1)

    async def wait_received(self, count: int) -> None:
        """Wait until ``count`` signals have come in all.

        Cancellation: does not end this wait; it is raised at the next checkpoint, as after Trio's
        own waits for threads. Ctrl-C (in Trio's main task) is raised after the wait.
        """
        try:
            while self.num_received < count:
                await wait_readable(self._fd)
                try:
                    self.num_received += os.eventfd_read(self._fd)
                except BlockingIOError:  # a spurious wake-up
                    continue
        except (trio.Cancelled, KeyboardInterrupt) as error:
            with trio.CancelScope(shield=True):  # a job is never abandoned
                await self.wait_received(count)
            if isinstance(error, KeyboardInterrupt):
                raise


class _TokenWakeup:
    """Signals from a thread to a task over Trio's token, without a descriptor, for one job."""

    __slots__ = ("_num_received", "_task", "_token")

    def __init__(self) -> None:
        self._token = current_trio_token()
        self._task: trio.lowlevel.Task | None = None  # the task that waits; None: no task
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
    """A job in a thread.

    Life: 1. made, which starts it; 2. a thread begins it; 3. its result or its error is stored; 4.
    the thread sends its last signal; 5. the task has waited for the job, and the thread is among
    the ``idle`` threads if it has an eventfd; otherwise the thread ends. The thread owns the
    outcome until 4, the task afterwards.
    """

    __slots__ = ("_error", "_idle", "_job", "_num_signals", "_result", "_thread")

    def __init__(self, job: Callable[[], T], idle: list[_JobThread], num_signals: int) -> None:
        self._job = job
        self._idle = idle
        self._num_signals = num_signals
        self._result: T
        self._error: BaseException | None = None
        self._thread = thread = idle.pop() if idle else _JobThread()
        thread.inbox.put(self)

    # ---- in the thread

    def run(self) -> None:
        """Run the job, and send its signals. An exception of the job is stored."""
        wakeup = self._thread.wakeup  # the waiting task may delete `_thread` while this sends
        if self._num_signals == 2:
            wakeup.send()
        try:
            self._result = self._job()
        except BaseException as error:
            self._error = error
        wakeup.send()

    # ---- in the task

    async def wait_begun(self) -> None:
        await self._thread.wakeup.wait_received(1)

    async def wait(self) -> T:
        thread, wakeup = self._thread, self._thread.wakeup
        await wakeup.wait_received(self._num_signals)
        if wakeup.__class__ is _EventfdWakeup:
            wakeup.num_received = 0  # this task has received every signal of the job
            self._idle.append(thread)
        # An exception of the job's refers to this object, which must not keep the descriptor.
        del thread, wakeup, self._thread
        if self._error is None:
            return self._result
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # it refers to this frame
