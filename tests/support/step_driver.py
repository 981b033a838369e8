"""What the drivers of all schedulers share: readers, a clock, and steps of a fake runner."""

from __future__ import annotations

from engine.core.common.events import Cancel, ReaderDrained, StepDone, StepFailed, Tick
from engine.core.common.steps import FailureKind, StepFailure
from engine.core.common.types import EndReason, RequestId


class StepDriver:
    """A scheduler, a fake runner, readers that read on command, and a clock.

    The driver of one kind of work passes ``scheduler`` and ``runner``, and defines `begin_step`,
    which plans a step into ``in_flight``, and `_take`, which judges output events.
    """

    def __init__(self, scheduler, runner):
        self.scheduler = scheduler
        self.runner = runner
        self.now = 0.0
        self.requests = {}
        self.credits = {}
        self.unread = {}
        self.refused = {}
        self.finished = {}
        self.in_flight = None

    # ---- inputs

    def apply(self, event):
        """Apply any event at the present time."""
        self._take(self.scheduler.apply(event, self.now))

    def cancel(self, name, reason=EndReason.CANCELLED):
        """Apply Cancel."""
        self.apply(Cancel(RequestId(name), reason))

    def end_late(self):
        """End the requests whose deadlines have passed, as their own scopes do."""
        for name, request in self.requests.items():
            if request.deadline is not None and request.deadline <= self.now:
                self.cancel(name, EndReason.DEADLINE)

    def read(self, name, count=None):
        """Let the reader take ``count`` messages, or all."""
        count = self.unread[name] if count is None else min(count, self.unread[name])
        self.unread[name] -= count
        if self.credits[name].release(count):
            self.apply(ReaderDrained(RequestId(name)))

    def tick(self, seconds):
        """Advance the clock, and apply Tick."""
        self.now += seconds
        self.apply(Tick())

    # ---- steps

    def end_step(self):
        """Execute the step in flight, apply its result or failure, and return the event."""
        plan, self.in_flight = self.in_flight, None
        try:
            event = StepDone(self.runner.execute(plan))
        except MemoryError as error:
            event = StepFailed(StepFailure(plan.plan_id, FailureKind.OUT_OF_MEMORY, repr(error)))
        except RuntimeError as error:
            event = StepFailed(StepFailure(plan.plan_id, FailureKind.ERROR, repr(error)))
        self.apply(event)
        return event

    def step(self, *, read=True, seconds=0.01):
        """Do one step; the readers then take everything. Return False if there was nothing to
        compute.
        """
        if self.begin_step() is None:
            return False
        self.now += seconds
        self.end_step()
        if read:
            for name in self.requests:
                self.read(name)
        self.scheduler.check()
        return True

    def run(self, *, max_steps=10_000):
        """Step until nothing is left to compute, and return the number of steps."""
        for steps in range(max_steps):
            if not self.step():
                return steps
        raise AssertionError(f"not idle after {max_steps} steps: {self.scheduler}")
