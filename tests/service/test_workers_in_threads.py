"""Workers in threads of this process, under the whole engine, in real time.

`test_workers.py` has workers in processes, and what happens when they die.
"""

import sys
import threading
import time
from pathlib import Path

import pytest
import trio

import engine
from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig, WorkerConfig
from engine.core.text.scheduler import Scheduler
from engine.core.text.types import Tokens
from engine.replica.loop import EngineLoop
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.support.core_driver import expected_tokens

LIMIT_S = 10.0  # seconds for each request
STEP_S = 0.003
OURS = str(Path(engine.__file__).parent)


class Crowd:
    """How many runners are in a step, and how many were at most."""

    def __init__(self):
        self.lock = threading.Lock()
        self.now = self.peak = 0
        self.threads = set()

    def change(self, by):
        """Count a runner that enters a step or leaves it."""
        with self.lock:
            self.now += by
            self.peak = max(self.peak, self.now)
            self.threads.add(threading.get_ident())


class CrowdedRunner(FakeRunner):
    """A fake that counts in a crowd while it computes, and fails when two of its steps overlap.

    `FakeRunner` raises for that, and for a row whose keys and values another worker has.
    """

    def __init__(self, crowd, step_s):
        super().__init__(script=FakeScript(step_s=step_s))
        self._crowd = crowd

    def execute(self, plan):
        self._crowd.change(1)
        try:
            return super().execute(plan)
        finally:
            self._crowd.change(-1)


def open_fleet(replicas, crowd, *, step_s=STEP_S, **options):
    """Open an engine with so many workers in threads."""
    model = ModelConfig("fake", workers=(WorkerConfig(count=replicas),))
    config = EngineConfig(models=(model,), check_level=2)
    return open_engine(config, make_runner=lambda *_: CrowdedRunner(crowd, step_s), **options)


async def ask(eng, first, count):
    """Run a request, and check its tokens and its time."""
    prompt, ids = (first, 2, 3), []
    asked = GenerateRequest(token_ids=prompt, sampling=SamplingParams(max_tokens=count))
    with trio.fail_after(LIMIT_S):
        async with eng.generate(asked) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    ids += event.token_ids
    assert ids == expected_tokens(prompt, count=count)


async def test_one_request():
    """A worker gets the request, answers within 5 s, and ends in order."""
    before = {thread.name for thread in threading.enumerate()}
    with trio.fail_after(5):
        async with open_fleet(1, Crowd()) as eng:
            await ask(eng, 1, 5)
            assert eng.list_models()[0].replicas[0].processed == 1
        assert eng.num_live == 0
        assert eng.list_models()[0].replicas == ()
    left = {thread.name for thread in threading.enumerate()} - before
    assert {name for name in left if not name.startswith("Trio thread")} <= {"triolet-watchdog"}


async def ask_beside(eng, requests, tokens):
    """Run requests beside each other, once the model is loaded."""
    await eng.load_model("fake")
    async with trio.open_nursery() as nursery:
        for number in range(requests):
            nursery.start_soon(ask, eng, 1 + number, tokens)


async def test_concurrent_load_of_a_hundred_requests_on_four_workers():
    """Each request ends within ten seconds, served by one worker."""
    crowd = Crowd()
    async with open_fleet(4, crowd) as eng:
        await ask_beside(eng, 100, 10)
        served = [replica.processed for replica in eng.list_models()[0].replicas]
    assert sum(served) == 100
    assert min(served) >= 10
    assert crowd.peak > 1


class RecordedLock:
    """A lock that calls ``report`` when it is taken. Its other attributes are those of ``lock``."""

    def __init__(self, lock, report):
        self._lock = lock
        self._report = report

    def acquire(self, *args, **kwargs):
        self._report()
        return self._lock.acquire(*args, **kwargs)

    def release(self):
        self._lock.release()

    def __getattr__(self, name):
        return getattr(self._lock, name)

    def __enter__(self):
        self.acquire()
        return self

    def __exit__(self, *exc):
        self.release()


def our_caller():
    """Return the place in the engine that took a lock, itself or through `threading`; or None."""
    frame = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_filename == threading.__file__
        or frame.f_code.co_qualname.startswith(RecordedLock.__name__)
    ):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(OURS):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@pytest.fixture
def taken(monkeypatch):
    """Return a list of the places in the engine that take a lock while a step is in flight.

    The watchdog's locks are left out: they belong to Python's Event, which wakes the watchdog and
    is not set where one step follows another.
    """
    places, in_flight, step = [], [], EngineLoop._step

    def report():
        place = our_caller()
        if in_flight and place is not None and not place.startswith(f"{OURS}/replica/watchdog.py"):
            places.append(place)

    async def watched(loop, plan, started):
        in_flight.append(plan)
        try:
            return await step(loop, plan, started)
        finally:
            in_flight.remove(plan)

    for name in ("Lock", "RLock"):
        make = getattr(threading, name)
        monkeypatch.setattr(threading, name, lambda make=make: RecordedLock(make(), report))
    monkeypatch.setattr(EngineLoop, "_step", watched)
    return places


async def test_no_lock_of_ours_is_taken_while_steps_run_and_the_steps_of_two_workers_overlap(taken):
    crowd = Crowd()
    async with open_fleet(2, crowd) as eng:
        await ask_beside(eng, 8, 20)
    assert taken == []
    assert crowd.peak == 2


async def test_a_lock_that_is_taken_during_a_step_is_noticed(taken, monkeypatch):
    """The test above can fail: here the scheduler takes a lock when it plans ahead."""
    source = "def prepare(self, now):\n    with lock:\n        return stock(self, now)\n"
    space = {"lock": threading.Lock(), "stock": Scheduler.prepare}
    exec(compile(source, f"{OURS}/planted.py", "exec"), space)
    monkeypatch.setattr(Scheduler, "prepare", space["prepare"])
    async with open_fleet(1, Crowd()) as eng:
        await ask(eng, 1, 5)
    assert set(taken) == {f"{OURS}/planted.py:2"}


async def test_schedulers_and_the_pool_stay_on_trios_thread_and_steps_do_not(monkeypatch):
    own, crowd, found = threading.get_ident(), Crowd(), set()

    def note(owner, name):
        stock = getattr(owner, name)

        def noted(*args):
            found.add(threading.get_ident())
            return stock(*args)

        monkeypatch.setattr(owner, name, noted)

    for name in ("apply", "plan", "prepare", "statistics", "check"):
        note(Scheduler, name)
    changed = []
    async with open_fleet(2, crowd, on_change=lambda: changed.append(threading.get_ident())) as eng:
        await ask_beside(eng, 6, 10)
    assert found == {own}
    assert set(changed) == {own}
    assert crowd.threads
    assert own not in crowd.threads


async def test_tasks_and_threads_that_block_share_an_engine():
    """Threads of a Trio program enter it by `trio.from_thread`."""
    crowd = Crowd()

    def block(eng, first):
        trio.from_thread.run(ask, eng, first, 30)

    async with open_fleet(1, crowd) as eng:
        await eng.wait_ready()
        started = time.monotonic()
        async with trio.open_nursery() as nursery:
            for first in (1, 2):
                nursery.start_soon(trio.to_thread.run_sync, block, eng, first)
                nursery.start_soon(ask, eng, 10 + first, 30)
        assert time.monotonic() - started < LIMIT_S
        counts = eng.statistics().totals
    assert counts.requests_total.finished == 4
    assert counts.step_rows_total > counts.step_count  # the requests shared steps
