"""The scheduler's checks of its inputs, and its statistics. `tests/golden` tests its decisions,
`tests/property` the laws that always hold."""

from types import SimpleNamespace

import pytest

from engine.core.common.events import Pause, PauseMode, Resume, StepDone, StepFailed
from engine.core.common.phases import Phase
from engine.core.common.step_budget import CLEAN_STEPS
from engine.core.common.steps import FailureKind, StepFailure
from engine.core.common.types import EndReason, RequestId
from engine.core.text import admission
from engine.core.text.admission import _has_tokens_left
from engine.core.text.plan import SCORED_TOKENS_MAX, RowResult, StepResult
from engine.core.text.types import ObservePrefixes, Preempted, Sampling, Tokens
from engine.errors import DeadlineInfeasible, EngineBug, Overloaded
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.support.core_driver import Driver, make_request


@pytest.fixture
def driver():
    """Return a driver with small steps."""
    return Driver(block_size=4, max_num_seqs=4, max_num_batched_tokens=16, prepared_plans=False)


def begun(driver, count=1):
    """Submit requests, begin a step, and return its plan."""
    for index in range(count):
        first = 10 * index + 1
        driver.submit(make_request(f"r{index}", range(first, first + 5), max_tokens=3))
    return driver.begin_step()


def test_one_plan_at_a_time(driver):
    begun(driver)
    with pytest.raises(EngineBug, match="internal"):
        driver.scheduler.plan(0.0)


def test_a_result_belongs_to_the_plan_in_flight(driver):
    plan = begun(driver)
    stranger = plan.plan_id + 1
    failure = StepFailure(stranger, FailureKind.ERROR, "")
    for event in (StepDone(StepResult(stranger, ())), StepFailed(failure)):
        with pytest.raises(EngineBug):
            driver.apply(event)
    driver.end_step()  # neither error changed anything
    with pytest.raises(EngineBug):
        driver.apply(StepDone(StepResult(plan.plan_id, ())))
    driver.run()
    driver.check_tokens()
    driver.check_idle()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_rows_result_names_its_sequence(driver, steps):
    plan = begun(driver)
    for _ in range(steps):  # the first step ends with the prompt, the others are decodes
        driver.end_step()
        plan = driver.begin_step()
    result = StepResult(plan.plan_id, (RowResult(plan.rows[0].sequence + 1, (7,), "<7>"),))
    with pytest.raises(EngineBug) as caught:
        driver.apply(StepDone(result))
    assert "came in the row of" in caught.value.log_detail


def test_a_row_that_samples_gives_a_token(driver):
    plan = begun(driver)
    with pytest.raises(EngineBug) as caught:
        driver.apply(StepDone(StepResult(plan.plan_id, (RowResult(plan.rows[0].sequence),))))
    assert "got none" in caught.value.log_detail


def test_the_queues_estimate_follows_the_measured_rate():
    driver = Driver(max_queued_requests=2, max_num_seqs=1, max_num_batched_tokens=200)
    driver.submit(make_request("warm", range(100), max_tokens=5))
    for _ in range(5):
        driver.begin_step()
        driver.now += 10.0
        driver.end_step()
    rate = 0.0  # 100 tokens in 10 s, then 1 token in each 10 s; a new rate weighs one fifth
    for tokens in (100, 1, 1, 1, 1):
        rate += 0.2 * (tokens / 10.0 - rate)
    driver.submit(make_request("a", range(4), arrival=driver.now))
    driver.submit(make_request("b", range(9), arrival=driver.now))
    driver.submit(make_request("c", range(9), arrival=driver.now))
    error = driver.refused["c"].error
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == pytest.approx(13 / rate)


