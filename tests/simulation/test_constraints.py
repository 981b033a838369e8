"""Compiled constraints in virtual time: once for all who wait, held while somebody needs them."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from engine import constraints as constraints_module
from engine.api import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.constraints import Constraints
from engine.core.types import Constraint, EndReason
from engine.errors import (
    DeadlineExceeded,
    EngineBug,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    ShuttingDown,
    Unsupported,
)
from engine.model.fake import FakeRunner, FakeScript
from engine.requests import GenerateRequest, SamplingParams
from tools.simulator.determinism import VirtualThreads, run_deterministically

CONFIG = EngineConfig(models=(ModelConfig("fake"),), check_level=2)
COSTLY = 1.0


def form(name):
    return Constraint("regex", name)


def request_for(name, **fields):
    sampling = SamplingParams(max_tokens=fields.pop("max_tokens", 3))
    constraint = form(name) if name else None
    return GenerateRequest(token_ids=(1, 2), sampling=sampling, constraint=constraint, **fields)


def run(body, *, seed=0, error=None):
    """Run ``body(engine, runner, calls)``; compiling takes `COSTLY` seconds, ``error(name)`` may
    make it fail."""
    threads, calls = VirtualThreads(), []

    def compile_(constraint):
        calls.append(constraint.source)
        threads.note_sleep(COSTLY)
        if error is not None and (found := error(constraint.source)) is not None:
            raise found

    runner = FakeRunner(script=FakeScript(step_s=0.01, sleep=threads.note_sleep, compile=compile_))

    async def main():
        async with open_engine(
            CONFIG, make_runner=lambda model, config: runner, threads=threads
        ) as engine:
            await engine.wait_ready()
            await body(engine, runner, calls)
            await engine.wait_idle()

    run_deterministically(main, seed)


async def ended(generation):
    """Drain it; its error."""
    while True:
        try:
            await generation.receive()
        except trio.EndOfChannel:
            return generation.error


@pytest.mark.parametrize("seed", range(5))
def test_a_constraint_is_compiled_once_for_all_who_wait_and_for_who_comes_later(seed):
    async def body(engine, runner, calls):
        first = [engine.submit(request_for("a", n=2), buffer=9) for _ in range(5)]
        assert [await ended(one) for one in first] == [None] * 5
        assert trio.current_time() >= COSTLY
        assert await ended(engine.submit(request_for("a"), buffer=9)) is None
        assert calls == ["a"]
        assert runner.compiled == {form("a")}

    run(body, seed=seed)


def test_a_costly_constraint_delays_no_other_request():
    async def body(engine, runner, calls):
        costly = engine.submit(request_for("costly"), buffer=9)
        start = trio.current_time()
        assert await ended(engine.submit(request_for(None), buffer=9)) is None
        assert trio.current_time() - start < COSTLY / 2
        assert not costly.is_closed
        assert await ended(costly) is None

    run(body)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (InvalidRequest.of("constraint.regex", "no"), InvalidRequest),
        (Unsupported("no", field="constraint"), Unsupported),
    ],
    ids=["invalid", "unsupported"],
)
def test_one_that_fails_is_told_to_each_and_remembered(seed, failure, expected):
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
def test_another_failure_is_not_remembered(failure):
    failures = [failure]

    async def body(engine, runner, calls):
        error = await ended(engine.submit(request_for("a"), buffer=9))
        assert isinstance(error, (EngineBug, Overloaded))
        assert await ended(engine.submit(request_for("a"), buffer=9)) is None
        assert calls == ["a", "a"]

    run(body, error=lambda name: failures.pop() if failures else None)


class Panic(BaseException):
    """What a library in Rust raises when it panics."""


def test_a_compiler_that_panics_ends_its_own_request_and_no_other():
    async def body(engine, runner, calls):
        bad = engine.submit(request_for("bad"), buffer=9)
        assert await ended(engine.submit(request_for("good"), buffer=9)) is None
        assert isinstance(await ended(bad), EngineBug)

    run(body, error=lambda name: Panic() if name == "bad" else None)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at", [0.0, 0.3])
def test_who_leaves_while_it_compiles_is_gone_at_once_and_the_work_is_kept(seed, at):
    async def body(engine, runner, calls):
        leaver = engine.submit(request_for("a"), buffer=9)
        await trio.sleep(at)
        assert at == 0.0 or leaver.phase == "compile"
        leaver.cancel(EndReason.CANCELLED)
        start = trio.current_time()
        assert isinstance(await ended(leaver), RequestCancelled)
        assert trio.current_time() == start
        await engine.wait_idle()
        assert await ended(engine.submit(request_for("a"), buffer=9)) is None
        assert at == 0.0 or calls == ["a"]

    run(body, seed=seed)


def test_a_deadline_passes_while_it_compiles_and_says_so():
    async def body(engine, runner, calls):
        late = engine.submit(request_for("a", timeout_s=0.5), buffer=9)
        error = await ended(late)
        assert isinstance(error, DeadlineExceeded)
        assert (error.phase, error.tokens_done) == ("compile", 0)
        assert trio.current_time() < COSTLY

    run(body)


def test_what_nobody_waits_for_any_more_is_not_begun():
    """Two compile at a time; the third's waiter leaves before its turn."""

    async def body(engine, runner, calls):
        going = [engine.submit(request_for(name), buffer=9) for name in ("a", "b")]
        await trio.sleep(0.1)
        third = engine.submit(request_for("c"), buffer=9)
        await trio.sleep(0.1)
        third.cancel(EndReason.CANCELLED)
        assert [await ended(one) for one in going] == [None, None]
        assert sorted(calls) == ["a", "b"]

    run(body)


