"""The estimate of step times: how many prompt tokens a step has (D4), and which prompts are refused
because they cannot be computed in time (D18). `test_drafts` tests the cost of drafts."""

import pytest

from engine.core.text.plan import DRAFTING_STEP_MAX
from engine.core.text.step_times import CHUNK_MIN, KEPT, TOKENS_EACH
from engine.errors import DeadlineInfeasible
from tests.support.core_driver import Driver, make_request
from tests.support.step_times import note, step_times

BUDGET = 100


# ---- measurements


def test_one_accident_changes_nothing_and_five_steps_of_a_slower_machine_all():
    times = step_times(BUDGET, beside_s=0.05)
    for _ in range(KEPT):
        note(times, 0.01, decodes=4)
        note(times, 0.05, decodes=4, prompt=40)
    for decodes, prompt in ((4, 0), (4, 40)):
        note(times, 60.0, decodes=decodes, prompt=prompt)
        assert times.decodes_s(4) == 0.01
        assert times.prompt_tokens(BUDGET, 4, 4) == 40
    for _ in range(4):
        note(times, 0.02, decodes=4)
    assert times.decodes_s(4) == 0.02


# ---- how long a prompt takes at least


def test_without_a_measurement_nothing_takes_time():
    assert step_times().least_s(10**6) == step_times().decodes_s(3) == 0.0


