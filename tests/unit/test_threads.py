"""Worker threads, with each kind of wake-up.

A job reports to its task whatever happens to either, and leaves nothing behind.
"""

import errno
import gc
import os
import signal
import sys
import threading
import time
from contextlib import closing

import pytest
import trio
from trio.lowlevel import start_thread_soon
from trio.testing import wait_all_tasks_blocked

import engine.replica.threads
from engine.replica.threads import SHORT_TURN_S, WorkerThreads
from tests.support.wire import wait_until

LIMIT_S = 10.0
HAS_EVENTFD = hasattr(os, "eventfd")


def no_eventfd(*args):
    """Raise the error of a process without descriptors left."""
    raise OSError(errno.EMFILE, "too many open files")


@pytest.fixture(params=["eventfd", "out of descriptors", "not on Linux"])
def threads(request, monkeypatch):
    """Yield worker threads with each kind of wake-up."""
    if request.param == "out of descriptors":
        monkeypatch.setattr(os, "eventfd", no_eventfd, raising=False)
    elif request.param == "not on Linux":
        monkeypatch.delattr(os, "eventfd", raising=False)
    elif not HAS_EVENTFD:
        pytest.skip("this system has none")
    with closing(WorkerThreads()) as threads:
        yield threads


@pytest.fixture
def limiter():
    return trio.CapacityLimiter(1)


def count_files():
    return len(os.listdir("/proc/self/fd"))


def open_files():
    """Return the number of open descriptors, after a collection."""
    gc.collect()
    return count_files()


@pytest.fixture(autouse=True)
def files_are_closed_before_the_next_test():
    """Wait until the descriptors are closed: the last job's thread closes its descriptor, perhaps
    after its task has gone on, and the next test must not count it."""
    before = open_files()
    yield
    wait_until(lambda: open_files() <= before, LIMIT_S, "the descriptors' end")


async def test_threads_take_short_turns_while_a_job_runs_beside_the_loop(threads):
    """Jobs of steps leave Python's switch interval as it is; beside other jobs it is short, until
    the last one ends or fails. Red if the loop waits for Python's default interval beside a thread
    that decodes a request."""
    usual_s, seen = sys.getswitchinterval(), []

    def fail():
        raise LookupError("gone")

    async with trio.open_nursery() as nursery:
        first, second = Held(), Held()
        for job in (first, second):
            nursery.start_soon(threads.run, job, trio.CapacityLimiter(1))
            await trio.to_thread.run_sync(job.has_begun.wait, LIMIT_S)
            seen.append(sys.getswitchinterval())
        first.go.set()
        with pytest.raises(LookupError):
            await threads.run(fail, trio.CapacityLimiter(1))
        seen.append(sys.getswitchinterval())
        second.go.set()
    assert seen == pytest.approx([SHORT_TURN_S] * 3)
    assert sys.getswitchinterval() == usual_s
    assert await threads.start(sys.getswitchinterval, reports_begin=False).wait() == usual_s


class Held:
    """A job that runs until the test releases it."""

    def __init__(self, result=None, error=None):
        self.has_begun, self.go = threading.Event(), threading.Event()
        self.is_over = False
        self._result, self._error = result, error

    def __call__(self):
        self.has_begun.set()
        assert self.go.wait(LIMIT_S)
        self.is_over = True
        if self._error is not None:
            raise self._error
        return self._result


async def test_a_jobs_result_and_its_error_come_back(threads):
    for number in range(100):
        assert await threads.start(lambda n=number: n, reports_begin=False).wait() == number

    def fail():
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        await threads.start(fail, reports_begin=False).wait()
    assert await threads.start(lambda: 7, reports_begin=False).wait() == 7


async def test_a_jobs_begin_is_reported_while_it_runs(threads):
    for _ in range(3):
        held = Held(5)
        job = threads.start(held, reports_begin=True)
        with trio.fail_after(LIMIT_S):
            await job.wait_begun()
        assert not held.is_over
        held.go.set()
        assert await job.wait() == 5


async def test_a_begin_that_comes_with_the_end_or_is_not_waited_for_is_not_the_end(
    threads, limiter
):
    for waits in (True, False):
        is_over = threading.Event()
        job = threads.start(is_over.set, reports_begin=True)
        assert is_over.wait(LIMIT_S)
        if waits:
            await job.wait_begun()
        await job.wait()
        held = Held(1)
        job = threads.start(held, reports_begin=False)
        with trio.move_on_after(0.02) as scope:
            await trio.sleep_forever()
        assert scope.cancelled_caught
        assert not held.is_over
        held.go.set()
        assert await job.wait() == 1


async def test_each_of_several_jobs_at_once_reports_its_own_end(threads):
    for order in [(3, 0, 4, 2, 1), (0, 1, 2, 3, 4)]:
        helds = [Held(number) for number in range(5)]
        send, receive = trio.open_memory_channel(0)

        async def wait(held, send=send):
            job = threads.start(held, reports_begin=True)
            await job.wait_begun()
            await send.send(await job.wait())

        async with trio.open_nursery() as nursery:
            for held in helds:
                nursery.start_soon(wait, held)
            for number in order:
                helds[number].go.set()
                with trio.fail_after(LIMIT_S):
                    assert await receive.receive() == number


@pytest.mark.parametrize("reports_begin", [False, True])
async def test_a_cancelled_caller_waits_for_the_end_and_has_the_result(threads, reports_begin):
    held, results = Held(3), []

    async def call():
        job = threads.start(held, reports_begin=reports_begin)
        if reports_begin:
            await job.wait_begun()
        results.append(await job.wait())
        await trio.lowlevel.checkpoint_if_cancelled()
        raise AssertionError("the cancel is lost")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.sleep(0.02)
            assert not results
            held.go.set()
    assert held.is_over
    assert results == [3]
    assert await threads.start(lambda: 4, reports_begin=False).wait() == 4


