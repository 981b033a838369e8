"""State slots, snapshots, and where a chunk ends so that its last state can be a snapshot."""

import pytest

from engine.config import SchedulerConfig
from engine.core.text.memory.snapshots import end_of_chunk
from engine.core.text.memory.states import States, StepStates
from engine.core.text.plan import StateDelta
from engine.core.text.types import PromptImage, Sampling
from engine.errors import ConfigError
from tests.support.core_driver import Driver, make_request


@pytest.mark.parametrize(
    ("end", "start", "stop", "branch", "last"),
    [
        (16, 0, 18, 0, 16),  # ends at the last border, where an equal prompt would go on
        (18, 16, 18, 0, 16),
        (8, 0, 18, 8, 16),  # ends where another prompt has left this one
        (18, 0, 18, 0, 0),  # no border is wanted
        (8, 0, 11, 0, 16),  # the step's budget ends the chunk, at a border
        (3, 0, 3, 0, 16),  # the chunk contains no border
        (12, 8, 15, 8, 16),
        (7, 5, 7, 0, 16),
        (16, 0, 30, 40, 16),  # the wanted branch is not in this chunk
    ],
)
def test_a_chunk_ends_at_a_border_where_a_state_may_be_needed(end, start, stop, branch, last):
    assert end_of_chunk(start, stop, 4, branch=branch, last=last) == end


class Holder:
    """Stands in for a sequence: its state slot."""

    is_background = False

    def __init__(self):
        self.state_slot = None


def written(states, *keys):
    """Write a snapshot for each key, one step after the other."""
    for key in keys:
        step = StepStates(states)
        slot = step.snapshot(0)
        step.keep()
        states.end_snapshot(slot, key)


def test_a_hit_ends_at_the_last_border_with_a_snapshot():
    states = States(4)
    written(states, b"2")
    assert states.cut([b"1", b"2", b"3"], (7, 8, 9)) == (7, 8)
    assert states.cut([b"1"], (7,)) == ()


def test_the_snapshot_that_was_used_last_is_overwritten_last():
    states, first, second = States(3), Holder(), Holder()
    written(states, b"a", b"b", b"c")
    step = StepStates(states)
    assert step.begin(first, b"a") is not None
    assert step.begin(second, b"a") is not None
    step.keep()
    left = [key for key in (b"a", b"b", b"c") if states.snapshots.match((key,))]
    assert left == [b"a"]
    states.release(first)
    states.release(second)
    states.pool.check([])


def test_a_snapshot_leaves_the_slots_of_choices_that_will_fork():
    states = States(3)
    step = StepStates(states)
    step.give(Holder())
    assert step.snapshot(2) is None
    assert step.snapshot(1) is not None


@pytest.mark.parametrize("prepared_plans", [False, True])
def test_snapshots_keep_nobody_from_starting(prepared_plans):
    """Red if a snapshot takes the state slot that the next sequence in the queue needs. That
    sequence would wait for another's whole prompt, which is scored 64 tokens a step."""
    driver = Driver(
        num_blocks=512, block_size=4, max_model_len=2048, max_num_seqs=2, num_states=2,
        max_num_batched_tokens=256, prepared_plans=prepared_plans,
    )  # fmt: skip
    scored = Sampling(temperature=0.0, prompt_logprobs=1)
    driver.submit(make_request("long", [i % 50 + 4 for i in range(1200)], sampling=scored))
    driver.step()
    driver.submit(make_request("short", range(30, 40), max_tokens=40))
    for _ in range(3):
        driver.step()
    assert driver.scheduler.statistics().running == 2
    driver.run()
    driver.check_tokens()


def test_a_step_that_is_undone_gives_every_slot_back():
    states, seq = States(3), Holder()
    step = StepStates(states)
    step.give(seq)
    step.snapshot(0)
    step.undo([seq])
    assert seq.state_slot is None
    states.pool.check([])


def test_a_row_that_is_dropped_gives_back_its_snapshot_alone():
    states, seq, other = States(4), Holder(), Holder()
    step = StepStates(states)
    step.give(seq)
    step.give(other)
    dropped, kept = step.snapshot(0), step.snapshot(0)
    step.drop(StateDelta(seq.state_slot, None, dropped), [seq])
    step.drop(StateDelta(other.state_slot, None, None), [])
    assert step.snapshots == [kept]
    assert seq.state_slot is None
    assert states.pool.num_free == 2
    step.keep()


@pytest.mark.parametrize("ended", ["running", "waiting"])
def test_a_request_that_ends_behind_a_prepared_step_gives_back_its_own_slot(ended):
    driver = Driver(
        num_blocks=64, block_size=4, max_num_seqs=3, num_states=3, max_num_batched_tokens=8
    )
    for name, first in (("running", 1), ("other", 11), ("waiting", 21)):
        driver.submit(make_request(name, range(first, first + 4), max_tokens=4))
    driver.begin_step()
    assert [seq.request_id for seq in driver.scheduler._prepared.started] == ["waiting"]
    driver.cancel(ended)
    driver.end_step()
    driver.run()
    driver.check_tokens()
    driver.check_idle()


def test_each_sequence_that_may_run_has_a_slot():
    with pytest.raises(ConfigError, match="3 slots, but --max-num-seqs is 4"):
        SchedulerConfig(num_blocks=8, max_model_len=64, max_num_seqs=4, num_states=3)


def test_a_parked_sequence_gives_its_slot_to_one_that_would_start():
    driver = Driver(num_blocks=64, block_size=4, max_num_seqs=2, num_states=2, prepared_plans=False)
    for name in ("a", "b"):
        driver.submit(make_request(name, range(1, 9), max_tokens=9), buffer=1)
    for _ in range(5):
        driver.step(read=False)
    assert driver.scheduler.statistics().parked == 2
    driver.submit(make_request("c", range(30, 40), max_tokens=2))
    said = driver.scheduler.explain("c", driver.now).waiting_for
    assert said.startswith("state slots: 1 are lacking")
    driver.step(read=False)
    assert driver.scheduler.statistics().running == 1
    driver.run()
    driver.check_tokens()


@pytest.mark.parametrize("start", [0, 3])
def test_no_snapshot_cuts_an_image_that_one_step_computes_as_a_whole(start):
    """The fake worker raises KvMismatch if a chunk ends inside such an image. Here the image ends
    the prompt and contains the border at which an equal prompt would go on."""
    driver = Driver(
        num_blocks=64, block_size=4, max_num_seqs=2, num_states=4, max_num_batched_tokens=32,
    )  # fmt: skip
    image = PromptImage(start, 14 - start, 5, b"a", is_whole=True)
    prompt = [50] * start + [99] * (14 - start)
    driver.submit(make_request("r", prompt, max_tokens=3, images=(image,)))
    driver.run()
    driver.check_tokens()
    driver.check_idle()
