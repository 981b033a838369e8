"""The bound on ended calls whose clients do not read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Overloaded
from grpc_service.access.unread_calls import (
    UNREAD_AGE_S,
    UNREAD_CALLS_MAX,
    UNREAD_CALLS_PER_ADDRESS_MAX,
    UnreadCalls,
    address_of,
)


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:5123", "ipv4:10.0.0.7"),
        ("ipv6:%5B::1%5D:5", "ipv6:[::1]"),
        ("unix:", ""),
        ("unix:/run/socket", ""),
        ("", ""),
    ],
)
def test_an_address_is_the_peer_without_its_port(peer, address):
    assert address_of(peer) == address


def test_an_ended_call_is_unread_after_a_second_until_it_is_left():
    unread_calls = UnreadCalls(clock := Clock())
    unread_calls.ended("call", "a")
    assert unread_calls.count() == 0
    clock.now += UNREAD_AGE_S
    assert unread_calls.count() == 1
    unread_calls.gone("call")
    unread_calls.gone("call")
    assert unread_calls.count() == 0


def test_a_call_that_is_left_in_time_never_counts():
    unread_calls = UnreadCalls(clock := Clock())
    unread_calls.ended("call", "a")
    unread_calls.gone("call")
    clock.now += 2 * UNREAD_AGE_S
    assert unread_calls.count() == 0


def fill(unread_calls, clock, number, address, first=0):
    """End ``number`` calls of an address, and let time pass until they count as unread."""
    for call in range(first, first + number):
        unread_calls.ended(call, address)
    clock.now += UNREAD_AGE_S


def test_an_address_at_its_bound_is_refused_and_no_other():
    unread_calls = UnreadCalls(clock := Clock())
    fill(unread_calls, clock, UNREAD_CALLS_PER_ADDRESS_MAX, "a")
    unread_calls.check_room("b")
    with pytest.raises(Overloaded, match="64 calls from this address") as caught:
        unread_calls.check_room("a")
    assert caught.value.retry_after_s
    unread_calls.gone(0)
    unread_calls.check_room("a")


def test_clients_without_an_address_are_bound_by_the_total_only():
    unread_calls = UnreadCalls(clock := Clock())
    fill(unread_calls, clock, UNREAD_CALLS_MAX - 1, "")
    unread_calls.check_room("")
    fill(unread_calls, clock, 1, "", first=UNREAD_CALLS_MAX)
    for address in ("", "a"):
        with pytest.raises(Overloaded, match="1024 calls"):
            unread_calls.check_room(address)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ended", "gone", "wait"]), st.integers(0, 9), st.sampled_from("ab")
        )
    )
)
def test_the_counts_are_those_of_a_list(steps):
    """The oracle is a list of every ended call with its time."""
    unread_calls, ended = UnreadCalls(clock := Clock()), {}
    for verb, call, address in steps:
        if verb == "ended" and call not in ended:
            unread_calls.ended(call, address)
            ended[call] = (clock.now, address)
        elif verb == "gone":
            unread_calls.gone(call)
            ended.pop(call, None)
        elif verb == "wait":
            clock.now += 0.4
        old = [one for at, one in ended.values() if at <= clock.now - UNREAD_AGE_S]
        assert unread_calls.count() == len(old)
        assert unread_calls._by_address == {one: old.count(one) for one in set(old)}
