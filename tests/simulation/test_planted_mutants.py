"""The simulator finds every planted bug within two hundred small worlds."""

from functools import cache

import pytest

from engine.core.common.one_choice import OneChoiceCore
from engine.core.encode.scheduler import EncodeScheduler
from tests.simulator.mutants import MUTANTS, Mutant, find, planted, shows

pytestmark = pytest.mark.usefixtures("quiet")


@cache
def check_in_order(run, seed):
    """Check that the world of this seed is in order without a planted bug."""
    run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.title)
def test_a_planted_bug_is_found(mutant):
    check_in_order(mutant.run, mutant.seed)
    if shows(mutant, mutant.seed) is None:  # the seed draws another world by now: search
        assert find(mutant) is not None, "no watcher finds the bug"


def test_a_mutant_whose_source_has_gone_is_an_error():
    gone = Mutant("gone", Mutant.__eq__, "no such text", "")
    stale = Mutant("stale", find, "no such text", "")
    hidden = Mutant("hidden", OneChoiceCore._commit, "", "", owner=EncodeScheduler)
    for mutant in (gone, stale, hidden):
        with pytest.raises((LookupError, OSError)), planted(mutant):
            pass


def test_a_bug_is_gone_with_its_block():
    inherited = next(one for one in MUTANTS if one.function.__name__ not in vars(one.get_owner()))
    for mutant in (MUTANTS[0], inherited):
        owner, name = mutant.get_owner(), mutant.function.__name__
        before = dict(vars(owner))
        with planted(mutant):
            assert getattr(owner, name) is not mutant.function
        assert vars(owner) == before
