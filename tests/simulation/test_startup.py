"""Calls in the first instant of an engine, in any order in which its tasks start."""

import pytest
import trio

from engine.core.text.scheduler import Scheduler
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.simulator.determinism import run_deterministically
from tests.support.virtual_engine import fake_engine

SEEDS = range(8)  # seeds of the order in which tasks run; half of them swap two tasks


def run(body, seed):
    """Run ``body(engine)`` in a fresh engine, and return how many models it loaded."""
    runners = []

    def make(script):
        runners.append(FakeRunner(script=script))
        return runners[-1]

    async def main():
        async with fake_engine(FakeScript(load_s=0.5), make, waits=False) as engine:
            await body(engine)

    run_deterministically(main, seed)
    return len(runners)


@pytest.mark.parametrize("seed", SEEDS)
def test_asking_for_a_model_before_its_preload_has_begun(seed):
    async def body(engine):
        generation = engine.submit(
            GenerateRequest(token_ids=(1,), sampling=SamplingParams(max_tokens=1)), buffer=9
        )
        await engine.wait_ready()
        await generation.wait_closed()
        assert generation.error is None

    assert run(body, seed) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_leaving_before_anything_has_begun(seed):
    async def body(engine):
        pass

    assert run(body, seed) <= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_failing_before_anything_has_begun(seed):
    class LeftError(Exception):
        pass

    async def body(engine):
        raise LeftError

    with pytest.RaisesGroup(LeftError, allow_unwrapped=True, flatten_subgroups=True):
        run(body, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_cancelled_while_loading(seed):
    async def body(engine):
        with trio.move_on_after(0.1):
            await engine.wait_ready()

    assert run(body, seed) == 1


@pytest.mark.parametrize(("level", "checks"), [(0, 0), (1, 4)])
def test_an_idle_loop_checks_its_invariants_once_a_second_and_at_its_end(
    level, checks, monkeypatch
):
    """Ten requests come at once, then two a second apart. No request waits for a check."""
    num_checks = 0

    def check(scheduler):
        nonlocal num_checks
        num_checks += 1

    monkeypatch.setattr(Scheduler, "check", check)

    async def main():
        async with fake_engine(FakeScript(step_s=0.01), check_level=level) as engine:
            for pause in [0.0] * 10 + [1.0] * 2:
                await trio.sleep(pause)
                await engine.submit(request, buffer=2).wait_closed()

    request = GenerateRequest(token_ids=(1,), sampling=SamplingParams(max_tokens=1))
    run_deterministically(main, 0)
    assert num_checks == checks