def test_a_scored_prompt_is_computed_whole_within_the_bound_on_logits():
    """A scored prompt takes nothing from the prefix cache; others find its blocks there.

    The fake runner raises if a plan asks for log-probabilities of tokens that no plan has computed.
    """
    driver = Driver(
        block_size=4, num_blocks=400, max_model_len=400, max_num_seqs=8, max_num_batched_tokens=256
    )
    prompt = range(150)
    driver.submit(make_request("plain", prompt))
    driver.run()
    scored = Sampling(temperature=0.0, prompt_logprobs=2)
    for name in ("a", "b", "c"):
        driver.submit(make_request(name, prompt, sampling=scored, n=2))
    driver.submit(make_request("plain too", prompt))
    spent = []
    while (plan := driver.begin_step()) is not None:
        rows = [row for row in plan.rows if row.logits.scores]
        spent.append(sum(row.count for row in rows))
        assert spent[-1] <= SCORED_TOKENS_MAX + len(rows)
        driver.now += 0.01
        driver.end_step()
        for name in driver.requests:
            driver.read(name)
    assert sum(spent) >= 3 * 149
    assert max(spent) >= SCORED_TOKENS_MAX
    cached = {name: driver.finished[name, 0].usage.cached_tokens for name in driver.requests}
    assert cached == {"plain": 0, "a": 0, "b": 0, "c": 0, "plain too": 148}
    told = [event for event in driver.log if isinstance(event, Tokens) and event.prompt_logprobs]
    assert [(event.request_id, event.choice) for event in told] == [("a", 0), ("b", 0), ("c", 0)]
    assert all([e.token_id for e in event.prompt_logprobs] == [*prompt] for event in told)
    driver.check_tokens()
    driver.check_idle()


def test_one_scored_prompt_does_not_hold_up_another():
    driver = Driver(
        block_size=4,
        num_blocks=400,
        max_model_len=400,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        prepared_plans=False,
    )
    scored = Sampling(temperature=0.0, prompt_logprobs=0)
    driver.submit(make_request("long", range(390), sampling=scored))
    driver.begin_step()
    driver.end_step()
    driver.submit(make_request("short", range(5), sampling=scored))
    for _ in range(5):  # one token of the prompt in each step
        assert ("short", 0) not in driver.tokens
        driver.step()
    assert ("short", 0) in driver.tokens
    assert ("long", 0) not in driver.tokens
    driver.run()
    driver.check_tokens()


def test_a_preempted_scored_prompt_is_reported_once_and_then_comes_from_the_cache():
    driver = Driver(
        block_size=4, num_blocks=40, max_model_len=150, max_num_seqs=4, max_num_batched_tokens=64
    )
    scored = Sampling(temperature=0.0, prompt_logprobs=0)
    driver.submit(make_request("low", range(90), sampling=scored, priority=5, max_tokens=20))
    while ("low", 0) not in driver.tokens:
        driver.step()
    driver.submit(make_request("high", range(200, 290), priority=0, max_tokens=20))
    driver.run()
    assert any(isinstance(event, Preempted) for event in driver.log)
    told = [event for event in driver.log if isinstance(event, Tokens) and event.prompt_logprobs]
    assert [event.request_id for event in told] == ["low"]
    driver.check_tokens()
    driver.check_idle()


def test_a_scored_prompt_is_infeasible_even_if_all_of_it_is_cached():
    driver = Driver(
        block_size=4, num_blocks=400, max_model_len=400, max_num_seqs=8, max_num_batched_tokens=250
    )
    driver.submit(make_request("warm", range(250), max_tokens=1))
    driver.begin_step()
    driver.now += 10.0  # the measured rate is 25 tokens a second
    driver.end_step()
    for name, asked in (("plain", None), ("scored", 0)):
        sampling = Sampling(temperature=0.0, prompt_logprobs=asked)
        deadline = driver.now + 1.0
        driver.submit(make_request(name, range(250), sampling=sampling, deadline=deadline))
    assert [*driver.refused] == ["scored"]
    assert isinstance(driver.refused["scored"].error, DeadlineInfeasible)


