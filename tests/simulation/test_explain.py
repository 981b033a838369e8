"""Explain tells what each request waits for, in virtual time, with steps in flight.

The timings in a request's Finished are tested here, too.
"""

from functools import partial

import pytest
import trio

from engine.core.common.events import Finished, PauseMode
from engine.core.text.types import Constraint, Tokens
from engine.errors import RequestNotFound
from engine.requests.text.chat_values import Chat
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.simulator.determinism import run_deterministically
from tests.support.bodies import run_by
from tests.support.virtual_engine import fake_engine, read_all

STEP_S = 1.0


def run(body, *, num_blocks=512, script=None, seed=0, load_s=0.0, **config):
    """Run ``body(engine)`` in a fresh engine."""
    script = script or FakeScript()
    script.step_s, script.load_s = STEP_S, load_s
    settings = {"stall_timeout_s": 1e6, "prefix_cache": False, "inter_token_target_s": 0.0}
    make = partial(FakeRunner, num_blocks=num_blocks, max_model_len=num_blocks * 16)

    async def main():
        async with fake_engine(script, make, waits=not load_s, **settings | config) as engine:
            await body(engine)
            engine.resume()
            for _, name in list(engine._supervisor._live):
                engine.abort(name)

    run_deterministically(main, seed)


in_engine = partial(run_by, run)


def ask(engine, name, *, text="x", max_tokens=5, buffer=4096, **fields):
    request = GenerateRequest(
        text=text, request_id=name, sampling=SamplingParams(max_tokens=max_tokens), **fields
    )
    return engine.submit(request, buffer=buffer)


@in_engine(load_s=5.0)
async def test_a_request_of_a_loading_model_waits_for_the_load(engine):
    ask(engine, "a")
    await trio.sleep(1)
    said = engine.explain("a")
    assert (said.state, said.waiting_for, said.position) == ("WAITING", "model load", 0)
    assert (said.blocks, said.computed_tokens, said.estimate_s) == (0, 0, None)


def test_a_request_that_is_tokenised_is_explained():
    async def body(engine):
        script.encode_s = 3.0
        ask(engine, "a", text="x" * 5000)
        await trio.sleep(1)
        assert engine.explain("a").waiting_for.startswith("its tokens")

    script = FakeScript()
    run(body, script=script)


def test_a_request_whose_constraint_is_compiled_is_explained():
    async def body(engine):
        ask(engine, "a", constraint=Constraint("regex", "a"))
        await trio.sleep(1)
        said = engine.explain("a")
        assert (said.state, said.waiting_for.split(",")[0]) == ("WAITING", "its constraint")

    script = FakeScript(compile=lambda constraint: script.sleep(3.0))
    run(body, script=script)


@in_engine()
async def test_a_running_request_is_explained_with_its_progress_during_a_step(engine):
    ask(engine, "a", text="x" * 40, max_tokens=100)
    await trio.sleep(STEP_S / 2)  # the first step computes its prompt
    first = engine.explain("a")
    assert (first.state, first.waiting_for, first.position) == ("RUNNING", "", 0)
    assert (first.computed_tokens, first.blocks) == (0, 3)
    await trio.sleep(3 * STEP_S)
    later = engine.explain("a")
    assert (later.computed_tokens, later.blocks) == (42, 3)


@in_engine()
async def test_a_request_that_came_during_a_step_is_known(engine):
    ask(engine, "a", max_tokens=100)
    await trio.sleep(STEP_S / 2)
    ask(engine, "b", max_tokens=100)
    await trio.sleep(STEP_S / 4)
    waiting_for = "the step in flight, after which it enters the queue"
    assert engine.explain("b").waiting_for == waiting_for


@in_engine(max_num_seqs=1)
async def test_seats_priority_and_places_in_the_queue(engine):
    ask(engine, "running", max_tokens=100)
    await trio.sleep(STEP_S / 2)
    for name, priority in (("second", 5), ("first", 2), ("third", 5)):
        ask(engine, name, priority=priority)
        await trio.sleep(STEP_S / 10)
    await trio.sleep(3 * STEP_S)
    said = {name: engine.explain(name) for name in ("first", "second", "third")}
    assert [said[name].position for name in said] == [1, 2, 3]
    assert said["first"].waiting_for == "seats: 1 of 1 sequences run"
    assert said["third"].waiting_for.startswith("priority:")
    assert all(one.estimate_s is None for one in said.values()), "none has ended yet"


