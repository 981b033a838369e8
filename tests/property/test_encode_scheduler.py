"""The encode scheduler against a plain model of it, on drawn schedules.

Every reader gets the values of each of its inputs once, and one end. The invariants hold after
every event, and requests go on in their order.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.common.events import Pause, PauseMode, Resume, StepDone, StepFailed
from engine.core.common.steps import FailureKind, RowFailure, StepFailure
from engine.core.common.types import EndReason
from tests.support.encode_driver import EncodeDriver, Picture
from tests.support.examples import examples

REQUESTS = st.tuples(
    st.lists(st.integers(1, 25) | st.just(Picture(4)), min_size=1, max_size=12),
    st.integers(-1, 1),
    st.sampled_from([None, None, None, 0.0, 0.02, 10.0]),
    st.sampled_from([0.0, 0.015, 12.0]),
)


class EncodeSchedulerMachine(RuleBasedStateMachine):
    """Random requests, readers, cancels, pauses and failures over a small budget."""

    @initialize(
        budget=st.integers(1, 60),
        max_num_seqs=st.integers(1, 8),
        buffer=st.sampled_from([1, 2, 5, 1000]),
        queue=st.sampled_from([2, 20]),
    )
    def start(self, budget, max_num_seqs, buffer, queue):
        self.buffer = buffer
        self.driver = EncodeDriver(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_queued_requests=queue,
            max_queued_tokens=500,
        )
        self.count = 0

    @rule(asked=st.lists(REQUESTS, min_size=1, max_size=4))
    def submit(self, asked):
        """Submit a request, after a ``delay`` of tokenising in which later ones may come first."""
        for lengths, priority, timeout, delay in asked:
            self.count += 1
            self.driver.submit(
                f"r{self.count}",
                lengths,
                buffer=self.buffer,
                priority=priority,
                arrival=self.driver.now - delay,
                deadline=None if timeout is None else self.driver.now + timeout,
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
    @rule()
    def end_step(self):
        self.driver.now += 0.01
        assert isinstance(self.driver.end_step(), StepDone)

    @rule(steps=st.integers(1, 12), reads=st.booleans())
    def run_some_steps(self, steps, reads):
        if self.driver.in_flight is not None:
            self.driver.end_step()
        for _ in range(steps):
            if not self.driver.step(read=reads):
                break

    @rule(kind=st.sampled_from(FailureKind), times=st.integers(1, 3))
    def fail_steps(self, kind, times):
        driver = self.driver
        for _ in range(times):
            plan = driver.in_flight or driver.begin_step()
            if plan is not None:
                driver.in_flight = None
                driver.apply(StepFailed(StepFailure(plan.plan_id, kind, "drawn")))
                driver.scheduler.check()

    @rule(index=st.integers(0, 3))
    def fail_a_row(self, index):
        plan = self.driver.in_flight or self.driver.begin_step()
        if plan is None:
            return
        rows = plan.rows
        failed = rows[index % len(rows)].sequence
        self.driver.runner.script.row_faults[failed] = (0, "encode")
        result = self.driver.end_step().result
        assert isinstance(result.rows[index % len(rows)], RowFailure)

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
        for name, live in scheduler._requests.items():
            said = scheduler.explain(name, now)
            is_waiting = live.started_at is None and live.parked_since is None
            assert (said.state == "WAITING") == is_waiting == bool(said.position)
            assert (said.state == "PARKED") == (live.parked_since is not None)
            assert said.state == "RUNNING" or said.waiting_for
            places += [said.position] if said.position else []
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
            assert (name in driver.finished) != (name in driver.refused), name


TestEncodeScheduler = EncodeSchedulerMachine.TestCase
TestEncodeScheduler.settings = settings(
    max_examples=examples(300), stateful_step_count=50, deadline=None
)
