"""Drafts in the core (D27): drafts of rows, their verification and commit, and their lengths."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import StepDone
from engine.core.common.steps import FailureKind, RowFailure
from engine.core.common.types import EndReason
from engine.core.text.drafting.draft_counts import DRAFTERS, DraftCounter, counts_of
from engine.core.text.drafting.draft_lengths import (
    BUDGET_STEPS,
    EARNED,
    EARNED_LEAST,
    TRY_EVERY,
    TRY_EVERY_MAX,
    DraftBudget,
    Lengths,
    Trials,
)
from engine.core.text.memory.blocks import blocks_for
from engine.core.text.plan import DRAFTED_TOKENS_MAX, DRAFTING_STEP_MAX
from engine.core.text.step_times import PASS_COST, PLAIN_EVERY, PLAIN_FIRST
from engine.core.text.types import Sampling, Tokens
from engine.errors import ConfigError, EngineBug
from engine.worker.factory import runner_spec
from engine.worker.fakes.digests import digest_after
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.simulator.drafters import drafter, right_draft
from tests.support.core_driver import Driver, expected_tokens, make_request
from tests.support.step_times import note, step_times


def always_right(tokens, seed, choice):
    return right_draft(tokens, seed, choice, DRAFTED_TOKENS_MAX)


def drafting(draft=always_right, *, script=None, **config):
    config = {"num_blocks": 64, "block_size": 4, "max_model_len": 128, **config}
    runner = FakeRunner(
        num_blocks=config["num_blocks"],
        block_size=config["block_size"],
        max_model_len=config["max_model_len"],
        script=script or FakeScript(draft=draft),
    )
    return Driver(runner=runner, **config)


def totals_of(driver):
    """Return the numbers of verified drafts, of their tokens, and of accepted tokens."""
    counts = driver.scheduler.statistics().drafts
    return tuple(sum(each) for each in zip(*[one[1:4] for one in counts], strict=True))


def finish(driver):
    """Run until all requests have ended, and check tokens and blocks."""
    steps = driver.run()
    driver.check_tokens()
    driver.scheduler.check()
    assert driver.scheduler.statistics().free_blocks == driver.config.num_blocks
    return steps


def test_right_drafts_save_steps_and_change_no_token():
    driver = drafting()
    driver.submit(make_request("a", range(1, 6), max_tokens=40))
    assert finish(driver) < 12
    assert driver.tokens["a", 0] == expected_tokens(range(1, 6), count=40)
    usage = driver.finished["a", 0].usage
    assert usage.drafted_tokens == usage.accepted_tokens >= 28


def test_wrong_drafts_change_no_token_and_are_given_up():
    driver = drafting(drafter(0.0))
    driver.submit(make_request("a", range(1, 6), max_tokens=100))
    assert finish(driver) == 100
    usage = driver.finished["a", 0].usage
    assert usage.accepted_tokens == 0
    assert usage.drafted_tokens < 40
    assert totals_of(driver)[1:] == (usage.drafted_tokens, 0)


def test_each_row_is_one_message_whatever_it_accepts():
    driver = drafting()
    driver.submit(make_request("a", range(1, 6), max_tokens=40), buffer=3)
    finish(driver)
    sizes = [len(event.token_ids) for event in driver.log if isinstance(event, Tokens)]
    assert sum(sizes) == 40
    assert max(sizes) > 5
    by_position = driver.scheduler.statistics().drafts[DRAFTERS.index("lookup")].by_position
    assert sum(by_position) == sum(size - 1 for size in sizes)
    assert list(by_position) == sorted(by_position, reverse=True)


def test_a_draft_never_goes_beyond_the_last_token():
    driver = drafting()
    driver.submit(make_request("a", range(1, 6), max_tokens=3))
    plans = []
    while (plan := driver.begin_step()) is not None:
        plans.append(plan)
        driver.end_step()
    assert [plan.num_drafts for plan in plans] == [0, 1]
    driver.check_tokens()


def test_a_stop_inside_a_draft_drops_what_is_behind_it():
    wanted = expected_tokens(range(1, 6), count=40)
    last = 0
    for token in [*range(1, 6), *wanted[:20]]:
        last = digest_after(last, token)
    script = FakeScript(draft=always_right, eos_at=lambda digest: digest == last)
    driver = drafting(script=script)
    driver.submit(make_request("a", range(1, 6), max_tokens=40))
    driver.run()
    driver.check_tokens()
    assert driver.tokens["a", 0][:-1] == wanted[:20]
    assert driver.finished["a", 0].reason is EndReason.STOP
    assert driver.finished["a", 0].usage.completion_tokens == 21


def test_a_full_step_drafts_nothing():
    driver = drafting(num_blocks=200)
    for index in range(DRAFTING_STEP_MAX):
        driver.submit(make_request(str(index), [index + 1, 2], max_tokens=10))
    finish(driver)
    assert totals_of(driver)[0] == 0


def test_a_step_samples_no_more_positions_than_it_may():
    driver = drafting(num_blocks=200)
    for index in range(5):
        driver.submit(make_request(str(index), [index + 1, 2], max_tokens=30))
    most = 0
    while (plan := driver.begin_step()) is not None:
        assert plan.num_drafts == 0 or len(plan.rows) + plan.num_drafts <= DRAFTING_STEP_MAX
        most = max(most, len(plan.rows) + plan.num_drafts)
        driver.end_step()
    assert most == DRAFTING_STEP_MAX
    driver.check_tokens()


def test_drafts_stay_inside_the_steps_budget():
    driver = drafting(max_num_batched_tokens=6, max_num_seqs=4)
    for name in "abc":
        driver.submit(make_request(name, range(1, 20), max_tokens=20))
    while (plan := driver.begin_step()) is not None:
        assert plan.num_tokens <= 6
        driver.end_step()
    driver.check_tokens()
    assert totals_of(driver)[0] > 0


def test_the_last_token_of_a_steps_budget_is_drafted():
    driver = drafting(max_num_batched_tokens=2, max_num_seqs=1)
    driver.submit(make_request("a", [1], max_tokens=20))
    assert finish(driver) == 11
    assert totals_of(driver) == (9, 9, 9)


def test_drafts_take_only_blocks_that_are_free():
    """Two sequences that just fit the pool are not preempted to make room for drafts."""
    driver = drafting(num_blocks=16, max_model_len=64)
    for name in "ab":
        driver.submit(make_request(name, range(1, 9), max_tokens=24))
    finish(driver)
    assert driver.scheduler.statistics().preemptions == 0
    assert totals_of(driver)[0] > 0


def test_a_row_has_the_blocks_that_its_drafts_need_and_no_more():
    driver = drafting(prepared_plans=False)
    driver.submit(make_request("a", range(1, 6), max_tokens=40))
    seq, drafted = driver.scheduler._ledger.requests["a"].parent, 0
    while (plan := driver.begin_step()) is not None:
        (row,) = plan.rows
        assert len(seq.blocks) == blocks_for(row.start + row.count, 4)
        drafted += row.drafts
        driver.end_step()
    assert drafted >= 28
    assert finish(driver) == 0


def run_in_small_pool(draft, *, block_size, num_blocks, prompt, max_tokens):
    """Run three requests in a small pool, and return how many steps and preemptions it took."""
    most = min(128, num_blocks * block_size)
    driver = drafting(draft, num_blocks=num_blocks, block_size=block_size, max_model_len=most)
    for index, name in enumerate("abc"):
        tokens = range(ord(name), ord(name) + prompt + index)
        driver.submit(make_request(name, tokens, max_tokens=max_tokens))
    return finish(driver), driver.scheduler.statistics().preemptions


@pytest.mark.parametrize("block_size", [2, pytest.param(4, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize("prompt", [4, 7, 9])
@pytest.mark.parametrize("max_tokens", [8, pytest.param(14, marks=pytest.mark.slow), 24])
def test_drafts_that_are_wrong_take_no_blocks_from_others(block_size, prompt, max_tokens):
    """In any pool that holds a sequence, steps and preemptions are as many as without drafts."""
    least = -(-(prompt + 2 + max_tokens) // block_size)
    for num_blocks in range(least, 3 * least + 1):
        pool = {"block_size": block_size, "num_blocks": num_blocks}
        work = {"prompt": prompt, "max_tokens": max_tokens}
        plain = run_in_small_pool(None, **pool, **work)
        assert run_in_small_pool(drafter(0.0, seed=3), **pool, **work) == plain, pool


@pytest.mark.parametrize("num_blocks", range(8, 25))
def test_preempted_sequences_that_draft_keep_their_tokens(num_blocks):
    driver = drafting(drafter(0.7), num_blocks=num_blocks, max_model_len=32)
    for name in "abc":
        driver.submit(make_request(name, [*range(1, 7), ord(name)], max_tokens=24))
    finish(driver)


@pytest.mark.parametrize("n", [2, 4])
def test_choices_that_fork_draft_for_themselves(n):
    driver = drafting(drafter(0.8))
    sampling = Sampling(seed=7)
    driver.submit(make_request("a", range(1, 8), max_tokens=30, n=n, sampling=sampling))
    finish(driver)
    assert all(driver.finished["a", choice].usage.accepted_tokens for choice in range(n))


def test_a_parked_sequence_that_drafts_goes_on():
    driver = drafting(drafter(0.8))
    driver.submit(make_request("a", range(1, 8), max_tokens=40), buffer=1)
    while driver.step(read=False) or driver.unread["a"]:
        driver.read("a")
    driver.check_tokens()
    assert driver.finished["a", 0].usage.accepted_tokens


def test_blocks_that_drafts_complete_are_found_by_later_requests():
    driver = drafting()
    driver.submit(make_request("a", range(1, 6), max_tokens=30))
    driver.run()
    whole = [*range(1, 6), *driver.tokens["a", 0]]
    driver.submit(make_request("b", whole, max_tokens=4))
    driver.run()
    driver.check_tokens()
    # The last token is not computed, and only full blocks of the others are cached.
    assert driver.finished["b", 0].usage.cached_tokens == (len(whole) - 1) // 4 * 4


def test_a_failed_step_runs_again_without_its_drafts():
    failures = []

    def fault(plan):
        if plan.num_drafts and len(failures) < 2:
            failures.append(plan)
            return RuntimeError("drafts")
        return None

    driver = drafting(script=FakeScript(draft=always_right, plan_fault=fault))
    driver.submit(make_request("a", range(1, 6), max_tokens=40))
    finish(driver)
    assert len(failures) == 2
    assert driver.finished["a", 0].reason is EndReason.LENGTH


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_sample_that_fails_behind_a_draft_is_taken_again(index):
    driver = drafting()
    driver.submit(make_request("a", range(1, 6), max_tokens=40))
    for _ in range(2):
        driver.step()
    assert driver.begin_step().num_drafts > 2
    rows, is_failed = driver.fail_row(index)
    assert is_failed == (index == 0) == isinstance(rows[0], RowFailure)
    assert is_failed or len(rows[0].tokens) == index
    driver.run()
    driver.check_tokens()
    assert driver.finished["a", 0].reason is (EndReason.FAILED if is_failed else EndReason.LENGTH)


def test_rows_of_a_step_that_lacked_memory_do_not_draft():
    kinds = []

    def fault(plan):
        if plan.num_drafts and not kinds:
            kinds.append(FailureKind.OUT_OF_MEMORY)
            return MemoryError("drafts")
        return None

    driver = drafting(script=FakeScript(draft=always_right, plan_fault=fault))
    driver.submit(make_request("a", range(1, 6), max_tokens=40))
    finish(driver)
    assert kinds


def test_a_request_that_wants_no_drafts_gets_none():
    driver = drafting()
    driver.submit(make_request("a", range(1, 6), max_tokens=10, speculates=False))
    assert finish(driver) == 10
    assert driver.finished["a", 0].usage.drafted_tokens == 0


def test_the_step_after_a_draft_is_not_prepared_and_the_others_are():
    driver = drafting(lambda tokens, seed, choice: [1] if len(tokens) % 3 else [])
    driver.submit(make_request("a", range(1, 6), max_tokens=12))
    kinds = set()
    while (plan := driver.begin_step()) is not None:
        kinds.add((plan.num_drafts > 0, driver.scheduler._prepared is not None))
        driver.end_step()
    assert (True, True) not in kinds
    assert (False, True) in kinds
    driver.check_tokens()


@pytest.mark.parametrize("draft", [always_right, None])
def test_more_tokens_than_were_drafted_are_a_bug(draft):
    driver = drafting(draft)
    driver.submit(make_request("a", range(1, 6), max_tokens=40))
    driver.step()
    plan = driver.begin_step()
    result = driver.runner.execute(plan)
    [row] = result.rows
    one_more = row.tokens + (2 + row.drafted - len(row.tokens)) * row.tokens[:1]
    wrong = result._replace(rows=(row._replace(tokens=one_more),))
    with pytest.raises(EngineBug) as caught:
        driver.scheduler.apply(StepDone(wrong), driver.now)
    assert "tokens for" in caught.value.log_detail


def test_explain_says_what_was_drafted_and_accepted():
    driver = drafting()
    driver.submit(make_request("a", range(1, 6), max_tokens=40))
    for _ in range(3):
        driver.step()
    explained = driver.scheduler.explain("a", driver.now)
    assert explained.drafted_tokens == explained.accepted_tokens > 0


# ---- what is counted


COUNT = st.integers(0, DRAFTED_TOKENS_MAX)


@given(st.lists(st.tuples(st.integers(1, DRAFTED_TOKENS_MAX), COUNT, COUNT, st.booleans())))
def test_the_sums_over_the_drafters_are_those_of_all_drafts(drawn):
    """A draft counts for one drafter, and each of its tokens for the one that proposed it."""
    counter, wanted = DraftCounter(), Counter()
    for drafted, accepted, forced, by_model in drawn:
        accepted, forced = min(accepted, drafted), min(forced, drafted)
        counter.note(drafted, accepted, forced=forced, by_model=by_model)
        drafter = "model" if by_model else "lookup"
        wanted[drafter if drafted > forced else "constraint", "drafts"] += 1
        for place in range(drafted):
            who = "constraint" if place < forced else drafter
            wanted[who, "drafted"] += 1
            wanted[who, place] += place < accepted
    counts = counts_of([counter])
    assert sum(one.drafts for one in counts) == len(drawn)
    assert sum(one.drafted for one in counts) == sum(one[0] for one in drawn)
    for one in counts:
        assert (one.drafts, one.drafted) == (
            wanted[one.drafter, "drafts"],
            wanted[one.drafter, "drafted"],
        )
        assert list(one.by_position) == [wanted[one.drafter, k] for k in range(DRAFTED_TOKENS_MAX)]
        assert one.accepted == sum(one.by_position)


def test_what_each_drafter_has_drafted_is_told_apart():
    """The statistics count each drafter apart, and so does Explain for a request."""
    script = FakeScript(draft=always_right, draft_model=drafter(0.9, count=4))
    driver = drafting(script=script)
    driver.scheduler._times.pass_ratio = 0.01
    for name in "abc":
        driver.submit(make_request(name, [*range(1, 6), ord(name)], max_tokens=40))
    explained = Counter()
    while driver.step():
        if live := driver.scheduler.explain("a", driver.now):
            explained = {one.drafter: one.drafted for one in live.drafts}
            assert sum(explained.values()) == live.drafted_tokens
    counts = {one.drafter: one for one in driver.scheduler.statistics().drafts}
    usages = [finished.usage for finished in driver.finished.values()]
    assert sum(one.drafted for one in counts.values()) == sum(u.drafted_tokens for u in usages)
    assert sum(one.accepted for one in counts.values()) == sum(u.accepted_tokens for u in usages)
    assert counts["lookup"].accepted == counts["lookup"].drafted > 0
    assert explained["lookup"] > 0
    assert counts["constraint"].drafted == 0


# ---- the length of a draft


def fed(share, *, rounds=60, trials=None):
    """Return the `Lengths` after drafts of which this share of tokens was right."""
    one = Lengths(0.5, trials)
    for _ in range(rounds):
        one.note(4, 4 * share)
    return one


def length(one, most, times, *beside):
    """Return how long a draft is: the best length, or 1 for a trial."""
    best, _ = one.best(most, times, *beside)
    return best or int(one.trials.is_due())


def test_the_share_is_the_mean_of_the_verified_tokens_and_of_what_was_expected():
    """The expected share weighs as much as two verified tokens."""
    one = Lengths(0.5)
    one.note(1, 1)
    assert one.share == pytest.approx((2 * 0.5 + 1) / 3)
    one.note(1, 0)
    assert one.share == pytest.approx((2 * 0.5 + 1) / 4)
    one.note(5, 2)  # 2 tokens were right and 1 was wrong; the 2 behind it count for nothing
    assert one.share == pytest.approx((2 * 0.5 + 3) / 7)


def test_of_many_tokens_the_last_ones_count():
    one = fed(1, rounds=200)
    one.note(1, 0)
    assert one.share == pytest.approx(0.9, abs=1e-6)


@pytest.mark.parametrize("right", [0, 1])
def test_one_token_alone_changes_no_length_much(right):
    """A draft that fails or succeeds at its first token is no reason to stop or to draft most."""
    one = Lengths()
    before, _ = one.best(DRAFTED_TOKENS_MAX, step_times())
    one.note(1, right)
    after, _ = one.best(DRAFTED_TOKENS_MAX, step_times())
    assert 1 <= after < DRAFTED_TOKENS_MAX
    assert after >= before if right else after <= before


def test_a_draft_is_as_long_as_its_tokens_are_right():
    times = step_times()
    assert length(fed(1), DRAFTED_TOKENS_MAX, times) == DRAFTED_TOKENS_MAX
    assert length(fed(0), DRAFTED_TOKENS_MAX, times) == 0
    one = Lengths()
    lengths = []
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        one.share = share
        lengths.append(length(one, DRAFTED_TOKENS_MAX, times))
    assert lengths == sorted(lengths)
    assert lengths[0] >= 1


def test_of_two_drafts_that_pay_alike_the_shorter_is_taken():
    times = step_times()
    times._ratios[:2] = [1.0, 2.0]  # times of steps with 1 draft, and with 2 or 3, against without
    assert Lengths(1.0).best(3, times) == (1, 2.0)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_drafts_that_never_pay_are_tried_now_and_then(num_rows):
    """The more rows share the trials, the more seldom each of them tries a draft."""
    trials = Trials()
    tried = [trials.is_due(num_rows) for _ in range(10 * num_rows * TRY_EVERY)]
    assert sum(tried) == 10
    assert fed(0).best(8, step_times()) == (0, 0.0)


def test_a_draft_model_that_does_not_pay_is_tried_ever_more_seldom():
    trials = Trials(slows=True)
    tried = [i for i in range(8 * TRY_EVERY_MAX) if trials.is_due()]
    waits = [after - before for before, after in zip([-1, *tried], tried, strict=False)]
    assert waits[:5] == [TRY_EVERY << k for k in range(5)]
    assert {*waits[5:]} == {TRY_EVERY_MAX}


def test_an_offer_that_pays_makes_the_next_trial_as_late_as_the_first():
    one = fed(0, trials=Trials(slows=True))
    first = [one.trials.is_due() for _ in range(TRY_EVERY)]
    assert first == [False] * (TRY_EVERY - 1) + [True]
    assert not any(one.trials.is_due() for _ in range(TRY_EVERY))
    one.share = 1.0
    assert one.best(8, step_times())[0] > 0
    assert [one.trials.is_due() for _ in range(TRY_EVERY)] == first


def test_a_text_that_begins_to_repeat_itself_is_drafted_again():
    one = fed(0)
    for _ in range(20 * TRY_EVERY):
        if count := length(one, 8, step_times()):
            one.note(count, count)
    assert length(one, 8, step_times()) >= 7


# ---- what drafts cost


def measured(ratio, *, num_drafts=1):
    """Return the estimate after steps with drafts took ``ratio`` times as long as without."""
    times = step_times()
    for _ in range(10):
        note(times, 0.01, decodes=1)
        note(times, 0.01 * ratio, decodes=1, drafts=num_drafts)
    return times


def test_where_drafts_take_long_a_sequence_drafts_less():
    one = Lengths(0.4)
    assert length(one, 1, step_times()) == length(one, 1, measured(1.3)) == 1
    assert length(one, 1, measured(1.5)) == 0


def test_what_a_draft_model_takes_makes_its_drafts_shorter():
    one = Lengths(0.8, Trials(slows=True))
    times, lengths = step_times(), []
    for ratio in (0.05, 0.2, 0.4, 0.9):
        times.pass_ratio = ratio
        lengths.append(one.best(DRAFTED_TOKENS_MAX, times)[0])
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 5
    assert lengths[-1] == 0


def test_what_a_draft_model_takes_is_measured_in_steps_without_drafts():
    times = step_times()
    for _ in range(10):
        times.note_passes(1, 4, 0.004)  # no step was measured to compare with
    assert times.pass_ratio == PASS_COST
    note(times, 0.01, decodes=1)
    for _ in range(10):
        times.note_passes(1, 4, 0.004)
    assert times.pass_ratio == pytest.approx(0.1)


def test_a_few_slow_steps_change_no_cost():
    for before in (step_times(), measured(1.05)):
        note(before, 0.01, decodes=1)
        for _ in range(4):
            note(before, 100.0, decodes=1, drafts=1)
            before.note_passes(1, 1, 100.0)
        assert before.ratio(1) == pytest.approx(1.05)
        assert before.pass_ratio == PASS_COST


def test_costs_are_kept_by_the_number_of_drafts_and_never_below_one():
    times = measured(1.6, num_drafts=9)
    assert times.ratio(15) == pytest.approx(1.6)
    assert times.ratio(1) == step_times().ratio(1)
    assert measured(0.5).ratio(1) == 1.0


def test_sequences_that_do_not_draft_count_in_what_drafts_gain():
    """A draft that makes the step longer does not pay if most of the step's rows have none."""
    one = Lengths(0.6)
    assert length(one, 1, measured(1.2)) == 1
    assert length(one, 1, measured(1.2), 1, 7) == 0