@pytest.mark.parametrize(("seats", "waits"), [(1, (5, 10, 15)), (2, (2.5, 5, 7.5))])
def test_a_request_that_waits_for_a_seat_gets_an_estimate_of_such_waits(seats, waits):
    """Each request runs for five steps, so that seats are free after `waits` seconds."""

    async def body(engine):
        ask(engine, "earlier")
        await trio.sleep(7 * STEP_S)
        line, names = [], ("first", "second", "third")
        for name in ("runs", "runs too")[:seats] + names:
            line.append(ask(engine, name))
            await trio.sleep(STEP_S / 10)
        await trio.sleep(STEP_S)
        said = [engine.explain(name) for name in names]
        assert [one.waiting_for.split(":")[0] for one in said] == ["seats"] * 3
        assert [one.estimate_s for one in said] == pytest.approx(waits)
        timings = [await timings_of(generation) for generation in line[seats:]]
        for one, timing in zip(said, timings, strict=True):
            assert abs(one.estimate_s - timing.queue_s) <= 5 * STEP_S

    run(body, max_num_seqs=seats)


@in_engine(max_num_seqs=8, max_num_batched_tokens=40)
async def test_a_wait_for_the_token_budget_alone_is_estimated_from_computed_tokens(engine):
    for name in "abcd":
        ask(engine, name, text="x" * 80)
        await trio.sleep(0.001)
    await trio.sleep(1.5 * STEP_S)
    said = engine.explain("d")
    assert (said.state, said.position > 1) == ("WAITING", True)
    assert said.estimate_s > engine.explain("c").estimate_s >= 0


@in_engine(num_blocks=8)
async def test_blocks(engine):
    ask(engine, "large", text="x" * 90, max_tokens=30)
    await trio.sleep(STEP_S / 2)
    ask(engine, "next", text="y" * 90, max_tokens=30)
    await trio.sleep(2 * STEP_S)
    said = engine.explain("next")
    assert said.waiting_for == "KV blocks: 4 are lacking, 2 are free"
    assert (said.state, said.position, said.blocks) == ("WAITING", 1, 0)


@in_engine(max_num_seqs=8, max_num_batched_tokens=40)
async def test_the_budget_of_tokens(engine):
    for name in "abc":
        ask(engine, name, text="x" * 64)
        await trio.sleep(0.001)
    await trio.sleep(1.5 * STEP_S)
    states = [engine.explain(name).state for name in "abc"]
    assert states == ["RUNNING", "RUNNING", "WAITING"]
    assert engine.explain("c").waiting_for in (
        "a step",
        "token budget: the next steps compute what is ahead",
    )
    await trio.sleep(2 * STEP_S)
    assert engine.explain("c").state == "RUNNING"


@in_engine()
async def test_a_reader_that_does_not_read(engine):
    ask(engine, "slow", max_tokens=100, buffer=2)
    await trio.sleep(10 * STEP_S)
    said = engine.explain("slow")
    assert said.state == "PARKED"
    assert said.waiting_for.startswith("reader")
    assert 5 * STEP_S < said.parked_s < 10 * STEP_S
    assert said.blocks == 1
    await trio.sleep(5)
    assert engine.explain("slow").parked_s == pytest.approx(said.parked_s + 5)


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.WAIT])
@in_engine(max_num_seqs=1)
async def test_a_pause(engine, *, mode):
    ask(engine, "runs", max_tokens=100)
    await trio.sleep(STEP_S / 2)
    ask(engine, "waits")
    await trio.sleep(2 * STEP_S)
    engine.pause(mode)
    await trio.sleep(2 * STEP_S)
    pausing = f"resume: the model is paused ({mode.value})"
    assert engine.explain("waits").waiting_for == pausing
    runs = engine.explain("runs").waiting_for
    assert runs == (pausing if mode is PauseMode.KEEP else "")


@in_engine(max_num_batched_tokens=40, max_num_seqs=8)
async def test_of_several_choices_the_one_furthest_behind_is_explained(engine):
    ask(engine, "a", text="x" * 100, n=3, max_tokens=100)
    await trio.sleep(STEP_S / 2)
    assert engine.explain("a").state == "WAITING"
    assert "another choice" in engine.explain("a").waiting_for
    await trio.sleep(10 * STEP_S)
    assert engine.explain("a").state == "RUNNING"


