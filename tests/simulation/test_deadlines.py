"""Deadlines in virtual time, where the instants are exact (D18)."""

from __future__ import annotations

import pytest
import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.errors import DeadlineExceeded
from engine.requests.text_values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeRunner, FakeScript
from tools.simulator.determinism import VirtualThreads, run_deterministically

STEP_S = 0.1


def ends_of(arrivals, *, timeout_s, seed):
    """Submit one request to an idle engine for each hand-off age in ``arrivals``.

    Return the end of each request, after how many seconds it came, and the number of steps.
    """
    threads, ends = VirtualThreads(), []

    def make_runner(model, config):
        return FakeRunner(script=FakeScript(step_s=STEP_S, sleep=threads.note_sleep))

    async def main():
        config = EngineConfig(models=(ModelConfig("fake"),), check_level=2)
        async with open_engine(config, make_runner=make_runner, threads=threads) as engine:
            await engine.wait_ready()
            for age in arrivals:
                steps = engine.statistics().totals.step_count
                start = trio.current_time()
                generation = engine.submit(
                    GenerateRequest(
                        token_ids=(1,),
                        sampling=SamplingParams(max_tokens=100),
                        timeout_s=timeout_s,
                    ),
                    buffer=200,
                    arrived_at=start - age,
                )
                await generation.wait_closed()
                took = trio.current_time() - start
                await trio.sleep(1)
                made = engine.statistics().totals.step_count - steps
                ends.append((generation.error, round(took, 6), made))

    run_deterministically(main, seed)
    return ends


def ends_of_leavers(leavers, *, timeout_s):
    """Return the counted ends of readers that leave, each given as (when, when the server knew)."""
    threads = VirtualThreads()

    def make_runner(model, config):
        return FakeRunner(script=FakeScript(step_s=STEP_S, sleep=threads.note_sleep))

    async def main():
        config = EngineConfig(models=(ModelConfig("fake"),), check_level=2)
        async with open_engine(config, make_runner=make_runner, threads=threads) as engine:
            await engine.wait_ready()
            for left_s, heard_s in leavers:
                start = trio.current_time()
                request = GenerateRequest(
                    token_ids=(1,), sampling=SamplingParams(max_tokens=100), timeout_s=timeout_s
                )
                generation = engine.submit(request, buffer=200)
                await trio.sleep_until(start + heard_s)
                generation.close_reader(None if left_s is None else start + left_s)
                await generation.wait_closed()
            totals.append(engine.statistics().totals.requests_total)

    totals = []
    run_deterministically(main, 0)
    return totals[0].cancelled, totals[0].deadline


@pytest.mark.parametrize(
    ("timeout_s", "left_s", "heard_s", "is_deadline"),
    [
        (0.1, 0.079, 0.079, False),
        (0.1, 0.081, 0.081, True),
        (0.1, 0.079, 0.085, False),  # it was on its way while the deadline passed
        (0.1, 0.1, 0.1, True),
        (10.0, 9.97, 9.97, False),
        (10.0, 9.99, 9.99, True),
        (None, 3.0, 3.0, False),
        (0.1, None, 0.085, False),  # in process, leaving has nothing to do with a client's timer
    ],
)
def test_a_call_that_grpc_ends_close_to_its_deadline_counts_as_a_deadline(
    timeout_s, left_s, heard_s, is_deadline
):
    """The end is within 20 ms of the client's timer; the server's is a tenth earlier."""
    counted = ends_of_leavers([(left_s, heard_s)], timeout_s=timeout_s)
    assert counted == ((0, 1) if is_deadline else (1, 0))


@pytest.mark.parametrize("seed", range(4))
def test_a_deadline_that_has_passed_on_arrival_starts_nothing(seed):
    """R206."""
    [(error, took, steps)] = ends_of([0.5], timeout_s=0.4, seed=seed)
    assert isinstance(error, DeadlineExceeded)
    assert (took, steps) == (0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_the_time_a_request_spent_on_its_way_counts(seed):
    """The server's margin is 20 ms, and a tenth of short timeouts."""
    ends = ends_of([0.0, 0.15, 0.3], timeout_s=0.5, seed=seed)
    assert [took for _, took, _ in ends] == [0.48, 0.33, 0.18]
    assert all(isinstance(error, DeadlineExceeded) for error, _, _ in ends)
    [(_, took, _)] = ends_of([0.0], timeout_s=0.1, seed=seed)
    assert took == 0.09