@pytest.mark.parametrize("budget", [2, 3, 64, 100, 2048, 3000])
def test_a_prompt_is_compared_with_steps_as_large_as_its_largest_chunk_only(budget):
    for step in {*range(2, budget + 1, max(1, budget // 100)), budget - 1, budget} - {1}:
        times = step_times(budget)
        note(times, 1.0, prompt=step)
        known = [n for n in range(1, 3 * budget, max(1, budget // 50)) if times.least_s(n)]
        assert all(min(prompt, budget) <= step for prompt in known), step
        assert step < budget or 3 * budget - max(1, budget // 50) <= max(known)


def test_the_shortest_time_counts_not_the_last():
    times = step_times(BUDGET)
    for seconds in (2.0, 1.0, 4.0):
        note(times, seconds, prompt=BUDGET)
    assert times.least_s(300) == 3.0
    assert times.least_s(50) == 0.5


@pytest.mark.parametrize("target", [0.0, 0.3, 0.9])
@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.0, 0.01), (0.5, 0.01), (1.0, 0.0)])
def test_an_estimate_is_never_above_what_a_prompt_takes_of_fixed_and_linear_cost(
    fixed_s, token_s, target
):
    times = step_times(BUDGET, step_s=target)
    note(times, fixed_s + token_s, decodes=1)
    for _ in range(5):
        most = times.prompt_tokens(BUDGET, 1, 0)
        note(times, fixed_s + token_s * most, prompt=most)
    for step in range(2, most + 1):
        note(times, fixed_s + token_s * step, prompt=step)
        for prompt in range(1, 250, 7):
            chunks = -(-prompt // times.prompt_tokens(BUDGET, 1, 0))
            assert times.least_s(prompt) <= fixed_s * chunks + token_s * prompt + 1e-9
    assert times.least_s(BUDGET) > 0.9 * token_s * BUDGET


def test_refusals_weaken_an_old_measurement_until_there_is_a_new_one():
    times = step_times(BUDGET)
    note(times, 20.0, prompt=BUDGET)  # an outlier: usually such a step takes 1 s
    tries = 0
    while times.least_s(BUDGET) > 5.0:
        times.note_refusal(BUDGET)
        note(times, 1.0, prompt=2)  # a small step says nothing about large ones
        tries += 1
    assert 1 < tries < 50
    note(times, 1.0, prompt=BUDGET)
    assert times.least_s(BUDGET) == 1.0


# ---- prompt tokens of steps without decodes


@pytest.mark.parametrize("budget", [3, 9, 64, 2048, 3000])
@pytest.mark.parametrize("token_s", [1e-5, 1e-4, 1e-3, 0.1])
def test_a_steps_prompts_take_the_time_a_step_should_take_within_an_eighth_of_the_budget(
    budget, token_s
):
    times = step_times(budget, step_s=0.2)
    assert times.prompt_tokens(budget, 1, 0) == budget
    note(times, token_s, decodes=1)
    for _ in range(5):  # the number at most doubles with each step
        count = times.prompt_tokens(budget, 1, 0)
        note(times, token_s * count, prompt=max(2, count))
    least, should_take = max(2, -(-budget // 8)), max(0.2, 4 * token_s)
    assert min(least, CHUNK_MIN) <= count <= budget
    assert count <= max(least, CHUNK_MIN) or count * token_s <= should_take * (1 + 1e-9)
    assert count == budget or (count + 1) * token_s > should_take * (1 - 1e-9)


def test_a_slow_step_makes_the_next_ones_small_and_fast_ones_of_those_end_it():
    times, counts = step_times(800, step_s=0.2), []
    note(times, 0.01, decodes=1)
    note(times, 20.0, prompt=800)  # an outlier
    for _ in range(4):
        counts.append(times.prompt_tokens(800, 1, 0))
        note(times, counts[-1] / 2000, prompt=counts[-1])
    assert counts == [100, 200, 400, 400]
    assert times.least_s(8000) == pytest.approx(4.0), "no step is as large as the first again"


@pytest.mark.parametrize("target", [0.0, float("inf")])
def test_no_target_and_an_infinite_one_bound_nothing(target):
    times = step_times(800, step_s=target, beside_s=target)
    note(times, 20.0, prompt=800)
    note(times, 20.0, decodes=3)
    assert times.prompt_tokens(800, 1, 0) == times.prompt_tokens(800, 1, 3) == 800


def test_steps_that_cost_much_whatever_they_compute_are_not_made_small():
    times = step_times(800, step_s=0.2)
    for work in ({"decodes": 1}, {"prompt": 400}, {"prompt": 800}):
        note(times, 0.5, **work)
    assert times.prompt_tokens(800, 1, 0) == times.prompt_tokens(800, 3, 2) == 800


@pytest.mark.parametrize("decodes", [0, 3])
def test_a_size_that_was_never_measured_bounds_no_step(decodes):
    """A step below an eighth of the budget does not bound large steps; the first large step bounds
    larger ones. Beside decodes, steps grow by doubling."""
    times = step_times(800, step_s=0.2, beside_s=0.2)
    note(times, 0.01, decodes=1)
    note(times, 0.1, prompt=99)
    assert times.prompt_tokens(800, 4, decodes) == (100 if decodes else 800)
    note(times, 0.1, prompt=100)
    assert times.prompt_tokens(800, 4, decodes) == (190 if decodes else 200)


def test_before_a_step_of_decodes_alone_the_shortest_step_with_prompts_is_the_shortest():
    """Red if steps with a high fixed cost are made small, which hardly makes them faster."""
    times = step_times(800, step_s=0.2)
    for seconds, prompt in ((0.5, 800), (0.4, 400), (0.6, 800)):
        note(times, seconds, prompt=prompt)
    assert times.prompt_tokens(800, 1, 0) == 800
    note(times, 0.01, decodes=1)
    assert times.prompt_tokens(800, 1, 0) == 200


# ---- the prompts of a step beside decodes


def test_costs_that_change_are_followed():
    """The cost of a token may change, as that of attention does with the length of the context."""
    times, counts = step_times(beside_s=0.05), []
    for token_s in [1e-3] * 30 + [2e-3] * 30 + [5e-4] * 30:
        note(times, 0.01, decodes=4)
        counts.append(times.prompt_tokens(2048, 4, 4))
        note(times, 0.01 + token_s * counts[-1], prompt=counts[-1], decodes=4)
    assert counts[29::30] == pytest.approx([40, 20, 80], rel=0.1)


def test_a_size_whose_smallest_step_takes_too_long_is_left():
    """Steps of 32 tokens and of 31 are of different sizes. Once steps of 32 take too long, steps
    become smaller, although steps of 31 were fast when they were measured last."""
    times, counts = step_times(beside_s=0.05), []
    for count, token_s in [(31, 1e-3), (32, 2e-3)]:
        note(times, 0.01, decodes=4)
        note(times, 0.01 + token_s * count, prompt=count, decodes=4)
    for _ in range(10):
        counts.append(times.prompt_tokens(2048, 4, 4))
        note(times, 0.01 + 2e-3 * counts[-1], prompt=counts[-1], decodes=4)
    assert counts[-1] == pytest.approx(20, rel=0.1), counts


def test_many_sequences_have_some_tokens_each_within_the_limit():
    times = step_times(beside_s=0.02)
    note(times, 1.0, prompt=1000)
    note(times, 0.014, decodes=8)
    assert times.prompt_tokens(2048, 8, 8) == CHUNK_MIN
    assert times.prompt_tokens(2048, 60, 8) == 60 * TOKENS_EACH
    assert times.prompt_tokens(100, 60, 8) == 100


@pytest.mark.parametrize("known", [4, DRAFTING_STEP_MAX])
def test_more_decodes_than_were_measured_count_as_those_that_were(known):
    times = step_times(beside_s=0.1)
    note(times, 1.0, prompt=1000)
    note(times, 0.04, decodes=known)
    assert times.prompt_tokens(2048, 4, known) == times.prompt_tokens(2048, 30, 2 * known) == 60
    assert times.prompt_tokens(2048, 1, known - 1) == 100, "fewer were never measured"


def test_steps_that_encode_images_say_nothing_of_prompts():
    times = step_times(beside_s=0.02)
    note(times, 60.0, prompt=100, image_cost=40)
    assert times.prompt_tokens(2048, 1, 1) == 2048
    assert times.least_s(100) == 0.0


# ---- in the scheduler


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
    prompt = [*range(1, 65), *OTHER]  # the first 64 tokens are cached
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
    driver = measured(step_time_target_s=0.5, prepared_plans=prepared_plans)  # 64 tokens/s
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


@pytest.mark.parametrize("prepared_plans", [False, True])
def test_a_prompt_beside_an_answer_is_computed_in_small_steps_and_alone_in_large_ones(
    prepared_plans,
):
    driver = Driver(
        max_num_batched_tokens=512,
        max_model_len=1024,
        max_num_seqs=8,
        inter_token_target_s=0.1,
        prepared_plans=prepared_plans,
    )
    counts = []

    def step():
        plan = driver.begin_step()
        counts.append(sum(row.count for row in plan.rows if row.count > 1))
        driver.now += 0.01 + counts[-1] * 1e-3
        driver.end_step()

    driver.submit(make_request("answer", range(1, 129), max_tokens=100))
    for _ in range(5):
        step()
        driver.read("answer")
    assert counts == [128, 0, 0, 0, 0]
    driver.submit(make_request("prompt", range(1000, 1400), max_tokens=1))
    for _ in range(20):
        step()
        driver.read("answer")
    beside = [count for count in counts[5:] if count]
    assert sum(beside) == 400
    assert len(beside) >= 4
    assert max(beside) <= 120