def test_statistics_count_what_happened(driver):
    begun(driver, 3)
    stats = driver.scheduler.statistics()
    assert (stats.running, stats.waiting, stats.parked, stats.ending) == (3, 0, 0, 0)
    assert (stats.step_count, stats.step_rows_total, stats.prompt_tokens_total) == (1, 3, 15)
    driver.cancel("r0")
    stats = driver.scheduler.statistics()
    assert (stats.running, stats.ending) == (2, 1)
    assert stats.free_blocks == stats.total_blocks - 6
    driver.end_step()
    driver.run()
    stats = driver.scheduler.statistics()
    assert (stats.completion_tokens_total, stats.late_results, stats.preemptions) == (6, 1, 0)
    assert stats.step_rows_total == 3 + 2 + 2
    assert (stats.free_blocks, stats.cached_blocks) == (stats.total_blocks, 2)
    assert (stats.prefix_queries, stats.prefix_hits) == (15, 0)
    driver.submit(make_request("again", range(11, 16), max_tokens=1))
    driver.run()
    stats = driver.scheduler.statistics()
    assert (stats.prefix_queries, stats.prefix_hits) == (20, 4)
    assert driver.finished["again", 0].usage.cached_tokens == 4
    driver.check_idle()


def test_the_peak_of_the_queue_stays_when_the_queue_is_empty_again(driver):
    assert driver.scheduler.statistics().peak_waiting == 0
    for index in range(7):
        driver.submit(make_request(f"r{index}", [index + 1], max_tokens=2))
    driver.run()
    driver.submit(make_request("alone", [9], max_tokens=2))
    stats = driver.scheduler.statistics()
    assert (stats.waiting, stats.peak_waiting) == (1, 7)


def test_phases_add_up_to_a_choices_life(driver):
    driver.submit(make_request("r", range(1, 40), max_tokens=3), buffer=1)
    driver.tick(1.0)  # a second in the queue
    while not driver.tokens:  # three steps of prefill
        driver.begin_step()
        driver.now += 0.5
        driver.end_step()
    driver.tick(2.0)
    assert driver.begin_step() is None  # parked from now on: the stream is full
    driver.tick(4.0)
    assert driver.scheduler.explain("r", driver.now).parked_s == 4.0
    driver.read("r")
    driver.tick(8.0)
    driver.begin_step()
    driver.now += 0.5
    driver.end_step()
    assert driver.scheduler.is_live("r")
    driver.cancel("r")
    assert not driver.scheduler.is_live("r")
    seconds = driver.finished["r", 0].timings
    assert (seconds.queue_s, seconds.prefill_s, seconds.parked_s) == (1.0, 1.5, 4.0)
    assert seconds.decode_s == 2.0 + 8.0 + 0.5
    assert driver.finished["r", 0].phase is Phase.DECODE


def test_a_start_that_was_prepared_and_discarded_counts_as_waiting():
    driver = Driver(block_size=4, max_num_seqs=2, max_num_batched_tokens=4)
    for name, first in (("running", 1), ("waiting", 11)):
        driver.submit(make_request(name, range(first, first + 4), max_tokens=4))
    driver.begin_step()
    assert driver.scheduler._prepared.started
    driver.apply(Pause(PauseMode.KEEP))
    driver.end_step()
    assert driver.begin_step() is None
    driver.tick(2.0)
    driver.apply(Resume())
    driver.run()
    assert driver.finished["waiting", 0].timings.queue_s >= 2.0


# ---- who gives way to the first of the queue -------------------------------------------------


def crowded(num_blocks, **config):
    """Return a driver whose blocks hold one token by default, so that counts are exact."""
    exact = {
        "block_size": 1,
        "max_model_len": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "prefix_cache": False,
        "prepared_plans": False,
    }
    return Driver(num_blocks=num_blocks, **(exact | config))


def preempted(driver):
    return [event.request_id for event in driver.log if isinstance(event, Preempted)]


@pytest.mark.parametrize("lacking", range(-1, 5))
def test_a_parked_request_gives_its_blocks_to_the_first_of_the_queue(lacking):
    driver = crowded(16)
    driver.submit(make_request("silent", range(1, 11), max_tokens=6), buffer=1)
    driver.step(read=False)
    driver.step(read=False)  # the stream is full: the request is parked, and keeps its blocks
    assert driver.scheduler.statistics().parked == 1
    length = driver.scheduler.statistics().free_blocks + lacking
    driver.submit(make_request("reader", range(20, 20 + length), max_tokens=2))
    plan = driver.begin_step()
    assert [one.prompt[0] for one in plan.admitted] == [20]
    driver.end_step()


