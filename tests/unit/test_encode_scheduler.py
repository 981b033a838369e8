"""The encode scheduler, one decision at a time."""

import pytest

from engine.core.common.credit import Credit
from engine.core.common.events import Pause, PauseMode, Resume, StepDone, Submit
from engine.core.common.phases import Phase
from engine.core.common.steps import FailureKind
from engine.core.common.types import EndReason, PlanId, RequestId
from engine.core.encode.types import EncodeInput, EncodeRequest, EncodeResult, InputKind
from engine.errors import (
    DuplicateRequest,
    EngineBug,
    Overloaded,
    Paused,
    RequestTooLarge,
)
from engine.worker.fakes.encode import FakeEncoder
from tests.support.encode_driver import Apart, EncodeDriver, Picture


def lengths(plan):
    return [row.input.num_tokens for row in plan.rows]


def test_requests_share_a_step_sorted_by_length():
    driver = EncodeDriver(max_num_batched_tokens=100)
    driver.submit("a", [5, 2])
    driver.submit("b", [3])
    assert lengths(driver.begin_step()) == [2, 3, 5]


def test_padding_counts_against_the_budget():
    driver = EncodeDriver(max_num_batched_tokens=20)
    driver.submit("a", [10, 1, 1])
    assert lengths(driver.begin_step()) == [1, 10]
    driver.end_step()
    assert lengths(driver.begin_step()) == [1]


def test_queries_beside_inputs_count_once_in_a_step_and_in_a_request():
    """Each has a query of 16 tokens. Without their count, all six would be in one step."""
    driver = EncodeDriver(max_num_batched_tokens=37)
    one, other = (EncodeInput((first, *range(15))) for first in (50, 51))
    driver.submit("a", [Apart(2, one)] * 3)
    driver.submit("b", [Apart(2, other)] * 2)
    driver.submit("c", [Apart(2, one)])
    assert driver.requests["a"].num_tokens == 22
    assert driver.scheduler.phase_of("b") is Phase.QUEUED
    plan = driver.begin_step()
    assert lengths(plan) == [2, 2, 2]
    assert plan.num_tokens == 22
    driver.end_step()
    plan = driver.begin_step()
    assert (lengths(plan), plan.num_tokens) == ([2, 2], 20)
    driver.end_step()
    driver.run()
    assert [len(plan.rows) for plan in driver.plans] == [3, 2, 1]


def test_a_query_that_others_have_does_not_keep_an_input_out():
    driver = EncodeDriver(max_num_batched_tokens=24)
    query = EncodeInput(tuple(range(16)))
    driver.submit("a", [Apart(2, query)])
    driver.submit("b", [Apart(2, query)])
    assert lengths(driver.begin_step()) == [2, 2]


def test_an_input_and_a_query_beyond_the_budget_have_a_step_of_their_own():
    driver = EncodeDriver(max_num_batched_tokens=8)
    driver.submit("a", [Apart(2, EncodeInput(tuple(range(30)))), 1])
    driver.run()
    assert [len(plan.rows) for plan in driver.plans] == [1, 1]


def test_a_step_has_at_most_so_many_inputs():
    driver = EncodeDriver(max_num_seqs=3)
    driver.submit("a", [1] * 5)
    assert lengths(driver.begin_step()) == [1, 1, 1]


def test_an_input_longer_than_the_budget_has_a_step_of_its_own():
    driver = EncodeDriver(max_num_batched_tokens=8)
    driver.submit("a", [1])
    driver.submit("b", [30])
    driver.submit("c", [1])
    assert lengths(driver.begin_step()) == [1]
    driver.end_step()
    assert lengths(driver.begin_step()) == [30]


def test_nobody_overtakes_a_request_that_does_not_fit_beside_the_first():
    driver = EncodeDriver(max_num_batched_tokens=20)
    driver.submit("a", [15])
    driver.submit("b", [12])
    driver.submit("c", [1])
    assert lengths(driver.begin_step()) == [15]
    driver.end_step()
    assert lengths(driver.begin_step()) == [12]


def test_priority_decides_then_arrival_whatever_was_submitted_first():
    driver = EncodeDriver(max_num_seqs=1)
    driver.now = 5.0
    driver.submit("late", [1])
    driver.submit("early", [2], arrival=4.0)
    driver.submit("urgent", [3], priority=-1)
    order = []
    while driver.begin_step() is not None:
        order += lengths(driver.in_flight)
        driver.end_step()
    assert order == [3, 2, 1]


