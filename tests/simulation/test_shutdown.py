"""The end of an engine in virtual time: requests that run then, that wait, and that come too late.

`tests/service/test_signals.py` ends whole servers, and `test_pool.py` unloads models.
"""

from functools import partial

import pytest
import trio

from engine.errors import RequestAborted, ShuttingDown, WorkerLost
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.simulation.test_turns import turns_of_loops
from tests.simulator.determinism import run_deterministically
from tests.support.bodies import run_by
from tests.support.virtual_engine import fake_engine

STEP_S = 1.0

seeds = pytest.mark.parametrize("seed", range(4))  # seeds of the order in which tasks run


class LeftError(Exception):
    """What a program raises in the block of its engine."""


def request(max_tokens):
    """Return a request that takes as many steps as it has tokens."""
    return GenerateRequest(token_ids=(5, 6), sampling=SamplingParams(max_tokens=max_tokens))


def run(body, seed, *, root=None, step_faults=None, **settings):
    """Run ``body(engine)`` in an engine whose steps take a second.

    Return the seconds that the engine lasts, and its number of steps. ``root`` is the scope around
    the engine.
    """
    times = []
    script = FakeScript(step_s=STEP_S, step_faults=step_faults or {})
    runner = FakeRunner(script=script)

    async def main():
        with root or trio.CancelScope():
            try:
                async with fake_engine(
                    script, lambda script: runner, max_num_seqs=1, **settings
                ) as engine:
                    times.append(trio.current_time())
                    await body(engine)
            except* LeftError:
                pass
        times.append(trio.current_time())

    run_deterministically(main, seed)
    return round(times[1] - times[0], 6), runner.steps


in_engine = partial(run_by, run)


@seeds
@pytest.mark.parametrize(
    ("timeout_s", "num_whole", "took"), [(100, 3, 8.5), (4.5, 1, 4.5), (0, 0, 0)]
)
@in_engine()
async def test_shutdown_with_work_pending(engine, *, seed, timeout_s, num_whole, took):
    """Running and waiting requests may finish until the timeout; the others are cut."""
    asked = [engine.submit(request(3), buffer=9) for _ in range(3)]
    await trio.sleep(0.5)
    began = trio.current_time()
    cut = []

    async def drain():
        cut.append(await engine.drain(timeout_s))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain)
        await trio.sleep(0.25)
        assert isinstance(engine.submit(request(1), buffer=9).error, ShuttingDown)
    assert trio.current_time() - began == pytest.approx(max(took, 0.25))
    errors = [one.error for one in asked]
    assert errors.count(None) == num_whole
    assert all(isinstance(error, ShuttingDown) for error in errors if error is not None)
    assert cut == [3 - num_whole]


@seeds
@pytest.mark.parametrize("how", ["cancel", "raise", "drain"])
def test_the_step_in_flight_is_waited_for_and_no_other_begins(seed, how):
    """This holds however the engine ends, although two more requests wait."""

    root = trio.CancelScope()

    async def body(engine):
        for _ in range(3):
            engine.submit(request(1000), buffer=2000)
        await trio.sleep(2.5)
        if how == "raise":
            raise LeftError
        if how == "drain":
            await engine.drain(0.0)
        else:
            root.cancel()
            await trio.sleep_forever()

    assert run(body, seed, root=root) == (3.0, 3)


@seeds
def test_a_worker_that_is_to_drain_finishes_what_it_can_and_logs_how_much_it_did(seed, caplog):
    """The short request finishes, and the long one is cut."""
    caplog.set_level("INFO", logger="engine.pool.serving")

    async def body(engine):
        short = engine.submit(request(3), buffer=9)
        await trio.sleep(0.25)
        long = engine.submit(request(1000), buffer=2000)
        await trio.sleep(0.25)
        await engine.unload_model("fake", 5.0)
        assert short.error is None
        assert isinstance(long.error, RequestAborted)

    run(body, seed)
    [said] = [one for one in caplog.messages if "has ended" in one]
    assert said == (
        "replica 0 of fake has ended: it finished 1 requests, 0 failed and 0 were cancelled; "
        "its steps took 6.0 s"
    )


@seeds
@in_engine(step_faults={1: WorkerLost("planted")}, max_worker_deaths=1)
async def test_ending_twice_or_with_a_dead_worker_is_no_error(engine, *, seed):
    lost = engine.submit(request(9), buffer=9)
    await lost.wait_closed()
    assert isinstance(lost.error, WorkerLost)
    for _ in range(2):
        assert await engine.drain(1.0) == 0
        await engine.drain_in_background(0.0)
    assert isinstance(engine.submit(request(1), buffer=9).error, ShuttingDown)


@seeds
@pytest.mark.parametrize("is_busy", [True, False])
@in_engine()
async def test_a_worker_that_gets_no_more_work_ends_and_does_not_spin(
    engine, *, seed, is_busy, monkeypatch
):
    """The worker's loop ends at once if it is idle, otherwise after the step in flight."""
    turns = turns_of_loops(monkeypatch)
    began = trio.current_time()
    asked = engine.submit(request(1000 if is_busy else 1), buffer=2000)
    await trio.sleep(2.5)
    before = len(turns)
    await engine.unload_model("fake", 0.0)
    assert trio.current_time() - began == (3.0 if is_busy else 2.5)
    assert isinstance(asked.error, RequestAborted) is is_busy
    assert len(turns) <= before + 1
    await trio.sleep(100)
    assert len(turns) <= before + 1
