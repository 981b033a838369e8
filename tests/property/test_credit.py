"""A stream's credit: reserved, filled and free slots always add up (D1)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine.core.common.credit import Credit
from engine.errors import EngineBug

OPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "cancel", "fill", "release", "again"]), st.integers(1, 4)
    ),
    max_size=60,
)


@given(capacity=st.integers(1, 6), ops=OPS)
def test_a_credit_agrees_with_three_counters(capacity, ops):
    credit, reserved, filled, starved, again = Credit(capacity), 0, 0, False, 0
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
        elif op == "again":  # a new reader is sent ``count`` of the earlier messages again
            again = max(0, count - filled)
            frees = count < filled
            assert credit.send_again(count) == (frees and starved)
            starved = starved and not frees
            filled = min(filled, count)
        elif count > filled + again:
            with pytest.raises(EngineBug):
                credit.release(count)
        else:
            without = min(again, count)
            again, filled = again - without, filled - (count - without)
            frees = count > without
            assert credit.release(count) == (frees and starved)
            starved = starved and not frees
        assert (credit.reserved, credit.filled) == (reserved, filled)
        assert credit.free == capacity - reserved - filled >= 0


@given(
    num_delivered=st.integers(0, 5),
    num_taken=st.integers(0, 5),
    num_undelivered=st.integers(0, 3),
    num_received=st.integers(0, 5),
)
def test_a_new_reader_takes_what_is_sent_again_and_what_is_still_on_its_way(
    num_delivered, num_taken, num_undelivered, num_received
):
    """The step in flight may have filled a slot whose event is not delivered yet. Red if that event
    counts as one that is sent again: one release would be too many."""
    num_taken = min(num_taken, num_delivered)
    num_again = num_delivered - min(num_received, num_delivered)
    credit = Credit(10)
    assert credit.try_reserve(num_delivered + num_undelivered)
    credit.fill(num_delivered + num_undelivered)
    credit.release(num_taken)
    credit.send_again(num_again, num_undelivered)
    for _ in range(num_again + num_undelivered):
        credit.release()
    assert credit.free == 10
    with pytest.raises(EngineBug):
        credit.release()


def test_releasing_nothing_wakes_nobody():
    credit = Credit(1)
    credit.mark_starved()
    assert credit.release(0) is False
    assert credit.starved


def test_an_empty_buffer_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Credit(0)
