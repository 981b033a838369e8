"""The bound on ended calls whose clients do not read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import Overloaded
from grpc_service.zombies import (
    ZOMBIE_AGE_S,
    ZOMBIES_MAX,
    ZOMBIES_PER_ADDRESS_MAX,
    Zombies,
    address_of,
)


class Clock:
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


def test_an_ended_call_is_a_zombie_after_a_second_until_it_has_gone():
    zombies = Zombies(clock := Clock())
    zombies.ended("call", "a")
    assert zombies.count() == 0
    clock.now += ZOMBIE_AGE_S
    assert zombies.count() == 1
    zombies.gone("call")
    zombies.gone("call")
    assert zombies.count() == 0


def test_a_call_that_goes_in_time_never_counts():
    zombies = Zombies(clock := Clock())
    zombies.ended("call", "a")
    zombies.gone("call")
    clock.now += 2 * ZOMBIE_AGE_S
    assert zombies.count() == 0


def fill(zombies, clock, number, address, first=0):
    for call in range(first, first + number):
        zombies.ended(call, address)
    clock.now += ZOMBIE_AGE_S


def test_an_address_at_its_bound_is_refused_and_no_other():
    zombies = Zombies(clock := Clock())
    fill(zombies, clock, ZOMBIES_PER_ADDRESS_MAX, "a")
    zombies.check_room("b")
    with pytest.raises(Overloaded, match="64 calls from this address") as caught:
        zombies.check_room("a")
    assert caught.value.retry_after_s
    zombies.gone(0)
    zombies.check_room("a")


def test_clients_without_an_address_are_bound_by_the_total_only():
    zombies = Zombies(clock := Clock())
    fill(zombies, clock, ZOMBIES_MAX - 1, "")
    zombies.check_room("")
    fill(zombies, clock, 1, "", first=ZOMBIES_MAX)
    for address in ("", "a"):
        with pytest.raises(Overloaded, match="1024 calls"):
            zombies.check_room(address)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ended", "gone", "wait"]), st.integers(0, 9), st.sampled_from("ab")
        )
    )
)
def test_the_counts_are_those_of_a_list(steps):
    """Against a model that keeps every ended call with its time."""
    zombies, ended = Zombies(clock := Clock()), {}
    for verb, call, address in steps:
        if verb == "ended" and call not in ended:
            zombies.ended(call, address)
            ended[call] = (clock.now, address)
        elif verb == "gone":
            zombies.gone(call)
            ended.pop(call, None)
        elif verb == "wait":
            clock.now += 0.4
        old = [one for at, one in ended.values() if at <= clock.now - ZOMBIE_AGE_S]
        assert zombies.count() == len(old)
        assert zombies._by_address == {one: old.count(one) for one in set(old)}