def test_no_more_give_way_than_the_first_of_the_queue_needs():
    """Two later requests hold blocks, and the last request's blocks alone are enough."""
    driver = crowded(16)
    for name, arrival in (("a", 1.0), ("b", 2.0)):
        driver.submit(make_request(name, range(1, 8), max_tokens=4, arrival=arrival, priority=1))
    driver.step()
    free = driver.scheduler.statistics().free_blocks
    held = (16 - free) // 2
    driver.submit(make_request("first", range(30, 30 + free + held - 1), max_tokens=1, arrival=3.0))
    driver.begin_step()
    assert preempted(driver) == ["b"]
    assert driver.scheduler.statistics().preemptions == 1
    driver.end_step()


def test_no_more_give_way_than_a_running_sequence_needs():
    """Some blocks are free; the last request holds the missing ones."""
    driver = crowded(16)
    for name, arrival in (("older", 0.0), ("a", 1.0), ("b", 2.0)):
        driver.submit(make_request(name, (1, 2, 3), max_tokens=9, arrival=arrival))
    driver.step()
    ledger = driver.scheduler._ledger
    assert ledger.pool.num_free
    older, last = (ledger.requests[RequestId(name)].parent for name in ("older", "b"))
    count = ledger.pool.num_free + len(last.blocks)
    assert admission.victims_for_running(ledger, older, count) == [last]


def test_nobody_gives_way_if_the_first_of_the_queue_still_could_not_start():
    """The first of the queue needs two seats, and later requests hold only one."""
    driver = crowded(64, max_num_seqs=2)
    driver.submit(make_request("older", (1, 2), max_tokens=9, arrival=1.0))
    driver.submit(make_request("later", (3, 4), max_tokens=9, arrival=3.0, priority=1))
    driver.step()
    driver.submit(make_request("first", (5, 6), max_tokens=2, arrival=2.0, n=2))
    driver.step()
    assert preempted(driver) == []
    assert driver.scheduler.statistics().running == 2


@pytest.mark.parametrize(("new", "gives_way"), [(6, ["later"]), (7, []), (8, [])])
def test_blocks_that_the_first_of_the_queue_would_share_do_not_count_as_given_up(new, gives_way):
    """The later request holds four blocks, two of them cached blocks that the first of the queue
    would share. The first lacks ``new`` blocks, and preemption would free only two. Found by the
    simulator's seed 5086."""
    driver = crowded(
        24, block_size=4, max_model_len=96, max_num_batched_tokens=200, prefix_cache=True
    )
    driver.submit(make_request("older", range(100, 160), max_tokens=9))
    driver.submit(make_request("later", range(1, 17), max_tokens=9, arrival=1.0, priority=1))
    driver.step()
    prompt = [*range(1, 9), *range(200, 200 + 4 * new)]
    driver.submit(make_request("first", prompt, max_tokens=2, arrival=2.0))
    plan = driver.begin_step()
    assert preempted(driver) == gives_way
    assert [one.prompt for one in plan.admitted] == [tuple(prompt)] * len(gives_way)
    driver.end_step()


def test_a_long_scored_prompt_leaves_tokens_to_the_first_of_the_queue():
    """The long prompt is scored 64 tokens a step, however many are left.

    The step's other tokens, and a later request's blocks, are for the first of the queue.
    """
    driver = crowded(
        50, block_size=4, max_model_len=200, max_num_batched_tokens=90, prefix_cache=True
    )
    scored = Sampling(temperature=0.0, prompt_logprobs=0)
    driver.submit(make_request("scored", range(1, 161), max_tokens=1, sampling=scored))
    driver.submit(make_request("later", range(200, 216), max_tokens=9, arrival=1.0, priority=1))
    driver.step()
    driver.submit(make_request("first", range(220, 244), max_tokens=2, arrival=2.0))
    plan = driver.begin_step()
    assert preempted(driver) == ["later"]
    assert [one.prompt[0] for one in plan.admitted] == [220]
    driver.end_step()


