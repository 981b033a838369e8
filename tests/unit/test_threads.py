"""Worker threads: what a started job tells its task, whatever happens to either, and that nothing
is left of it; with each kind of bell."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
from contextlib import closing

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import engine.threads
from engine.threads import WorkerThreads
from tests.support.wire import wait_until

LIMIT_S = 10.0
HAS_EVENTFD = hasattr(os, "eventfd")


def no_eventfd(*args):
    raise OSError(errno.EMFILE, "too many open files")


@pytest.fixture(params=["eventfd", "out of descriptors", "not on Linux"])
def threads(request, monkeypatch):
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


def open_files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


class Held:
    """A job that goes on until it is let go."""

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
        assert await threads.start(lambda n=number: n, tells_begin=False).wait() == number

    def fail():
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        await threads.start(fail, tells_begin=False).wait()
    assert await threads.start(lambda: 7, tells_begin=False).wait() == 7


async def test_its_begin_is_told_while_it_goes_on(threads):
    for _ in range(3):
        held = Held(5)
        job = threads.start(held, tells_begin=True)
        with trio.fail_after(LIMIT_S):
            await job.wait_begun()
        assert not held.is_over
        held.go.set()
        assert await job.wait() == 5


async def test_a_begin_that_is_heard_with_the_end_or_not_waited_for_is_not_the_end(
    threads, limiter
):
    for waits in (True, False):
        is_over = threading.Event()
        job = threads.start(is_over.set, tells_begin=True)
        assert is_over.wait(LIMIT_S)
        if waits:
            await job.wait_begun()
        await job.wait()
        held = Held(1)
        job = threads.start(held, tells_begin=False)
        with trio.move_on_after(0.02) as scope:
            await trio.sleep_forever()
        assert scope.cancelled_caught
        assert not held.is_over
        held.go.set()
        assert await job.wait() == 1


async def test_jobs_that_run_at_once_hear_each_its_own_end(threads):
    for order in [(3, 0, 4, 2, 1), (0, 1, 2, 3, 4)]:
        helds = [Held(number) for number in range(5)]
        send, receive = trio.open_memory_channel(0)

        async def wait(held, send=send):
            job = threads.start(held, tells_begin=True)
            await job.wait_begun()
            await send.send(await job.wait())

        async with trio.open_nursery() as nursery:
            for held in helds:
                nursery.start_soon(wait, held)
            for number in order:
                helds[number].go.set()
                with trio.fail_after(LIMIT_S):
                    assert await receive.receive() == number


@pytest.mark.parametrize("tells_begin", [False, True])
async def test_a_cancelled_caller_waits_for_the_end_and_has_the_result(threads, tells_begin):
    held, results = Held(3), []

    async def call():
        job = threads.start(held, tells_begin=tells_begin)
        if tells_begin:
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
    assert await threads.start(lambda: 4, tells_begin=False).wait() == 4


async def test_one_that_was_cancelled_before_it_waits_hears_the_end_all_the_same(threads):
    with trio.CancelScope() as scope:
        scope.cancel()
        for number in range(10):
            job = threads.start(lambda n=number: n, tells_begin=True)
            await job.wait_begun()
            assert await job.wait() == number
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught


async def test_no_thread_to_be_had_takes_nothing(threads, monkeypatch):
    def start(run, deliver):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(engine.threads, "start_thread_soon", start)
        with pytest.raises(RuntimeError, match="new thread"):
            threads.start(lambda: None, tells_begin=True)
    assert await threads.start(lambda: 1, tells_begin=True).wait() == 1


def test_ctrl_c_in_trios_main_task_comes_after_the_job(threads):
    held = Held()

    async def main():
        token = trio.lowlevel.current_trio_token()
        job = threads.start(held, tells_begin=False)
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


@pytest.mark.skipif(not HAS_EVENTFD, reason="counts them by /proc")
def test_descriptors_are_as_many_as_jobs_at_once_and_go_with_close():
    async def main():
        threads = WorkerThreads()
        before = open_files()
        for _ in range(10):
            jobs = [threads.start(lambda: None, tells_begin=True) for _ in range(4)]
            for job in jobs:
                await job.wait()
            assert open_files() == before + 4

        def fail():
            raise LookupError("gone")

        gc.disable()  # what failed refers to its job for longer than its bell
        try:
            with pytest.raises(LookupError):
                await threads.start(fail, tells_begin=False).wait()
            threads.close()
            assert len(os.listdir("/proc/self/fd")) == before
        finally:
            gc.enable()

    trio.run(main)


@pytest.mark.skipif(not HAS_EVENTFD, reason="counts them by /proc")
def test_a_job_that_outlives_trio_rings_at_nobody_elses_file():
    """As when Trio crashes: whoever waits is never resumed."""
    held, before = Held(), open_files()

    async def main():
        WorkerThreads().start(held, tells_begin=True)

    trio.run(main)
    assert open_files() == before + 1, "it is the thread's now"
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(4)]
    held.go.set()
    wait_until(lambda: open_files() == before + len(others), LIMIT_S, "the thread's end")
    for other in others:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
        os.close(other)
