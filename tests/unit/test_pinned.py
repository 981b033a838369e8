"""The pinned runner does everything on its one thread, and leaves nothing behind."""

from __future__ import annotations

import threading

import pytest

from engine.core.text.plan import StepPlan
from engine.core.text.types import Constraint
from engine.errors import EngineBug, ShuttingDown
from engine.worker.fakes.encoder import FakeEncoder
from engine.worker.fakes.text import FakeRunner, FakeScript
from engine.worker.pinned_runner import STACK_BYTES, PinnedEncodeRunner, PinnedTextRunner

LIMIT_S = 10.0
FORM = Constraint("json_object", "{}")


class Traced(FakeRunner):
    """A runner that records the thread of each call; each step waits for ``go``."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()

    def _note(self, name):
        self.calls.append((name, threading.current_thread().name, threading.get_ident()))

    def estimate(self):
        self._note("estimate")
        return super().estimate()

    def load(self, progress):
        self._note("load")
        return super().load(progress)

    def execute(self, plan):
        self._note("execute")
        self.begun.set()
        assert self.go.wait(LIMIT_S)
        return super().execute(plan)

    def close(self):
        self._note("close")
        super().close()


def names():
    """Return the names of all threads."""
    return {thread.name for thread in threading.enumerate()}


def test_every_call_but_compiling_comes_from_one_thread_of_its_own_which_close_joins():
    """R55."""
    runner = Traced()
    pinned = PinnedTextRunner(runner, "a")
    assert "inference-worker-a_0" not in names()
    assert pinned.estimate() == FakeRunner().estimate()
    assert pinned.load(lambda progress: None) == FakeRunner().load(lambda progress: None)
    for number in range(3):
        helper = threading.Thread(target=pinned.execute, args=(StepPlan(number, ()),))
        helper.start()
        helper.join()
    assert pinned.execute(StepPlan(3, ())).plan_id == 3
    pinned.close()
    assert [name for name, _, _ in runner.calls] == [
        *("estimate", "load", *["execute"] * 4, "close")
    ]
    assert {name for _, name, _ in runner.calls} == {"inference-worker-a_0"}
    assert len({ident for _, _, ident in runner.calls}) == 1
    assert "inference-worker-a_0" not in names()


def test_a_thread_gets_its_stack_and_others_the_size_they_had(monkeypatch):
    """R56."""
    sizes, set_size = [], threading.stack_size
    monkeypatch.setattr(threading, "stack_size", lambda *n: (sizes.append(n), set_size(*n))[1])
    pinned = PinnedTextRunner(FakeRunner(), "a")
    pinned.load(lambda progress: None)
    assert sizes == [(STACK_BYTES,), (0,)]
    pinned.close()


def test_a_compilation_waits_for_no_step():
    runner = Traced()
    pinned = PinnedTextRunner(runner, "a")
    pinned.load(lambda progress: None)
    runner.go.clear()
    step = threading.Thread(target=pinned.execute, args=(StepPlan(0, ()),))
    step.start()
    assert runner.begun.wait(LIMIT_S)
    assert pinned.compile(FORM) == 2
    assert step.is_alive()
    pinned.forget(FORM)
    assert not runner.compiled
    runner.go.set()
    step.join(LIMIT_S)
    pinned.close()


def test_closing_waits_for_the_step_in_flight_and_later_ones_are_refused():
    runner = Traced()
    pinned = PinnedTextRunner(runner, "a")
    pinned.load(lambda progress: None)
    runner.go.clear()
    step = threading.Thread(target=pinned.execute, args=(StepPlan(0, ()),))
    step.start()
    assert runner.begun.wait(LIMIT_S)
    closers = [threading.Thread(target=pinned.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    runner.go.set()
    for thread in (step, *closers):
        thread.join(LIMIT_S)
    assert [name for name, _, _ in runner.calls] == ["load", "execute", "close"]
    for call in (lambda: pinned.execute(StepPlan(1, ())), lambda: pinned.load(print)):
        with pytest.raises(ShuttingDown):
            call()


@pytest.mark.parametrize("error", [MemoryError("all"), LookupError("x"), SystemExit(3)])
def test_a_steps_error_reaches_its_caller_and_the_thread_goes_on(error):
    runner = FakeRunner(script=FakeScript(step_faults={0: error}))
    pinned = PinnedTextRunner(runner, "a")
    pinned.load(lambda progress: None)
    with pytest.raises(type(error)) as raised:
        pinned.execute(StepPlan(0, ()))
    assert raised.value is error
    assert pinned.execute(StepPlan(1, ())).plan_id == 1
    pinned.close()


def test_a_load_that_fails_leaves_a_thread_that_close_joins():
    runner = FakeRunner(script=FakeScript(load_error=LookupError("x")))
    pinned = PinnedTextRunner(runner, "a")
    with pytest.raises(EngineBug):
        pinned.execute(StepPlan(0, ()))
    with pytest.raises(LookupError):
        pinned.load(lambda progress: None)
    assert "inference-worker-a_0" in names()
    pinned.close()
    assert "inference-worker-a_0" not in names()


def test_an_encoder_keeps_its_tokenizers():
    runner = FakeEncoder()
    pinned = PinnedEncodeRunner(runner, "a")
    pinned.load(lambda progress: None)
    assert pinned.tokenizer.encode("<7>") == (7,)
    assert pinned.encoder_tokenizer.encode_texts(["<7>"], "")[0].full_tokens == 1
    pinned.close()
