"""Holders' shares of one machine, by schedules of a pure scheduler.

`tests.simulator.share_watch` judges every plan of these schedules, as of those of
`tests/property/test_scheduler.py` and of the simulator's worlds. Here holders keep the machine busy
for long, so that small wrongs add up.
"""

import math
import statistics
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.core.common.shares import Shares
from engine.core.common.steps import FailureKind
from engine.core.common.waiting_queue import BACKGROUND, WaitingQueue
from engine.core.text import prices, scheduler, shared_steps, step_times
from tests.simulator.mutants import Mutant, any_fails, planted
from tests.support.busy import DECODE_S, ROW_S, TOKEN_S, Busy
from tests.support.encode_driver import EncodeDriver, Picture
from tests.support.examples import examples

STEPS = 60


# ---- shares ------------------------------------------------------------------------------------


@settings(max_examples=examples(25), deadline=None)
@given(
    asked=st.lists(
        st.tuples(
            st.integers(1, 3),  # weight
            st.integers(1, 5),  # streams
            st.integers(2, 60),  # prompt
            st.sampled_from([3, 20, 60]),  # tokens of an answer; the next request follows at once
        ),
        min_size=2,
        max_size=8,
    ),
    prepared=st.booleans(),
    prefix_cache=st.booleans(),
    shared_prompts=st.booleans(),
    interventions=st.lists(
        st.tuples(st.integers(0, STEPS), st.sampled_from(["cancel", "burst", "leave"])), max_size=6
    ),
)
def test_busy_holders_have_equal_shares_for_their_weights(
    asked, prepared, prefix_cache, shared_prompts, interventions
):
    """The watcher judges every plan; nobody waits for ever; and no step is empty."""
    busy = Busy(prepared_plans=prepared, prefix_cache=prefix_cache, max_num_seqs=40)
    live = {}

    def ask(index):
        weight, _, prompt, max_tokens = asked[index]
        first = 7 if shared_prompts else None
        fields = {"prompt": prompt, "max_tokens": max_tokens, "weight": weight, "first": first}
        live[busy.ask(f"h{index}", **fields)] = index

    for index, (_, streams, _, _) in enumerate(asked):
        for _ in range(streams):
            ask(index)
    for number in range(STEPS):
        for at, what in interventions:
            if at == number:
                name = sorted(live)[number % len(live)]
                if what == "cancel":
                    busy.driver.cancel(name)
                elif what == "burst":
                    for _ in range(10):
                        ask(live[name])
                else:  # it comes back after five steps, with nothing saved up
                    for other in [one for one, index in live.items() if index == live[name]]:
                        busy.driver.cancel(other)
        is_idle = busy.driver.scheduler.is_idle  # the last holder may have gone
        assert (busy.step() is None) == is_idle
        ended = {name for name, choice in busy.driver.finished}
        for name in sorted(live.keys() & ended):
            index = live.pop(name)
            if name not in busy.driver.refused and len(live) < 40:
                ask(index)
    for name in busy.driver.requests:
        busy.driver.read(name)
    busy.driver.run()
    busy.driver.check_idle()
    busy.driver.check_ends()


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 5)])
def test_many_streams_have_no_more_of_the_machine_than_one(weights, prepared):
    """The holder with many rows skips steps, so that both have, by their weights, what a step of
    their rows alone takes."""
    busy = Busy(prepared_plans=prepared)
    busy.ask("one", weight=weights[1], max_tokens=390)
    busy.run(10)  # what one decode costs
    for _ in range(15):
        busy.ask("many", weight=weights[0], max_tokens=390)
    busy.run(20)
    seen = busy.run(200)
    many_s = seen["many"] * (DECODE_S + 15 * ROW_S)
    one_s = seen["one"] * (DECODE_S + ROW_S)
    assert max(seen.values()) == 200
    assert math.isclose(many_s / one_s, weights[0] / weights[1], rel_tol=0.15)


