"""Methods of the core's value classes: end reasons, sampling parameters and requests."""

import pytest

from engine.core.common.types import EndReason, RequestId
from engine.core.text.types import Request, Sampling, Stops


def test_only_a_temperature_of_zero_is_greedy():
    assert Sampling(temperature=0.0).is_greedy
    assert not Sampling(temperature=1e-9).is_greedy
    assert not Sampling().is_greedy


@pytest.mark.parametrize("reason", EndReason)
def test_two_ends_are_successes(reason):
    assert reason.is_success == (reason.value in ("stop", "length"))


def test_a_request_counts_its_prompt_and_the_most_that_its_choices_may_generate():
    request = Request(RequestId("r1"), (7, 8, 9), Sampling(), Stops(5), 2.5, n=2)
    assert request.num_tokens_ahead == 13


def test_a_requests_journal_line_is_stable_and_shows_no_prompt():
    request = Request(RequestId("r1"), (7, 8, 9), Sampling(), Stops(5), 2.5, n=2, priority=-1)
    assert request.journal_line() == "r1 prompt=3 n=2 max=5 priority=-1"