def test_a_model_that_only_costs_may_cost_its_budget_and_a_hundredth():
    """Here the model could draft in 10,000 steps, and make each take twice as long."""
    budget, lost = DraftBudget(), 0.0
    for _ in range(10_000):
        if budget.is_open:
            budget.note(0.0, 1.0)
            lost += 1.0
        else:
            budget.note_other()
    assert BUDGET_STEPS < lost <= 1 + BUDGET_STEPS + 10_000 * EARNED


def test_a_model_that_never_pays_earns_ever_less_and_one_that_pays_again_earns_all():
    budget, lost = DraftBudget(), []
    for _ in range(20_000):
        if budget.is_open:
            budget.note(0.0, 1.0)
            lost.append(1.0)
        else:
            budget.note_other()
            lost.append(0.0)
    assert sum(lost[10_000:]) <= 1 + 10_000 * EARNED_LEAST
    budget.note(2.0, 1.0)
    before = budget.left
    budget.note_other()
    assert budget.left == pytest.approx(before + EARNED)


def test_a_model_that_saves_no_more_than_it_costs_does_not_earn_all_again():
    budget = DraftBudget()
    budget.note(0.0, 2 * BUDGET_STEPS)
    budget.note(1.0, 1.0)
    before = budget.left
    budget.note_other()
    assert budget.left == pytest.approx(before + EARNED / 4), "halved by each of two steps"


