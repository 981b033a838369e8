"""What becomes of requests, wherever they are, when their worker dies (R141), in virtual time."""

from __future__ import annotations

from dataclasses import fields

import pytest
import trio

from engine.api import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.types import Constraint
from engine.errors import WorkerLost
from engine.model.fake import FakeRunner, FakeScript
from engine.requests import GenerateRequest, SamplingParams
from engine.status import LEVELS, Counts
from tools.simulator.determinism import VirtualThreads, run_deterministically

STEP_S = 1.0
DIES_AT_STEP = 5


def ends(asks, seed):
    """Submit (when, request) of each to a model whose first worker dies in its fifth step: how each
    ended, and how many events of a start each reader had."""
    threads, workers = VirtualThreads(), []

    def make_runner(model, config):
        faults = {} if workers else {DIES_AT_STEP: WorkerLost("planted")}
        script = FakeScript(  # a text of 4,096 characters and more is tokenised in a thread
            step_s=STEP_S,
            encode_s=4.0,
            sleep=threads.note_sleep,
            step_faults=faults,
            compile=lambda constraint: threads.note_sleep(4.0),
        )
        workers.append(FakeRunner(script=script))
        return workers[-1]

    async def main():
        config = EngineConfig(models=(ModelConfig("fake"),), max_num_seqs=1, check_level=2)
        async with open_engine(config, make_runner=make_runner, threads=threads) as engine:
            await engine.wait_ready()
            generations = []
            start = trio.current_time()
            for when, request in asks:
                await trio.sleep_until(start + when)
                generations.append(engine.submit(request, buffer=500))
            for generation in generations:
                await generation.wait_closed()
            kinds = [[type(e).__name__ for e in one.drain()] for one in map(Reader, generations)]
            return [(g.error, k.count("Started")) for g, k in zip(generations, kinds, strict=True)]

    found = run_deterministically(main, seed)
    assert len(workers) == 2
    return found


class Reader:
    """What a generation that has ended left in its channel."""

    def __init__(self, generation):
        self._generation = generation

    def drain(self):
        while True:
            try:
                yield self._generation._receive.receive_nowait()
            except (trio.EndOfChannel, trio.WouldBlock):
                return


def asked(**fields):
    return GenerateRequest(
        **{"token_ids": (3, 4)} | fields, sampling=SamplingParams(max_tokens=20, ignore_eos=True)
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(asked(), id="in line"),
        pytest.param(asked(token_ids=None, text="<7>" * 1400), id="tokenised"),
        pytest.param(asked(constraint=Constraint("regex", "a")), id="compiled"),
        pytest.param(asked(n=1, timeout_s=500.0), id="with a deadline"),
    ],
)
def test_who_had_not_begun_goes_on_with_the_next_worker(other, seed):
    (lost, _), (error, num_starts) = ends([(0.0, asked()), (3.0, other)], seed)
    assert isinstance(lost, WorkerLost)
    assert error is None
    assert num_starts == 1


def test_what_died_holds_nothing_while_its_worker_is_still_being_closed():
    threads, closing = VirtualThreads(), []

    class SlowToClose(FakeRunner):
        def close(self):
            super().close()
            closing.append(True)
            threads.note_sleep(10 * STEP_S)

    def make_runner(model, config):
        faults = {} if closing else {DIES_AT_STEP: WorkerLost("planted")}
        script = FakeScript(step_s=STEP_S, sleep=threads.note_sleep, step_faults=faults)
        return SlowToClose(script=script)

    async def main():
        config = EngineConfig(models=(ModelConfig("fake"),))
        async with open_engine(config, make_runner=make_runner, threads=threads) as engine:
            await engine.wait_ready()
            generation = engine.submit(asked(), buffer=500)
            await trio.sleep(2.5 * STEP_S)
            [alive] = engine.statistics().replicas
            assert alive.counts.running == 1
            await generation.wait_closed()
            await trio.sleep(STEP_S / 2)
            assert closing
            dead = engine.statistics().replicas[0].counts  # and the one that is to come back
            held = (dead.running, dead.total_blocks, dead.free_blocks, dead.cached_blocks)
            assert held == (0, 0, 0, 0)
            assert dead.step_count > alive.counts.step_count
            assert dead.memory_reserved > 0

    run_deterministically(main, 0)


def test_the_levels_are_counts():
    assert {field.name for field in fields(Counts)} > LEVELS
