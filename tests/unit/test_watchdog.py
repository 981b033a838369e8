"""When the watchdog reports a hung step, when it ends the process, and that it sleeps otherwise.

Its limits are fractions of a second here, and the tests' own time limits are generous.
"""

import contextlib
import logging
import threading
import time
from types import SimpleNamespace

import pytest

from engine.replica.watchdog import EXIT_HUNG, StepWatch, Watchdog
from tests.support.wire import wait_until

LIMIT_S = 0.05
LONG_S = 60.0


@pytest.fixture
def clock(monkeypatch):
    """Stop the clock of watchdogs, and return it."""
    clock = SimpleNamespace(now=1.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("engine.replica.watchdog.time", fake)
    return clock


@contextlib.contextmanager
def watching(limit_s=LIMIT_S):
    """Yield a started watchdog.

    Its ``told`` are the functions that it has asked the event loop to run; ``codes`` are the exit
    codes with which it ended the process.
    """
    codes = []
    watchdog = Watchdog(limit_s, exit_process=codes.append)
    watchdog.codes, watchdog.told = codes, []
    watchdog.start(watchdog.told.append)
    try:
        yield watchdog
    finally:
        watchdog.stop()
        wait_until(lambda: "triolet-watchdog" not in names(), 5, "the thread's end")


def names():
    return {thread.name for thread in threading.enumerate()}


def reported(watchdog, count=1):
    """Wait for ``count`` reports, and run the last one's function, as the event loop would."""
    wait_until(lambda: len(watchdog.told) == count, 5, "the report")
    watchdog.told[-1]()


def logged(caplog, text):
    """Return the log records that contain a text."""
    return [record for record in caplog.records if text in record.getMessage()]


def test_a_step_within_its_time_is_not_reported():
    with watching(LONG_S) as watchdog:
        watch = watchdog.watch("a", lambda: None)
        for step in range(1000):
            watch.begin(step)
            watch.end()
        assert not watchdog.told


def test_a_hung_step_is_reported_once_with_all_stacks_and_its_end_too(caplog):
    """Red with faulthandler, which writes the 100 newest threads only: a server of many models has
    more, and the main thread's stack would be missing."""
    changes, is_over = [], threading.Event()
    with watching() as watchdog, contextlib.ExitStack() as stack:
        for number in range(150):
            thread = threading.Thread(target=is_over.wait, name=f"waiting {number}.")
            thread.start()
            stack.callback(thread.join)
        stack.callback(is_over.set)
        watch = watchdog.watch("a", lambda: changes.append(watch.is_hung))
        watch.begin(7)
        reported(watchdog)
        wait_until(lambda: logged(caplog, "step 7 of a has been running"), 5)
        assert watch.is_hung
        time.sleep(4 * LIMIT_S)
        assert len(watchdog.told) == 1
        watch.end()
        assert changes == [True, False]
    [record] = logged(caplog, "step 7 of a has been running")
    assert record.levelno == logging.ERROR
    assert logged(caplog, "step 7 of a has ended")
    stacks = record.getMessage()
    assert "test_a_hung_step_is_reported_once" in stacks
    assert "in Watchdog._run" in stacks
    assert all(f"waiting {number}." in stacks for number in range(150))


def test_each_hung_step_is_reported_also_after_a_sleep(caplog):
    with watching() as watchdog:
        watch = watchdog.watch("a", lambda: None)
        for step in (1, 2):
            watch.begin(step)
            reported(watchdog, step)
            watch.end()
            wait_until(lambda: watchdog.is_asleep, 5)
        for step in (1, 2):
            wait_until(lambda step=step: logged(caplog, f"step {step} of a has been"), 5)


def test_a_report_that_comes_after_the_steps_end_changes_nothing():
    with watching() as watchdog:
        watch = watchdog.watch("a", lambda: pytest.fail("nothing has changed"))
        watch.begin(1)
        wait_until(lambda: watchdog.told, 5)
        watch.end()
        watch.begin(2)
        watchdog.told[0]()
        assert not watch.is_hung


def test_one_model_that_hangs_says_nothing_of_another(clock):
    with watching() as watchdog:
        hung, other = (watchdog.watch(name, lambda: None) for name in "ab")
        hung.begin(1)
        clock.now += 0.6 * LIMIT_S
        other.begin(1)
        clock.now += 0.6 * LIMIT_S
        reported(watchdog)
        time.sleep(2 * LIMIT_S)
        assert len(watchdog.told) == 1
        assert (hung.is_hung, other.is_hung) == (True, False)


def test_it_sleeps_when_nothing_runs_and_has_no_thread_before_anything_did():
    with watching() as watchdog:
        watch = watchdog.watch("a", lambda: None)
        assert "triolet-watchdog" not in names()
        watch.begin(1)
        assert "triolet-watchdog" in names()
        watch.end()
        wait_until(lambda: watchdog.is_asleep, 5, "its sleep")


def test_a_step_is_no_wake_up_while_steps_follow_each_other():
    with watching(LONG_S) as watchdog:
        watch = watchdog.watch("a", lambda: None)
        woken = []
        watchdog.wake = lambda wake=watchdog.wake: (woken.append(1), wake())
        for step in range(1000):
            watch.begin(step)
            watch.end()
        assert len(woken) == 1


def test_without_a_watchdog_nothing_is_reported():
    watch = StepWatch("a")
    watch.begin(1)
    watch.end()
    assert not watch.is_hung


# ---- ending the process ----------------------------------------------------------------------


def test_a_process_that_waits_for_a_hung_step_ends_with_its_own_code():
    with watching() as watchdog:
        watch = watchdog.watch("a", lambda: None)
        watch.begin(1)
        wait_until(lambda: watchdog.told, 5)
        time.sleep(2 * LIMIT_S)
        assert not watchdog.codes  # no exit: the process still serves
        watchdog.leave(0, patience_s=LONG_S, waits_for_steps=True)
        wait_until(lambda: watchdog.codes, 5)
        assert watchdog.codes == [EXIT_HUNG] == [70]


def test_a_step_has_its_time_when_the_process_leaves():
    with watching(1.0) as watchdog:
        watch = watchdog.watch("a", lambda: None)
        start = time.monotonic()
        watch.begin(1)
        watchdog.leave(75, patience_s=0.0, waits_for_steps=True)
        wait_until(lambda: watchdog.codes, 5)
        assert time.monotonic() - start >= 1.0
        assert watchdog.codes == [70]


@pytest.mark.parametrize("runs_a_step", [True, False])
def test_work_other_than_a_step_is_abandoned_with_the_given_exit_code(runs_a_step):
    with watching(LONG_S) as watchdog:
        watch = watchdog.watch("a", lambda: None)
        if runs_a_step:
            watch.begin(1)
        watchdog.leave(75, patience_s=0.1, waits_for_steps=True)
        time.sleep(0.3 if runs_a_step else 0.0)
        if runs_a_step:
            assert not watchdog.codes
            watch.end()
        wait_until(lambda: watchdog.codes, 5)
        assert watchdog.codes == [75]


def test_a_second_signals_leave_waits_for_no_step_and_replaces_the_first():
    with watching(LONG_S) as watchdog:
        watch = watchdog.watch("a", lambda: None)
        watch.begin(1)
        watchdog.leave(0, patience_s=LONG_S, waits_for_steps=True)
        watchdog.leave(143, patience_s=0.05, waits_for_steps=False)
        wait_until(lambda: watchdog.codes, 5)
        assert watchdog.codes == [143]


def test_a_process_that_ends_in_time_is_left_alone(clock):
    with watching() as watchdog:
        watchdog.leave(0, patience_s=LIMIT_S, waits_for_steps=True)
        watchdog.stop()
        clock.now += 2 * LIMIT_S
    assert not watchdog.codes


def test_a_log_that_nobody_reads_does_not_keep_the_process(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr("engine.replica.watchdog.log.warning", lambda *args: gate.wait(10))
    with watching(LONG_S) as watchdog:
        watchdog.leave(75, patience_s=0.0, waits_for_steps=True)
        wait_until(lambda: watchdog.codes, 5)
        gate.set()
