"""Simulated devices, for benches that need steps of some length without a model.

The three kinds of step differ in what they do with the GIL: an accelerator's step, or a kernel's on
a CPU, releases it; a step of Python code gives it up every few milliseconds; a step of an extension
that never releases it keeps every other thread of the process waiting.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING

from engine.worker.fakes.text import FakeRunner, FakeScript

if TYPE_CHECKING:
    from engine.core.text.plan import StepPlan, StepResult

# A function of the C library that is called with the GIL held, as those of `ctypes.CDLL` are not.
_usleep = ctypes.PyDLL(None).usleep


def release(seconds: float) -> None:
    """Sleep with the GIL released."""
    time.sleep(seconds)


def compute_in_python(seconds: float) -> None:
    """Execute Python code for that much of the thread's own processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def hold(seconds: float) -> None:
    """Sleep for less than a second with the GIL held."""
    _usleep(round(1e6 * seconds))


class Device(FakeRunner):
    """A device whose steps take ``step_s`` and release the GIL. ``busy_s`` is the sum of the times
    of its steps, in seconds."""

    sleep = staticmethod(release)

    def __init__(self, step_s: float) -> None:
        super().__init__(script=FakeScript(step_s=step_s, sleep=self.sleep))
        self.busy_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute the plan and add its time to ``busy_s``."""
        started = time.monotonic()
        try:
            return super().execute(plan)
        finally:
            self.busy_s += time.monotonic() - started


class LockedDevice(Device):
    """A device whose steps take a lock that all devices share."""

    lock = threading.Lock()

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute the plan while holding the lock."""
        with self.lock:
            return super().execute(plan)


class PythonDevice(Device):
    """A device whose steps are Python code."""

    sleep = staticmethod(compute_in_python)


class HoldingDevice(Device):
    """A device whose steps never release the GIL."""

    sleep = staticmethod(hold)
