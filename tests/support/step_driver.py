"""Drive a scheduler with a fake runner, synchronously, and check what comes out, beside a watcher.

The drivers of all kinds of work share this: readers that read on command, a clock, steps, and the
checks of answers and ends.
"""

import contextlib
import itertools

from engine.core.common.credit import Credit
from engine.core.common.events import (
    Admitted,
    Cancel,
    Finished,
    ReaderDrained,
    Refused,
    StepDone,
    StepFailed,
    Submit,
    Tick,
)
from engine.core.common.phases import Phase
from engine.core.common.steps import FailureKind, StepFailure
from engine.core.common.types import EndReason, RequestId


class StepDriver:
    """A scheduler, a fake runner, readers, and a clock.

    The driver of one kind of work passes the scheduler, the runner and a watcher of the scheduler
    (`tests.simulator`), and defines `take_result`, which judges a message for a reader. Messages
    and ends are kept by their ``key``. ``fault`` is the field of the fake's script that fails plans
    of the kind.
    """

    fault = ""
    ticks_do_all = True  # a Tick leaves nothing due for which a plan must be made

    def __init__(self, scheduler, runner, watch):
        self.scheduler = scheduler
        self.runner = runner
        self.watch = watch
        self.now = 0.0
        self.requests = {}
        self.credits = {}
        self.unread = {}
        self.refused = {}
        self.finished = {}
        self.plans = []
        self.log = []
        self.in_flight = None

    # ---- inputs

    def add(self, request, buffer):
        """Apply Submit. The request's reader holds at most ``buffer`` messages."""
        credit, name = Credit(buffer), request.request_id
        if name not in self.requests:
            self.requests[name], self.credits[name], self.unread[name] = request, credit, 0
        self.apply(Submit(request, credit))

    def apply(self, event):
        """Apply any event at the present time, and judge what it caused."""
        events = self.scheduler.apply(event, self.now)
        assert not (wrong := self.watch.applied(event, events, self.now)), wrong
        self._take(events)

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
        due = self.scheduler.next_wakeup(self.now)
        is_due = due is not None and due <= self.now
        assert not (is_due and self.ticks_do_all), "a Tick leaves something to do"

    # ---- steps

    def begin_step(self):
        """Plan a step, judge the plan, and return it; None if there is nothing to compute."""
        plan, events = self.scheduler.plan(self.now)
        assert not (wrong := self.watch.planned(plan, events, self.now)), wrong
        self._take(events)
        self.in_flight = plan
        if plan is not None:
            self.plans.append(plan)
            self.scheduler.prepare(self.now)  # as the engine's loop does while a step runs
            self.scheduler.check()
        return plan

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

    def fail_step(self, kind=FailureKind.ERROR):
        """Let the step in flight fail, after the worker has admitted and released its sequences."""
        plan, self.in_flight = self.in_flight, None
        script = self.runner.script
        former = getattr(script, self.fault)
        setattr(script, self.fault, lambda plan: KeyboardInterrupt())
        with contextlib.suppress(KeyboardInterrupt):
            self.runner.execute(plan)
        setattr(script, self.fault, former)
        self.apply(StepFailed(StepFailure(plan.plan_id, kind, "drawn")))
        self.scheduler.check()

    def fail_row(self, index=0, phase="sample"):
        """Execute the step in flight, in which the sample number ``index`` fails, counted from 0
        over parents and forked choices. Return the rows of the result, and whether one of them must
        have failed."""
        numbers = itertools.count()
        script = self.runner.script
        script.sample_fault = lambda: phase if next(numbers) == index else None
        rows = self.end_step().result.rows
        script.sample_fault = None
        return rows, next(numbers) > index and not self.is_behind_draft(rows, index)

    def is_behind_draft(self, rows, index):
        """Return whether the sample number ``index`` came behind an accepted draft, in these rows:
        its failure fails no row, because the next step samples the position again."""
        return False

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

    # ---- outputs

    def key(self, event):
        """Return the key of the request, or choice, that an event belongs to."""
        return event.request_id

    def take_result(self, event):
        """Judge an event that is neither an answer nor an end, and keep it."""
        raise NotImplementedError

    def _take(self, events):
        for event in events:
            self.log.append(event)
            assert self.key(event) not in self.finished, f"{event} after the end"
            match event:
                case Admitted():
                    assert event.request_id not in self.refused
                case Refused():
                    self.refused[event.request_id] = event
                case Finished():
                    self.finished[self.key(event)] = event
                    self.check_end(event)
                case _:
                    self.take_result(event)

    def check_end(self, event):
        """Judge an end by what has come before it."""

    def phase_of(self, name):
        """Return a request's phase; None if it is not live."""
        return self.scheduler.phase_of(name)

    def check_explained(self, name, said):
        """Judge the Explanation of a live request."""

    def check_counts(self):
        """Check that the statistics agree with what the readers know."""
        stats = self.scheduler.statistics()
        assert stats.waiting <= stats.peak_waiting
        assert stats.step_count == len(self.plans)
        for name, credit in self.credits.items():
            assert credit.filled == self.unread[name]

    def check_idle(self):
        """Check that every request is gone, and every slot given back."""
        self.scheduler.check()
        self.check_counts()
        stats = self.scheduler.statistics()
        assert (stats.running, stats.waiting, stats.parked, stats.ending) == (0, 0, 0, 0)
        assert stats.queued_tokens == 0
        assert self.scheduler.is_idle

    def check_ends(self):
        """Check that each request was refused, or has ended."""
        for name in self.requests:
            assert (name in self.finished) != (name in self.refused), name


