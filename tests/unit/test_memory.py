"""The books of memory, and how many replicas fit (R116–R119)."""

from __future__ import annotations

import pytest

from engine.errors import EngineBug
from engine.memory import MemoryBooks, plan_workers


@pytest.mark.parametrize(
    ("reserved", "each", "limit", "granted"),
    [
        (0, 2, 4, 2),  # both, to the last byte
        (0, 2, 3, 1),
        (0, 2, 2, 1),
        (0, 2, 1, 0),
        (1, 2, 5, 2),
        (1, 2, 4, 1),
        (3, 2, 4, 0),
        (9, 2, 4, 0),  # what was measured may pass the limit
        (0, 0, 4, 2),
    ],
)
def test_how_many_of_two_replicas_fit(reserved, each, limit, granted):
    """R117: two if they fit, else one, else none; the limit itself fits."""
    assert plan_workers(reserved, each, limit, wanted=2) == granted


def test_the_books_are_kept_for_each_device():
    books = MemoryBooks(10)
    books.know("cuda:0", 5)
    books.know("cuda:0", 99)  # known already
    a, b = books.reserve("a", "cpu", 10), books.reserve("b", "cuda:0", 5)
    assert [books.free(device) for device in ("cpu", "cuda:0")] == [0, 0]
    a.measured(4)
    assert (books.free(), books.peak()) == (6, 10)
    a.release()
    b.release()
    assert (books.total_reserved, books.total_limit) == (0, 15)


def test_a_device_without_a_limit_of_its_own_has_the_cpus():
    books = MemoryBooks(10)
    books.know("mps", None)
    assert books.limit("mps") == 10


def test_more_than_there_is_is_never_reserved():
    books = MemoryBooks(10)
    books.reserve("a", "cpu", 8)
    with pytest.raises(EngineBug):
        books.reserve("b", "cpu", 3)
    assert books.reserved() == 8


def test_what_was_measured_may_pass_the_limit_and_nothing_is_free_then():
    books = MemoryBooks(10)
    books.reserve("a", "cpu", 8).measured(12)
    assert (books.reserved(), books.free()) == (12, 0)


def test_a_reservation_is_released_once():
    reservation = MemoryBooks(10).reserve("a", "cpu", 8)
    reservation.release()
    for job in (reservation.release, lambda: reservation.measured(1)):
        with pytest.raises(EngineBug):
            job()
    assert reservation.books.reserved() == 0
