"""The scheduler of drawings: turns, seats, ends, deadlines, pauses, and the content of plans."""

import pytest

from engine.core.common.events import Pause, PauseMode, Resume, StepFailed
from engine.core.common.phases import Phase
from engine.core.common.steps import FailureKind, StepFailure
from engine.core.common.types import EndReason, RequestId
from engine.core.image_generation.least_times import SHAPES_MAX, LeastTimes, Shape
from engine.core.image_generation.types import Drawn, Stepped, Verb
from engine.errors import DeadlineInfeasible, DuplicateRequest, EngineBug, Overloaded, Paused
from tests.support.image_generation_driver import ImageGenerationDriver


def told(driver):
    """Return the journal's line of each plan so far, without the plan's number."""
    return [plan.journal_line().partition(": ")[2] for plan in driver.plans]


def test_a_drawing_takes_its_steps_in_order():
    driver = ImageGenerationDriver()
    driver.submit("a", steps=2, n=2, width=120, preview_every=2)
    assert driver.run() == 1 + 2 + 2 * 3
    tiles = [f"1 decode {index}" for index in range(6)]
    assert told(driver) == ["1 encode 0", "1 denoise 0", "1 denoise 1 preview", *tiles]
    kinds = [type(event) for event in driver.got["a"]]
    assert kinds == [Stepped, Stepped, Drawn, Drawn]
    assert driver.finished["a"].choice == 0  # several images have one end, that of choice 0
    driver.check_idle()


def test_drawings_take_turns_in_the_order_of_their_ranks():
    driver = ImageGenerationDriver(max_drawings=3)
    driver.submit("late", steps=2)
    driver.submit("early", steps=2, arrival=-1.0)
    driver.submit("first", steps=1, priority=-1)
    driver.run()
    turns = [line.split()[0] for line in told(driver)]
    # "first" has the sequence 1, "early" 2, "late" 3
    assert turns == ["1", "2", "3", "1", "2", "3", "1", "2", "3", "2", "3"]


def test_no_more_drawings_begin_than_there_are_seats():
    driver = ImageGenerationDriver(max_drawings=2)
    for name in "abc":
        driver.submit(name, steps=2)
    driver.step()
    stats = driver.scheduler.statistics()
    assert (stats.running, stats.waiting, stats.queued_tokens) == (2, 1, 2)
    driver.run()
    first = next(number for number, line in enumerate(told(driver)) if line.startswith("3 "))
    ends = [number for number, line in enumerate(told(driver)) if line.endswith("decode 0")]
    assert first > ends[0], "the third begins when one of the others has ended"


def test_the_worker_hears_of_each_end_once_with_the_next_plan():
    driver = ImageGenerationDriver()
    driver.submit("a", steps=3)
    driver.submit("b", steps=3)
    driver.step()
    driver.cancel("a")
    assert driver.begin_step().ended == (1,)
    driver.end_step()
    assert driver.begin_step().ended == ()
    assert list(driver.runner.drawings) == [2]


def test_a_cancel_during_its_step_drops_the_result_and_gives_the_slot_back():
    driver = ImageGenerationDriver()
    driver.submit("a", steps=3)
    driver.step()
    driver.begin_step()
    driver.cancel("a")
    assert driver.scheduler.statistics().ending == 1
    assert not driver.scheduler.is_idle
    driver.end_step()
    assert driver.got["a"] == []
    assert driver.credits["a"].free == 1000
    assert driver.scheduler.statistics().late_results == 1
    driver.check_idle()


def test_a_reader_without_room_is_passed_over_and_leaves_its_seat():
    driver = ImageGenerationDriver(max_drawings=1)
    driver.submit("full", steps=5, buffer=1)
    driver.submit("other", steps=2)
    for _ in range(10):
        driver.step(read=False)
    assert driver.scheduler.explain(RequestId("full"), driver.now).state == "PARKED"
    assert driver.finished.keys() == {"other"}
    driver.read("full")
    assert driver.step(read=False)
    assert len(driver.got["full"]) == 2


def test_timings_add_up():
    driver = ImageGenerationDriver()
    driver.submit("a", steps=2, buffer=1)
    driver.now = 1.0
    assert driver.scheduler.is_live("a")
    for _ in range(3):  # encode, denoise, and a step after which the stream is full
        driver.step(read=False)
    began = driver.now
    driver.now += 5.0
    driver.read("a")
    driver.run()
    assert not driver.scheduler.is_live("a")
    timings = driver.finished["a"].timings
    assert timings.queue_s == pytest.approx(1.0)
    assert timings.parked_s == pytest.approx(5.0, abs=0.1)
    whole = timings.queue_s + timings.prefill_s + timings.decode_s + timings.parked_s
    assert whole == pytest.approx(driver.now)
    assert began - 1.0 > timings.prefill_s > 0


