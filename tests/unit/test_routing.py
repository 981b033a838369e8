"""Which replica a request goes to."""

import pytest

from engine.pool.routing import by_prefix, least_busy
from engine.replica.replica import Work


@pytest.mark.parametrize(
    ("loads", "place"),
    [
        ([Work(5, 9), Work(4, 9), Work(6, 0)], 1),
        ([Work(5, 2), Work(5, 1)], 1),
        ([Work(0, 0)], 0),
    ],
)
def test_the_least_busy_has_the_fewest_tokens_then_the_fewest_requests(loads, place):
    assert {least_busy(loads, turn) for turn in range(5)} == {place}


def test_equally_busy_replicas_take_turns():
    loads = [Work(3, 1)] * 3
    assert [least_busy(loads, turn) for turn in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [by_prefix(loads, [7, 7, 7], turn) for turn in range(3)] == [0, 1, 2]


def test_a_cached_prefix_wins_until_its_replica_is_busier_than_that():
    cached = [0, 512]
    assert by_prefix([Work(0, 0), Work(100, 1)], cached, 0) == 1
    assert by_prefix([Work(0, 0), Work(511, 4)], cached, 0) == 1
    assert by_prefix([Work(0, 0), Work(513, 4)], cached, 0) == 0
