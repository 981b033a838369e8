"""What happens to requests in each phase when their worker dies, in virtual time."""

from dataclasses import fields, replace

import pytest
import trio

from engine.core.text.types import Constraint
from engine.errors import ShuttingDown, WorkerLost
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.status import LEVELS, Counts
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.simulator.determinism import VirtualThreads, run_deterministically
from tests.support.virtual_engine import fake_engine

STEP_S = 1.0
DIES_AT_STEP = 5


def ends(asks, seed, *, runner_class=FakeRunner, encode_s=4.0, **settings):
    """Submit each (when, request) to a model whose first worker dies in its fifth step.

    Return how each request ended, and how many Started events its reader got.
    """
    threads, workers = VirtualThreads(), []

    def make(script):
        faults = {} if workers else {DIES_AT_STEP: WorkerLost("planted")}
        workers.append(runner_class(script=replace(script, step_faults=faults)))
        return workers[-1]

    async def main():
        settings.setdefault("max_num_seqs", 1)
        script = FakeScript(  # a text of 4,096 or more characters is tokenised in a thread
            step_s=STEP_S,
            encode_s=encode_s,
            compile=lambda constraint: threads.note_sleep(4.0),
        )
        async with fake_engine(script, make, threads=threads, **settings) as engine:
            generations = []
            start = trio.current_time()
            for when, request in asks:
                await trio.sleep_until(start + when)
                generations.append(engine.submit(request, buffer=500))
            for generation in generations:
                await generation.wait_closed()
            return [(one.error, (await drained(one)).count("Started")) for one in generations]

    found = run_deterministically(main, seed)
    assert len(workers) == 2
    return found


async def drained(stream):
    """Return the class names of the events that an ended stream left to its reader."""
    names = []
    while True:
        try:
            names.append(type(await stream.receive()).__name__)
        except trio.EndOfChannel:
            return names


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
def test_requests_that_had_not_begun_go_on_with_the_next_worker(other, seed):
    (lost, _), (error, num_starts) = ends([(0.0, asked()), (3.0, other)], seed)
    assert isinstance(lost, WorkerLost)
    assert error is None
    assert num_starts == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_request_that_was_only_planned_goes_on_with_the_next_worker(seed):
    """The plan of its first step was prepared during the step in which the worker died."""
    long = asked(token_ids=tuple(range(1, 27)))  # takes the token budget that is left in two steps
    asks = [(0.0, asked()), (2.5, long), (3.2, asked(token_ids=(5, 6)))]
    found = ends(asks, seed, max_num_seqs=3, max_num_batched_tokens=16)
    (running, _), (prefilling, _), (error, num_starts) = found
    assert isinstance(running, WorkerLost)
    assert isinstance(prefilling, WorkerLost)
    assert error is None
    assert num_starts == 1


class ClosedRunner(FakeRunner):
    """Answers like a process worker's runner once it is closed."""

    is_closed = False

    def close(self):
        self.is_closed = True
        super().close()

    def compile(self, constraint):
        if self.is_closed:
            raise ShuttingDown("the model was closed")
        return super().compile(constraint)


@pytest.mark.parametrize("seed", range(4))
def test_a_constraint_that_finds_its_worker_dead_is_compiled_by_the_next_one(seed):
    formed = asked(token_ids=None, text="<7>" * 1400, constraint=Constraint("regex", "a"))
    # "formed" is tokenised from 3 to 6.5 s. The worker dies at 6 s, the next one loads from 7 s on.
    found = ends([(0.0, asked()), (3.0, formed)], seed, runner_class=ClosedRunner, encode_s=3.5)
    (lost, _), (error, num_starts) = found
    assert isinstance(lost, WorkerLost)
    assert error is None
    assert num_starts == 1


def test_a_dead_replica_holds_nothing_while_its_worker_is_closed():
    threads, closing = VirtualThreads(), []

    class SlowToClose(FakeRunner):
        def close(self):
            super().close()
            closing.append(True)
            threads.note_sleep(10 * STEP_S)

    def make(script):
        faults = {} if closing else {DIES_AT_STEP: WorkerLost("planted")}
        return SlowToClose(script=replace(script, step_faults=faults))

    async def main():
        async with fake_engine(FakeScript(step_s=STEP_S), make, threads=threads) as engine:
            generation = engine.submit(asked(), buffer=500)
            await trio.sleep(2.5 * STEP_S)
            [alive] = engine.statistics().replicas
            assert alive.counts.running == 1
            await generation.wait_closed()
            await trio.sleep(STEP_S / 2)
            assert closing
            dead = engine.statistics().replicas[0].counts  # including its successor's
            held = (dead.running, dead.total_blocks, dead.free_blocks, dead.cached_blocks)
            assert held == (0, 0, 0, 0)
            assert dead.step_count > alive.counts.step_count
            assert dead.memory_reserved > 0

    run_deterministically(main, 0)


class LookingReader:
    """A reader that calls ``look`` when it hears of the end."""

    def __init__(self, look):
        self._look = look

    def push(self, event):
        pass

    def end(self, error):
        self._look(error)


@pytest.mark.parametrize("seed", range(4))
def test_a_dead_worker_has_left_the_routing_when_its_requests_hear_of_its_death(seed):
    """A request that is submitted in that moment waits for the next worker."""
    workers, seen = [], []

    def make(script):
        faults = {} if workers else {DIES_AT_STEP: WorkerLost("planted")}
        workers.append(FakeRunner(script=replace(script, step_faults=faults)))
        return workers[-1]

    async def main():
        async with fake_engine(FakeScript(step_s=STEP_S), make, waits=False) as engine:

            def look(error):
                entry = engine.registry.entries["fake"]
                seen.append((error, entry.ready, engine.submit(asked(), buffer=99)))

            await engine.wait_ready()
            await engine.submit(asked(), buffer=99, reader=LookingReader(look)).wait_closed()
            [(error, ready, later)] = seen
            assert isinstance(error, WorkerLost)
            assert list(ready) == []
            await later.wait_closed()
            assert later.error is None

    run_deterministically(main, seed)
    assert len(workers) == 2


def test_the_levels_are_counts():
    assert {field.name for field in fields(Counts)} > LEVELS
