"""Holders' shares of several replicas of a model.

`tests.simulator.share_watch` judges every plan: no holder is ahead at a replica by more than what
others were served elsewhere, and some steps. Here is what it cannot see: that this does count.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.core.common.shares import ELSEWHERE_PART, ELSEWHERE_STEPS, Shares
from tests.simulator.mutants import Mutant, any_fails, planted
from tests.support.busy import Replicas
from tests.support.encode_driver import EncodeDriver
from tests.support.examples import examples

STEPS = 40  # of each replica
LARGEST_STEPS = 8  # by so many of the largest steps a replica's holders may differ


class Account:
    """What holders with work at a replica all the time must have of it. ``at`` has their names for
    each replica."""

    def __init__(self, at):
        self.at = at
        self.served = [dict.fromkeys(names, 0.0) for names in at]
        self.elsewhere = [dict.fromkeys(names, 0.0) for names in at]
        # what counts later, and did count, of the first holder beside the second, which has nothing
        pairs = [[(x, y) for x in names for y in names if x != y] for names in at]
        self.pots = [dict.fromkeys(some, 0.0) for some in pairs]
        self.counted = [dict.fromkeys(some, 0.0) for some in pairs]
        self.largest = 0.0

    def note(self, replica, charged):
        """Take note of what holders were charged for a step, and check the replica's bounds."""
        self.largest = max([self.largest, *charged.values()])
        served = self.served[replica]
        for name, price in charged.items():
            if name in served:
                served[name] += price
        pots, counted = self.pots[replica], self.counted[replica]
        for pair in pots:
            part = min(pots[pair], ELSEWHERE_PART * charged.get(pair[1], 0.0))
            pots[pair] -= part
            counted[pair] += part
        for other, names in enumerate(self.at):
            for name in names if other != replica else ():
                self.elsewhere[other][name] += charged.get(name, 0.0)
        for other, some in enumerate(self.pots):
            for pair in some if other != replica else ():
                most = ELSEWHERE_STEPS * self.largest
                some[pair] = min(some[pair] + charged.get(pair[0], 0.0), most)
        bound = LARGEST_STEPS * self.largest
        for one, other in pots:
            # a holder that goes on elsewhere keeps a part of what this replica computes
            assert served[one] + bound >= (1 - ELSEWHERE_PART) * served[other], (one, other)
            if self.elsewhere[replica][other] == 0.0:
                lead = served[one] + counted[one, other] - served[other]
                assert lead <= bound, (replica, one, other, lead / self.largest)


@settings(max_examples=examples(25), deadline=None)
@given(
    asked=st.lists(
        st.tuples(
            st.integers(1, 3),  # weight
            st.lists(st.sampled_from([0, 0, 1, 3]), min_size=4, max_size=4),  # streams by replica
            st.integers(2, 60),  # prompt
        ),
        min_size=2,
        max_size=8,
    ),
    num_replicas=st.integers(2, 4),
    prepared=st.booleans(),
    comers=st.lists(
        st.tuples(st.integers(0, 4 * STEPS), st.integers(0, 3), st.integers(0, 7)), max_size=8
    ),
)
def test_what_other_replicas_compute_counts(asked, num_replicas, prepared, comers):
    """Streams that go on all the time, and some that come and go. At the end all have ended."""
    replicas = Replicas(num_replicas, prepared_plans=prepared, max_num_seqs=40)
    at = [
        [f"h{index}" for index, (_, streams, _) in enumerate(asked) if streams[number]]
        for number in range(num_replicas)
    ]
    account = Account(at)

    def ask(number, index, **fields):
        weight, _, prompt = asked[index]
        replicas.all[number].ask(f"h{index}", prompt=prompt, weight=weight, **fields)

    for number in range(num_replicas):
        for index, (_, streams, _) in enumerate(asked):
            for _ in range(streams[number]):
                ask(number, index)
    for step in range(STEPS * num_replicas):
        for when, number, index in comers:
            if when == step:
                ask(number % num_replicas, index % len(asked), max_tokens=5)
        number, rows = replicas.step()
        if rows:
            account.note(number, replicas.all[number].charged)
    for one in replicas.all:
        for name in one.driver.requests:
            one.driver.read(name)
        one.driver.run()
        one.driver.check_idle()
        one.driver.check_ends()


def asymmetric(weights=(1, 1)):
    """Return two replicas. One holder has streams at both, the other at the second alone."""
    replicas = Replicas(2, max_model_len=4000, num_blocks=4000)
    for one in replicas.all:
        for _ in range(4):
            one.ask("both", max_tokens=3900, weight=weights[0])
    for _ in range(4):
        replicas.all[1].ask("one", max_tokens=3900, weight=weights[1])
    replicas.run(2.0)
    return replicas


