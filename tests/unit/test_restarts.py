"""When a replica that died comes back (R98, R141)."""

from __future__ import annotations

import pytest

from engine.core.restarts import WINDOW_S, Restarts


@pytest.mark.parametrize(
    ("limit", "delays"),
    [
        (5, [1.0, 2.0, 4.0, 8.0, None, None]),
        (1, [None, None]),
        (9, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, None]),
    ],
)
def test_each_death_waits_twice_as_long_until_it_is_given_up(limit, delays):
    restarts = Restarts(limit)
    assert [restarts.died(100.0 + count) for count in range(len(delays))] == delays


def test_a_death_counts_for_as_long_as_the_window_is():
    restarts = Restarts()
    assert [restarts.died(now) for now in (0.0, 10.0)] == [1.0, 2.0]
    assert restarts.died(WINDOW_S) == 2.0  # the first is as old as that
    assert restarts.died(WINDOW_S + 9.9) == 4.0
    assert restarts.died(3 * WINDOW_S) == 1.0
