"""When a failed load may be tried again, and when a replica that died comes back."""

import pytest

from engine.pool.backoff import FAILURES_TO_OPEN, OPEN_S, WINDOW_S, CircuitBreaker, RestartBackoff


def failed(times, now=100.0):
    """Return a breaker after this number of failures."""
    breaker = CircuitBreaker()
    for _ in range(times):
        breaker.failed(now)
    return breaker


def test_the_wait_doubles_until_it_opens():
    waits = [failed(times).wait_s(100.0) for times in range(7)]
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, OPEN_S, OPEN_S]


def test_the_wait_passes():
    assert failed(2).wait_s(101.5) == 0.5
    assert failed(2).wait_s(102.0) == 0.0


def test_one_success_closes_a_breaker_that_was_not_open():
    breaker = failed(FAILURES_TO_OPEN - 1)
    breaker.succeeded()
    breaker.failed(200.0)
    assert breaker.wait_s(200.0) == 1.0


def test_three_successes_close_an_open_breaker_and_a_failure_between_opens_it_again():
    breaker = failed(FAILURES_TO_OPEN)
    breaker.succeeded()
    breaker.succeeded()
    breaker.failed(200.0)
    assert breaker.is_open
    assert breaker.wait_s(200.0) == OPEN_S
    for _ in range(3):
        assert breaker.is_open
        breaker.succeeded()
    assert not breaker.is_open
    breaker.failed(300.0)
    assert breaker.wait_s(300.0) == 1.0


def test_the_operator_closes_it():
    breaker = failed(9)
    breaker.reset()
    assert (breaker.wait_s(100.0), breaker.num_failures) == (0.0, 0)


@pytest.mark.parametrize(
    ("limit", "delays"),
    [
        (5, [1.0, 2.0, 4.0, 8.0, None, None]),
        (1, [None, None]),
        (9, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, None]),
    ],
)
def test_each_death_waits_twice_as_long_until_it_is_given_up(limit, delays):
    backoff = RestartBackoff(limit)
    assert [backoff.died(100.0 + count) for count in range(len(delays))] == delays


def test_a_death_counts_for_as_long_as_the_window_is():
    backoff = RestartBackoff()
    assert [backoff.died(now) for now in (0.0, 10.0)] == [1.0, 2.0]
    assert backoff.died(WINDOW_S) == 2.0  # the first death is too old to count
    assert backoff.died(WINDOW_S + 9.9) == 4.0
    assert backoff.died(3 * WINDOW_S) == 1.0
