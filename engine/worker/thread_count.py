"""How many threads the next step's products use, while other programs take some of the cores.

A product waits for the slowest of its threads, so that one that the system does not schedule may
cost more than it computes. Nothing tells beforehand what another number would do. So it is tried:
a *trial* runs a few steps with another number, and compares the time that they take with that of
steps of the same kind before them. Fewer are tried when threads wait for a core, or, where the
system does not say so, now and then; more when a pause is over.

Rule 1: the pause before the next trial in a direction grows with what the last one has cost, and
with each that fails, so that trials take about `COST` of the time. Rule 2: fewer threads have to be
faster by `GAIN`, more only not slower, because the kernels' team loses little by a thread that is
late: where two numbers are alike, the larger one stays, and the count does not go back and forth.
Rule 3: this class has no clock and asks the system nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

COST, COST_MOST = 0.02, 0.1  # of all time, for trials; most where steps are long
GAIN = 0.10
WAITING = 0.1  # threads that wait for a core, from which on fewer are tried
PAUSE_MIN_S, PAUSE_MAX_S = 0.25, 8.0  # before a trial in the same direction
PAUSE_AFTER_S = 1.0  # before one in the other direction, after one that was kept
FAILURES_MAX = 5  # that double the pause
TRIAL_S, TRIAL_STEPS = 0.06, 2  # the least time and number of steps that decide
GIVEN_UP = 16  # steps of a trial that have nothing to be compared with
HOPELESS = 2.0  # how much slower a trial's steps are, if it ends at once
WINDOW_S = 0.05  # in which waiting threads are counted
FORGOTTEN_S, FORGOTTEN_STEPS = 2.0, 8  # after which a step's time says nothing about the next
SHARE = 0.3  # of the newest step in the usual time of its kind
KINDS_MAX = 64


@dataclass(slots=True)
class _Usual:
    """What steps of a kind take."""

    seconds: float
    at: float

    def is_valid(self, now: float) -> bool:
        """Return whether it still says something about a step."""
        return now - self.at <= max(FORGOTTEN_S, FORGOTTEN_STEPS * self.seconds)


@dataclass(slots=True)
class _Direction:
    """Trials of more, or of fewer, threads."""

    pause_ends: float = -math.inf
    failures: int = 0
    waiting: float = 0.0  # threads that waited when the last trial failed


@dataclass(slots=True)
class _Trial:
    """Steps with another count, and the time that they would have taken with the usual one."""

    before: int
    waiting: float
    taken: float = 0.0
    expected: float = 0.0
    steps: int = 0
    unknown: int = 0


class ThreadCount:
    """Chooses `count`, between 1 and ``limit``.

    After each step `note` says how long it took. With a constant load the count settles. It falls
    within a second after the cores were taken, and rises within about `PAUSE_MAX_S` after they are
    free again.
    """

    def __init__(self, limit: int) -> None:
        self.count = self._limit = limit
        self._usual: dict[Hashable, _Usual] = {}
        self._trial: _Trial | None = None
        self._more, self._fewer = _Direction(), _Direction()
        self._stride = 1  # of the next trial of more
        self._window_s = self._waited_s = self._waiting = 0.0

    def note(self, kind: Hashable, seconds: float, waited_s: float | None, now: float) -> None:
        """Note a step that ended ``now``. Steps of one ``kind`` take about equally long.
        ``waited_s`` is for how long its threads together waited for a core; None if the system
        does not say."""
        if self._limit == 1:
            return
        if self._trial is not None:
            self._note_trial(self._trial, kind, seconds, now)
            return
        self._note_usual(kind, seconds, now)
        self._window_s += seconds
        self._waited_s += waited_s or 0.0
        if self._window_s >= WINDOW_S:
            # Where the system does not say who waits, one thread may.
            waiting = 1.0 if waited_s is None else self._waited_s / self._window_s
            # In two windows, as what is usual has to be what it is since they wait.
            self._try(min(waiting, self._waiting), now)
            self._window_s, self._waited_s, self._waiting = 0.0, 0.0, waiting

    def _note_usual(self, kind: Hashable, seconds: float, now: float) -> None:
        usual = self._usual.get(kind)
        if usual is None or not usual.is_valid(now):
            self._remember(kind, _Usual(seconds, now))
            return
        usual.seconds += SHARE * (seconds - usual.seconds)
        usual.at = now

    def _remember(self, kind: Hashable, usual: _Usual) -> None:
        self._usual.pop(kind, None)
        if len(self._usual) >= KINDS_MAX:
            self._usual.pop(next(iter(self._usual)))
        self._usual[kind] = usual

    def _try(self, waiting: float, now: float) -> None:
        """Begin a trial if there is a reason. ``waiting`` is how many threads waited for a core."""
        fewer = self._fewer
        may_try = now >= fewer.pause_ends or waiting > 1.5 * fewer.waiting + WAITING
        if self.count > 1 and waiting > WAITING and may_try:
            # Fewer by those that wait, half of them, and one alone: what was refuted comes last.
            less = (round(waiting), self.count // 2, self.count - 1)[fewer.failures % 3]
            self._begin(self.count - max(1, less), waiting)
        elif self.count < self._limit and now >= self._more.pause_ends:
            self._begin(self.count + max(self._stride, self.count // 8), waiting)

    def _begin(self, count: int, waiting: float) -> None:
        self._trial = _Trial(self.count, waiting)
        self.count = min(max(1, count), self._limit)

    def _note_trial(self, trial: _Trial, kind: Hashable, seconds: float, now: float) -> None:
        usual = self._usual.get(kind)
        if usual is None or not usual.is_valid(now - trial.taken):
            trial.unknown += 1
            if trial.unknown >= GIVEN_UP:
                self._end(trial, now, keeps=False)
            return
        trial.taken += seconds
        trial.expected += usual.seconds
        trial.steps += 1
        if trial.taken > HOPELESS * max(trial.expected, TRIAL_S / 2):
            self._end(trial, now, keeps=False)
        elif trial.steps >= TRIAL_STEPS and trial.expected >= TRIAL_S:
            gain = GAIN if self.count < trial.before else 0.0
            self._end(trial, now, keeps=trial.taken <= (1 - gain) * trial.expected)

    def _end(self, trial: _Trial, now: float, *, keeps: bool) -> None:
        is_more = self.count > trial.before
        own, other = (self._more, self._fewer) if is_more else (self._fewer, self._more)
        self._trial = None
        if keeps:
            self._usual.clear()
            own.failures = other.failures = 0
            own.pause_ends = now
            other.pause_ends, other.waiting = now + PAUSE_AFTER_S, math.inf
            self._stride = 2 * self._stride if is_more else 1
            return
        self.count, self._stride = trial.before, 1
        lost = max(0.0, trial.taken - trial.expected)
        pause = max(PAUSE_MIN_S, lost / COST) * 2 ** min(own.failures, FAILURES_MAX)
        own.failures += 1
        own.pause_ends = now + min(pause, max(PAUSE_MAX_S, lost / COST_MOST))
        own.waiting = trial.waiting
