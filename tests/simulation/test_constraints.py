"""Compiled constraints in virtual time: compiled once for all waiting requests, kept while used."""

from contextlib import suppress
from functools import partial

import pytest
import trio

from engine.config import EngineConfig, ModelConfig
from engine.core.common.phases import Phase
from engine.core.common.types import EndReason
from engine.core.text.types import Constraint
from engine.errors import (
    DeadlineExceeded,
    EngineBug,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    ShuttingDown,
    Unsupported,
)
from engine.requests.tasks import RequestTasks
from engine.requests.text import compiled_constraints as constraints_module
from engine.requests.text.compiled_constraints import CompiledConstraints
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.worker.fakes.text import FakeRunner, FakeScript
from tests.simulator.determinism import VirtualThreads, run_deterministically
from tests.support.bodies import run_by
from tests.support.virtual_engine import fake_engine, read_all

CONFIG = EngineConfig(models=(ModelConfig("fake"),), check_level=2)
COSTLY = 1.0


def form(name):
    return Constraint("regex", name)


def request_for(name, **fields):
    sampling = SamplingParams(max_tokens=fields.pop("max_tokens", 3))
    constraint = form(name) if name else None
    return GenerateRequest(token_ids=(1, 2), sampling=sampling, constraint=constraint, **fields)


def run(body, *, seed=0, error=None):
    """Run ``body(engine, runner, calls)``.

    Compiling takes `COSTLY` seconds ("cheap": a tenth); ``error(name)`` may return an error.
    """
    calls = []

    def compile_(constraint):
        calls.append(constraint.source)
        script.sleep(COSTLY / 10 if constraint.source == "cheap" else COSTLY)
        if error is not None and (found := error(constraint.source)) is not None:
            raise found

    script = FakeScript(step_s=0.01, compile=compile_)
    runner = FakeRunner(script=script)

    async def main():
        async with fake_engine(script, lambda script: runner) as engine:
            await body(engine, runner, calls)
            await engine.wait_idle()

    run_deterministically(main, seed)


in_engine = partial(run_by, run)


async def ended(generation):
    """Read the stream to its end, and return its error."""
    await read_all(generation)
    return generation.error


@pytest.mark.parametrize("seed", range(5))
@in_engine()
async def test_a_constraint_is_compiled_once_for_waiting_and_later_requests(
    engine, runner, calls, *, seed
):
    first = [engine.submit(request_for("a", n=2), buffer=9) for _ in range(5)]
    assert [await ended(one) for one in first] == [None] * 5
    assert trio.current_time() >= COSTLY
    assert await ended(engine.submit(request_for("a"), buffer=9)) is None
    assert calls == ["a"]
    assert runner.compiled == {form("a")}


@pytest.mark.parametrize("name", [None, "cheap"])
@in_engine()
async def test_a_costly_constraint_delays_no_other_request(engine, runner, calls, *, name):
    costly = engine.submit(request_for("costly"), buffer=9)
    start = trio.current_time()
    assert await ended(engine.submit(request_for(name), buffer=9)) is None
    assert trio.current_time() - start < COSTLY / 2
    assert not costly.is_closed
    assert await ended(costly) is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (InvalidRequest.of("constraint.regex", "no"), InvalidRequest),
        (Unsupported("no", field="constraint"), Unsupported),
    ],
    ids=["invalid", "unsupported"],
)
def test_a_failed_compilation_is_raised_for_each_request_and_kept(seed, failure, expected):
    async def body(engine, runner, calls):
        bad = [engine.submit(request_for("bad"), buffer=9) for _ in range(3)]
        good = engine.submit(request_for("good"), buffer=9)
        errors = [await ended(one) for one in bad]
        assert [type(error) for error in errors] == [expected] * 3
        assert len({id(error) for error in errors}) == 3
        assert await ended(good) is None
        start = trio.current_time()
        assert isinstance(await ended(engine.submit(request_for("bad"), buffer=9)), expected)
        assert trio.current_time() - start < COSTLY / 2
        assert calls.count("bad") == 1

    run(body, seed=seed, error=lambda name: failure if name == "bad" else None)