def test_waiting_raises_a_priority_by_a_level_in_ten_seconds():
    driver = EncodeDriver(max_num_seqs=1)
    driver.submit("old", [1], priority=1)
    driver.now = 10.0
    driver.submit("new", [2], priority=1)
    driver.submit("first", [3], priority=0)
    assert lengths(driver.begin_step()) == [1]  # "old", by now as urgent as "first"


def test_a_slow_reader_is_parked_and_costs_nobody_else_anything():
    driver = EncodeDriver(max_num_seqs=4)
    driver.submit("slow", [1] * 10, buffer=4)
    driver.submit("other", [2] * 6)
    driver.step(read=False)
    assert lengths(driver.begin_step()) == [2, 2, 2, 2]
    assert driver.scheduler.phase_of("slow") is Phase.PARKED
    driver.end_step()
    stats = driver.scheduler.statistics()
    assert (stats.parked, stats.waiting) == (6, 2)
    assert stats.queued_tokens == 4  # a parked request takes no room in the queue
    driver.step(read=False)
    assert driver.finished["other"].reason is EndReason.STOP


def test_a_parked_request_goes_on_when_there_is_room_for_half_its_stream():
    driver = EncodeDriver()
    driver.submit("slow", [1] * 10, buffer=5)
    driver.step(read=False)
    assert driver.begin_step() is None
    driver.read("slow", 1)
    driver.read("slow", 1)
    assert driver.begin_step() is None, "two slots make no batch"
    driver.read("slow", 1)
    assert lengths(driver.begin_step()) == [1, 1, 1]


def test_the_last_inputs_need_room_for_themselves_only():
    driver = EncodeDriver()
    driver.submit("slow", [1] * 6, buffer=5)
    driver.step(read=False)
    assert driver.begin_step() is None
    driver.read("slow", 1)
    assert lengths(driver.begin_step()) == [1]


def test_slots_that_a_failed_step_gives_back_are_not_waited_for():
    """The request's reader has read everything, so that the core gets no further ReaderDrained."""
    driver = EncodeDriver(max_num_batched_tokens=20)
    driver.submit("a", [20, *[1] * 9], buffer=4)
    driver.step(read=False)
    assert len(driver.begin_step().rows) == 3
    assert driver.scheduler.phase_of("a") is Phase.PARKED
    driver.read("a", 1)
    driver.fail_step(FailureKind.OUT_OF_MEMORY)
    driver.run()
    assert driver.finished["a"].reason is EndReason.STOP


def test_a_reader_that_takes_anything_is_not_stalled():
    driver = EncodeDriver(stall_timeout_s=30.0)
    driver.submit("slow", [1] * 10, buffer=5)
    driver.step(read=False)
    assert driver.begin_step() is None
    driver.tick(29.0)
    driver.read("slow", 1)
    driver.tick(29.0)
    assert "slow" not in driver.finished
    assert driver.scheduler.next_wakeup(driver.now) == pytest.approx(driver.now + 1.0)
    driver.tick(1.01)
    assert driver.finished["slow"].reason is EndReason.STALLED
    assert driver.finished["slow"].phase is Phase.PARKED
    driver.scheduler.check()


def test_a_stream_filled_by_one_step_is_not_parked_before_its_reader_could_read():
    driver = EncodeDriver(max_num_seqs=4)
    driver.submit("a", [1] * 9, buffer=4)
    assert len(driver.begin_step().rows) == 4
    assert driver.scheduler.phase_of("a") is Phase.ENCODE


def test_a_row_that_fails_ends_its_own_request_alone():
    driver = EncodeDriver()
    driver.submit("bad", [1, 1])
    driver.submit("good", [1, 1])
    plan = driver.begin_step()
    driver.runner.script.row_faults[plan.rows[0].sequence] = (0, "encode")
    driver.end_step()
    assert driver.finished["bad"].reason is EndReason.FAILED
    assert driver.finished["bad"].detail == "encode: scripted"
    assert driver.finished["good"].reason is EndReason.STOP


