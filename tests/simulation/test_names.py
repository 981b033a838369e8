"""What `submit` returns, and that a second request with an id never gets the first one's events."""

import math
from dataclasses import replace
from functools import partial

import pytest
import trio
from trio.testing import assert_no_checkpoints

from engine.core.common.types import EndReason
from engine.errors import (
    DuplicateRequest,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ShuttingDown,
)
from engine.requests.readers import Leaving
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.status import AbortOutcome
from engine.worker.fakes.text import FakeScript
from tests.simulator.determinism import run_deterministically
from tests.support.bodies import run_by
from tests.support.virtual_engine import fake_engine, read_all

STEP_S = 0.01
REQUEST = GenerateRequest(
    token_ids=(5, 6, 7), request_id="same", sampling=SamplingParams(max_tokens=20)
)


class EventReader:
    """Keep the events of a stream, and call ``on_end`` when the stream ends."""

    def __init__(self, on_end):
        self.events = []
        self.error = None
        self._on_end = on_end

    def push(self, event):
        self.events.append(event)

    def end(self, error):
        self.error = error
        self._on_end()


def run_engine(body, seed, *, waits=True, script=None, **settings):
    """Run ``body(engine)``, once the model is ready or (``waits`` False) while it loads.

    ``script`` has fields of FakeScript, ``settings`` fields of EngineConfig.
    """

    async def main():
        behaviour = FakeScript(**{"step_s": STEP_S} | (script or {}))
        async with fake_engine(behaviour, waits=waits, **settings) as engine:
            await body(engine)

    run_deterministically(main, seed)


in_engine = partial(run_by, run_engine)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lived_s", [0.0, STEP_S / 2, 2 * STEP_S, 4.5 * STEP_S])
@pytest.mark.parametrize("gap_s", [0.0, STEP_S / 3, STEP_S])
@run_by(run_deterministically)
async def test_a_name_used_again_right_after_an_abort(*, seed, lived_s, gap_s):
    async with fake_engine(FakeScript(step_s=STEP_S)) as engine:
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
            await trio.sleep(STEP_S)  # the id is free after the step in flight
        assert second.error is None
        assert len(events) == 22  # Started, twenty tokens, Finished
        await engine.wait_idle()


@pytest.mark.parametrize("seed", range(3))
@run_by(run_deterministically)
async def test_no_id_of_a_client_reaches_a_request_with_another_id(*, seed):
    async with fake_engine(FakeScript(step_s=STEP_S)) as engine:
        await read_all(engine.submit(REQUEST, buffer=99))
        again = engine.submit(REQUEST, buffer=99)  # the core uses another id
        await trio.sleep(4.5 * STEP_S)
        taken = replace(REQUEST, token_ids=(900, 901), request_id=again.core_id, check=False)
        stranger = engine.submit(taken, buffer=99)
        likely = replace(REQUEST, token_ids=(900, 901), request_id="same~1")
        others = [stranger, engine.submit(likely, buffer=99)]
        with trio.fail_after(100 * STEP_S):
            assert len(await read_all(again)) == 22
            assert [len(await read_all(other)) for other in others] == [0, 22]
        assert again.error is None
        assert isinstance(stranger.error, InvalidRequest)


@pytest.mark.parametrize("seed", range(3))
@in_engine()
async def test_a_name_may_be_used_again_as_soon_as_its_end_is_known(engine, *, seed):
    started = []

    def start():
        reader = EventReader(again)
        started.append(reader)
        engine.submit(REQUEST, buffer=99, reader=reader)

    def again():
        if len(started) < 4:
            assert engine.abort("same") is AbortOutcome.ALREADY_ENDED
            start()

    start()
    await trio.sleep(200 * STEP_S)
    assert [len(one.events) for one in started] == 4 * [22]
    assert [one.error for one in started] == 4 * [None]
    assert engine.num_live == 0


@pytest.mark.parametrize("seed", range(6))
@in_engine()
async def test_a_name_used_again_for_a_request_that_ends_sooner_than_the_first_ones_task(
    engine, *, seed
):
    ends = []

    def again():
        ends.append(engine.submit(replace(REQUEST, model="unknown"), buffer=9))

    engine.submit(REQUEST, buffer=99, reader=EventReader(again))
    await trio.sleep(100 * STEP_S)
    assert [type(one.error) for one in ends] == [ModelNotFound]
    assert engine.num_live == 0


@pytest.mark.parametrize("seed", range(3))
@in_engine()
async def test_an_end_is_counted_before_its_reader_gets_it(engine, *, seed):
    for number in range(1, 4):
        counts = []

        def look(counts=counts):
            counts.append(engine.statistics().totals.requests_total)

        stream = engine.submit(REQUEST, buffer=99, reader=EventReader(look))
        await stream.wait_closed()
        assert [count.finished for count in counts] == [number]
        await trio.sleep(STEP_S)