def test_a_model_that_pays_keeps_its_budget_open():
    budget = DraftBudget()
    budget.note(0.0, BUDGET_STEPS - 1)  # the draft model reads a long prompt
    for _ in range(100):
        assert budget.is_open
        budget.note(2.0, 1.5)
    assert budget.left == BUDGET_STEPS


# ---- a draft model


def with_model(draft, *, draft_s=0.0, **config):
    script = FakeScript(draft_model=draft, draft_s=draft_s, sleep=lambda _: None)
    return drafting(script=script, **config)


def test_a_draft_model_saves_steps_and_changes_no_token():
    driver = with_model(always_right)
    driver.submit(make_request("a", range(1, 6), max_tokens=40))
    assert finish(driver) < 20
    usage = driver.finished["a", 0].usage
    assert usage.drafted_tokens == usage.accepted_tokens >= 20


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_draft_model_may_draft_fewer_tokens_than_are_wanted(most):
    """Only the drafted tokens count, and blocks taken for the missing ones are given back."""
    driver = with_model(lambda *given: always_right(*given)[:most])
    driver.submit(make_request("a", range(1, 6), max_tokens=100))
    finish(driver)
    usage = driver.finished["a", 0].usage
    assert (usage.drafted_tokens, usage.accepted_tokens) == totals_of(driver)[1:]
    assert usage.drafted_tokens == usage.accepted_tokens
    assert (usage.drafted_tokens > 0) == (most > 0)