async def test_a_caller_cancelled_before_it_waits_still_waits_for_the_end(threads):
    with trio.CancelScope() as scope:
        scope.cancel()
        for number in range(10):
            job = threads.start(lambda n=number: n, reports_begin=True)
            await job.wait_begun()
            assert await job.wait() == number
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught


async def test_a_thread_that_cannot_start_leaves_nothing_behind(threads, monkeypatch):
    def start(run, deliver):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(engine.replica.threads, "start_thread_soon", start)
        with pytest.raises(RuntimeError, match="new thread"):
            threads.start(lambda: None, reports_begin=True)
    assert await threads.start(lambda: 1, reports_begin=True).wait() == 1


def test_ctrl_c_in_trios_main_task_comes_after_the_job(threads):
    held = Held()

    async def main():
        token = trio.lowlevel.current_trio_token()
        job = threads.start(held, reports_begin=False)
        for delay_s in (0.05, 0.1):
            interrupt = (signal.raise_signal, signal.SIGINT)
            threading.Timer(delay_s, token.run_sync_soon, interrupt).start()
        threading.Timer(0.15, held.go.set).start()
        await job.wait()
        await trio.lowlevel.checkpoint()

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert held.is_over


# ---- what is left


@pytest.fixture(params=[0.0, 0.02], ids=["prompt", "late"])
def write(request, monkeypatch):
    """Let `os.eventfd_write` return at once or, in the second run, late: as if its thread lost the
    processor, so that the task that it woke runs while the thread still has the descriptor."""

    def write(fd, value):
        eventfd_write(fd, value)
        time.sleep(request.param)

    eventfd_write = os.eventfd_write
    monkeypatch.setattr(os, "eventfd_write", write)


@pytest.mark.skipif(not HAS_EVENTFD, reason="counts them by /proc")
@pytest.mark.usefixtures("write")
async def test_descriptors_are_as_many_as_jobs_at_once_and_go_with_close():
    threads = WorkerThreads()
    before = open_files()
    for _ in range(10):
        jobs = [threads.start(lambda: None, reports_begin=True) for _ in range(4)]
        for job in jobs:
            await job.wait()
        assert open_files() == before + 4

    def fail():
        raise LookupError("gone")

    gc.disable()  # the traceback keeps the job, which must not keep the descriptor
    try:
        with pytest.raises(LookupError):
            await threads.start(fail, reports_begin=False).wait()
        threads.close()
        # The last job's thread may still be in its last write.
        wait_until(lambda: count_files() == before, LIMIT_S, "the descriptors' end")
    finally:
        gc.enable()


@pytest.mark.skipif(not HAS_EVENTFD, reason="without eventfds each job has a thread of its own")
async def test_one_thread_runs_job_after_job_and_goes_back_to_trio_with_close(monkeypatch):
    begun, ended = [], threading.Event()

    def start(job, deliver):
        begun.append(job)
        start_thread_soon(job, lambda outcome: (deliver(outcome), ended.set()))

    monkeypatch.setattr("engine.replica.threads.start_thread_soon", start)
    with closing(WorkerThreads()) as threads:
        used = set()
        for _ in range(20):
            used.add(await threads.start(threading.get_ident, reports_begin=False).wait())
            assert await trio.to_thread.run_sync(threading.get_ident) not in used
        assert not ended.is_set()
    assert len(used) == len(begun) == 1
    wait_until(ended.is_set, LIMIT_S, "the thread's end")


@pytest.mark.skipif(not HAS_EVENTFD, reason="counts them by /proc")
async def test_a_descriptor_is_closed_when_its_thread_has_left_and_not_before(monkeypatch):
    has_written, go = threading.Event(), threading.Event()
    eventfd_write = os.eventfd_write

    def write(fd, value):
        eventfd_write(fd, value)
        has_written.set()
        assert go.wait(LIMIT_S)

    monkeypatch.setattr(os, "eventfd_write", write)
    threads = WorkerThreads()
    before = open_files()
    assert await threads.start(lambda: 5, reports_begin=False).wait() == 5
    assert has_written.is_set()
    threads.close()
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(4)]
    assert open_files() == before + 1 + len(others), "the thread owns the descriptor now"
    go.set()
    wait_until(lambda: open_files() == before + len(others), LIMIT_S, "the thread's end")
    for other in others:
        os.close(other)


@pytest.mark.skipif(not HAS_EVENTFD, reason="counts them by /proc")
@pytest.mark.usefixtures("write")
async def test_a_reused_descriptor_wakes_as_often_even_if_its_last_thread_is_late():
    with closing(WorkerThreads()) as threads:
        for number in range(10):
            held = Held(number)
            job = threads.start(held, reports_begin=True)
            with trio.fail_after(LIMIT_S):
                await job.wait_begun()
            assert not held.is_over
            held.go.set()
            assert await job.wait() == number


@pytest.mark.skipif(not HAS_EVENTFD, reason="counts them by /proc")
def test_a_job_that_outlives_trio_writes_to_nobody_elses_file():
    """When Trio crashes, its task never resumes, and the descriptor may be another file's."""
    held, before = Held(), open_files()

    async def main():
        WorkerThreads().start(held, reports_begin=True)

    trio.run(main)
    assert open_files() == before + 1, "it is the thread's now"
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(4)]
    held.go.set()
    wait_until(lambda: open_files() == before + len(others), LIMIT_S, "the thread's end")
    for other in others:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
        os.close(other)
