"""The best measured rate: refusals of what it makes impossible (D18), and a step's prompts."""

from __future__ import annotations

import pytest

from engine.core.text.pace.best_rate import BestRate
from engine.errors import DeadlineInfeasible
from tests.support.core_driver import Driver, make_request

BUDGET = 100


def test_without_a_measurement_nothing_takes_time():
    assert BestRate(BUDGET).seconds_for(10**6) == 0.0


@pytest.mark.parametrize("budget", [2, 3, 64, 100, 2048, 3000])
def test_a_prompt_is_compared_with_steps_as_large_as_its_largest_chunk_only(budget):
    for step in range(1, budget + 1):
        rate = BestRate(budget)
        rate.note(step, 1.0)
        known = [n for n in range(1, 3 * budget, max(1, budget // 50)) if rate.seconds_for(n)]
        assert all(min(prompt, budget) <= step for prompt in known), step
        assert step < budget or 3 * budget - max(1, budget // 50) <= max(known)


def test_a_step_of_one_token_shows_what_a_prompt_of_one_token_takes():
    rate = BestRate(64)
    rate.note(1, 2.0)
    assert rate.seconds_for(1) == 2.0
    assert rate.seconds_for(2) == 0.0


def test_the_best_rate_counts_not_the_last():
    rate = BestRate(BUDGET)
    for seconds in (2.0, 1.0, 4.0):
        rate.note(BUDGET, seconds)
    assert rate.seconds_for(300) == 3.0
    assert rate.seconds_for(50) == 0.5


@pytest.mark.parametrize("target", [0.0, 0.3, 0.9])
@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.0, 0.01), (0.5, 0.01), (1.0, 0.0)])
def test_an_estimate_is_never_above_what_a_prompt_takes_of_fixed_and_linear_cost(
    fixed_s, token_s, target
):
    rate = BestRate(BUDGET, target)
    for step in range(1, BUDGET + 1):
        rate.note(step, fixed_s + token_s * step)
        for prompt in range(1, 250, 7):
            chunks = -(-prompt // rate.prompt_budget)
            assert rate.seconds_for(prompt) <= fixed_s * chunks + token_s * prompt + 1e-9


def test_refusals_weaken_an_old_measurement_until_there_is_a_new_one():
    rate = BestRate(BUDGET)
    rate.note(BUDGET, 20.0)  # an accident: such a step takes 1 s
    tries = 0
    while rate.seconds_for(BUDGET) > 5.0:
        rate.note_refusal(BUDGET)
        rate.note(1, 1.0)  # this shows nothing about large steps
        tries += 1
    assert 1 < tries < 50
    rate.note(BUDGET, 1.0)
    assert rate.seconds_for(BUDGET) == 1.0


@pytest.mark.parametrize("budget", [2, 9, 64, 2048, 3000])
@pytest.mark.parametrize("token_s", [1e-5, 1e-4, 1e-3, 0.1])
def test_a_steps_prompts_take_the_time_a_step_should_take_within_an_eighth_of_the_budget(
    budget, token_s
):
    rate = BestRate(budget, 0.2)
    rate.note(1, token_s)
    assert rate.prompt_budget == budget or budget <= 8  # a small step shows nothing
    for step in (budget, budget // 2 + 1):
        rate.note(step, token_s * step)
        assert -(-budget // 8) <= rate.prompt_budget <= budget
        should_take = max(0.2, 4 * token_s)  # or the time of four of the shortest steps
        is_in_time = rate.prompt_budget * token_s <= should_take * (1 + 1e-9)
        assert is_in_time or rate.prompt_budget == -(-budget // 8)
        is_full = (rate.prompt_budget + 1) * token_s > should_take * (1 - 1e-9)
        assert is_full or rate.prompt_budget == budget


def test_a_slow_step_makes_the_next_ones_small_and_a_fast_one_of_those_is_enough_to_end_it():
    rate = BestRate(800, 0.2)
    rate.note(1, 0.01)
    rate.note(800, 20.0)  # an accident
    assert rate.prompt_budget == 100
    rate.note(rate.prompt_budget, 0.05)
    assert rate.prompt_budget == 400


def test_one_slow_steps_estimate_is_corrected_by_smaller_steps_after_it():
    rate = BestRate(2048, 0.15)
    rate.note(2048, 8.0)  # the first step, while everything is cold
    for _ in range(5):
        rate.note(20, 0.02)
        rate.note(rate.prompt_budget, rate.prompt_budget / 3000)
    assert rate.prompt_budget < 1024, "no step is as large as the first again"
    assert rate.seconds_for(8192) == pytest.approx(8192 / 3000)


def test_an_infinite_target_bounds_nothing():
    rate = BestRate(800, float("inf"))
    rate.note(800, 20.0)
    assert rate.prompt_budget == 800


def test_steps_that_cost_much_whatever_they_compute_are_not_made_small():
    rate = BestRate(800, 0.2)
    for tokens in (1, 400, 800):
        rate.note(tokens, 0.5)
    assert rate.prompt_budget == 800
    rate = BestRate(800, 0.2)
    rate.note(800, 4.5)  # half a second, and 5 ms a token
    assert rate.prompt_budget == 800  # no measurement shows a step's fixed cost yet
    rate.note(1, 0.505)
    assert rate.prompt_budget == 359


# ---- in the scheduler ------------------------------------------------------------------------


def measured(seconds=1.0, **config):
    """Return a driver whose only measured step had 64 tokens and took ``seconds``."""
    fields = {"max_num_batched_tokens": 64, "max_num_seqs": 8, **config}
    driver = Driver(**fields)
    driver.submit(make_request("warm", range(1, 65), max_tokens=1))
    driver.begin_step()
    driver.now += seconds
    driver.end_step()
    driver.read("warm")
    return driver


def submit(driver, prompt, left, name="r", **fields):
    """Submit a request ``left`` seconds before its deadline; return whether it was accepted."""
    deadline = None if left is None else driver.now + left
    driver.submit(make_request(name, prompt, arrival=driver.now, deadline=deadline, **fields))
    return name not in driver.refused


OTHER = range(500, 628)  # 128 tokens: two full steps


@pytest.mark.parametrize(
    ("left", "is_taken"), [(2.01, True), (2.0, True), (1.99, False), (0.001, False), (None, True)]
)
def test_a_prompt_that_cannot_be_computed_in_time_is_refused(left, is_taken):
    driver = measured()
    assert submit(driver, OTHER, left) is is_taken
    if not is_taken:
        error = driver.refused["r"].error
        assert isinstance(error, DeadlineInfeasible)
        assert (error.phase, error.tokens_done) == ("queued", 0)
        assert str(error).startswith("the prompt takes at least 2 s")
    driver.run()
    driver.check_idle()


def test_a_passed_deadline_is_left_to_the_requests_scope():
    assert submit(measured(), OTHER, 0.0)


def test_nothing_is_refused_before_a_large_step_was_measured():
    driver = measured()
    assert submit(Driver(max_num_batched_tokens=64, max_num_seqs=8), OTHER, 1e-9)
    small = Driver(max_num_batched_tokens=65, max_num_seqs=8)
    small.submit(make_request("warm", range(1, 65), max_tokens=1))
    small.begin_step()
    small.now += 1.0
    small.end_step()
    assert submit(small, OTHER, 1e-9)
    assert not submit(driver, OTHER, 1e-9)


def test_cached_tokens_need_not_be_computed():
    driver = measured()
    prompt = [*range(1, 65), *OTHER]  # 64 of these tokens are cached
    assert submit(driver, prompt, 2.0)
    assert not submit(driver, prompt, 1.9, name="late")
    assert not submit(driver, prompt, 2.0, name="alone", bypass_prefix_cache=True)
    assert not submit(driver, prompt, 2.0, name="salted", cache_salt="x")
    driver.run()
    driver.check_idle()


def test_without_a_cache_everything_is_computed():
    driver = measured(prefix_cache=False)
    assert not submit(driver, [*range(1, 65), *OTHER], 2.0)


def test_several_choices_compute_their_prompt_once():
    assert submit(measured(), OTHER, 2.0, n=4)


def test_a_faster_step_makes_more_prompts_feasible():
    driver = measured()
    assert not submit(driver, OTHER, 1.0)
    driver.submit(make_request("more", range(200, 264), max_tokens=1))
    driver.begin_step()
    driver.now += 0.5
    driver.end_step()
    assert submit(driver, OTHER, 1.0, name="again")


def test_one_slow_step_does_not_refuse_feasible_prompts_for_ever():
    driver = measured(seconds=20.0)
    for number in range(50):
        name = f"r{number}"
        first = 100 + number
        driver.submit(
            make_request(name, range(first, first + 64), max_tokens=1, deadline=driver.now + 5.0)
        )
        if name not in driver.refused:
            break
        assert isinstance(driver.refused[name].error, DeadlineInfeasible)
    assert 1 < number < 49
    driver.run()
    assert (name, 0) in driver.finished


@pytest.mark.parametrize("prepared_plans", [False, True])
def test_the_first_of_a_burst_have_their_tokens_in_the_time_that_a_step_should_take(prepared_plans):
    driver = measured(step_time_target_s=0.5, prepared_plans=prepared_plans)  # 64 tokens a second
    driver.submit(make_request("small", [1], max_tokens=1))
    driver.begin_step()
    driver.now += 0.01
    driver.end_step()
    driver.read("small")
    for index in range(4):
        name, first = f"r{index}", 100 * (index + 1)
        driver.submit(make_request(name, range(first, first + 16), max_tokens=1))
    counts = []
    while (plan := driver.begin_step()) is not None:
        counts.append(sorted(row.count for row in plan.rows))
        driver.now += sum(counts[-1]) / 64
        driver.end_step()
        for index in range(4):
            driver.read(f"r{index}")
    assert counts == [[16, 16], [16, 16]]
    driver.check_idle()