@pytest.mark.parametrize("streams", [2, 8, 24, 60])
@pytest.mark.parametrize(("prompt", "max_tokens"), [(8, 390), (30, 20)])
def test_weights_divide_the_tokens_of_equal_work(streams, prompt, max_tokens):
    """However many rows a step has room for. Each answer is followed by another request."""
    busy = Busy(max_num_seqs=128, max_num_batched_tokens=512, num_blocks=8000)
    live = {}
    for name, weight in (("heavy", 3), ("light", 1)):
        for number in range(streams):
            tokens = max_tokens - number % 7  # else all would end at once
            live[busy.ask(name, prompt=prompt, weight=weight, max_tokens=tokens)] = name, weight
    before = Counter()
    for step in range(1600 if max_tokens < 100 else 360):
        assert busy.step() is not None
        for ended, _ in [one for one in busy.driver.finished if one[0] in live]:
            name, weight = live.pop(ended)
            live[busy.ask(name, prompt=prompt, weight=weight, max_tokens=max_tokens)] = name, weight
        if step == 60:
            before.update(busy.tokens)
    got = busy.tokens - before
    assert got["heavy"] / got["light"] == pytest.approx(3, rel=0.05)


def test_holders_with_like_needs_share_their_steps():
    busy = Busy()
    for _ in range(8):
        busy.ask("one")
        busy.ask("other")
    busy.run(10)
    assert busy.run(100) == {"one": 100, "other": 100}


def test_an_idle_holder_saves_nothing_up():
    busy = Busy(max_num_seqs=40)
    for _ in range(10):
        busy.ask("one")
        busy.ask("other")
    busy.ask("idle", max_tokens=2)
    busy.run(200)
    busy.ask("idle")
    seen = busy.run(60)
    assert seen["one"] >= 3  # the others do not wait for what it has not used
    assert seen["other"] >= 3


def test_a_holder_that_leaves_at_once_keeps_its_lead():
    """Else one that asks for one long prompt after another would always begin anew."""
    busy = Busy()
    busy.ask("steady", max_tokens=390)
    name, steps = busy.ask("hasty", prompt=70, max_tokens=1), 0
    for _ in range(150):
        rows = busy.step()
        steps += "hasty" in rows
        if (name, 0) in busy.driver.finished:
            name = busy.ask("hasty", prompt=70, max_tokens=1)
    share = steps * 70 * TOKEN_S / busy.driver.now
    assert 0.4 < share < 0.6, share


@pytest.mark.parametrize("weight", [1, 3])
def test_a_holder_that_returns_waits_for_one_short_step(weight):
    """Whatever it had before, and though another has many long prompts and answers."""
    busy = Busy(max_num_seqs=80, max_num_batched_tokens=512, num_blocks=20_000)
    for number in range(60):
        busy.ask("many", prompt=300, max_tokens=20 + number)
    busy.run(30)
    alone_s = 40 * TOKEN_S
    waits = []
    for _ in range(9):
        busy.driver.begin_step()  # a step of the others has just begun
        asked = busy.driver.now
        name = busy.ask("chat", prompt=40, max_tokens=10, weight=weight)
        busy.end_step()
        while not busy.driver.tokens.get((name, 0)):
            assert busy.step() is not None
        waits.append(busy.driver.now - asked)
        while (name, 0) not in busy.driver.finished:
            assert busy.step() is not None
            for _ in range(60 - len(busy.driver.scheduler._ledger.requests)):
                busy.ask("many", prompt=300, max_tokens=40)
    assert statistics.median(waits) <= 2.2 * alone_s, waits


def test_a_step_has_decodes_of_a_holder_in_turn():
    """No stream of a holder gets more tokens than another."""
    busy = Busy(max_num_seqs=80, max_num_batched_tokens=512, num_blocks=20_000)
    names = [busy.ask("many", max_tokens=390) for _ in range(60)]
    busy.ask("one", max_tokens=390)
    busy.run(100)
    before = [len(busy.driver.tokens.get((name, 0), ())) for name in names]
    busy.run(150)
    counts = [len(busy.driver.tokens.get((names[k], 0), ())) - before[k] for k in range(60)]
    assert max(counts) - min(counts) <= 2
    assert max(busy.step().get("many", 0) for _ in range(50)) < 60


