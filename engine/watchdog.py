"""Steps that hang: noticed by a plain thread, which can also end a process that only waits for one.

A step that hangs cannot be cancelled, and whoever joins it hangs too (D17). So one thread looks at
when the running steps began. It reports a step that takes too long, once, with the stacks of all
threads; and once the process has nothing left to do but to join its threads (`Watchdog.leave`), it
does not let it wait for ever.

Rule 1: a step costs its loop a look at the clock and a few attributes, no lock and no wake-up: the
thread sleeps to the limit of the oldest step and then looks again. It wakes once per limit while
steps follow each other; an idle engine makes no wake-ups but one last look.
Rule 2: nothing here waits for what a hung thread may hold: lines are written by a helper that is
waited for `SAY_LIMIT_S`, and the engine is told, never asked.
Rule 3: nothing here knows an event loop; ``tell`` runs a callback on the loop's thread.

It cannot see a step that hangs with Python's global lock held, as no thread runs then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import math
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_HUNG = 70  # D17; EX_SOFTWARE of sysexits.h
SAY_LIMIT_S = 1.0  # guess: a log line takes microseconds, unless nobody empties the pipe
LEAVE_POLL_S = 0.05  # guess: the process is ending and has nothing else to do

log = logging.getLogger(__name__)


class StepWatch:
    """What one loop says of its steps. One at a time; `begin` and `end` belong to the loop's
    thread, as does everything else here but what is said otherwise.

    ``is_hung``: the step that runs has been reported. ``on_change`` is called when that changes.
    Without a watchdog nothing is ever reported.
    """

    __slots__ = ("_on_change", "_watchdog", "is_hung", "name", "reported_at", "started_at", "step")

    def __init__(
        self,
        name: str,
        watchdog: Watchdog | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.step = 0
        self.started_at: float | None = None  # read by the watchdog's thread
        self.reported_at: float | None = None  # written by it: the start of the step it reported
        self.is_hung = False
        self._watchdog = watchdog
        self._on_change = on_change

    def begin(self, step: int) -> None:
        """A step goes to its worker."""
        self.step = step
        self.started_at = time.monotonic()
        watchdog = self._watchdog
        # in this order: either the thread sees the step before it sleeps, or we see it asleep
        if watchdog is not None and watchdog.is_asleep:
            watchdog.wake()

    def end(self) -> None:
        """The step is over, however it ended."""
        started_at, self.started_at = self.started_at, None
        if self.is_hung and started_at is not None:
            self.is_hung = False
            took = time.monotonic() - started_at
            log.warning("step %d of %s has ended, after %.1f s", self.step, self.name, took)
            self._on_change()

    def close(self) -> None:
        """There will be no more steps."""
        if self._watchdog is not None:
            self._watchdog.forget(self)

    def note_hung(self, started_at: float) -> None:
        """The step that began then was reported; without effect if it is over by now."""
        if self.started_at == started_at:
            self.is_hung = True
            self._on_change()


class _Leave(NamedTuple):
    code: int
    at: float
    waits_for_steps: bool


class Watchdog:
    """The thread and what it looks at.

    Life: made → `start` → `leave`, perhaps more than once → `stop`. The thread starts with the
    first step; it is a daemon, as it may sleep for long when it is told to stop.

    ``limit_s``: a step that runs for longer hangs. ``exit_process`` ends the process at once.
    """

    def __init__(self, limit_s: float, *, exit_process: Callable[[int], object] = os._exit) -> None:
        self.limit_s = limit_s
        self.is_asleep = True  # no step ran when the thread last looked
        self._exit_process = exit_process
        self._tell: Callable[[Callable[[], None]], None] = lambda callback: None
        self._watches: tuple[StepWatch, ...] = ()
        self._leave: _Leave | None = None
        self._is_stopped = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, tell: Callable[[Callable[[], None]], None]) -> None:
        """``tell`` runs a callback on the loops' thread and never waits."""
        self._tell = tell

    def watch(self, name: str, on_change: Callable[[], None]) -> StepWatch:
        """Look after the steps of one more loop."""
        watch = StepWatch(name, self, on_change)
        self._watches = (*self._watches, watch)
        return watch

    def forget(self, watch: StepWatch) -> None:
        """Look after a loop no more: it has ended."""
        self._watches = tuple(one for one in self._watches if one is not watch)

    def stop(self) -> None:
        """Look no more. Does not wait for the thread."""
        self._is_stopped = True
        if self._thread is not None:
            self._wake.set()

    def leave(self, code: int, *, patience_s: float, waits_for_steps: bool) -> None:
        """From now on the process only joins its threads: what is still there after
        ``patience_s`` seconds is not waited for, and the process ends with ``code``.

        ``waits_for_steps``: a step may take its time up to the limit; one that hangs, now or
        then, ends the process with `EXIT_HUNG`. A later call replaces an earlier one; `stop`
        undoes all.
        """
        self._leave = _Leave(code, time.monotonic() + patience_s, waits_for_steps)
        self.wake()

    def wake(self) -> None:
        """Have the thread look now. From the loops' thread."""
        self.is_asleep = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="triolet-watchdog", daemon=True)
            self._thread.start()
        self._wake.set()

    # ---- on the thread

    def _run(self) -> None:
        while not self._is_stopped:
            self._wake.clear()  # before the look: what happens after it wakes us again
            next_look = self._look(time.monotonic())
            if next_look == math.inf:
                self.is_asleep = True
                if self._look(time.monotonic()) == math.inf and not self._is_stopped:
                    self._wake.wait()
                self.is_asleep = False
            elif not self._is_stopped:
                self._wake.wait(max(0.0, next_look - time.monotonic()))

    def _look(self, now: float) -> float:
        """Do what is due. When to look again; infinity: not before something happens."""
        next_look = math.inf
        for watch in self._watches:
            started_at = watch.started_at
            if started_at is None or started_at == watch.reported_at:
                continue
            if now >= started_at + self.limit_s:
                self._report(watch, started_at, now)
            else:
                next_look = min(next_look, started_at + self.limit_s)
        if self._leave is None or self._is_stopped:
            return next_look
        self._look_at_leave(self._leave, now)
        return min(next_look, now + LEAVE_POLL_S)

    def _look_at_leave(self, leave: _Leave, now: float) -> None:
        running = [watch for watch in self._watches if watch.started_at is not None]
        if leave.waits_for_steps and running:
            if any(watch.started_at == watch.reported_at for watch in running):
                self._end_process(EXIT_HUNG, "a step hangs")
        elif now >= leave.at:
            self._end_process(leave.code, "a worker thread is still busy")

    def _report(self, watch: StepWatch, started_at: float, now: float) -> None:
        watch.reported_at = started_at
        self._tell(lambda: watch.note_hung(started_at))
        step, seconds = watch.step, now - started_at

        def say() -> None:
            log.error(
                "step %d of %s has been running for %.1f s; what every thread does follows",
                *(step, watch.name, seconds),
            )
            with contextlib.suppress(io.UnsupportedOperation, AttributeError, ValueError):
                faulthandler.dump_traceback(sys.stderr, all_threads=True)

        _say(say)

    def _end_process(self, code: int, why: str) -> None:
        def say() -> None:
            log.warning("%s: ending the process without it, exit code %d", why, code)
            sys.stdout.flush()

        _say(say)
        if not self._is_stopped:
            self._is_stopped = True
            self._exit_process(code)


def _say(say: Callable[[], None]) -> None:
    """Run ``say`` in a thread that may be left behind: standard error may be a full pipe, and its
    lock a hung thread's."""
    helper = threading.Thread(target=say, name="triolet-watchdog-says", daemon=True)
    helper.start()
    helper.join(SAY_LIMIT_S)