@pytest.mark.parametrize("drafted", [0, 1])
def test_the_time_of_a_draft_model_counts_where_it_has_drafted(drafted):
    """A model that has not drafted has only computed tokens that its cache lacked."""
    driver = with_model(always_right, draft_s=0.001)
    driver.submit(make_request("a", range(1, 6), max_tokens=40))
    for _ in range(1 + PLAIN_FIRST):
        driver.step()
    result = driver.runner.execute(driver.begin_step())
    row = result.rows[0]
    assert row.drafted
    row = row._replace(tokens=row.tokens[: 1 + drafted], drafted=drafted)
    passes = driver.scheduler._times._passes
    before = list(passes)
    driver.scheduler.apply(StepDone(result._replace(rows=(row,))), driver.now)
    assert (list(passes) != before) == bool(drafted)


def test_more_drafts_than_were_planned_are_a_bug():
    driver = with_model(always_right)
    driver.submit(make_request("a", range(1, 6), max_tokens=40))
    for _ in range(1 + PLAIN_FIRST):
        driver.step()
    plan = driver.begin_step()
    assert plan.rows[0].by_model
    result = driver.runner.execute(plan)
    wrong = result._replace(rows=(result.rows[0]._replace(drafted=99),))
    with pytest.raises(EngineBug) as caught:
        driver.scheduler.apply(StepDone(wrong), driver.now)
    assert "were planned" in caught.value.log_detail