def test_a_full_queue_has_room_for_another_holders_part():
    """By weight, and not without bound."""
    busy = Busy(max_num_seqs=2, max_queued_requests=12)
    for _ in range(20):
        busy.ask("many")
    assert len(busy.driver.refused) == 8
    for holder, weight, admitted in (("other", 1, 6), ("heavy", 2, 6), ("late", 3, 0)):
        before = len(busy.driver.refused)
        for _ in range(10):
            busy.ask(holder, weight=weight)
        assert len(busy.driver.refused) == before + 10 - admitted
    busy.driver.run()
    busy.driver.check_idle()


def test_background_work_fills_no_part_of_the_others_queue():
    busy = Busy(max_num_seqs=2, max_queued_requests=8)
    for _ in range(6):
        busy.ask("other", priority=BACKGROUND)
    for _ in range(10):
        busy.ask("many")
    before = len(busy.driver.refused)
    for _ in range(4):
        busy.ask("other")
    assert before > 0
    assert len(busy.driver.refused) == before


def test_what_is_cached_costs_nothing():
    """A holder whose prompts are cached is in nearly every step, as it has few tokens computed."""
    busy = Busy()
    busy.ask("steady", max_tokens=390)
    name, done = busy.ask("cached", prompt=68, max_tokens=1, first=7), 0
    busy.run(20)
    for _ in range(150):
        busy.step()
        if (name, 0) in busy.driver.finished:
            name = busy.ask("cached", prompt=68, max_tokens=1, first=7)
            done += 1
    assert done > 60, done


def test_a_holder_that_cannot_be_in_a_step_saves_nothing_up():
    """The least holder's only sequence samples its last token in the step in flight. It is lifted
    when the next step is taken, and not before: a plan that is dropped changes nothing."""
    busy = Busy()
    busy.ask("many", max_tokens=390)
    busy.run(10)
    busy.ask("few", max_tokens=2)
    busy.driver.begin_step()
    while busy.driver.scheduler._prepared is None or not busy.driver.scheduler._prepared.passed:
        busy.driver.end_step()
        busy.driver.begin_step()
    few = busy.driver.scheduler._prepared.passed[0]
    before = few.counter
    assert few.holder == "few"
    busy.ask("new")  # so the prepared plan is dropped
    assert busy.driver.scheduler._prepared is None
    assert few.counter == before


def test_a_step_that_failed_is_not_charged_beside_its_rows_alone():
    busy = Busy(prepared_plans=False)
    for _ in range(4):
        busy.ask("one")
        busy.ask("other")
    busy.run(10)
    before = busy.counters()
    for kind in FailureKind:
        assert len(busy.driver.begin_step().rows) > 1
        assert busy.counters() != before
        busy.driver.fail_step(kind)
        assert busy.counters() == pytest.approx(before)


@pytest.mark.parametrize("num_waiting", [0, 2])
def test_a_steps_cost_grows_with_holders_and_requests_not_with_their_product(
    monkeypatch, num_waiting
):
    """Counts how often a plan goes through all running sequences, and through the queue."""
    looks = Counter()

    class Counted(list):
        def __iter__(self):
            looks["running"] += 1
            return super().__iter__()

    in_order = WaitingQueue.in_order

    def counted(queue, now):
        looks["queue"] += 1
        return in_order(queue, now)

    monkeypatch.setattr(WaitingQueue, "in_order", counted)
    busy = Busy(max_num_seqs=60, num_blocks=4000, prepared_plans=False)
    ledger = busy.driver.scheduler._ledger
    ledger.running = Counted()
    for number in range(60):
        busy.ask(f"h{number}")
    busy.run(10)
    for number in range(60 * num_waiting):
        busy.ask(f"h{number % 60}")
    assert len(ledger.running) == 60
    for _ in range(5):
        looks.clear()
        busy.driver.scheduler.plan(busy.driver.now)
        assert looks["running"] <= 12, looks
        assert looks["queue"] <= 4, looks
        step = busy.driver.scheduler._step
        busy.driver.in_flight = step.plan
        busy.driver.end_step()


def test_one_holder_is_never_counted():
    busy = Busy()
    for _ in range(4):
        busy.ask("one")
    busy.run(20)
    assert busy.counters() == {"one": 0.0}
    assert not busy.driver.scheduler._ledger.shares.is_contested