def test_each_row_of_a_failed_step_runs_alone_and_only_the_guilty_fails():
    guilty = []

    def fault(plan):
        if any(row.input in guilty for row in plan.rows):
            return RuntimeError("scripted")
        return None

    runner = FakeEncoder(max_model_len=64)
    runner.script.encode_fault = fault
    driver = EncodeDriver(runner=runner)
    driver.submit("bad", [3])
    driver.submit("good", [3, 2])
    guilty.append(driver.requests["bad"].inputs[0])
    driver.run()
    assert driver.finished["bad"].reason is EndReason.FAILED
    assert driver.finished["good"].reason is EndReason.STOP
    assert [len(plan.rows) for plan in driver.plans] == [3, 1, 1, 1]


def test_running_out_of_memory_halves_the_batch_until_it_fits():
    runner = FakeEncoder(max_model_len=64)
    runner.script.encode_fault = lambda plan: MemoryError() if plan.num_tokens > 10 else None
    driver = EncodeDriver(runner=runner, max_num_batched_tokens=64)
    driver.submit("a", [4] * 8)
    driver.run()
    assert driver.finished["a"].reason is EndReason.STOP
    assert [len(plan.rows) for plan in driver.plans] == [8, 4, 2, 2, 2, 2]
    driver.submit("b", [4] * 300)
    runner.script.encode_fault = None
    driver.run()
    assert max(len(plan.rows) for plan in driver.plans[6:]) == 16, "the budget came back"


def test_an_input_that_is_too_much_for_the_memory_alone_fails():
    runner = FakeEncoder(max_model_len=64)
    runner.script.encode_fault = lambda plan: MemoryError() if plan.num_tokens > 10 else None
    driver = EncodeDriver(runner=runner)
    driver.submit("large", [12])
    driver.submit("small", [4])
    driver.run()
    assert driver.finished["large"].reason is EndReason.FAILED
    assert driver.finished["large"].detail.startswith("memory: ")
    assert driver.finished["small"].reason is EndReason.STOP


@pytest.mark.parametrize("kind", FailureKind)
def test_a_request_that_ends_during_a_failed_step_is_not_run_again(kind):
    driver = EncodeDriver()
    driver.submit("gone", [2, 2])
    driver.submit("stays", [2])
    driver.begin_step()
    driver.cancel("gone")
    driver.fail_step(kind)
    driver.run()
    assert driver.finished["stays"].reason is EndReason.STOP
    assert driver.got["gone"] == []
    assert all(len(plan.rows) == 1 for plan in driver.plans[1:])


def test_a_row_of_a_failed_step_whose_request_is_parked_runs_alone_and_ends_it():
    """The request's stream is full, except for the slot that the failed step gave back."""
    driver = EncodeDriver(max_num_seqs=2)
    driver.submit("slow", [1] * 3, buffer=2)
    driver.submit("other", [1] * 3)
    driver.step(read=False)
    driver.read("slow", 1)
    assert len(driver.begin_step().rows) == 2  # one row of each request
    driver.fail_step()
    assert len(driver.begin_step().rows) == 1
    driver.end_step()
    assert len(driver.got["slow"]) == 3
    assert driver.finished["slow"].reason is EndReason.STOP
    driver.run()
    driver.check_idle()


def test_a_cancel_during_a_step_ends_the_request_at_once_and_drops_its_results():
    driver = EncodeDriver()
    driver.submit("a", [1, 1])
    driver.begin_step()
    driver.cancel("a")
    assert driver.finished["a"].reason is EndReason.CANCELLED
    assert driver.finished["a"].phase is Phase.ENCODE
    assert driver.scheduler.statistics().ending == 2
    assert not driver.scheduler.is_idle
    driver.end_step()
    assert driver.got["a"] == []
    assert driver.scheduler.statistics().late_results == 2
    driver.check_idle()


def test_nothing_is_computed_past_its_deadline():
    driver = EncodeDriver()
    driver.submit("late", [1], deadline=1.0)
    driver.now = 1.0
    assert driver.begin_step() is None
    driver.cancel("late", EndReason.DEADLINE)
    assert driver.finished["late"].phase is Phase.QUEUED


