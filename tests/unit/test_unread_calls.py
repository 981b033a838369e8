"""The bound on ended calls whose clients do not read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpc_service.access.unread_calls import (
    UNREAD_AGE_S,
    UNREAD_CALLS_MAX,
    UNREAD_CALLS_PER_CONNECTION_MAX,
    UnreadCalls,
)


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self):
        return self.now


class Ended:
    is_given_up = False
    is_being_read = False

    def evict(self):
        assert not self.is_given_up
        self.is_given_up = True


def test_an_ended_call_is_unread_after_a_second_until_it_is_left():
    unread_calls, call = UnreadCalls(clock := Clock()), Ended()
    unread_calls.ended(call, "a")
    assert unread_calls.count() == 0
    clock.now += UNREAD_AGE_S
    assert unread_calls.count() == 1
    unread_calls.gone(call)
    unread_calls.gone(call)
    assert unread_calls.count() == 0


def test_a_call_that_is_left_in_time_never_counts():
    unread_calls, call = UnreadCalls(clock := Clock()), Ended()
    unread_calls.ended(call, "a")
    unread_calls.gone(call)
    clock.now += 2 * UNREAD_AGE_S
    assert unread_calls.count() == 0


def fill(unread_calls, clock, number, connection):
    """End calls of a connection, let time pass until they are unread, and return them."""
    calls = [Ended() for _ in range(number)]
    for call in calls:
        unread_calls.ended(call, connection)
    clock.now += UNREAD_AGE_S
    unread_calls.count()
    return calls


def test_a_connection_beyond_its_bound_loses_its_oldest_and_no_other_does():
    unread_calls = UnreadCalls(clock := Clock())
    others = fill(unread_calls, clock, 10, "b")
    calls = fill(unread_calls, clock, UNREAD_CALLS_PER_CONNECTION_MAX + 3, "a")
    assert [call.is_given_up for call in calls[:4]] == [True, True, True, False]
    assert not any(call.is_given_up for call in (*others, *calls[4:]))
    assert unread_calls.count() == 10 + UNREAD_CALLS_PER_CONNECTION_MAX


def test_a_client_that_reads_slowly_keeps_its_calls_until_it_stops():
    unread_calls = UnreadCalls(clock := Clock())
    calls = [Ended() for _ in range(UNREAD_CALLS_PER_CONNECTION_MAX + 3)]
    for call in calls:
        call.is_being_read = True
        unread_calls.ended(call, "slow")
    clock.now += UNREAD_AGE_S
    assert unread_calls.count() == len(calls)
    fill(unread_calls, clock, 1, "slow")
    assert [call.is_given_up for call in calls[:5]] == [True, True, True, True, False]


def test_beyond_the_bound_of_all_the_connection_that_has_most_loses_its_oldest():
    unread_calls = UnreadCalls(clock := Clock())
    lots = fill(unread_calls, clock, 60, "lots")
    for number in range(UNREAD_CALLS_MAX - 60):
        fill(unread_calls, clock, 1, number)
    assert not any(call.is_given_up for call in lots)
    fill(unread_calls, clock, 2, "new")
    assert [call.is_given_up for call in lots[:3]] == [True, True, False]
    assert unread_calls.count() == UNREAD_CALLS_MAX


@pytest.mark.parametrize(("per_connection", "in_all"), [(3, 5), (2, 100), (100, 4)])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ended", "gone", "wait"]), st.integers(0, 9), st.sampled_from("abc")
        )
    )
)
def test_the_counts_are_those_of_a_list(per_connection, in_all, steps):
    """The oracle is a list of every ended call with its time."""
    unread_calls, ended = UnreadCalls(clock := Clock(), most=per_connection, most_in_all=in_all), {}
    calls = {}
    for verb, number, connection in steps:
        if verb == "ended" and number not in ended:
            calls[number] = Ended()
            ended[number] = (clock.now, connection)
            unread_calls.ended(calls[number], connection)
        elif verb == "gone" and number in ended:
            unread_calls.gone(calls[number])
            del ended[number]
        elif verb == "wait":
            clock.now += 0.4
        count = unread_calls.count()
        ended = {one: at for one, at in ended.items() if not calls[one].is_given_up}
        old = [one for at, one in ended.values() if at <= clock.now - UNREAD_AGE_S]
        assert count == len(old) <= in_all
        assert all(old.count(one) <= per_connection for one in old)