class OneChoiceDriver(StepDriver):
    """The driver of a kind of work whose requests have one choice.

    The subclass of a kind defines ``request``, which makes a core's request. It may override
    `check_result` and `num_messages`. ``got`` has each reader's messages so far.
    """

    request = None

    def __init__(self, scheduler, runner, watch):
        super().__init__(scheduler, runner, watch)
        self.got = {}

    def add(self, request, buffer):
        """Apply Submit. The request's reader holds at most ``buffer`` messages."""
        self.got.setdefault(request.request_id, [])
        super().add(request, buffer)

    def submit(self, name, *given, buffer=1000, arrival=None, **fields):
        """Submit the request that ``request`` makes of the arguments."""
        fields |= {"request_id": name, "arrival": self.now if arrival is None else arrival}
        self.add(self.request(*given, **fields), buffer)

    def take_result(self, event):
        """Judge an event that is neither an answer nor an end, and keep it."""
        name = event.request_id
        self.check_result(event, self.requests[name], self.got[name])
        self.got[name].append(event)
        self.unread[name] += 1

    def check_result(self, event, request, got):
        """Judge an event by its request and the events that its reader has got before."""
        assert event.value == request.expected()[len(got)]

    def num_messages(self, request):
        """Return how many messages make a whole answer."""
        return len(request.expected())

    def check_end(self, event):
        """Check that an end is a success if everything has come."""
        name = event.request_id
        is_whole = len(self.got[name]) == self.num_messages(self.requests[name])
        assert is_whole == event.reason.is_success

    def check_explained(self, name, said):
        """Check the explained state by the request's phase."""
        phase = self.phase_of(name)
        assert (said.state == "WAITING") == (phase is Phase.QUEUED) == bool(said.position)
        assert (said.state == "PARKED") == (phase is Phase.PARKED)

    def num_live(self):
        """Return how many of the requests that the statistics count have not ended."""
        ended = self.finished.keys() | self.refused.keys()
        return len(self.requests.keys() - ended)

    def check_counts(self):
        """Check the statistics, also that they count as many requests as are alive."""
        super().check_counts()
        stats = self.scheduler.statistics()
        assert stats.running + stats.waiting + stats.parked == self.num_live()
