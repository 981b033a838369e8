"""Who may call what, and for how long: peers and timeouts as grpc writes them."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpc_service import servicer


@pytest.mark.parametrize(
    "peer",
    [
        "ipv4:127.0.0.1:5000",
        "ipv4:127.1.2.3:5000",
        "ipv6:%5B::1%5D:5000",
        "ipv6:[::1]:5000",
        "ipv6:%5B::ffff:127.0.0.1%5D:5000",
        "unix:",
        "unix:/run/triolet.sock",
    ],
)
def test_loopback_and_unix_sockets_are_local(peer):
    assert servicer.is_local(peer)


@pytest.mark.parametrize(
    "peer",
    ["ipv4:10.0.0.1:5000", "ipv6:%5B2001:db8::1%5D:5000", "ipv6:%5B::ffff:10.0.0.1%5D:1", "", "x"],
)
def test_everything_else_is_not(peer):
    assert not servicer.is_local(peer)


class Context:
    def __init__(self, peer):
        self._peer = peer
        self.aborted = None

    def peer(self):
        return self._peer

    async def abort(self, *ending):
        self.aborted = ending
        raise grpc.aio.AbortError


@pytest.mark.parametrize("is_local_only", [True, False])
def test_control_is_for_local_peers(is_local_only):
    async def behaviour(request, context):
        return "answer"

    context = Context("ipv4:10.0.0.1:5000")
    answer = servicer._answering(behaviour, is_local_only=is_local_only)
    if not is_local_only:
        assert asyncio.run(answer(None, context)) == "answer"
        return
    with pytest.raises(grpc.aio.AbortError):
        asyncio.run(answer(None, context))
    assert context.aborted[0] is grpc.StatusCode.PERMISSION_DENIED


def sent(timeout_s):
    """The seconds that grpc's core puts into the grpc-timeout header for a timeout: milliseconds
    below a second, else three digits, rounded up."""
    millis = math.ceil(timeout_s * 1000)
    unit = 1
    while millis > 999 * unit:
        unit *= 10
    return math.ceil(millis / unit) * unit / 1000


@pytest.mark.parametrize(
    ("asked", "travels"), [(0.25, 0.25), (1.001, 1.01), (9.99, 9.99), (10.01, 10.1), (100.1, 101)]
)
def test_a_clients_timeout_travels_rounded_up(asked, travels):
    assert sent(asked) == pytest.approx(travels)


@given(st.floats(0.001, 1e6), st.floats(0, 0.005))
def test_what_is_left_is_never_more_than_the_clients_own_timer_says(asked, age):
    left = servicer.clients_timeout(max(0.0, sent(asked) - age))
    assert left <= asked + 0.001  # the header's own unit, where nothing else is rounded
    assert left >= 0.98 * asked - age - 0.001


def test_a_call_without_a_deadline_has_none():
    assert servicer.clients_timeout(None) is None