def test_a_choice_that_forks_drafts_nothing_in_the_row_of_another_one():
    driver = drafting()
    driver.submit(make_request("a", range(1, 6), max_tokens=8, n=2))
    result = driver.runner.execute(driver.begin_step())
    forked = result.rows[1]._replace(drafted=1)
    with pytest.raises(EngineBug) as caught:
        driver.scheduler.apply(StepDone(result._replace(rows=(result.rows[0], forked))), driver.now)
    assert "got 1 drafts, and 0 were planned" in caught.value.log_detail


def test_a_row_takes_the_drafter_that_gains_more():
    """Once the model is always right and the n-gram drafter always wrong, and once the other way
    round."""
    for by_model, script in (
        (True, FakeScript(draft=drafter(0.0), draft_model=always_right)),
        (False, FakeScript(draft=always_right, draft_model=drafter(0.0))),
    ):
        driver = drafting(script=script)
        driver.submit(make_request("a", range(1, 6), max_tokens=100))
        kinds = []
        while (plan := driver.begin_step()) is not None:
            kinds += [row.by_model for row in plan.rows if row.drafts]
            driver.end_step()
        driver.check_tokens()
        assert kinds.count(by_model) > kinds.count(not by_model)


@pytest.mark.parametrize(
    ("num_rows", "share", "draft_s", "stall"),
    [(1, 0.5, 1.0, 1), (1, 0.5, 0.6, 4), (4, 0.0, 0.3, 1)],
)
def test_a_draft_model_that_does_not_pay_switches_itself_off_for_later_requests_too(
    num_rows, share, draft_s, stall
):
    """Each token of the model takes ``draft_s`` of a step's time, and a ``share`` of its tokens is
    right. Every seventh step takes ``stall`` times as long, like an accident of the machine."""
    driver = with_model(drafter(share), draft_s=draft_s, num_blocks=400)
    tried, num_steps = [], 0
    for index in range(20):
        for row in range(num_rows):
            driver.submit(make_request(f"{index}/{row}", range(1, 6), max_tokens=60))
        tried.append(0)
        while (plan := driver.begin_step()) is not None:
            longest = max([row.drafts for row in plan.rows if row.by_model], default=0)
            tried[-1] += longest > 0
            num_steps += 1
            driver.now += (1.0 + draft_s * longest) * (stall if num_steps % 7 == 0 else 1.0)
            driver.end_step()
    driver.check_tokens()
    assert 0 < sum(tried[-10:]) <= 10 * 60 * EARNED
    assert sum(tried[1:]) <= 2 + tried[0] + 20 * 60 / TRY_EVERY_MAX