def test_nobody_gives_way_to_a_request_whose_place_in_the_queue_is_outdated():
    """Both requests are old enough for the next priority level, which the queue notices only when
    it is sorted, once a second. A request that joins the queue before that is put in front too
    early. Found by the simulator's seed 602."""
    driver = crowded(16)
    driver.submit(make_request("older", range(1, 6), max_tokens=9), buffer=1)
    driver.step(read=False)
    driver.step(read=False)  # the stream is full: the request is parked, and keeps its blocks
    driver.now = 9.5
    driver.submit(make_request("younger", range(20, 32), max_tokens=4))
    driver.step(read=False)
    driver.read("older")  # back in the queue, without blocks
    driver.now = 10.2
    driver.step(read=False)
    assert preempted(driver) == []
    driver.now = 10.6
    driver.step(read=False)
    assert preempted(driver) == ["younger"]
    assert driver.scheduler.phase_of("older") in (Phase.PREFILL, Phase.DECODE)


@pytest.mark.parametrize(("prompt_limit", "is_pending"), [(2, True), (1, False)])
def test_the_last_two_tokens_of_a_running_prompt_complete_a_block_for_the_next_one(
    prompt_limit, is_pending
):
    driver = Driver(block_size=4, max_num_seqs=2, max_num_batched_tokens=6, prepared_plans=False)
    driver.submit(make_request("runs", range(1, 9), max_tokens=2))
    driver.step()  # computes six tokens of the prompt
    driver.submit(make_request("waits", range(1, 13), max_tokens=2))
    ledger = driver.scheduler._ledger
    first = ledger.requests["waits"].parent
    matched = admission.match(ledger, first)
    assert len(matched) == 1
    assert admission._will_be_pending(ledger, first, matched, prompt_limit) is is_pending


def test_a_cached_prefix_counts_once_against_the_free_blocks():
    """The request starts: it needs nearly all blocks, of which two thirds are cached."""
    driver = crowded(16, max_num_seqs=2, prefix_cache=True)
    driver.submit(make_request("before", range(1, 12), max_tokens=1))
    driver.run()
    driver.submit(make_request("after", range(1, 16), max_tokens=1))
    assert driver.step()
    assert driver.scheduler.statistics().prefix_hits == 11
    driver.run()
    driver.check_idle()


# ---- out of memory (D17) ---------------------------------------------------------------------


def out_of_memory(driver):
    """Make the next step run out of memory."""
    driver.begin_step()
    driver.fail_step(FailureKind.OUT_OF_MEMORY)


def test_the_only_prompt_in_a_step_is_not_preempted_when_memory_runs_out(driver):
    driver.submit(make_request("only", range(1, 41)))
    driver.step()  # a step of 16 prompt tokens
    out_of_memory(driver)
    assert preempted(driver) == []
    assert driver.scheduler.statistics().running == 1


def test_each_request_has_its_own_tries_when_memory_stays_short(driver):
    """Of two requests, each is ended when memory is short at its fourth try."""
    for name, arrival in (("a", 1.0), ("b", 2.0)):
        driver.submit(make_request(name, range(1, 4), arrival=arrival))
    for times in range(1, 9):
        out_of_memory(driver)
        assert len(driver.finished) == times // 4


def test_the_chunk_budget_comes_back_by_halves_after_so_many_clean_steps(driver):
    driver.submit(make_request("r", range(1, 30), max_tokens=60))
    driver.step()
    for _ in range(2):
        out_of_memory(driver)
    limits = []
    for _ in range(2 * CLEAN_STEPS + 1):
        limits.append(driver.scheduler._budget.tokens)
        driver.step()
    assert limits == [4] * CLEAN_STEPS + [8] * CLEAN_STEPS + [16]