def test_a_holder_with_a_replica_of_its_own_leaves_the_other_to_others():
    """Its own streams at the shared replica go on, with an eighth of the time."""
    replicas = asymmetric()
    charged = replicas.run(10.0)[1]
    assert charged["both"] / charged["one"] == pytest.approx(1 - ELSEWHERE_PART, rel=0.1)


def test_weights_divide_the_time_of_all_replicas():
    """A holder's time at its own replica is a part of what its weight gives it."""
    charged = asymmetric((3, 1)).run(10.0)
    totals = {name: charged[0][name] + charged[1][name] for name in ("both", "one")}
    assert totals["both"] / totals["one"] == pytest.approx(1.0, rel=0.1)  # for their weights


def test_what_was_computed_elsewhere_is_soon_forgotten():
    replicas = asymmetric()
    replicas.run(8.0)
    for name in list(replicas.all[0].driver.requests):
        replicas.all[0].driver.cancel(name)
    before = replicas.all[1].driver.scheduler.shares
    assert max(x.elsewhere for x in before.in_order()) <= ELSEWHERE_STEPS * 0.03
    replicas.run(2.0)
    charged = replicas.run(5.0)[1]
    assert charged["both"] == pytest.approx(charged["one"], rel=0.05)


def test_a_holder_that_comes_does_not_profit_by_what_others_had_before():
    """It was idle while the other had both replicas."""
    replicas = Replicas(2, max_model_len=4000, num_blocks=4000)
    for one in replicas.all:
        one.ask("old", max_tokens=3900)
    replicas.all[0].ask("small", max_tokens=3)
    replicas.run(5.0)
    for one in replicas.all:
        one.ask("new", max_tokens=3900)
    charged = replicas.run(1.0)
    for one in charged:
        assert one["old"] == pytest.approx(one["new"], rel=0.15)


def test_the_steps_of_a_failed_replica_count_no_more():
    replicas = asymmetric()
    replicas.all[0].driver.scheduler.shares.part()
    failed = replicas.all.pop(0)
    replicas.run(2.0)
    charged = replicas.run(5.0)[0]
    assert charged["both"] == pytest.approx(charged["one"], rel=0.05)
    assert not failed.driver.scheduler.shares.is_counted
    for one in replicas.all:
        one.driver.scheduler.check()


def test_with_one_holder_nothing_is_counted():
    replicas = Replicas(2)
    for one in replicas.all:
        one.ask("one")
    replicas.run(1.0)
    for one in replicas.all:
        assert not one.driver.scheduler.shares.is_counted
        assert not one.charged
    replicas.all[0].ask("other", max_tokens=2)
    assert [x.driver.scheduler.shares.is_counted for x in replicas.all] == [True, True]
    replicas.run(1.0)
    assert [x.driver.scheduler.shares.is_counted for x in replicas.all] == [False, False]


def test_encoders_share_their_replicas_too():
    drivers = [
        EncodeDriver(max_num_batched_tokens=64, max_num_seqs=4, max_queued_tokens=100_000)
        for _ in range(2)
    ]
    replicas = []
    for index, driver in enumerate(drivers):
        driver.scheduler.shares.join(replicas)
        for number in range(60):
            driver.submit(f"both{index}.{number}", [16] * 12, holder="both")
    for number in range(60):
        drivers[1].submit(f"one{number}", [16] * 12, holder="one")
    computed = {"both": 0, "one": 0}
    for _ in range(100):
        for driver in drivers:
            driver.begin_step()
            for live, _ in driver.scheduler._step.rows if driver is drivers[1] else ():
                computed[live.request.holder] += 1
            driver.end_step()
    assert computed["both"] / computed["one"] == pytest.approx(1 - ELSEWHERE_PART, abs=0.05)


# ---- planted bugs ------------------------------------------------------------------------------

BUGS = (
    Mutant("other replicas are not told", Shares._tell, "share.elsewhere + price", "0.0"),
    Mutant(
        "what replicas compute counts at once",
        Shares._count_elsewhere,
        "min(share.elsewhere - common, ELSEWHERE_PART * gain)",
        "share.elsewhere - common",
    ),
    Mutant(
        "weights are ignored elsewhere", Shares._tell, "sign * price / share.weight", "sign * price"
    ),
    Mutant(
        "what counts later has no bound",
        Shares._tell,
        "min(max(0.0, share.elsewhere + price), most)",
        "share.elsewhere + price",
    ),
)
CHECKS = (
    test_a_holder_with_a_replica_of_its_own_leaves_the_other_to_others,
    test_weights_divide_the_time_of_all_replicas,
    test_what_was_computed_elsewhere_is_soon_forgotten,
    test_a_holder_that_comes_does_not_profit_by_what_others_had_before,
    test_the_steps_of_a_failed_replica_count_no_more,
)


@pytest.mark.quick(2)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.title)
def test_a_planted_bug_is_found(bug):
    with planted(bug):
        assert any_fails(CHECKS)