# ---- memory ------------------------------------------------------------------------------------


def test_a_holder_gets_a_seat_though_another_has_all():
    busy = Busy(max_num_seqs=8)
    for _ in range(20):
        busy.ask("many")
    busy.run(5)
    name = busy.ask("one")
    busy.step()
    busy.step()
    assert busy.driver.scheduler._ledger.requests[name].parent.state.name == "RUNNING"
    assert len(busy.driver.scheduler._ledger.running) == 8


def test_seats_are_taken_up_to_a_holders_part_and_not_back():
    busy = Busy(max_num_seqs=8)
    for _ in range(20):
        busy.ask("many", max_tokens=390)
    busy.run(5)
    for _ in range(20):
        busy.ask("other", max_tokens=390)
    busy.run(30)
    before = busy.driver.scheduler.statistics().preemptions
    busy.run(60)
    running = [x.live.request.holder for x in busy.driver.scheduler._ledger.running]
    assert sorted(map(running.count, ("many", "other"))) == [4, 4]
    assert busy.driver.scheduler.statistics().preemptions == before


def test_a_holder_gets_blocks_though_another_has_all():
    busy = Busy(num_blocks=25, max_model_len=100, max_num_seqs=8)
    for _ in range(6):
        busy.ask("many", prompt=60, max_tokens=30)
    busy.run(6)
    name = busy.ask("one", prompt=20, max_tokens=10)
    busy.run(4)
    assert busy.driver.scheduler._ledger.requests[name].parent.state.name == "RUNNING"
    busy.driver.run()
    busy.driver.check_idle()


ROOM_IS_LEFT = Mutant(
    "the step that makes room does not start the first waiting request",
    shared_steps.SharedStepBuilder._lacks_room_for_first,
    "self._start(first, admission.match(self._ledger, first))",
    "pass",
)


def preempt_for_the_first_waiting():
    """Run a schedule in which a sequence of one holder gives way for the first waiting request of
    another."""
    fields = {"num_blocks": 12, "max_model_len": 192, "max_num_seqs": 4}
    busy = Busy(max_num_batched_tokens=8, **fields)
    asks = {2: [("c", 8, 27, 1)], 4: [("c", 76, 38, 1)], 8: [("a", 80, 87, 3)]}
    asks[12] = [("a", 27, 124, 1), ("b", 28, 17, 1), ("b", 11, 4, 1)]
    for number in range(60):
        for holder, prompt, max_tokens, weight in asks.get(number, ()):
            busy.ask(holder, prompt=prompt, max_tokens=max_tokens, weight=weight)
        busy.step()
    return busy.driver


def test_the_step_that_makes_room_for_the_first_waiting_request_starts_it():
    """The driver's watcher judges that nothing gives way for nobody."""
    driver = preempt_for_the_first_waiting()
    assert driver.scheduler.statistics().preemptions > 0
    with planted(ROOM_IS_LEFT), pytest.raises(AssertionError, match="gave way for nobody"):
        preempt_for_the_first_waiting()


# ---- encoders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(1, 1), (3, 1)])
def test_an_encoder_computes_as_much_for_a_holder_with_few_inputs(weights):
    driver = EncodeDriver(max_num_batched_tokens=64, max_num_seqs=8, max_queued_tokens=100_000)
    for number in range(40):
        driver.submit(f"many{number}", [16] * 12, holder="many", weight=weights[0])
    for number in range(3):
        driver.submit(f"few{number}", [16] * 12, holder="few", weight=weights[1])
    computed = {"many": 0, "few": 0}
    for _ in range(12):
        plan = driver.begin_step()
        rows = driver.scheduler._step.rows
        for live, _ in rows:
            computed[live.request.holder] += 1
        assert len(plan.rows) == 4
        driver.end_step()
    assert computed["many"] / computed["few"] == pytest.approx(weights[0] / weights[1], rel=0.1)
    for name in driver.requests:
        driver.read(name)
    driver.run()
    driver.check_idle()