@pytest.mark.parametrize("mode", PauseMode)
def test_pauses(mode):
    driver = EncodeDriver(max_num_seqs=1)
    driver.submit("begun", [1, 1])
    driver.step()
    driver.submit("waits", [1])
    driver.apply(Pause(mode))
    driver.submit("new", [1])
    assert ("new" in driver.refused) == (mode is not PauseMode.KEEP)
    driver.run()
    ended = {name: event.reason for name, event in driver.finished.items()}
    assert (
        ended
        == {
            PauseMode.KEEP: {},
            PauseMode.WAIT: {"begun": EndReason.STOP},
            PauseMode.ABORT: {"begun": EndReason.ABORTED, "waits": EndReason.ABORTED},
        }[mode]
    )
    driver.apply(Resume())
    driver.run()
    assert set(driver.finished) | set(driver.refused) == {"begun", "waits", "new"}
    if mode is not PauseMode.KEEP:
        assert isinstance(driver.refused["new"].error, Paused)


def test_the_queue_is_bounded_in_requests_and_tokens():
    driver = EncodeDriver(max_queued_requests=2, max_queued_tokens=20)
    driver.submit("huge", [30, 30])  # beyond the bound, but alone in the queue
    driver.submit("one", [1])
    assert isinstance(driver.refused["one"].error, Overloaded)
    assert driver.refused["one"].error.retry_after_s >= 1.0
    assert "tokens" in str(driver.refused["one"].error)
    driver.run()
    for name in ("a", "b", "c"):
        driver.submit(name, [1])
    assert list(driver.refused) == ["one", "c"]
    assert "2 requests" in str(driver.refused["c"].error)


def test_other_refusals():
    driver = EncodeDriver(max_model_len=8)
    driver.submit("long", [1, 9])
    assert isinstance(driver.refused["long"].error, RequestTooLarge)
    assert driver.refused["long"].error.violations[0].field == "inputs[1]"
    driver.submit("twice", [1])
    again = Submit(driver.requests["twice"], Credit(1))
    [refused] = driver.scheduler.apply(again, driver.now)
    assert isinstance(refused.error, DuplicateRequest)


def test_a_result_for_another_plan_or_row_is_a_bug():
    driver = EncodeDriver()
    driver.submit("a", [1])
    plan = driver.begin_step()
    with pytest.raises(EngineBug) as caught:
        driver.scheduler.plan(driver.now)
    assert "still in flight" in caught.value.log_detail
    with pytest.raises(EngineBug) as caught:
        driver.scheduler.apply(StepDone(EncodeResult(PlanId(99), ())), driver.now)
    assert "not in flight" in caught.value.log_detail
    driver.submit("b", [1])
    driver.end_step()
    other = driver.begin_step()
    wrong = driver.runner.execute(plan)
    with pytest.raises(EngineBug) as caught:
        driver.scheduler.apply(StepDone(EncodeResult(other.plan_id, wrong.rows)), driver.now)
    assert "came in the row of" in caught.value.log_detail


def test_timings_add_up():
    driver = EncodeDriver(max_num_seqs=2)
    driver.submit("a", [1] * 4, buffer=2)
    driver.now = 1.0
    assert driver.scheduler.phase_of("a") is Phase.QUEUED
    assert not driver.scheduler.has_begun("a")
    assert driver.scheduler.is_live("a")
    driver.step(read=False)
    assert driver.scheduler.has_begun("a")
    assert driver.begin_step() is None  # the request is parked now
    driver.now = 3.0
    driver.read("a")
    driver.step()
    assert not driver.scheduler.is_live("a")
    timings = driver.finished["a"].timings
    assert timings.queue_s == pytest.approx(1.0)
    assert timings.parked_s == pytest.approx(1.99)
    assert timings.prefill_s == pytest.approx(0.02)


# ---- explaining


def test_an_encode_request_says_what_it_waits_for():
    driver = EncodeDriver(max_num_batched_tokens=10)
    driver.submit("a", [10, 10])
    driver.submit("b", [5])

    def said(name):
        explained = driver.scheduler.explain(name, driver.now)
        return explained.state, explained.waiting_for, explained.position

    assert said("a") == ("WAITING", "a step", 1)
    assert said("b") == ("WAITING", "token budget: the next steps compute what is ahead", 2)
    driver.begin_step()
    assert said("a") == ("RUNNING", "", 0)
    driver.apply(Pause(PauseMode.WAIT))
    assert said("a") == ("RUNNING", "", 0)  # a pause by WAIT lets running requests go on
    assert said("b")[:2] == ("WAITING", "resume: the model is paused (wait)")
    driver.apply(Resume())
    driver.apply(Pause(PauseMode.KEEP))
    assert said("a") == ("RUNNING", "resume: the model is paused (keep)", 0)
    assert said("b")[:2] == ("WAITING", "resume: the model is paused (keep)")


