"""Fixtures of the RPC library's tests."""

import pytest
import trio.testing


@pytest.fixture
def autojump_clock():
    """A clock that jumps to the next deadline as soon as every task waits."""
    return trio.testing.MockClock(autojump_threshold=0)
