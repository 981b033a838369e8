"""The gate at which fakes of a test server wait, instead of sleeping, until the test opens it.

Fakes are pickled with their ``sleep`` for the process that decodes images. So this file is no part
of `tests.support.fake_server`, which runs as a program.
"""

import threading
from dataclasses import dataclass


class Gate:
    """Fakes wait here from `hold` to `let_go`."""

    def __init__(self):
        self._changed = threading.Condition()
        self._is_held = False
        self._num_free = 0  # how many waiting threads may go on
        self._num_passed = {}
        self._num_waiting = 0

    @property
    def num_held(self):
        """How many threads wait for `let_go`, or for one more `let_one_go`."""
        return self._num_waiting - self._num_free

    def hold(self):
        """Let fakes wait from now on."""
        with self._changed:
            self._is_held, self._num_free = True, 0
            self._num_passed.clear()

    def let_one_go(self):
        """Let one waiting thread go on."""
        with self._changed:
            self._num_free += 1
            self._changed.notify_all()

    def let_go(self):
        """Let all waiting threads go on, and let no fake wait any more."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def wait(self, sleep):
        """Wait for `let_go` or `let_one_go`, but not in ``sleep``'s first ``passes`` calls."""
        with self._changed:
            if not self._is_held:
                return
            passed = self._num_passed.setdefault(id(sleep), 0)
            self._num_passed[id(sleep)] += 1
            if passed < sleep.passes:
                return
            self._num_waiting += 1
            self._changed.wait_for(lambda: self._num_free or not self._is_held)
            self._num_waiting -= 1
            self._num_free -= self._is_held


def compile_slowly(sleep, seconds, constraint):
    """Compile a constraint of a script, which takes some seconds of ``sleep``."""
    sleep(seconds)


GATE = Gate()


@dataclass(frozen=True)
class SleepAtGate:
    """The ``sleep`` of a script, which waits at the gate except for the first ``passes`` times."""

    passes: int

    def __call__(self, seconds):
        if seconds:
            GATE.wait(self)
