"""Workers in processes of their own, killed and hung, under the whole engine.

The fake workers import no torch; the right answer to a request follows from its prompt alone.
"""

import operator
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig, WorkerConfig
from engine.errors import TrioletError, WorkerLost
from engine.replica.watchdog import Watchdog
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.status import ModelState
from grpc_service.app.health import model_states
from tests.support.core_driver import expected_tokens
from tests.support.process_fakes import process_runner

STEP_S = 0.02
IDLE_IN_TRIO = ("_thread_cache", "_work")  # where a cached thread of Trio waits: file and function
BACK_LIMIT_S = 10.0  # a restart's backoff of a second or two, and the start of a process


class Fleet:
    """An engine of fake workers; ``runners`` has all runners made so far. ``asked`` says how each
    behaves (`tests.support.worker_fakes`)."""

    def __init__(self, replicas, *, step_s=STEP_S, asked=None, adapters=(), **config):
        self.runners = []
        self._killed = set()
        self._step_s = step_s
        self._asked = asked or {}
        workers = (WorkerConfig(count=replicas, runner="process"),)
        self.config = EngineConfig(
            models=(ModelConfig("fake", workers=workers, adapters=adapters),),
            check_level=2,
            max_num_seqs=config.pop("max_num_seqs", 64),
            **config,
        )

    def make(self, model, config):
        """Make a runner whose worker is a fake."""
        assert model.runner == "process"
        self.runners.append(process_runner(step_s=self._step_s, **self._asked))
        return self.runners[-1]

    def open(self, **options):
        """Open the engine."""
        return open_engine(self.config, make_runner=self.make, **options)

    @property
    def alive(self):
        """The workers that run and were not killed.

        A process lives on for a moment after its kill; after it was waited for, the id may be
        another process's.
        """
        return [one for one in self.runners if one not in self._killed and one.is_alive]

    def kill(self, runner=None):
        """Kill the worker of ``runner``, or else the first one that is alive."""
        runner = runner or self.alive[0]
        self._killed.add(runner)
        os.kill(runner.process.pid, signal.SIGKILL)


def request(first, count=10, **fields):
    """Return a request whose tokens follow from ``first``."""
    return GenerateRequest(
        token_ids=(first, 3), sampling=SamplingParams(max_tokens=count, ignore_eos=True), **fields
    )


async def tokens_of(engine, asked, on_tokens=lambda: None):
    """Return all tokens of a request, which are right as far as they came, however it ended."""
    got, error = [], None
    try:
        async with engine.generate(asked) as stream:
            async for event in stream:
                if new := getattr(event, "token_ids", ()):
                    got += new
                    on_tokens()
    except TrioletError as raised:
        error = raised
    assert got == list(expected_tokens(asked.token_ids, count=len(got)))
    if error is None:
        assert len(got) == asked.sampling.max_tokens
    return got, error


async def wait_for(condition, limit_s=BACK_LIMIT_S):
    """Wait until ``condition()`` is true."""
    with trio.fail_after(limit_s):
        while True:
            if condition():
                return
            await trio.sleep(0.01)


def states(engine):
    """Return the states of all replicas."""
    return [replica.state for replica in engine.statistics().replicas]


def is_whole(engine, replicas):
    """Return whether all replicas are ready."""
    return states(engine) == [ModelState.READY] * replicas


def resources():
    """Return what an engine could keep of lost workers: descriptors, threads, processes.

    Trio keeps threads without a job for ten seconds; these do not count.
    """
    codes = [frame.f_code for frame in sys._current_frames().values()]
    idle = [code for code in codes if (Path(code.co_filename).stem, code.co_name) == IDLE_IN_TRIO]
    return len(os.listdir("/proc/self/fd")), len(codes) - len(idle), len(children())


def children():
    """Return the worker processes that this one has started, by id."""
    found = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return [pid for pid in " ".join(found).split() if is_worker(pid)]


def is_worker(pid):
    """Return whether the process is one of this test's workers."""
    try:
        return b"engine.worker.process.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # the process has just ended
        return False


@pytest.mark.parametrize("phase", ["idle", "queued", "decode"])
async def test_a_killed_worker_costs_its_own_requests_alone_and_comes_back(phase):
    fleet = Fleet(2, max_num_seqs=1 if phase == "queued" else 64)
    async with fleet.open() as engine:
        await engine.load_model("fake")
        unhurt, lost = fleet.runners
        results = {}

        async def ask(name, first, count=30):
            results[name] = await tokens_of(engine, request(first, count))

        async with trio.open_nursery() as nursery:
            if phase != "idle":
                nursery.start_soon(ask, "a", 5)
                nursery.start_soon(ask, "b", 6)
                await trio.sleep(5 * STEP_S)
            if phase == "queued":
                nursery.start_soon(ask, "c", 7)
                nursery.start_soon(ask, "d", 8)
                await trio.sleep(3 * STEP_S)
            fleet.kill(lost)
            await wait_for(lambda: ModelState.DEGRADED in states(engine))
            assert model_states(engine.list_models(), draining=False)["model/fake"] is True
        lost_ones = [name for name, (_, error) in results.items() if isinstance(error, WorkerLost)]
        assert len(lost_ones) == (0 if phase == "idle" else 1)
        for name, (_, error) in results.items():
            assert error is None or name in lost_ones
        if phase == "queued":
            assert {"c", "d"} & set(lost_ones) == set()  # queued requests move to another worker
        await wait_for(lambda: is_whole(engine, 2))
        restarts = [replica.restarts for replica in engine.list_models()[0].replicas]
        assert sorted(restarts) == [0, 1]
        assert (await tokens_of(engine, request(9)))[1] is None
        assert unhurt.is_alive