def test_the_peak_of_the_queue_counts_inputs_and_stays():
    """Inputs that return from a failed step, or from a slow reader, count again."""
    driver = EncodeDriver(max_num_seqs=4)
    driver.submit("a", [5, 2, 3])
    driver.submit("b", [3, 1])
    driver.begin_step()
    driver.fail_step()
    stats = driver.scheduler.statistics()
    assert (stats.waiting, stats.peak_waiting) == (5, 5)
    driver.run()
    driver.submit("slow", [1] * 6, buffer=2)
    driver.run()
    stats = driver.scheduler.statistics()
    assert (stats.parked, stats.waiting, stats.peak_waiting) == (0, 0, 6)
    driver.check_idle()


def test_the_tokens_of_all_accepted_requests_are_counted():
    driver = EncodeDriver(max_model_len=50)
    driver.submit("a", [5, 2])
    driver.submit("b", [3])
    driver.submit("too long", [51])
    assert driver.scheduler.statistics().prompt_tokens_total == 10


# ---- texts and images


def kinds(driver):
    """Return the kinds of all steps until nothing is left."""
    first = len(driver.plans)
    driver.run()
    return [plan.kind.value for plan in driver.plans[first:]]


def test_images_of_several_requests_share_a_step_and_texts_have_another():
    driver = EncodeDriver(max_num_batched_tokens=100)
    driver.submit("a", [5, Picture(4)])
    driver.submit("b", [Picture(4), 3])
    assert kinds(driver) == ["text", "image"]
    assert [lengths(plan) for plan in driver.plans] == [[3, 5], [4, 4]]
    assert driver.finished["a"].usage.prompt_tokens == 9


def test_a_text_waits_for_one_step_of_images_at_most_and_the_other_way_round():
    """Red if the oldest request's kind decides: all images would come before the texts."""
    driver = EncodeDriver(max_num_batched_tokens=8)
    driver.submit("images", [Picture(4)] * 6)
    assert driver.begin_step().kind is InputKind.IMAGE
    driver.submit("texts", [8, 8, 8])
    driver.end_step()
    assert kinds(driver) == ["text", "image", "text", "image", "text"]


def test_a_kind_whose_requests_cannot_go_on_gives_its_turn_away():
    driver = EncodeDriver(max_num_batched_tokens=4)
    driver.submit("slow", [4, 4, 4], buffer=1)
    driver.submit("images", [Picture(4)] * 3)
    driver.step(read=False)
    for _ in range(3):
        assert driver.begin_step().kind is InputKind.IMAGE
        driver.end_step()
    assert driver.scheduler.phase_of("slow") is Phase.PARKED
    driver.scheduler.check()


def test_images_of_a_failed_step_run_alone_and_texts_are_not_among_them():
    driver = EncodeDriver()
    driver.submit("a", [Picture(4), Picture(4), 2])
    assert driver.begin_step().kind is InputKind.TEXT
    driver.end_step()
    assert lengths(driver.begin_step()) == [4, 4]
    driver.fail_step()
    assert kinds(driver) == ["image", "image"]
    assert driver.finished["a"].reason is EndReason.STOP


def test_an_image_may_have_more_tokens_than_a_text_and_counts_in_the_queue():
    driver = EncodeDriver(max_queued_tokens=200)
    driver.submit("a", [Picture(150)])
    assert driver.scheduler.statistics().queued_tokens == 150
    driver.submit("b", [Picture(150)])
    assert isinstance(driver.refused["b"].error, Overloaded)
    driver.submit("c", [65])
    assert isinstance(driver.refused["c"].error, RequestTooLarge)
    driver.run()
    assert driver.finished["a"].reason is EndReason.STOP


def test_a_text_that_the_model_pads_costs_what_the_model_computes():
    driver = EncodeDriver(max_num_batched_tokens=64)
    inputs = tuple(EncodeInput((token,), width=32) for token in (5, 6, 7))
    driver.add(EncodeRequest(RequestId("a"), inputs, 0.0), 9)
    assert lengths(driver.begin_step()) == [32, 32]
    assert driver.in_flight.num_tokens == 64