@pytest.mark.parametrize("wrong", [{"n": -10_000}, {"timeout_s": math.nan}])
@in_engine(0)
async def test_submit_raises_nothing_for_an_impossible_number(engine, *, wrong):
    request = replace(REQUEST, **wrong, check=False)
    assert isinstance(engine.submit(request, buffer=9).error, InvalidRequest)


@pytest.mark.parametrize("seed", range(3))
@in_engine(max_num_seqs=1, max_queued_requests=1)
async def test_submit_answers_at_once_whatever_became_of_the_queue_and_the_engine(engine, *, seed):
    """A full queue and a closed engine refuse with different errors, which are the stream's error.
    The stream of `Engine.generate`, which is waited for, raises the same."""

    async def raised(engine):
        with pytest.raises((Overloaded, ShuttingDown)) as caught:
            async with engine.generate(asked) as stream:
                await anext(stream)
        return type(caught.value)

    asked = replace(REQUEST, request_id="")
    with assert_no_checkpoints():
        errors = [engine.submit(asked, buffer=9).error for _ in range(3)]
    assert [type(error) for error in errors] == [type(None), type(None), Overloaded]
    assert await raised(engine) is Overloaded
    await engine.drain(0.0)
    with assert_no_checkpoints():
        assert isinstance(engine.submit(asked, buffer=9).error, ShuttingDown)
    assert await raised(engine) is ShuttingDown


@pytest.mark.parametrize("seed", range(3))
@in_engine()
async def test_an_engine_that_refuses_a_request_gives_up_no_stream_for_it(engine, *, seed):
    """Red if a closed engine, or a bad request to a full one, ends a detached stream."""
    supervisor, reader = engine._supervisor, EventReader(lambda: None)
    asked = replace(REQUEST, request_id="", resume_window_s=600.0)
    lost = engine.submit(asked, buffer=9, reader=reader)
    lost.leave(reader, trio.current_time(), Leaving(is_lost=True))
    supervisor._max_live = 1
    bad = replace(asked, timeout_s=math.nan, check=False)
    assert isinstance(engine.submit(bad, buffer=9).error, InvalidRequest)
    supervisor._tasks.close()
    assert isinstance(engine.submit(asked, buffer=9).error, ShuttingDown)
    assert lost.reason is None


@pytest.mark.parametrize("seed", range(4))
@in_engine(script={"step_costs": {2: 80.0}})
async def test_a_name_used_again_while_a_step_hangs_for_longer_than_ids_are_remembered(
    engine, *, seed
):
    """The cancel of the first request still waits for the step when the second request comes."""
    first = engine.submit(REQUEST, buffer=99)
    await trio.sleep(1.0)  # in the middle of the long step
    first.cancel(EndReason.CANCELLED)
    await trio.sleep(65.0)
    second = engine.submit(REQUEST, buffer=99)
    assert len(await read_all(second)) == 22
    assert second.error is None


@pytest.mark.parametrize("seed", range(4))
@in_engine(waits=False, script={"load_s": 5.0}, max_num_seqs=2, max_queued_requests=4)
async def test_requests_that_wait_for_a_load_are_bounded_too(engine, *, seed):
    asked = [engine.submit(replace(REQUEST, request_id=f"r{i}"), buffer=99) for i in range(9)]
    refused = [one for one in asked if one.is_closed]
    assert refused == asked[6:]
    assert all(isinstance(one.error, Overloaded) for one in refused)
    lengths = [len(await read_all(one)) for one in asked[:6]]
    assert lengths.count(22) >= 4  # the queue has room for four, once the model is loaded


@pytest.mark.parametrize("seed", range(4))
@in_engine(max_num_seqs=1, max_queued_requests=5)
async def test_requests_whose_clients_are_away_fill_no_server(engine, *, seed):
    """Red if a client can fill the server with resume windows, and keep all others out."""
    window = replace(REQUEST, request_id="", resume_window_s=600.0)
    lost, asked = [], []
    for _ in range(6):
        reader = EventReader(lambda: None)
        lost.append(engine.submit(window, buffer=9, reader=reader))
        lost[-1].leave(reader, trio.current_time(), Leaving(is_lost=True))
        await trio.sleep(STEP_S)
    for _ in range(6):
        asked.append(engine.submit(replace(REQUEST, request_id=""), buffer=99))
        await trio.sleep(STEP_S)
    assert [stream.reason for stream in lost] == [EndReason.CANCELLED] * 6
    assert isinstance(engine.submit(REQUEST, buffer=9).error, Overloaded)
    assert [len(await read_all(stream)) for stream in asked] == [22] * 6


@pytest.mark.parametrize("seed", range(3))
@in_engine()
async def test_an_id_used_again_is_the_same_in_every_event(engine, *, seed):
    for _ in range(2):
        async with engine.generate(REQUEST) as stream:
            assert {event.request_id async for event in stream} == {"same"}
