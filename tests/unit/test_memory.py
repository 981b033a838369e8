"""The ledger of memory, and how many replicas fit (R116, R117, R119)."""

from __future__ import annotations

import pytest

from engine import memory_limit
from engine.errors import EngineBug
from engine.pool.memory import MemoryLedger, plan_workers


@pytest.mark.parametrize(
    ("reserved", "each", "limit", "granted"),
    [
        (0, 2, 4, 2),  # both fit, to the last byte
        (0, 2, 3, 1),
        (0, 2, 2, 1),
        (0, 2, 1, 0),
        (1, 2, 5, 2),
        (1, 2, 4, 1),
        (3, 2, 4, 0),
        (9, 2, 4, 0),  # measured memory may exceed the limit
        (0, 0, 4, 2),
    ],
)
def test_how_many_of_two_replicas_fit(reserved, each, limit, granted):
    """R117: two if they fit, else one, else none; the limit itself fits."""
    assert plan_workers(reserved, each, limit, wanted=2) == granted


@pytest.mark.parametrize(("container", "usable"), [("max", 1000), ("600", 600), ("5000", 1000)])
def test_the_default_limit_is_four_fifths_of_what_the_process_may_use(
    tmp_path, monkeypatch, container, usable
):
    """R116: a container's limit counts if it is less than the machine's memory."""
    (tmp_path / "memory.max").write_text(f"{container}\n")
    monkeypatch.setattr(memory_limit, "_CGROUP_FILES", (tmp_path / "memory.max", tmp_path / "no"))
    monkeypatch.setattr(memory_limit, "_machine_bytes", lambda: 1000)
    assert memory_limit.usable_bytes() == usable
    assert memory_limit.default_limit() == 0.8 * usable


def test_each_device_has_its_own_limit():
    """R87."""
    ledger = MemoryLedger(10)
    ledger.add_device("cuda:0", 5)
    ledger.add_device("cuda:0", 99)  # has a limit already
    a, b = ledger.reserve("a", "cpu", 10), ledger.reserve("b", "cuda:0", 5)
    assert [ledger.free(device) for device in ("cpu", "cuda:0")] == [0, 0]
    a.measured(4)
    assert (ledger.free(), ledger.peak()) == (6, 10)
    a.release()
    b.release()
    assert (ledger.total_reserved, ledger.total_limit) == (0, 15)


def test_a_device_without_a_limit_of_its_own_has_the_cpus():
    ledger = MemoryLedger(10)
    ledger.add_device("mps", None)
    assert ledger.limit("mps") == 10


def test_never_is_more_reserved_than_the_limit():
    """R81."""
    ledger = MemoryLedger(10)
    ledger.reserve("a", "cpu", 8)
    with pytest.raises(EngineBug):
        ledger.reserve("b", "cpu", 3)
    assert ledger.reserved() == 8


def test_measured_memory_may_exceed_the_limit_and_nothing_is_free_then():
    ledger = MemoryLedger(10)
    ledger.reserve("a", "cpu", 8).measured(12)
    assert (ledger.reserved(), ledger.free()) == (12, 0)


def test_a_reservation_is_released_once():
    """R119."""
    reservation = MemoryLedger(10).reserve("a", "cpu", 8)
    reservation.release()
    for job in (reservation.release, lambda: reservation.measured(1)):
        with pytest.raises(EngineBug):
            job()
    assert reservation.ledger.reserved() == 0