def test_a_choice_whose_fork_ran_out_of_memory_is_queued_from_then_on(driver):
    driver.runner.script.step_faults[0] = MemoryError("drawn")
    driver.submit(make_request("r", range(1, 5), max_tokens=2, n=2))
    assert driver.step(seconds=0.0)
    driver.tick(2.0)
    driver.run()
    assert driver.finished["r", 1].timings.queue_s == 2.0


@pytest.mark.parametrize(("length", "fits"), [(12, True), (13, False), (3, True)])
def test_a_prompt_of_whole_blocks_needs_no_copies_for_its_choices(length, fits):
    driver = Driver(block_size=4, num_blocks=4, max_model_len=16, max_num_batched_tokens=1024)
    driver.submit(make_request("r", range(1, length + 1), max_tokens=1, n=3))
    assert ("r" not in driver.refused) == fits


# ---- views -----------------------------------------------------------------------------------


def test_the_phase_of_a_request_is_where_its_first_choice_is(driver):
    phase_of = driver.scheduler.phase_of
    assert phase_of("r") is None
    driver.submit(make_request("r", range(1, 25), max_tokens=3, n=2), buffer=2)
    assert phase_of("r") is Phase.QUEUED
    driver.step(read=False)  # 16 of the prompt's 24 tokens
    assert phase_of("r") is Phase.PREFILL
    driver.step(read=False)
    assert phase_of("r") is Phase.DECODE
    driver.step(read=False)  # the stream is full with one message of each choice
    assert phase_of("r") is Phase.PARKED
    driver.read("r")
    driver.run()
    assert phase_of("r") is None


def test_blocks_computed_again_after_a_preemption_are_found_by_others():
    driver = crowded(16, block_size=2, max_model_len=32, max_num_seqs=4, prefix_cache=True)
    driver.submit(make_request("late", range(1, 13), max_tokens=9, arrival=2.0, priority=1))
    driver.step()
    driver.step()
    driver.submit(make_request("first", range(50, 77), max_tokens=1, arrival=3.0))
    while ("first", 0) not in driver.finished:  # "first" takes all blocks, cached ones too
        driver.step()
    assert preempted(driver) == ["late"]
    driver.step()
    hits = driver.scheduler.statistics().prefix_hits
    driver.submit(make_request("twin", range(1, 13), max_tokens=1, arrival=4.0))
    driver.step()
    assert driver.scheduler.statistics().prefix_hits - hits == 10  # all full blocks but the last
    driver.run()
    driver.check_tokens()
    driver.check_idle()


def test_an_observer_hears_of_each_block_with_its_own_tokens_and_its_parent(driver):
    heard = []
    observer = SimpleNamespace(
        stored=lambda key, parent, tokens: heard.append((key, parent, [*tokens]))
    )
    driver.apply(ObservePrefixes(observer))
    driver.submit(make_request("r", range(1, 13), max_tokens=1))
    driver.run()
    assert [tokens for _, _, tokens in heard] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    keys = [key for key, _, _ in heard]
    assert [parent for _, parent, _ in heard] == [None, *keys[:-1]]


def test_under_wait_a_running_request_that_lost_its_blocks_still_finishes():
    driver = Driver(num_blocks=6, block_size=4, max_model_len=24, max_num_seqs=4)
    for name in ("a", "b"):
        driver.submit(make_request(name, range(1, 9), max_tokens=12, bypass_prefix_cache=True))
    driver.step()
    driver.apply(Pause(PauseMode.WAIT))
    driver.submit(make_request("c", range(1, 5)))
    driver.run()
    assert driver.scheduler.statistics().preemptions > 0
    assert driver.finished["a", 0].reason is EndReason.LENGTH
    assert driver.finished["b", 0].reason is EndReason.LENGTH
    assert driver.refused["c"].error.reason == "PAUSED"
    driver.check_tokens()
    driver.check_idle()


