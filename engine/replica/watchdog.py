"""Detects steps that hang, in a plain thread, which can also end a process that a step blocks.

A step that hangs cannot be cancelled, and whatever joins its thread hangs too (D17). So one thread
watches when the running steps began. It reports a step that takes too long, once, with the stacks
of all threads. Once the process has nothing left to do but to join its threads (`Watchdog.leave`),
the thread ends the process rather than letting it wait for ever.

Rule 1: for a step, its loop reads the clock and sets a few attributes; it takes no lock, and wakes
the thread only after an idle time. The thread sleeps until the oldest step reaches its limit and
then checks again. It wakes once per limit while steps follow each other; an idle engine causes one
last check and no further wake-ups.
Rule 2: nothing here waits for locks that a hung thread may hold: a helper thread, waited for
`WRITE_LIMIT_S` at most, writes the log lines, and the loop gets callbacks and is never queried.
Rule 3: nothing here knows an event loop; ``call_soon`` runs a callback on the loop's thread.

The watchdog cannot see a step that hangs with Python's global lock held, as no thread runs then.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_HUNG = 70  # exit code of a process whose step hangs (D17): EX_SOFTWARE of sysexits.h
WRITE_LIMIT_S = 1.0  # longest wait for a log line to be written; a guess: it takes microseconds
LEAVE_POLL_S = 0.05  # seconds between two checks while the process ends; a guess

log = logging.getLogger(__name__)


class StepWatch:
    """One loop's report of its steps, one step at a time. Everything here belongs to the loop's
    thread, except where a comment names another one.

    ``is_hung`` is true while the running step is one that the watchdog has reported; ``on_change``
    is called when that changes. Without a watchdog no step is ever reported.
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
        self.reported_at: float | None = None  # start of the step last reported, by the watchdog
        self.is_hung = False
        self._watchdog = watchdog
        self._on_change = on_change

    def begin(self, step: int) -> None:
        """Note that a step goes to its worker."""
        self.step = step
        self.started_at = time.monotonic()
        watchdog = self._watchdog
        # In this order: the thread sees the step before it sleeps, or else is seen asleep here.
        if watchdog is not None and watchdog.is_asleep:
            watchdog.wake()

    def end(self) -> None:
        """Note that the step is over, however it ended."""
        started_at, self.started_at = self.started_at, None
        if self.is_hung and started_at is not None:
            self.is_hung = False
            took = time.monotonic() - started_at
            log.warning("step %d of %s has ended, after %.1f s", self.step, self.name, took)
            self._on_change()

    def close(self) -> None:
        """Note that no more steps will come."""
        if self._watchdog is not None:
            self._watchdog.forget(self)

    def note_hung(self, started_at: float) -> None:
        """Note that the step that began at ``started_at`` was reported, unless it is over by
        now."""
        if self.started_at == started_at:
            self.is_hung = True
            self._on_change()


class _Leave(NamedTuple):
    """The arguments of the last `Watchdog.leave`; ``at`` is when ``patience_s`` ends."""

    code: int
    at: float
    waits_for_steps: bool


class Watchdog:
    """The thread that watches for hung steps, and the loops whose steps it watches.

    Life: 1. made; 2. `start`; 3. `leave`, perhaps more than once; 4. `stop`. The thread starts with
    the first step. It is a daemon, because it may be asleep for long when `stop` is called.

    A step that runs for longer than ``limit_s`` seconds hangs. ``exit_process`` ends the process.
    """

    def __init__(self, limit_s: float, *, exit_process: Callable[[int], object] = os._exit) -> None:
        self.limit_s = limit_s
        self.is_asleep = True  # whether the thread waits for `wake`
        self._exit_process = exit_process
        self._call_soon: Callable[[Callable[[], None]], None] = lambda callback: None
        self._watches: tuple[StepWatch, ...] = ()
        self._leave: _Leave | None = None
        self._is_stopped = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, call_soon: Callable[[Callable[[], None]], None]) -> None:
        """Set how loops are notified. ``call_soon`` runs a callback on the loops' thread soon, and
        never waits for it."""
        self._call_soon = call_soon

    def watch(self, name: str, on_change: Callable[[], None]) -> StepWatch:
        """Watch the steps of one more loop, which it reports to the `StepWatch` returned."""
        watch = StepWatch(name, self, on_change)
        self._watches = (*self._watches, watch)
        return watch

    def forget(self, watch: StepWatch) -> None:
        """Stop watching a loop that has ended."""
        self._watches = tuple(other for other in self._watches if other is not watch)

    def stop(self) -> None:
        """Stop watching. Does not wait for the thread to end."""
        self._is_stopped = True
        if self._thread is not None:
            self._wake.set()

    def leave(self, code: int, *, patience_s: float, waits_for_steps: bool) -> None:
        """Bound how long the process takes to end. From now on it only joins its threads. If
        threads are left after ``patience_s`` seconds, the process ends with exit code ``code``.

        With ``waits_for_steps``, a step may first run up to its limit; if it hangs,
        the process ends with `EXIT_HUNG`. A later call replaces an earlier one; `stop` cancels it.
        """
        self._leave = _Leave(code, time.monotonic() + patience_s, waits_for_steps)
        self.wake()

    def wake(self) -> None:
        """Have the thread check the steps now. Called from the loops' thread."""
        self.is_asleep = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="triolet-watchdog", daemon=True)
            self._thread.start()
        self._wake.set()

    # ---- on the thread

    def _run(self) -> None:
        while not self._is_stopped:
            self._wake.clear()  # before the check, so that a later `wake` is not lost
            next_look = self._look(time.monotonic())
            if next_look == math.inf:
                self.is_asleep = True
                if self._look(time.monotonic()) == math.inf and not self._is_stopped:
                    self._wake.wait()
                self.is_asleep = False
            elif not self._is_stopped:
                self._wake.wait(max(0.0, next_look - time.monotonic()))

    def _look(self, now: float) -> float:
        """Report hung steps, and end the process if it is time. Return when to check again;
        infinity means when woken."""
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
        self._call_soon(lambda: watch.note_hung(started_at))
        step, seconds = watch.step, now - started_at

        def write() -> None:
            log.error(
                "step %d of %s has been running for %.1f s; what every thread does:\n%s",
                *(step, watch.name, seconds, _stacks()),
            )

        _try_to_write(write)

    def _end_process(self, code: int, why: str) -> None:
        def write() -> None:
            log.warning("%s: ending the process without it, exit code %d", why, code)
            sys.stdout.flush()

        _try_to_write(write)
        if not self._is_stopped:
            self._is_stopped = True
            self._exit_process(code)


def _stacks() -> str:
    """Return the stack of every thread, the main thread's first. No source line is read: the disk
    may be what hangs. (faulthandler writes the stacks of the 100 newest threads.)"""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in reversed(sys._current_frames().items()):
        lines.append(f"Thread {names.get(ident, ident)} (most recent call first):")
        for call, line in traceback.walk_stack(frame):
            code = call.f_code
            lines.append(f'  File "{code.co_filename}", line {line} in {code.co_qualname}')
    return "\n".join(lines)


def _try_to_write(write: Callable[[], None]) -> None:
    """Run ``write`` in a thread, which is left behind if it takes too long: standard error may be a
    full pipe, and a hung thread may hold its lock."""
    helper = threading.Thread(target=write, name="triolet-watchdog-log", daemon=True)
    helper.start()
    helper.join(WRITE_LIMIT_S)
