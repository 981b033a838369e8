"""The few decisions that the core's values make themselves."""

import pytest

from engine.core.common.types import EndReason
from engine.core.text.types import Sampling


def test_only_a_temperature_of_zero_is_greedy():
    assert Sampling(temperature=0.0).is_greedy
    assert not Sampling(temperature=1e-9).is_greedy
    assert not Sampling().is_greedy


@pytest.mark.parametrize("reason", EndReason)
def test_two_ends_are_successes(reason):
    assert reason.is_success == (reason.value in ("stop", "length"))