def test_parked_drawings_are_bounded():
    driver = ImageGenerationDriver(max_drawings=1)
    for number in range(6):
        driver.submit(f"full{number}", steps=5, buffer=1)
    for _ in range(100):
        driver.step(read=False)
    stats = driver.scheduler.statistics()
    assert (stats.parked, stats.waiting) == (4, 2)
    assert len(driver.runner.drawings) == 4


def test_a_stalled_reader_is_ended_and_tells_the_worker():
    driver = ImageGenerationDriver(stall_timeout_s=30.0)
    driver.submit("a", steps=5, buffer=1)
    for _ in range(3):
        driver.step(read=False)
    since = driver.now
    assert driver.scheduler.next_wakeup(driver.now) == since + 30.0
    driver.tick(29.9)
    assert not driver.finished
    driver.tick(0.2)
    assert driver.finished["a"].reason is EndReason.STALLED
    assert driver.finished["a"].phase is Phase.PARKED


def test_a_reader_that_has_taken_something_is_not_stalled_before_its_report_comes():
    """If the loop was busy, the core may get the tick before it hears that the reader took an image
    in time."""
    driver = ImageGenerationDriver(stall_timeout_s=30.0)
    driver.submit("a", steps=5, buffer=1)
    for _ in range(3):
        driver.step(read=False)
    (live,) = driver.scheduler._parked.values()
    assert live.credit.release()
    driver.tick(31.0)
    assert not driver.finished


@pytest.mark.parametrize("kind", FailureKind)
def test_a_failed_step_ends_its_drawing_alone(kind):
    driver = ImageGenerationDriver()
    driver.submit("a", steps=2)
    driver.submit("b", steps=2)
    driver.step()
    driver.step()
    plan = driver.begin_step()
    driver.apply(StepFailed(StepFailure(plan.plan_id, kind, "no")))
    assert driver.finished["a"].reason is EndReason.FAILED
    assert driver.finished["a"].detail.startswith("memory: ") == (kind is FailureKind.OUT_OF_MEMORY)
    driver.run()
    assert driver.finished["b"].reason is EndReason.STOP


def test_a_row_that_fails_names_its_field():
    driver = ImageGenerationDriver()
    driver.submit("a", steps=2)
    driver.runner.script.sample_fault = lambda: "encode"
    driver.step()
    assert driver.finished["a"].detail == "encode: drawn"
    assert driver.finished["a"].phase is Phase.ENCODE


# ---- deadlines


def test_a_deadline_that_no_drawing_meets_is_refused():
    driver = ImageGenerationDriver()
    driver.submit("measured", steps=2)
    for _ in range(4):
        driver.step(seconds=1.0)
    driver.submit("long", steps=10, deadline=driver.now + 9.0)
    driver.submit("short", steps=2, deadline=driver.now + 9.0)
    assert isinstance(driver.refused["long"].error, DeadlineInfeasible)
    assert "at least 12 s, of which 9 s are left" in str(driver.refused["long"].error)
    assert "short" not in driver.refused
    driver.submit("over", steps=10, deadline=driver.now)  # its cancel scope ends this one
    assert "over" not in driver.refused


def test_a_deadline_that_cannot_be_met_any_more_ends_a_waiting_drawing():
    driver = ImageGenerationDriver(max_drawings=1)
    driver.submit("runs", steps=50)
    for _ in range(5):
        driver.step(seconds=1.0)
    # Encoding takes 1 s and denoising 4 s; how long decoding a tile takes is not known yet.
    driver.submit("waits", steps=4, deadline=driver.now + 7.0)
    assert driver.scheduler.next_wakeup(driver.now) == pytest.approx(driver.now + 2.0, abs=1e-3)
    driver.tick(1.9)
    assert "waits" not in driver.finished
    driver.tick(driver.scheduler.next_wakeup(driver.now) - driver.now)
    assert driver.finished["waits"].reason is EndReason.DEADLINE
    assert driver.finished["waits"].phase is Phase.QUEUED
    assert "at least 5 s" in driver.finished["waits"].detail


def test_a_drawing_that_has_begun_may_try_its_luck():
    driver = ImageGenerationDriver()
    driver.submit("a", steps=50, deadline=30.0)
    for _ in range(20):
        driver.step(seconds=1.0)
    driver.tick(0.1)
    assert not driver.finished


def test_refusals_lower_an_estimate_until_a_step_is_measured():
    driver = ImageGenerationDriver()
    driver.submit("slow", steps=1)
    for _ in range(3):
        driver.step(seconds=10.0)
    for number in range(60):
        driver.submit(f"r{number}", steps=1, deadline=driver.now + 1.0)
        if f"r{number}" not in driver.refused:
            break
    assert 30 <= number < 60
    for _ in range(3):
        driver.step(seconds=0.1)
    driver.submit("again", steps=1, deadline=driver.now + 1.0)
    assert "again" not in driver.refused


