"""The scheduler of drawings against watchers from outside, on drawn schedules.

Every reader gets each step and each image once and in order, and one end. Drawings take turns, the
worker hears of every end with the next plan, and the invariants hold after every event.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.common.events import Pause, PauseMode, Resume, StepDone, StepFailed
from engine.core.common.steps import FailureKind, RowFailure, StepFailure
from engine.core.common.types import EndReason, RequestId
from tests.support.examples import examples
from tests.support.image_driver import SIZES, ImageDriver

REQUESTS = st.fixed_dictionaries(
    {
        "width": st.sampled_from(SIZES),
        "height": st.sampled_from(SIZES),
        "n": st.integers(1, 3),
        "steps": st.integers(1, 5),
        "scheduler": st.sampled_from(["", "pndm"]),
        "guidance_scale": st.sampled_from([1.0, 7.5]),
        "preview_every": st.sampled_from([0, 0, 1, 2]),
        "priority": st.integers(-1, 1),
    }
)
TIMEOUTS = st.sampled_from([None, None, None, 0.0, 0.05, 0.3, 10.0])


class ImageSchedulerMachine(RuleBasedStateMachine):
    """Random drawings, readers, cancels, pauses and failures over a few seats."""

    @initialize(
        max_drawings=st.integers(1, 3),
        buffer=st.sampled_from([1, 2, 5, 1000]),
        queue=st.sampled_from([2, 20]),
    )
    def start(self, max_drawings, buffer, queue):
        self.buffer = buffer
        self.driver = ImageDriver(
            max_drawings=max_drawings, max_queued_requests=queue, max_queued_tokens=60
        )
        self.count = 0

    @rule(
        asked=st.lists(
            st.tuples(REQUESTS, TIMEOUTS, st.sampled_from([0.0, 0.015, 12.0])),
            min_size=1,
            max_size=4,
        )
    )
    def submit(self, asked):
        """Submit a drawing, after a ``delay`` of preparing in which later ones may come first."""
        for fields, timeout, delay in asked:
            self.count += 1
            self.driver.submit(
                f"r{self.count}",
                buffer=self.buffer,
                arrival=self.driver.now - delay,
                deadline=None if timeout is None else self.driver.now + timeout,
                **fields,
            )

    @rule(data=st.data(), reason=st.sampled_from([EndReason.CANCELLED, EndReason.DEADLINE]))
    def cancel(self, data, reason):
        if self.driver.requests:
            self.driver.cancel(data.draw(st.sampled_from(sorted(self.driver.requests))), reason)

    @rule()
    def end_late_requests(self):
        """End late requests, as their own scopes do at some time after their deadlines."""
        self.driver.end_late()

    @rule(data=st.data(), count=st.integers(1, 4))
    def read(self, data, count):
        if self.driver.requests:
            self.driver.read(data.draw(st.sampled_from(sorted(self.driver.requests))), count)

    @precondition(lambda self: self.driver.in_flight is None)
    @rule()
    def begin_step(self):
        self.driver.begin_step()

    @precondition(lambda self: self.driver.in_flight is not None)
    @rule(seconds=st.sampled_from([0.001, 0.01, 0.2]))
    def end_step(self, seconds):
        self.driver.now += seconds
        assert isinstance(self.driver.end_step(), StepDone)

    @rule(steps=st.integers(1, 12), reads=st.booleans())
    def run_some_steps(self, steps, reads):
        if self.driver.in_flight is not None:
            self.driver.end_step()
        for _ in range(steps):
            if not self.driver.step(read=reads):
                break

    @rule(kind=st.sampled_from(FailureKind))
    def fail_a_step(self, kind):
        driver = self.driver
        plan = driver.in_flight or driver.begin_step()
        if plan is not None:
            for sequence in plan.ended:
                driver.runner.drawings.pop(sequence, None)
            driver.in_flight = None
            driver.apply(StepFailed(StepFailure(plan.plan_id, kind, "drawn")))
            driver.scheduler.check()

    @rule()
    def fail_a_row(self):
        driver = self.driver
        if (driver.in_flight or driver.begin_step()) is None:
            return
        driver.runner.script.sample_fault = lambda: "denoise"
        result = driver.end_step().result
        driver.runner.script.sample_fault = None
        assert isinstance(result.row, RowFailure)

    @rule(seconds=st.sampled_from([0.1, 5.0, 31.0]))
    def wait(self, seconds):
        self.driver.tick(seconds)

    @rule(mode=st.sampled_from(PauseMode), stays=st.sampled_from([False, False, True]))
    def pause(self, mode, stays):
        self.driver.apply(Pause(mode))
        if not stays:
            if self.driver.in_flight is None:
                self.driver.step()
            self.driver.apply(Resume())

    @rule()
    def resume(self):
        self.driver.apply(Resume())

    @invariant()
    def everything_live_is_explained(self):
        if not hasattr(self, "driver"):
            return
        scheduler, now = self.driver.scheduler, self.driver.now
        before, places = scheduler.statistics(), []
        for name in self.driver.requests:
            phase = scheduler.phase_of(RequestId(name))
            said = scheduler.explain(RequestId(name), now)
            if phase is None:
                assert said is None
                continue
            assert (said.state == "WAITING") == (phase.name == "queued") == bool(said.position)
            assert (said.state == "PARKED") == (phase.name == "parked")
            assert said.state == "RUNNING" or said.waiting_for
            if said.position:
                assert said.position == self.driver.place_of(name) + 1
                places.append(said.position)
        assert len(set(places)) == len(places)
        assert scheduler.explain("nobody", now) is None
        assert scheduler.statistics() == before

    @invariant()
    def invariants_hold(self):
        if hasattr(self, "driver"):
            self.driver.scheduler.check()
            self.driver.check_counts()

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        if driver.in_flight is not None:
            driver.end_step()
        driver.apply(Resume())
        for name, request in driver.requests.items():
            driver.read(name)
            if request.deadline is not None:
                driver.cancel(name, EndReason.DEADLINE)
        driver.run()
        driver.check_idle()
        for name in driver.requests:
            if name != "last":
                assert (name in driver.finished) != (name in driver.refused), name


TestImageScheduler = ImageSchedulerMachine.TestCase
TestImageScheduler.settings = settings(
    max_examples=examples(150), stateful_step_count=50, deadline=None
)
