"""Backoff and the circuit breaker over it (R114, R142)."""

from __future__ import annotations

from engine.core.breaker import FAILURES_TO_OPEN, OPEN_S, Breaker


def failed(times, now=100.0):
    breaker = Breaker()
    for _ in range(times):
        breaker.failed(now)
    return breaker


def test_the_wait_doubles_until_it_opens():
    waits = [failed(times).wait_s(100.0) for times in range(7)]
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, OPEN_S, OPEN_S]


def test_the_wait_passes():
    assert failed(2).wait_s(101.5) == 0.5
    assert failed(2).wait_s(102.0) == 0.0


def test_one_success_closes_what_was_not_open():
    breaker = failed(FAILURES_TO_OPEN - 1)
    breaker.succeeded()
    breaker.failed(200.0)
    assert breaker.wait_s(200.0) == 1.0


def test_three_successes_close_what_was_open_and_a_failure_between_opens_it_again():
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