def test_where_a_draft_model_has_switched_itself_off_plans_are_prepared_as_without_drafts():
    """The model is always wrong: once it is off, eight sequences' steps have no drafts."""
    driver = with_model(drafter(0.0), num_blocks=400, draft_s=1.0)
    driver.scheduler._drafts._budget.left = -100.0
    for index in range(8):
        driver.submit(make_request(str(index), [index + 1, 2], max_tokens=60))
    kinds = Counter()
    while (plan := driver.begin_step()) is not None:
        kinds[plan.num_drafts > 0, driver.scheduler._prepared is not None] += 1
        driver.now += 1.0
        driver.end_step()
    driver.check_tokens()
    assert kinds[True, False] == kinds[True, True] == 0
    assert kinds[False, False] <= 1  # nothing is prepared during the last step
    assert kinds[False, True] >= 59


def test_a_draft_model_that_has_switched_itself_off_is_not_used_where_something_is_looked_up():
    """Here the model is always right and cheap, the n-gram drafter always wrong."""
    driver = drafting(script=FakeScript(draft=drafter(0.0), draft_model=always_right))
    driver.submit(make_request("a", range(1, 6), max_tokens=100))
    while not driver.begin_step().rows[0].by_model:
        driver.end_step()
    driver.end_step()
    driver.scheduler._drafts._budget.left = -100.0
    looked_up = 0
    while (plan := driver.begin_step()) is not None:
        assert not plan.rows[0].by_model
        looked_up += plan.num_drafts
        driver.end_step()
    driver.check_tokens()
    assert looked_up > 0


