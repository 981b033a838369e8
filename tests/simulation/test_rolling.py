"""Servers drain in turn under clients that know them all, and no call is lost."""

from collections import Counter

import pytest

from tests.simulator.mutants import MUTANTS, shows
from tests.simulator.rolling import simulate

NUM_WORLDS = 4
PLANTED = [one for one in MUTANTS if one.run is simulate]


pytestmark = pytest.mark.usefixtures("quiet")


def test_rolling_drains_lose_no_call():
    """Calls that cross GOAWAY are served, later ones are refused so that they are repeated, and
    open connections can still call the service Control. All of these happen in the drawn worlds."""
    seen = Counter()
    for seed in range(NUM_WORLDS):
        seen += simulate(seed)
    assert {"crossed", "repeated", "continued", "looked at", "went elsewhere"} <= seen.keys()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(NUM_WORLDS, 100))
def test_rolling_drains_lose_no_call_in_more_worlds(seed):
    assert simulate(seed)["served"]


@pytest.mark.parametrize("mutant", PLANTED[:2], ids=lambda mutant: mutant.title)
def test_the_worlds_show_a_server_that_leaves_too_early(mutant):
    """`test_planted_mutants.py` plants all other bugs."""
    assert shows(mutant, mutant.seed) is not None
