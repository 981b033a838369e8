"""Telemetry against a plain model of the same deliveries, and how much it may keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.common.credit import Credit
from engine.core.common.events import Finished, Refused, Submit
from engine.core.common.phases import Phase
from engine.core.common.types import EndReason, RequestId, Timings, Usage
from engine.core.text.types import Request, Sampling, Stops, Tokens
from engine.errors import Overloaded
from engine.replica.telemetry import (
    COUNT_BOUNDS,
    SHORT_BOUNDS,
    TOKEN_BOUNDS,
    UNCOUNTED_MAX,
    Histogram,
    ReplicaTelemetry,
)

BOUNDS = (0.5, 1.0, 5.0)
NUM_REQUESTS, NUM_CHOICES = 4, 3
# Steps: which choices of which requests get a token, and the seconds since the step before.
STEPS = st.lists(
    st.tuples(
        st.sets(st.tuples(st.integers(0, NUM_REQUESTS - 1), st.integers(0, NUM_CHOICES - 1))),
        st.sampled_from([0.001, 0.004, 0.02, 0.3, 7.0, 90.0]),
    ),
    max_size=30,
)


def submit(number):
    name = RequestId(f"r{number}")
    request = Request(name, (1, 2), Sampling(), Stops(max_tokens=9), arrival=0.0, n=NUM_CHOICES)
    return Submit(request, Credit(9))


def finish(number, choice, reason=EndReason.LENGTH, parked_s=0.0):
    timings = Timings(queue_s=1.0, prefill_s=2.0, decode_s=3.0, parked_s=parked_s)
    return Finished(RequestId(f"r{number}"), choice, reason, Usage(2, 0, 5), timings)


def started():
    """Return a telemetry whose requests were all submitted."""
    telemetry = ReplicaTelemetry(Tokens)
    for number in range(NUM_REQUESTS):
        telemetry.submitted(submit(number))
    return telemetry


@given(STEPS)
def test_intervals_are_those_of_each_choice_by_itself(steps):
    telemetry, now, last = started(), 0.0, {}
    firsts, gaps = (
        Histogram(telemetry.first_token._bounds),
        Histogram(telemetry.inter_token._bounds),
    )
    for chosen, seconds in steps:
        now += seconds
        events = [Tokens(RequestId(f"r{one}"), choice, (1,), "x") for one, choice in chosen]
        telemetry.delivered(events, now)
        for who in chosen:
            if who in last:
                gaps.observe(now - last[who])
            else:
                firsts.observe(now)
            last[who] = now
    all_found = telemetry.snapshot().distributions
    for name, plain in (("first_token", firsts), ("inter_token", gaps)):
        found, wanted = all_found[name], plain.snapshot()
        assert found.counts == wanted.counts
        assert found.total == pytest.approx(wanted.total)


@given(st.lists(st.floats(0, 10), max_size=40))
def test_a_histogram_counts_every_value_once_at_its_bound(values):
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    found = histogram.snapshot()
    for index, bound in enumerate(BOUNDS):
        assert sum(found.counts[: index + 1]) == sum(value <= bound for value in values)
    assert found.count == len(values)
    assert found.total == pytest.approx(sum(values))


@given(st.permutations([(one, c) for one in range(NUM_REQUESTS) for c in range(NUM_CHOICES)]))
def test_a_request_is_counted_at_its_last_choice_and_then_forgotten(order):
    telemetry = started()
    ended = dict.fromkeys(range(NUM_REQUESTS), 0)
    for number, choice in order:
        telemetry.delivered([finish(number, choice)], 10.0)
        ended[number] += 1
        done = sum(count == NUM_CHOICES for count in ended.values())
        assert telemetry.request.snapshot().count == done
        assert telemetry.snapshot().ends.get("length", 0) == done
    assert telemetry.generation_tokens.snapshot().count == len(order)
    assert not telemetry._live


def test_a_refused_request_is_forgotten():
    telemetry = started()
    refused = [Refused(RequestId(f"r{n}"), Overloaded("full")) for n in range(NUM_REQUESTS)]
    telemetry.delivered(refused, 1.0)
    assert not telemetry._live
    telemetry.delivered([Tokens(RequestId("r0"), 0, (1,), "x")], 2.0)  # of no live request
    assert telemetry.first_token.snapshot().count == 0


def test_a_cancelled_request_is_timed_until_it_holds_nothing():
    telemetry = started()
    telemetry.cancelled(RequestId("r1"), Phase.DECODE, 5.0)
    telemetry.look_at_cancelled(lambda _: True, 6.0)
    assert telemetry.snapshot().cancel_to_free == {}
    telemetry.look_at_cancelled(lambda _: False, 6.5)
    telemetry.look_at_cancelled(lambda _: False, 9.0)
    found = telemetry.snapshot().cancel_to_free["decode"]
    assert (found.count, found.total) == (1, 1.5)


def test_idle_time_is_not_counted_as_a_gap_between_steps():
    telemetry = ReplicaTelemetry(Tokens)
    telemetry.step_ended(1, 1.0, 2.0)
    telemetry.step_ended(1, 2.25, 3.0)
    telemetry.idles()
    telemetry.step_ended(1, 100.0, 101.0)
    found = telemetry.snapshot().distributions
    assert found["step_gap"].total == 0.25
    assert found["step"].total == 2.75


RUNS = st.lists(
    st.tuples(
        st.integers(1, 200),  # rows
        st.sampled_from(["step", "step", "idle", "read"]),
        st.integers(1, 2 * UNCOUNTED_MAX),  # times
    ),
    max_size=8,
)


@given(RUNS)
def test_every_step_is_counted_once_and_few_of_them_wait_to_be(runs):
    """Noted steps are counted when telemetry is read, at idle, or when the list is full."""
    telemetry, now, ended_at = ReplicaTelemetry(Tokens), 0.0, None
    rows, gaps, times = Histogram(COUNT_BOUNDS), Histogram(SHORT_BOUNDS), Histogram(TOKEN_BOUNDS)
    intervals, last = Histogram(TOKEN_BOUNDS), None
    telemetry.submitted(submit(0))
    for num_rows, what in (run[:2] for run in runs for _ in range(run[2])):
        now += num_rows / 1000
        if what == "step":
            if ended_at is not None:
                gaps.observe(now - ended_at)
            ended_at = now + 0.02
            rows.observe(num_rows)
            times.observe(ended_at - now)
            telemetry.step_ended(num_rows, now, ended_at)
            telemetry.delivered([Tokens(RequestId("r0"), 0, (1,), "x")], ended_at)
            if last is not None:
                intervals.observe(ended_at - last)
            now = last = ended_at
        elif what == "idle":
            telemetry.idles()
            ended_at = None
        else:
            telemetry.snapshot()
        assert max(len(telemetry._steps), len(telemetry._intervals)) < UNCOUNTED_MAX
    found = telemetry.snapshot().distributions
    assert found["step_rows"] == rows.snapshot()
    assert found["step_gap"].counts == gaps.snapshot().counts
    assert found["step"].counts == times.snapshot().counts
    assert found["inter_token"].counts == intervals.snapshot().counts