async def test_requests_wait_after_the_only_worker_has_died():
    fleet = Fleet(1)
    async with fleet.open() as engine:
        await engine.wait_ready()
        fleet.kill()
        await wait_for(lambda: states(engine) == [ModelState.DEGRADED])
        assert model_states(engine.list_models(), draining=False)["model/fake"] is False
        assert (await tokens_of(engine, request(5)))[1] is None
        assert model_states(engine.list_models(), draining=False)["model/fake"] is True


async def test_a_worker_whose_step_hangs_is_killed_and_comes_back():
    fleet = Fleet(1, step_s=30.0)
    watchdog = Watchdog(0.5)
    async with fleet.open(watchdog=watchdog) as engine:
        await engine.wait_ready()
        fleet._step_s = STEP_S  # step time of the worker that is started next
        _, error = await tokens_of(engine, request(5))
        assert isinstance(error, WorkerLost)
        assert "took more than" in str(error)
        assert (await tokens_of(engine, request(5)))[1] is None


@pytest.mark.parametrize(
    "num_kills",
    [pytest.param(10, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.full)],
)
async def test_kills_at_any_instant_leave_nothing_behind(num_kills):
    """Red if each lost worker leaves a thread that never ends, or an open descriptor
    (`ProcessRunner.close`)."""
    fleet = Fleet(2, step_s=0.002, max_worker_deaths=1000)
    rng = random.Random(7)
    ends = Counter()
    baseline = resources()
    async with fleet.open() as engine:
        await engine.load_model("fake")

        async def client(number):
            while not is_over:
                _, error = await tokens_of(engine, request(1 + number, 8))
                ends["ok" if error is None else error.reason] += 1

        is_over = False
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(client, number)
            for _ in range(num_kills):
                await trio.sleep(rng.uniform(0, 0.05))
                fleet.kill(rng.choice(fleet.alive) if fleet.alive else None)
                await trio.sleep(rng.uniform(0, 0.05))
                while len(fleet.alive) < 2:  # a load by the operator does not wait for the backoff
                    await engine.load_model("fake", 2)
                    await trio.sleep(0.01)
            is_over = True
        assert len(fleet.runners) >= num_kills + 2
        assert set(ends) == {"ok", "WORKER_LOST"}
        assert ends["ok"] > ends["WORKER_LOST"]
        assert engine.statistics().totals.memory_reserved == sum(
            model.memory_bytes for model in engine.list_models()
        )
    await wait_for(lambda: all(map(operator.le, resources(), baseline)))


async def clients_beside_kills(*, clients, seconds, every_s):
    """Run clients while one of four workers is killed now and then.

    Return the ends of requests by reason, and their seconds.
    """
    fleet = Fleet(4, step_s=0.005, max_worker_deaths=1000)
    ends, times = Counter(), []
    async with fleet.open() as engine:
        await engine.load_model("fake")
        until = time.monotonic() + seconds

        async def client(number):
            while time.monotonic() < until:
                started = time.monotonic()
                _, error = await tokens_of(engine, request(1 + number, 16))
                times.append(time.monotonic() - started)
                ends["ok" if error is None else error.reason] += 1

        async with trio.open_nursery() as nursery:
            for number in range(clients):
                nursery.start_soon(client, number)
            while every_s and time.monotonic() < until:
                await trio.sleep(every_s)
                if len(fleet.alive) > 1:
                    fleet.kill()
    times.sort()
    return ends, times[int(0.99 * len(times))]


@pytest.mark.parametrize(
    ("clients", "seconds", "every_s"),
    [(20, 4.0, 1.0), pytest.param(100, 60.0, 5.0, marks=pytest.mark.full)],
)
async def test_clients_of_killed_workers_all_learn_how_their_request_ended(
    clients, seconds, every_s, capsys
):
    undisturbed, quiet_p99 = await clients_beside_kills(
        clients=clients, seconds=seconds / 2, every_s=None
    )
    ends, p99 = await clients_beside_kills(clients=clients, seconds=seconds, every_s=every_s)
    with capsys.disabled():
        print(
            f"\n{clients} clients, a worker of four killed every {every_s:g} s: {dict(ends)}, "
            f"p99 {p99:.2f} s, undisturbed {quiet_p99:.2f} s"
        )
    assert set(undisturbed) == {"ok"}
    assert set(ends) <= {"ok", "WORKER_LOST"}
    # A kill ends the requests of one worker of four, which may have had more than a fourth of them.
    assert ends["WORKER_LOST"] <= seconds / every_s * clients / 2
    assert ends["ok"] > ends["WORKER_LOST"]


@pytest.mark.model
@pytest.mark.full
async def test_the_demo_model_goes_on_after_its_worker_was_killed():
    config = EngineConfig(
        models=(ModelConfig("demo-stories", runner="process", threads=1),), max_worker_deaths=1000
    )
    asked = GenerateRequest(
        text="Once upon a time", sampling=SamplingParams(max_tokens=20, temperature=0.0)
    )

    async def text_of(engine):
        async with engine.generate(asked) as stream:
            return "".join([event.text async for event in stream if hasattr(event, "text")])

    async with open_engine(config) as engine:
        await engine.load_model("demo-stories")
        first = await text_of(engine)
        assert len(first) > 20
        for _ in range(5):
            [pid] = children()
            os.kill(int(pid), signal.SIGKILL)
            await wait_for(lambda: states(engine) == [ModelState.DEGRADED])
            await engine.load_model("demo-stories")
            assert await text_of(engine) == first
