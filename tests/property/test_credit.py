"""A stream's credit: reserved, filled and free slots always add up (D1)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine.core.common.credit import Credit
from engine.errors import EngineBug

OPS = st.lists(
    st.tuples(st.sampled_from(["reserve", "cancel", "fill", "release"]), st.integers(1, 4)),
    max_size=60,
)


@given(capacity=st.integers(1, 6), ops=OPS)
def test_a_credit_agrees_with_three_counters(capacity, ops):
    credit, reserved, filled, starved = Credit(capacity), 0, 0, False
    for op, count in ops:
        if op == "reserve":
            fits = reserved + filled + count <= capacity
            assert credit.try_reserve(count) == fits
            reserved += count if fits else 0
            if not fits:
                credit.mark_starved()
                starved = True
        elif op in ("cancel", "fill"):
            if count > reserved:
                with pytest.raises(EngineBug):
                    getattr(credit, op)(count)
                continue
            getattr(credit, op)(count)
            reserved -= count
            filled += count if op == "fill" else 0
        elif count > filled:
            with pytest.raises(EngineBug):
                credit.release(count)
        else:
            assert credit.release(count) == starved
            starved = False
            filled -= count
        assert (credit.reserved, credit.filled) == (reserved, filled)
        assert credit.free == capacity - reserved - filled >= 0


def test_releasing_nothing_wakes_nobody():
    credit = Credit(1)
    credit.mark_starved()
    assert credit.release(0) is False
    assert credit.starved


def test_an_empty_buffer_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Credit(0)


@given(capacity=st.integers(1, 6), count=st.integers(1, 4), ops=OPS)
def test_slots_added_beside_the_buffer_are_not_for_plans(capacity, count, ops):
    """A plan never gets more slots than the buffer has.

    The reader releases the slots that are added beside the buffer, as many as were added, at any
    time.
    """
    credit = Credit(capacity)
    credit.widen(count)
    reserved = filled = 0
    for op, number in ops:
        if op == "reserve":
            fits = reserved + filled + number <= capacity
            assert credit.try_reserve(number) == fits
            reserved += number if fits else 0
        elif op == "fill" and number <= reserved:
            credit.fill(number)
            reserved, filled = reserved - number, filled + number
        assert credit.free == capacity - reserved - filled
    assert credit.capacity - credit.beside == capacity
    credit.cancel(reserved)
    credit.release(filled + count)
    assert credit.free == credit.capacity