def run_encoder(driver, steps):
    """Compute steps, and return how many inputs of each holder there were."""
    computed = Counter()
    for _ in range(steps):
        driver.begin_step()
        computed.update(live.request.holder for live, _ in driver.scheduler._step.rows)
        driver.end_step()
    return computed


def test_holders_with_inputs_of_different_kinds_do_not_drift_apart():
    """Steps of texts and of images take turns, whatever they cost: a holder of texts that are
    cheap must not save up what it could not have, which a new holder would then be lifted to."""
    driver = EncodeDriver(max_num_batched_tokens=64, max_num_seqs=4, max_queued_tokens=100_000)
    for number in range(60):
        driver.submit(f"t{number}", [2] * 12, holder="texts")
        driver.submit(f"i{number}", [Picture(32)] * 12, holder="images")
    run_encoder(driver, 80)
    counters = [share.counter for share in driver.scheduler.shares.in_order()]
    assert max(counters) - min(counters) <= 2 * 64
    for number in range(20):
        driver.submit(f"n{number}", [Picture(32)] * 12, holder="new")
    computed = run_encoder(driver, 24)
    assert computed["images"] == pytest.approx(computed["new"], abs=4)


def test_holders_of_one_kind_share_its_steps_beside_another_kind():
    """Lifting them does not make them equal."""
    driver = EncodeDriver(max_num_batched_tokens=64, max_num_seqs=2, max_queued_tokens=100_000)
    for number in range(60):
        driver.submit(f"h{number}", [4] * 12, holder="heavy", weight=3)
        driver.submit(f"l{number}", [4] * 12, holder="light")
        driver.submit(f"i{number}", [Picture(32)] * 12, holder="images")
    computed = run_encoder(driver, 160)
    assert computed["heavy"] / computed["light"] == pytest.approx(3, rel=0.1)


def test_an_encoders_step_that_failed_is_not_charged_beside_its_rows_alone():
    driver = EncodeDriver(max_num_batched_tokens=64, max_num_seqs=4)
    for name in ("one", "other"):
        driver.submit(name, [16] * 12, holder=name)
    run_encoder(driver, 2)
    shares = driver.scheduler.shares
    before = {share.holder: share.counter for share in shares.in_order()}
    assert len(driver.begin_step().rows) > 1
    driver.fail_step()
    assert {share.holder: share.counter for share in shares.in_order()} == before


# ---- planted bugs ------------------------------------------------------------------------------

BUGS = (
    Mutant(
        "no lift",
        Shares.activate,
        "share.counter = max(share.counter, min(others, default=self._floor))",
        "pass",
    ),
    Mutant(
        "prompts are free",
        prices.price_alone,
        "prices[payer] += times.price_of_prompts(count)",
        "pass",
    ),
    Mutant(
        "cached tokens are charged",
        prices.counts_of,
        "count = row.count + cost",
        "count = row.start + row.count + cost",
    ),
    Mutant("weights are ignored", Shares.charge, "price / share.weight", "price"),
    Mutant(
        "nobody skips a step",
        shared_steps.SharedStepBuilder._behind,
        "if share.counter <= most",
        "if True",
    ),
    Mutant(
        "a holder that returns has no head start",
        Shares._place_of,
        "if share.is_back else 0.0",
        "if False else 0.0",
    ),
    Mutant(
        "steps are as long as without holders",
        step_times.StepTimes.short_step,
        "min(self._budget, max(SHORT_MIN, most))",
        "self._budget",
    ),
    Mutant("decodes have no turns", scheduler.Scheduler._next_step, "share.turn = rank", "pass"),
)
CHECKS = (
    lambda: test_many_streams_have_no_more_of_the_machine_than_one((3, 1), prepared=True),
    lambda: test_many_streams_have_no_more_of_the_machine_than_one((1, 1), prepared=False),
    test_an_idle_holder_saves_nothing_up,
    test_a_holder_that_leaves_at_once_keeps_its_lead,
    test_what_is_cached_costs_nothing,
    lambda: test_a_holder_that_returns_waits_for_one_short_step(1),
    test_a_step_has_decodes_of_a_holder_in_turn,
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.title)
def test_a_planted_bug_is_found(bug):
    assert not any_fails(CHECKS)
    with planted(bug):
        assert any_fails(CHECKS)