def test_an_ngram_drafter_beside_a_draft_model_drafts_no_more_than_without_one():
    """Red if n-gram drafts of one row seem to gain more as seven others could use the model."""
    planned = []
    for model in (None, drafter(0.0)):
        script = FakeScript(draft=_for_the_first, draft_model=model, sleep=lambda _: None)
        driver = drafting(script=script, num_blocks=400)
        driver.scheduler._drafts._budget.left = -100.0
        driver.scheduler._times._ratios[0] = 1.3
        driver.submit(make_request("0", [1, 2], max_tokens=100))
        planned.append([])
        while (plan := driver.begin_step()) is not None:
            planned[-1].append(plan.num_drafts)
            driver.end_step()
            if len(planned[-1]) == 20:
                for index in range(1, 8):
                    driver.submit(make_request(str(index), [index + 1, 2], max_tokens=60))
        driver.check_tokens()
    assert sum(planned[0][:20]) > 10
    assert sum(planned[0][20:]) <= 2
    assert planned[0] == planned[1]


def _for_the_first(tokens, seed, choice):
    return right_draft(tokens, seed, choice, 1) if tokens[0] == 1 else []


def test_a_draft_model_does_not_count_in_the_rates_of_steps():
    """Red if the engine believes that prompts beside a draft model are slow."""
    driver = with_model(always_right, draft_s=0.5)
    driver.submit(make_request("a", range(1, 6), max_tokens=60))
    while (plan := driver.begin_step()) is not None:
        model_s = 0.5 * max([row.drafts for row in plan.rows if row.by_model], default=0)
        driver.now += 1.0 + model_s
        driver.end_step()
    assert driver.scheduler._times.ratio(1) <= step_times().ratio(1)
    assert driver.scheduler._times.pass_ratio > PASS_COST


def test_a_draft_model_leaves_steps_to_measure_against():
    """The first `PLAIN_FIRST` steps have no drafts, and later one step in `PLAIN_EVERY`."""
    driver = with_model(always_right)
    driver.submit(make_request("a", range(1, 6), max_tokens=60))
    drafts = []
    while (plan := driver.begin_step()) is not None:
        drafts.append(plan.num_drafts)
        driver.end_step()
    assert drafts[1 : 1 + PLAIN_FIRST] == [0] * PLAIN_FIRST
    assert drafts[1 + PLAIN_FIRST] > 0
    times = measured(1.1)
    asked = [times.may_draft(1) for _ in range(10 * PLAIN_EVERY)]
    assert asked.count(False) == 10
    assert not times.may_draft(2)
    assert not times.may_draft(DRAFTING_STEP_MAX), "a full step drafts nothing"


def test_a_full_step_uses_no_draft_model():
    driver = with_model(always_right, num_blocks=200)
    for index in range(DRAFTING_STEP_MAX):
        driver.submit(make_request(str(index), [index + 1, 2], max_tokens=10))
    finish(driver)
    assert totals_of(driver)[0] == 0