@pytest.mark.parametrize(
    "failure", [ZeroDivisionError("x"), MemoryError(), Overloaded("busy")], ids=repr
)
def test_another_kind_of_failure_is_not_kept(failure):
    failures = [failure]

    async def body(engine, runner, calls):
        error = await ended(engine.submit(request_for("a"), buffer=9))
        assert isinstance(error, (EngineBug, Overloaded))
        assert await ended(engine.submit(request_for("a"), buffer=9)) is None
        assert calls == ["a", "a"]

    run(body, error=lambda name: failures.pop() if failures else None)


class Panic(BaseException):
    """The kind of exception that a panic in a Rust library raises."""


@in_engine(error=lambda name: Panic() if name == "bad" else None)
async def test_a_compiler_that_panics_ends_its_own_request_and_no_other(engine, runner, calls):
    bad = engine.submit(request_for("bad"), buffer=9)
    assert await ended(engine.submit(request_for("good"), buffer=9)) is None
    assert isinstance(await ended(bad), EngineBug)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at", [0.0, 0.3])
@in_engine()
async def test_a_request_that_leaves_during_a_compilation_ends_at_once_and_the_work_is_kept(
    engine, runner, calls, *, seed, at
):
    leaver = engine.submit(request_for("a"), buffer=9)
    await trio.sleep(at)
    assert at == 0.0 or leaver.phase is Phase.COMPILE
    leaver.cancel(EndReason.CANCELLED)
    start = trio.current_time()
    assert isinstance(await ended(leaver), RequestCancelled)
    assert trio.current_time() == start
    await engine.wait_idle()
    assert await ended(engine.submit(request_for("a"), buffer=9)) is None
    assert at == 0.0 or calls == ["a"]


@in_engine()
async def test_a_deadline_during_a_compilation_names_the_phase(engine, runner, calls):
    late = engine.submit(request_for("a", timeout_s=0.5), buffer=9)
    error = await ended(late)
    assert isinstance(error, DeadlineExceeded)
    assert (error.phase, error.tokens_done) == ("compile", 0)
    assert trio.current_time() < COSTLY


@in_engine()
async def test_a_compilation_that_nobody_waits_for_does_not_begin(engine, runner, calls):
    """Two constraints are compiled at a time; the third one's request leaves before its turn."""
    going = [engine.submit(request_for(name), buffer=9) for name in ("a", "b")]
    await trio.sleep(0.1)
    third = engine.submit(request_for("c"), buffer=9)
    await trio.sleep(0.1)
    third.cancel(EndReason.CANCELLED)
    assert [await ended(one) for one in going] == [None, None]
    assert sorted(calls) == ["a", "b"]


@pytest.mark.parametrize("seed", range(8))
def test_the_engine_may_close_during_a_compilation(seed):
    errors = []

    async def body(engine, runner, calls):
        one = engine.submit(request_for("a"), buffer=9)
        await trio.sleep(0.2)
        await engine.drain(0.1)
        errors.append(await ended(one))

    run(body, seed=seed)
    assert isinstance(errors[0], ShuttingDown)


# ---- the bounds ------------------------------------------------------------------------------


class SlowCompiler:
    """Compiles constraints of sizes given by their names, and keeps them, like a runner."""

    def __init__(self):
        self.kept = set()

    def compile(self, constraint):
        self.kept.add(constraint)
        return len(constraint.source)

    def forget(self, constraint):
        self.kept.discard(constraint)


def bounded(body, monkeypatch, *, entries=3, num_bytes=1000, waiting=9):
    """Run ``body(held, tasks, compiler)`` with bounds on compiled constraints and on requests."""
    monkeypatch.setattr(constraints_module, "ENTRIES_MAX", entries)
    monkeypatch.setattr(constraints_module, "BYTES_MAX", num_bytes)
    monkeypatch.setattr(constraints_module, "WAITING_MAX", waiting)
    compiler = SlowCompiler()

    async def main():
        held = CompiledConstraints(compiler, VirtualThreads())
        tasks = RequestTasks()
        async with tasks.running():
            await body(held, tasks, compiler)

    run_deterministically(main, 0)


async def use(held, tasks, *names):
    """Use constraints one after the other."""
    for name in names:
        async with held.held(form(name), tasks):
            pass