def test_under_wait_a_request_that_has_not_begun_waits_for_the_resume():
    driver = Driver(max_num_seqs=1)
    for name in ("a", "b"):
        driver.submit(make_request(name, range(1, 9)))
    driver.step()
    driver.apply(Pause(PauseMode.WAIT))
    driver.run()
    assert ("a", 0) in driver.finished
    assert ("b", 0) not in driver.finished
    driver.apply(Resume())
    driver.run()
    assert ("b", 0) in driver.finished


def test_a_device_with_little_memory_does_not_run_out_at_every_other_step():
    def too_many(plan):
        return MemoryError("device") if plan.num_tokens > 16 else None

    runner = FakeRunner(num_blocks=64, max_model_len=512, script=FakeScript(plan_fault=too_many))
    driver = Driver(runner=runner, max_model_len=512, max_num_seqs=2, max_num_batched_tokens=64)
    driver.submit(make_request("a", range(1, 321), max_tokens=4))
    driver.run()
    # 20 chunks of 16 tokens; after every 16 steps without an error, a chunk of 32 is tried.
    assert runner.steps <= 20 + 4 + 6
    driver.check_tokens()


# ---- explaining, and the parts of a decision that no other test sees


def test_a_waiting_request_says_what_it_waits_for():
    driver = Driver(
        num_blocks=6, block_size=4, max_model_len=24, max_num_seqs=4, prepared_plans=False
    )

    def said(name):
        explained = driver.scheduler.explain(name, driver.now)
        return explained.state, explained.waiting_for, explained.position

    driver.submit(make_request("a", range(1, 17), max_tokens=3))
    driver.submit(make_request("b", range(101, 117), max_tokens=3))
    driver.submit(make_request("c", range(201, 217), max_tokens=3))
    assert said("a") == ("WAITING", "a step", 1)
    assert said("b") == ("WAITING", "token budget: the next steps compute what is ahead", 2)
    driver.begin_step()
    state, reason, position = said("b")
    assert (state, position) == ("WAITING", 1)
    assert reason == "KV blocks: 3 are lacking, 2 are free"
    assert said("c")[1] == reason  # "c" waits for the same reason


def test_a_pause_leaves_no_estimate_of_when_a_request_starts():
    driver = Driver(block_size=4, max_num_seqs=1, prepared_plans=False)
    driver.submit(make_request("before", [1, 2], max_tokens=3))
    driver.run()
    for name in ("runs", "waits"):
        driver.submit(make_request(name, [3, 4], max_tokens=30))
    driver.step()
    assert driver.scheduler.explain("waits", driver.now).estimate_s > 0
    assert driver.scheduler.explain("runs", driver.now).estimate_s is None
    driver.apply(Pause(PauseMode.KEEP))
    assert driver.scheduler.explain("waits", driver.now).estimate_s is None


def running(*prompts, decodes=0):
    """Return running sequences with these numbers of prompt tokens left, and ``decodes``
    decodes."""
    counts = [*prompts, *[1] * decodes]
    return [SimpleNamespace(num_tokens=n, num_computed=0, is_scoring=False) for n in counts]


@pytest.mark.parametrize(
    ("prompts", "decodes", "budget", "limit", "is_left"),
    [
        ([], 0, 16, 16, True),
        ([15], 0, 16, 16, True),
        ([16], 0, 16, 16, False),
        ([14], 1, 16, 16, True),
        ([15], 1, 16, 16, False),
        ([2], 1, 3, 3, False),
        ([4], 0, 16, 5, True),
        ([5], 0, 16, 5, False),
        ([], 16, 16, 16, False),
    ],
)
def test_running_prompts_leave_tokens_of_a_step(prompts, decodes, budget, limit, is_left):
    ledger = SimpleNamespace(
        config=SimpleNamespace(max_num_batched_tokens=budget),
        running=running(*prompts, decodes=decodes),
        num_background=0,
    )
    assert _has_tokens_left(ledger, [], limit, None) == is_left
    with_victim = [*ledger.running, *running(100)]
    ledger.running = with_victim
    assert _has_tokens_left(ledger, with_victim[-1:], limit, None) == is_left