def test_least_times_compare_only_with_smaller_steps():
    times = LeastTimes()
    times.note(Shape(Verb.DENOISE, 100, 2), 4.0)
    times.note(Shape(Verb.DENOISE, 400, 1), 3.0)

    def estimate(pixels, rows):
        return times._estimate(Shape(Verb.DENOISE, pixels, rows))

    assert estimate(99, 2) == estimate(399, 1) == 0.0
    assert (estimate(100, 2), estimate(400, 1), estimate(400, 2)) == (4.0, 3.0, 4.0)
    times.note(Shape(Verb.DENOISE, 100, 2), 1.0)
    assert estimate(400, 2) == 3.0
    for pixels in range(1000, 1000 + 2 * SHAPES_MAX):
        times.note(Shape(Verb.DENOISE, pixels, 9), 1.0)
    assert len(times._shortest) == SHAPES_MAX


def test_with_guidance_an_image_takes_as_long_as_two_without():
    driver = ImageGenerationDriver()
    driver.submit("two", steps=1, n=2)
    for _ in range(2):  # encode, denoise
        driver.step(seconds=3.0)
    for name, guidance in (("guided", 2.0), ("alone", 1.0)):
        driver.submit(name, steps=1, guidance_scale=guidance, deadline=driver.now + 2.0)
    assert "guided" in driver.refused
    assert "alone" not in driver.refused


# ---- refusals and pauses


def test_a_full_queue_counts_denoising_steps():
    """Red if the refusal speaks of tokens, which a client that asks for images does not know."""
    driver = ImageGenerationDriver(max_queued_requests=9, max_queued_tokens=5, max_drawings=1)
    driver.submit("a", steps=3)
    driver.submit("b", steps=3)
    assert str(driver.refused["b"].error) == "the queue holds its 5 denoising steps"


def test_refusals_that_all_kinds_share():
    driver = ImageGenerationDriver(max_queued_requests=1, max_queued_tokens=5, max_drawings=1)
    driver.submit("a", steps=3)
    driver.submit("a", steps=3)
    assert isinstance(driver.refused.pop("a").error, DuplicateRequest)
    driver.submit("b", steps=3)
    assert isinstance(driver.refused["b"].error, Overloaded)
    driver.apply(Pause(PauseMode.WAIT))
    driver.submit("c", steps=3)
    assert isinstance(driver.refused["c"].error, Paused)


@pytest.mark.parametrize(
    ("mode", "steps", "ended"),
    [(PauseMode.KEEP, 0, set()), (PauseMode.WAIT, 3, {"a"}), (PauseMode.ABORT, 0, {"a", "b"})],
)
def test_pauses(mode, steps, ended):
    driver = ImageGenerationDriver()
    driver.submit("a", steps=2)
    driver.submit("b", steps=2)
    driver.step()
    driver.apply(Pause(mode))
    assert driver.run() == steps
    assert driver.finished.keys() == ended
    driver.apply(Resume())
    driver.run()
    assert driver.finished.keys() == {"a", "b"}


def test_explanations():
    driver = ImageGenerationDriver(max_drawings=2)
    for name in "abc":
        driver.submit(name, steps=4)
    driver.step()
    driver.step()
    driver.step()
    said = [driver.scheduler.explain(RequestId(name), driver.now) for name in "abc"]
    assert [one.state for one in said] == ["RUNNING", "RUNNING", "WAITING"]
    assert said[0].waiting_for == "its turn: drawings take one step each, and 1 more go on"
    assert said[2].waiting_for == "a seat: 2 drawings take turns"
    assert said[2].position == 1
    assert 7 * 0.01 <= said[2].estimate_s <= 1  # at least 7 steps of 10 ms
    assert driver.scheduler.explain(RequestId("nobody"), driver.now) is None


def test_a_result_of_another_plan_is_a_bug():
    driver = ImageGenerationDriver()
    driver.submit("a")
    plan = driver.begin_step()
    failure = StepFailure(plan.plan_id + 1, FailureKind.ERROR, "no")
    with pytest.raises(EngineBug):
        driver.scheduler.apply(StepFailed(failure), 0.0)
    with pytest.raises(EngineBug):
        driver.scheduler.plan(0.0)


def test_only_another_source_takes_as_long_to_encode_as_a_source():
    driver = ImageGenerationDriver()
    source = bytes(3 * 16 * 8)
    driver.submit("first", steps=1, source=source)
    driver.step(seconds=3.0)
    driver.run()
    driver.submit("drawn", steps=1, source=source, deadline=driver.now + 2.0)
    driver.submit("alone", steps=1, deadline=driver.now + 2.0)
    assert "drawn" in driver.refused
    assert "alone" not in driver.refused