@pytest.mark.parametrize("num_blocks", range(8, 25))
def test_preempted_sequences_with_a_draft_model_keep_their_tokens(num_blocks):
    driver = with_model(drafter(0.7), num_blocks=num_blocks, max_model_len=32)
    for name in "abc":
        driver.submit(make_request(name, [*range(1, 7), ord(name)], max_tokens=24))
    finish(driver)


def test_the_pace_of_decodes_is_that_without_drafts():
    """Else a step would get more prompt tokens the longer its drafts take, and fewer if every
    step that was measured had drafts."""
    driver = drafting(inter_token_target_s=0.1)
    driver.submit(make_request("a", range(1, 6), max_tokens=40))
    while (plan := driver.begin_step()) is not None:
        driver.now += 0.016 if plan.num_drafts else 0.01
        driver.end_step()
    assert totals_of(driver)[0] > 0
    assert 0.008 < driver.scheduler._times.decodes_s(1) < 0.015
    times = measured(1.6, num_drafts=4)
    assert times.decodes_s(1) == 0.01
    note(times, 0.032, decodes=3, drafts=4)
    assert times.decodes_s(3) == pytest.approx(0.02), "no such step without drafts was seen"


def tokens_per_s(draft, *, num_requests, draft_s):
    """Return the tokens per second of the third of three bursts of requests.

    A step takes 25 ms, and 1.3 ms for each row, ``draft_s`` for each draft and 0.9 ms for each
    prompt token, as with a model of half a billion parameters on two cores.
    """
    config = {"num_blocks": 1000, "block_size": 16, "max_model_len": 512, "max_num_seqs": 32}
    limits = {"max_num_batched_tokens": 2048, "inter_token_target_s": 0.02, "prefix_cache": False}
    driver = drafting(draft, **config, **limits)
    for burst in range(3):
        begun, waiting = driver.now, [f"{burst}/{index}" for index in range(num_requests)]
        driver.submit(make_request(waiting.pop(), range(1, 129), max_tokens=96))
        while (plan := driver.begin_step()) is not None:
            while waiting:  # the others arrive during the first request's step
                driver.submit(make_request(waiting.pop(), range(1, 129), max_tokens=96))
            prompts = plan.num_tokens - plan.num_drafts - len(plan.rows)
            driver.now += 0.025 + 0.0013 * len(plan.rows)
            driver.now += 0.0009 * prompts + draft_s * plan.num_drafts
            driver.end_step()
    return num_requests * 96 / (driver.now - begun)


@pytest.mark.parametrize("draft_s", [0.001, 0.0025])
@pytest.mark.parametrize(
    "num_requests",
    [4, 8, pytest.param(15, marks=pytest.mark.slow), pytest.param(32, marks=pytest.mark.slow)],
)
def test_prompts_come_no_later_because_of_drafts(num_requests, draft_s):
    """A burst is served as fast as without drafts if drafts are wrong, and slightly faster if they
    are right: most steps have prompts, and so no drafts. Red if prompts wait for drafts, which made
    a burst up to a fifth slower."""
    given = {"num_requests": num_requests, "draft_s": draft_s}
    without = tokens_per_s(None, **given)
    assert tokens_per_s(drafter(0.0), **given) >= 0.97 * without
    assert tokens_per_s(drafter(0.8), **given) >= 1.005 * without


def test_a_step_with_a_prompt_drafts_nothing():
    driver = drafting(max_num_batched_tokens=8, max_num_seqs=4)
    driver.submit(make_request("a", range(1, 6), max_tokens=60))
    for _ in range(4):
        driver.step()
    driver.submit(make_request("b", range(1, 60), max_tokens=60))
    beside = []
    while (plan := driver.begin_step()) is not None:
        beside += [plan.num_drafts] * any(row.start < 58 and row.count > 1 and not row.drafts
                                          for row in plan.rows)  # fmt: skip
        driver.end_step()
    assert len(beside) > 6
    assert not any(beside)
    assert totals_of(driver)[0] > 0


# ---- the configuration


def test_a_draft_model_implies_that_it_drafts_unless_drafts_are_off():
    assert ModelConfig("m", draft_model="d").speculation == "model"
    assert ModelConfig("m", draft_model="d", speculation="off").speculation == "off"
    assert runner_spec(ModelConfig("m", draft_model="d"), EngineConfig()).draft_model == "d"
    off = ModelConfig("m", draft_model="d", speculation="off")
    assert runner_spec(off, EngineConfig()).draft_model == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"speculation": "model"}, "--speculation is 'model', but --draft-model is not given"),
        (
            {"draft_model": "d", "tp": 2},
            "m has --tensor-parallel-size 2 and --draft-model, but a divided model drafts nothing; "
            "leave one of them out",
        ),
    ],
)
def test_what_does_not_go_with_a_draft_model_is_refused(fields, said):
    with pytest.raises(ConfigError) as caught:
        ModelConfig("m", **fields)
    assert str(caught.value) == said