@in_engine()
async def test_a_request_that_is_not_live_is_not_found(engine):
    generation = ask(engine, "a")
    with pytest.raises(RequestNotFound, match="'b'"):
        engine.explain("b")
    await generation.wait_closed()
    with pytest.raises(RequestNotFound):
        engine.explain("a")


def test_the_answer_costs_the_same_whether_ten_or_a_thousand_wait():
    """The test counts lookups in the waiting queue, not time."""
    looks = {}

    class CountingList(list):
        count = 0

        def __getitem__(self, index):
            CountingList.count += 1
            return super().__getitem__(index)

    async def body(engine):
        for number in range(1000):
            ask(engine, f"r{number}", max_tokens=100)
        await trio.sleep(2 * STEP_S)
        ledger = engine._pool.registry.entries["fake"].replicas[0].loop.core._ledger
        assert len(ledger.waiting) > 900
        for name in ("r10", "r990"):
            queue = ledger.waiting.items
            ledger.waiting.items, CountingList.count = CountingList(queue), 0
            engine.explain(name)
            looks[name], ledger.waiting.items = CountingList.count, queue

    run(body, max_num_seqs=4)
    assert max(looks.values()) <= 20  # a binary search in 1,000 takes ten


# ---- timings


async def timings_of(generation):
    [end] = [event for event in await read_all(generation) if isinstance(event, Finished)]
    return end.timings


@pytest.mark.parametrize("seed", range(4))
def test_timings_add_up_to_a_life_from_arrival_to_end(seed):
    """The phases: load, tokenising, the wait for a step and for a seat, prefill, decode."""

    async def body(engine):
        began, queues = trio.current_time(), {}

        async def read(generation):
            timings = await timings_of(generation)
            assert sum_of(timings) == pytest.approx(trio.current_time() - began)
            assert timings.load_s == 2.0
            assert timings.decode_s == (generation.request.sampling.max_tokens - 1) * STEP_S
            assert timings.parked_s == 0
            queues[generation.request_id] = timings.queue_s

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, ask(engine, "long", text="x" * 5000, max_tokens=3))
            nursery.start_soon(read, ask(engine, "short", text="y" * 10, max_tokens=4))
        # the long request is tokenised for 3 s; then the short one holds the seat for one more
        assert queues == pytest.approx({"long": 4.0, "short": 0.0})

    script = FakeScript(encode_s=3.0)
    run(body, script=script, load_s=2.0, seed=seed, num_blocks=1000, max_num_seqs=1)


def sum_of(timings):
    """Return the sum of all phases."""
    return (
        timings.queue_s + timings.load_s + timings.prefill_s + timings.decode_s + timings.parked_s
    )


@in_engine(max_num_seqs=1, max_num_batched_tokens=40)
async def test_each_phase_is_timed(engine):
    blocker = ask(engine, "blocker", max_tokens=3)
    await trio.sleep(0.001)
    generation = ask(engine, "a", text="x" * 100, max_tokens=4, buffer=2)
    await blocker.wait_closed()  # after 3 steps
    began = trio.current_time()
    assert began == pytest.approx(3 * STEP_S, abs=STEP_S / 100)
    await trio.sleep(20)  # after 3 steps of prefill and one decode the stream is full
    timings = await timings_of(generation)
    assert timings.queue_s == pytest.approx(3 * STEP_S - 0.001)
    assert timings.prefill_s == pytest.approx(3 * STEP_S)
    assert timings.parked_s == pytest.approx(20 - 4 * STEP_S)
    assert timings.decode_s == pytest.approx(3 * STEP_S)
    assert timings.load_s == 0


@in_engine(script=FakeScript(encode_s=3.0), num_blocks=1000)
async def test_a_chats_template_counts_as_queue(engine):
    chat = Chat(({"role": "user", "content": "x" * 5000},))
    request = GenerateRequest(chat=chat, sampling=SamplingParams(max_tokens=2))
    began = trio.current_time()
    generation = engine.submit(request, buffer=9)
    events = await read_all(generation)
    [end] = [event for event in events if isinstance(event, Finished)]
    assert sum(isinstance(event, Tokens) for event in events) == 2
    assert end.timings.queue_s == pytest.approx(3.0)
    assert sum_of(end.timings) == pytest.approx(trio.current_time() - began)