@run_by(bounded)
async def test_the_least_recently_used_constraint_is_forgotten_when_there_are_too_many(
    held, tasks, compiler, *, monkeypatch
):
    await use(held, tasks, "a", "b", "c", "a", "d")
    assert compiler.kept == {form(name) for name in "cad"}
    assert len(held) == 3


@run_by(bounded)
async def test_or_when_constraints_take_too_much_memory(held, tasks, compiler, *, monkeypatch):
    await use(held, tasks, "a" * 600, "b" * 600)
    assert held.num_bytes == 1200
    await use(held, tasks, "c")
    assert compiler.kept == {form("b" * 600), form("c")}


@run_by(bounded)
async def test_constraints_in_use_stay_and_more_than_these_are_refused_for_now(
    held, tasks, compiler, *, monkeypatch
):
    async with held.held(form("a"), tasks), held.held(form("b"), tasks):
        async with held.held(form("c"), tasks):
            with pytest.raises(Overloaded):
                await use(held, tasks, "d")
            await use(held, tasks, "a")
        await use(held, tasks, "d")
        assert compiler.kept == {form(name) for name in "abd"}


@run_by(bounded)
async def test_a_closed_engine_compiles_nothing(held, tasks, compiler, *, monkeypatch):
    with pytest.raises(ShuttingDown):
        await use(held, RequestTasks(), "a")


@run_by(bounded, entries=99, waiting=3)
async def test_too_many_waiting_requests_are_refused_for_now(held, tasks, compiler, *, monkeypatch):
    refused = []

    async def ask(name):
        try:
            await use(held, tasks, name)
        except Overloaded:
            refused.append(name)

    async with trio.open_nursery() as own:
        for name in "abcde":
            own.start_soon(ask, name)
    assert len(refused) == 2
    assert len(compiler.kept) == 3


# ---- threads that begin late, or never ---------------------------------------------------


class OddThreads(VirtualThreads):
    """Start a job ``late_s`` after its turn has come; raise for the first ``refusals`` jobs."""

    def __init__(self, late_s=0.0, refusals=0):
        super().__init__()
        self._late_s = late_s
        self._refusals = refusals

    async def run(self, job, limiter):
        if self._refusals:
            self._refusals -= 1
            await trio.lowlevel.checkpoint()
            raise RuntimeError("can't start new thread")
        async with limiter:
            with trio.CancelScope(shield=True):
                await trio.sleep(self._late_s)
            return job()


def with_threads(body, threads, seed):
    """Run ``body(held, tasks, compiler)`` with these threads."""
    compiler = SlowCompiler()

    async def main():
        held = CompiledConstraints(compiler, threads)
        tasks = RequestTasks()
        async with tasks.running():
            await body(held, tasks, compiler)
        assert compiler.kept == set(held._entries)

    run_deterministically(main, seed)


@pytest.mark.parametrize("seed", range(20))
def test_a_compilation_that_never_began_leaves_the_next_one_alone(seed):
    async def body(held, tasks, compiler):
        async def ask(after):
            for _ in range(after):
                await trio.lowlevel.checkpoint()
            with suppress(EngineBug):
                async with held.held(form("a"), tasks):
                    assert form("a") in compiler.kept
                    await trio.sleep(1)
                    assert form("a") in compiler.kept

        for after in (0, 3):  # the second request comes when the first gets its error
            tasks.start(ask, after)

    with_threads(body, OddThreads(refusals=1), seed)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_kept_that_was_compiled_for_requests_which_had_left(seed):
    """One request leaves while its compilation's thread starts; another one's never starts."""

    async def body(held, tasks, compiler):
        async def ask(name, until):
            with trio.move_on_at(start + until):
                await use(held, tasks, name)

        start = trio.current_time()
        tasks.start(ask, "b", 9.0)  # "a" and "b" together take all compilers
        tasks.start(ask, "a", 0.5)
        await trio.sleep(0.6)
        for name in "cd":
            tasks.start(ask, name, 9.0)
        await trio.sleep(0.1)
        tasks.start(ask, "a", 1.5)

    with_threads(body, OddThreads(late_s=1.0), seed)
