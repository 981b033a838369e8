"""A request id that is used again at once never gets what was the first one's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import trio

from engine.api import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.types import EndReason
from engine.errors import DuplicateRequest, InvalidRequest, ModelNotFound, Overloaded
from engine.model.fake import FakeRunner, FakeScript
from engine.requests import GenerateRequest, SamplingParams
from engine.status import AbortOutcome
from tools.simulator.determinism import VirtualThreads, run_deterministically

STEP_S = 0.01
REQUEST = GenerateRequest(
    token_ids=(5, 6, 7), request_id="same", sampling=SamplingParams(max_tokens=20)
)


async def read_all(generation):
    events = []
    while True:
        try:
            events.append(await generation.receive())
        except trio.EndOfChannel:
            return events


def run_engine(body, seed, *, waits=True, script=None, **settings):
    """Run ``body(engine)``, once the model is ready or (``waits`` False) while it loads.
    ``script``, ``settings``: FakeScript's and EngineConfig's fields."""
    threads = VirtualThreads()
    fields = {"step_s": STEP_S} | (script or {})
    runner = FakeRunner(script=FakeScript(sleep=threads.note_sleep, **fields))

    async def main():
        config = EngineConfig(models=(ModelConfig("fake"),), check_level=2, **settings)
        async with open_engine(
            config, make_runner=lambda model, config: runner, threads=threads
        ) as engine:
            if waits:
                await engine.wait_ready()
            await body(engine)

    run_deterministically(main, seed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lived_s", [0.0, STEP_S / 2, 2 * STEP_S, 4.5 * STEP_S])
@pytest.mark.parametrize("gap_s", [0.0, STEP_S / 3, STEP_S])
def test_a_name_used_again_right_after_an_abort(seed, lived_s, gap_s):
    threads = VirtualThreads()
    runner = FakeRunner(script=FakeScript(step_s=STEP_S, sleep=threads.note_sleep))

    async def main():
        config = EngineConfig(models=(ModelConfig("fake"),), check_level=2)
        async with open_engine(
            config, make_runner=lambda model, config: runner, threads=threads
        ) as engine:
            await engine.wait_ready()
            first = engine.submit(REQUEST, buffer=99)
            await trio.sleep(lived_s)
            first.cancel(EndReason.ABORTED)
            await first.wait_closed()
            await trio.sleep(gap_s)
            for _ in range(5):
                second = engine.submit(REQUEST, buffer=99)
                events = await read_all(second)
                if not isinstance(second.error, DuplicateRequest):
                    break
                await trio.sleep(STEP_S)  # at most until the step in flight is over
            assert second.error is None
            assert len(events) == 22  # Started, twenty tokens, Finished
            await engine.wait_idle()

    run_deterministically(main, seed)


@pytest.mark.parametrize("seed", range(3))
def test_no_name_of_a_clients_reaches_a_request_of_another_name(seed):
    threads = VirtualThreads()
    runner = FakeRunner(script=FakeScript(step_s=STEP_S, sleep=threads.note_sleep))

    async def main():
        config = EngineConfig(models=(ModelConfig("fake"),), check_level=2)
        async with open_engine(
            config, make_runner=lambda model, config: runner, threads=threads
        ) as engine:
            await engine.wait_ready()
            await read_all(engine.submit(REQUEST, buffer=99))
            again = engine.submit(REQUEST, buffer=99)  # has another name in the core
            await trio.sleep(4.5 * STEP_S)
            stranger = engine.submit(
                replace(REQUEST, token_ids=(900, 901), request_id=again.core_id), buffer=99
            )
            likely = replace(REQUEST, token_ids=(900, 901), request_id="same~1")
            others = [stranger, engine.submit(likely, buffer=99)]
            with trio.fail_after(100 * STEP_S):
                assert len(await read_all(again)) == 22
                assert [len(await read_all(other)) for other in others] == [0, 22]
            assert again.error is None
            assert isinstance(stranger.error, InvalidRequest)

    run_deterministically(main, seed)


@pytest.mark.parametrize("seed", range(3))
def test_whoever_hears_of_the_end_may_use_the_name_again_at_once(seed):
    async def body(engine):
        started = []

        def start():
            generation = engine.submit(REQUEST, buffer=99)
            started.append(generation)
            generation.on_ready = lambda: again(generation)

        def again(before):
            if before.is_closed and len(started) < 4:
                assert engine.abort("same") is AbortOutcome.ALREADY_ENDED
                start()

        start()
        await trio.sleep(200 * STEP_S)
        assert [len(one.take_ready()) for one in started] == 4 * [22]
        assert [one.error for one in started] == 4 * [None]
        assert engine.num_live == 0

    run_engine(body, seed)


@pytest.mark.parametrize("seed", range(6))
def test_a_name_used_again_for_a_request_that_ends_sooner_than_the_first_ones_task(seed):
    async def body(engine):
        ends = []

        def again():
            if first.is_closed:
                ends.append(engine.submit(replace(REQUEST, model="unknown"), buffer=9))

        first = engine.submit(REQUEST, buffer=99)
        first.on_ready = again
        await trio.sleep(100 * STEP_S)
        assert [type(one.error) for one in ends] == [ModelNotFound]
        assert engine.num_live == 0

    run_engine(body, seed)


@pytest.mark.parametrize("seed", range(3))
def test_an_end_is_counted_before_its_reader_hears_of_it(seed):
    async def body(engine):
        for number in range(1, 4):
            generation = engine.submit(REQUEST, buffer=99)
            counts = []

            def look(generation=generation, counts=counts):
                if generation.is_closed:
                    counts.append(engine.statistics().totals.requests_total)

            generation.on_ready = look
            await generation.wait_closed()
            assert [count.finished for count in counts] == [number]
            await trio.sleep(STEP_S)

    run_engine(body, seed)


@pytest.mark.parametrize("wrong", [{"n": -10_000}, {"timeout_s": math.nan}])
def test_submit_raises_nothing_for_a_number_that_cannot_be(wrong):
    async def body(engine):
        assert isinstance(engine.submit(replace(REQUEST, **wrong), buffer=9).error, InvalidRequest)

    run_engine(body, 0)


@pytest.mark.parametrize("seed", range(4))
def test_a_name_used_again_while_a_step_hangs_for_longer_than_ids_are_remembered(seed):
    """The cancel of the first still waits for the step when the second comes."""

    async def body(engine):
        first = engine.submit(REQUEST, buffer=99)
        await trio.sleep(1.0)  # into the long step
        first.cancel(EndReason.CANCELLED)
        await trio.sleep(65.0)
        second = engine.submit(REQUEST, buffer=99)
        assert len(await read_all(second)) == 22
        assert second.error is None

    run_engine(body, seed, script={"step_costs": {2: 80.0}})


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_wait_for_a_load_are_bounded_too(seed):
    async def body(engine):
        asked = [engine.submit(replace(REQUEST, request_id=f"r{i}"), buffer=99) for i in range(9)]
        refused = [one for one in asked if one.is_closed]
        assert refused == asked[6:]
        assert all(isinstance(one.error, Overloaded) for one in refused)
        lengths = [len(await read_all(one)) for one in asked[:6]]
        assert lengths.count(22) >= 4  # the queue has room for four, once there is one

    run_engine(
        body, seed, waits=False, script={"load_s": 5.0}, max_num_seqs=2, max_queued_requests=4
    )
