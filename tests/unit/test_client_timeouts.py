"""How long a call may take: timeouts as grpc writes them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpc_service.services import inference


def sent(timeout_s):
    """Return the seconds that grpc's core writes into the grpc-timeout header for a timeout.

    The core rounds up: to milliseconds below a second, and to three digits above.
    """
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
def test_the_remaining_time_never_exceeds_the_clients_own_timer(asked, age):
    left = inference.clients_timeout(max(0.0, sent(asked) - age))
    assert left <= asked + 0.001  # 1 ms is the header's unit; nothing else may be rounded
    assert left >= 0.98 * asked - age - 0.001


def test_a_call_without_a_deadline_has_none():
    assert inference.clients_timeout(None) is None