@pytest.mark.parametrize("seed", range(8))
def test_the_engine_may_close_while_it_compiles(seed):
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
    """Sizes by name; what is compiled, as a runner would keep it."""

    def __init__(self):
        self.kept = set()

    def compile(self, constraint):
        self.kept.add(constraint)
        return len(constraint.source)

    def forget(self, constraint):
        self.kept.discard(constraint)


def bounded(body, monkeypatch, *, entries=3, num_bytes=1000, waiting=9):
    monkeypatch.setattr(constraints_module, "ENTRIES_MAX", entries)
    monkeypatch.setattr(constraints_module, "BYTES_MAX", num_bytes)
    monkeypatch.setattr(constraints_module, "WAITING_MAX", waiting)
    compiler = SlowCompiler()

    async def main():
        held = Constraints(compiler, VirtualThreads())
        async with trio.open_nursery() as nursery:
            await body(held, nursery, compiler)

    run_deterministically(main, 0)


async def use(held, nursery, *names):
    for name in names:
        async with held.held(form(name), nursery):
            pass


def test_the_least_recently_used_goes_when_there_are_too_many(monkeypatch):
    async def body(held, nursery, compiler):
        await use(held, nursery, "a", "b", "c", "a", "d")
        assert compiler.kept == {form(name) for name in "cad"}
        assert len(held) == 3

    bounded(body, monkeypatch)


def test_or_when_they_take_too_much_memory(monkeypatch):
    async def body(held, nursery, compiler):
        await use(held, nursery, "a" * 600, "b" * 600)
        assert held.num_bytes == 1200
        await use(held, nursery, "c")
        assert compiler.kept == {form("b" * 600), form("c")}

    bounded(body, monkeypatch)


def test_what_is_held_stays_and_more_than_that_is_refused_for_now(monkeypatch):
    async def body(held, nursery, compiler):
        async with held.held(form("a"), nursery), held.held(form("b"), nursery):
            async with held.held(form("c"), nursery):
                with pytest.raises(Overloaded):
                    await use(held, nursery, "d")
                await use(held, nursery, "a")
            await use(held, nursery, "d")
            assert compiler.kept == {form(name) for name in "abd"}

    bounded(body, monkeypatch)


def test_a_closed_engine_compiles_nothing(monkeypatch):
    async def body(held, nursery, compiler):
        with pytest.raises(ShuttingDown):
            await use(held, None, "a")

    bounded(body, monkeypatch)


def test_too_many_that_wait_are_refused_for_now(monkeypatch):
    async def body(held, nursery, compiler):
        refused = []

        async def ask(name):
            try:
                await use(held, nursery, name)
            except Overloaded:
                refused.append(name)

        async with trio.open_nursery() as own:
            for name in "abcde":
                own.start_soon(ask, name)
        assert len(refused) == 2
        assert len(compiler.kept) == 3

    bounded(body, monkeypatch, entries=99, waiting=3)


# ---- threads that begin late, or not at all ---------------------------------------------------


class OddThreads(VirtualThreads):
    """Starts a job ``late_s`` after its turn has come; ``refusals`` are not started at all."""

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
    compiler = SlowCompiler()

    async def main():
        held = Constraints(compiler, threads)
        async with trio.open_nursery() as nursery:
            await body(held, nursery, compiler)
        assert compiler.kept == set(held._entries)

    run_deterministically(main, seed)


@pytest.mark.parametrize("seed", range(20))
def test_who_waited_for_a_compilation_that_never_began_leaves_the_next_one_alone(seed):
    async def body(held, nursery, compiler):
        async def ask(after):
            for _ in range(after):
                await trio.lowlevel.checkpoint()
            with suppress(EngineBug):
                async with held.held(form("a"), nursery):
                    assert form("a") in compiler.kept
                    await trio.sleep(1)
                    assert form("a") in compiler.kept

        for after in (0, 3):  # the second comes as the first hears of it
            nursery.start_soon(ask, after)

    with_threads(body, OddThreads(refusals=1), seed)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_kept_of_what_was_compiled_for_those_who_had_left(seed):
    """Its thread was about to begin when the first waiter left, and the second one's never did."""

    async def body(held, nursery, compiler):
        async def ask(name, until):
            with trio.move_on_at(start + until):
                await use(held, nursery, name)

        start = trio.current_time()
        nursery.start_soon(ask, "b", 9.0)  # with "a", all the compilers there are
        nursery.start_soon(ask, "a", 0.5)
        await trio.sleep(0.6)
        for name in "cd":
            nursery.start_soon(ask, name, 9.0)
        await trio.sleep(0.1)
        nursery.start_soon(ask, "a", 1.5)

    with_threads(body, OddThreads(late_s=1.0), seed)
