"""A runner in a process of its own: its results and its deaths, and nothing stays behind.

Fakes compute there (`tests.support.worker_fakes`); the conformance tests run real models in
processes. Every test ends with as many descriptors, threads and children as it began with.
"""

import logging
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.encode.types import EncodeInput, EncodeOptions, EncodePlan, EncodeRow
from engine.core.text.types import Constraint, Tokens
from engine.errors import (
    EngineBug,
    InvalidRequest,
    ShuttingDown,
    SpawnFailed,
    Unsupported,
    WorkerLost,
)
from engine.processes import child
from engine.requests.text.values import GenerateRequest, SamplingParams
from engine.status import Capability
from engine.worker.fakes.encode import FakeEncoder
from engine.worker.fakes.text import FakeRunner
from engine.worker.fakes.tokenizer import FakeTokenizer
from engine.worker.interface import RunnerSpec
from engine.worker.process.messages import WorkerProcessError
from engine.worker.process.runner import ProcessRunner
from tests.support import process_fakes, worker_fakes
from tests.support.core_driver import expected_tokens
from tests.support.process_fakes import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    a_plan,
    drive,
    empty_plan,
    is_gone,
    loaded,
    process_runner,
    wait_for,
)
from tests.support.programs import ROOT, imported_by
from tests.support.wire import wait_until

MEGABYTE = 1 << 20
SHORT_S = 5.0  # limit for waits of milliseconds, on a busy machine
FORM = Constraint("json_object", "{}")


def open_fds():
    """Return the process's open descriptors."""
    with os.scandir("/proc/self/fd") as entries:
        found = [int(entry.name) for entry in entries]
    return [fd for fd in found if os.path.exists(f"/proc/self/fd/{fd}")]


def own_threads():
    """Return this process's threads, without those that Trio keeps for later jobs."""
    return [one for one in threading.enumerate() if not one.name.startswith("Trio thread")]


def inventory():
    """Return the numbers of descriptors, threads and child processes, dead ones included."""
    children = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            children += (task / "children").read_text().split()
    return len(open_fds()), len(own_threads()), len(children)


@pytest.fixture(autouse=True)
def _leaves_nothing():
    before = inventory()
    yield
    check_left(before)


def check_left(before, note=""):
    """Wait until there is no more than before. Other files' tests may have closed some things."""
    patience = time.monotonic() + SHORT_S  # a thread that was told to end may still run
    while not _holds(before) and time.monotonic() < patience:
        time.sleep(0.01)
    assert _holds(before), f"{note} {inventory()}, before {before}"


def _holds(before):
    return all(now <= then for now, then in zip(inventory(), before, strict=True))


class Call(threading.Thread):
    """A call in a thread of its own, and what it raised."""

    def __init__(self, call, *args):
        super().__init__()
        self._call = call
        self._args = args
        self.error = None
        self.result = None
        self.start()

    def run(self):
        try:
            self.result = self._call(*self._args)
        except BaseException as error:
            self.error = error

    def outcome(self, timeout_s=30.0):
        """Return the call's error, or None, once it has ended."""
        self.join(timeout_s)
        assert not self.is_alive(), "the call still waits"
        return self.error


def repeat(call, *args):
    """Call until it raises."""
    while True:
        call(*args)


def load(runner):
    """Load a runner and return its info."""
    return runner.load(lambda progress: None)


# ---- the protocol ------------------------------------------------------------------------------


def test_every_row_of_many_varied_plans_is_the_same_as_in_this_process():
    here = FakeRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=512)
    load(here)
    own = drive(here, constraint=FORM)
    with loaded() as runner:
        apart = drive(runner, constraint=FORM)
    assert [plan for plan, _ in apart] == [plan for plan, _ in own]
    assert repr([result.rows for _, result in apart]) == repr([result.rows for _, result in own])
    assert any(row.logprobs for _, result in own for row in result.rows)
    assert any(row.prompt_logprobs for _, result in own for row in result.rows)


@pytest.mark.parametrize("kind", ["text-embedding", "rerank"])
def test_an_encoder_computes_in_its_process_what_it_computes_here(kind):
    own = FakeEncoder(Capability(kind))
    info = own.load(lambda progress: None)
    rows = tuple(
        EncodeRow(number, EncodeInput(tuple(range(1, number + 2))), EncodeOptions())
        for number in range(9)
    )
    plan = EncodePlan(4, rows)
    with closing(process_runner(kind=kind)) as runner:
        assert same_but_for_the_process(load(runner), info)
        assert repr(runner.execute(plan).rows) == repr(own.execute(plan).rows)
        made = runner.encoder_tokenizer.encode_texts(["<1><2>", "text"], "")
        assert made == own.encoder_tokenizer.encode_texts(["<1><2>", "text"], "")


def test_a_load_reports_progress_and_model_and_the_tokenizer_works_here():
    heard = []
    with closing(process_runner()) as runner:
        info = runner.load(heard.append)
        here = FakeRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=512)
        assert same_but_for_the_process(info, load(here))
        assert [progress.phase for progress in heard] == ["weights"]
        assert isinstance(runner.tokenizer, FakeTokenizer)
        assert runner.tokenizer.encode("<7><8>") == (7, 8)
        with pytest.raises(EngineBug):
            _ = runner.encoder_tokenizer
    assert runner.tokenizer.encode("<7>") == (7,)  # a request may still need the tokenizer


def same_but_for_the_process(info, own):
    """Return whether infos agree but for the memory of a worker process: at least Python's."""
    process_bytes = info.memory_bytes - own.memory_bytes
    assert MEGABYTE < process_bytes < 1000 * MEGABYTE
    return replace(info, memory_bytes=own.memory_bytes) == own


def test_an_estimate_starts_the_process_that_then_loads():
    with closing(process_runner()) as runner:
        estimate = runner.estimate()
        pid = runner.process.pid
        assert runner.is_alive
        assert runner.estimate().device == "cpu"
        with pytest.raises(EngineBug):
            _ = runner.tokenizer
        info = load(runner)
        assert abs(info.memory_bytes - estimate.num_bytes) < MEGABYTE
        assert runner.process.pid == pid
        assert runner.execute(empty_plan(3)).plan_id == 3


def test_an_estimate_that_fails_says_why_and_keeps_nothing():
    runner = process_runner(estimate_fault="refused")
    with pytest.raises(InvalidRequest, match="model: is not liked"):
        runner.estimate()
    assert not runner.is_alive
    runner = process_runner(estimate_fault="segfault")
    with pytest.raises(SpawnFailed, match=r"worker process was killed by signal 11 \(SIGSEGV\)"):
        runner.estimate()
    assert not runner.is_alive


def test_a_close_between_estimate_and_load_leaves_nothing():
    runner = process_runner()
    runner.estimate()
    runner.close()
    assert is_gone(runner.process.pid)
    with pytest.raises(ShuttingDown):
        load(runner)


def test_before_its_load_and_after_its_close_a_runners_repr_shows_its_state():
    runner = process_runner()
    assert not runner.is_alive
    assert runner.process is None
    assert runner.rss_bytes() == 0
    for asked in (lambda: runner.tokenizer, lambda: runner.sentinel):
        with pytest.raises(EngineBug):
            asked()
    with pytest.raises(EngineBug):
        runner.execute(empty_plan())
    runner.kill()  # no effect
    load(runner)
    assert runner.is_alive
    assert runner.rss_bytes() > 1 << 20
    with pytest.raises(EngineBug, match="internal error"):
        load(runner)
    runner.close()
    runner.close()
    assert not runner.is_alive
    for call in (lambda: runner.execute(empty_plan()), lambda: runner.compile(FORM)):
        with pytest.raises(ShuttingDown):
            call()


def test_a_runner_closed_before_its_load_starts_no_process():
    runner = process_runner()
    runner.close()
    with pytest.raises(ShuttingDown):
        load(runner)
    assert runner.process is None


def test_neither_process_imports_torch():
    code = (
        "from tests.support.process_fakes import process_runner\n"
        "runner = process_runner()\n"
        "runner.load(lambda progress: None)\n"
        "maps = open(f'/proc/{runner.process.pid}/maps').read()\n"
        "runner.close()\n"
        "assert 'libtorch' not in maps\n"
    )
    assert "torch" not in imported_by(code)


def test_two_workers_step_at_the_same_time(tmp_path):
    """Each runner waits inside its step until the other is inside its own."""
    runners = [
        process_runner(folder=str(tmp_path), name=own, meets=f"executing{other}")
        for own, other in (("A", "B"), ("B", "A"))
    ]
    try:
        for runner in runners:
            load(runner)
        calls = [Call(runner.execute, empty_plan()) for runner in runners]
        assert [call.outcome() for call in calls] == [None, None]
    finally:
        for runner in runners:
            runner.close()


def test_a_step_takes_no_lock_of_the_runners(monkeypatch):
    class Forbidden:
        def __enter__(self):
            raise AssertionError("a lock was taken in a step")

        __exit__ = None

    with loaded() as runner:
        locks = [
            (runner, "_starting"),
            (runner.process, "_reaping"),
            (runner.process.side_channels, "_lock"),
        ]
        with monkeypatch.context() as patch:
            for owner, name in locks:
                patch.setattr(owner, name, Forbidden())
            with pytest.raises(AssertionError, match="lock"):
                runner.compile(FORM)
            for number in range(5):
                runner.execute(a_plan(number))


async def test_an_engine_serves_from_a_worker_process_as_from_a_thread():
    config = EngineConfig(models=(ModelConfig("fake"),), check_level=2, prefix_cache=False)
    found = {}
    async with open_engine(config, make_runner=lambda model, config: process_runner()) as engine:

        async def run(number):
            prompt = tuple(range(5 + number, 40 + 3 * number))
            sampling = SamplingParams(max_tokens=8, temperature=0.5, seed=number, ignore_eos=True)
            request = GenerateRequest(token_ids=prompt, sampling=sampling)
            async with engine.generate(request) as stream:
                tokens = [e.token_ids async for e in stream if isinstance(e, Tokens)]
            found[number] = [token for step in tokens for token in step]
            assert found[number] == expected_tokens(prompt, count=8, seed=number)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(run, number)
    assert len(found) == 20


# ---- constraints, beside the steps


def test_constraints_are_compiled_while_a_step_runs_several_at_once(tmp_path):
    with loaded(folder=str(tmp_path), meets="go") as runner:
        step = Call(runner.execute, empty_plan())
        wait_for(tmp_path / "executing")
        calls = [Call(runner.compile, Constraint("choice", str(n))) for n in range(8)]
        assert [call.outcome() for call in calls] == [None] * 8
        assert step.is_alive()
        (tmp_path / "go").touch()
        assert step.outcome() is None


def test_a_slow_compilation_delays_neither_a_step_nor_another_one(tmp_path):
    with loaded(folder=str(tmp_path), compile_s=worker_fakes.HANG_S) as runner:
        slow = Call(runner.compile, FORM)
        wait_for(tmp_path / "compiling")
        for number in range(20):
            runner.execute(a_plan(number))
        assert slow.is_alive()
        runner.kill()
        assert isinstance(slow.outcome(), WorkerLost)


def test_a_constraint_that_cannot_be_compiled_is_named_by_field():
    with loaded() as runner:
        with pytest.raises(InvalidRequest) as refused:
            runner.compile(Constraint("regex", "("))
        assert [one.field for one in refused.value.violations] == ["constraint.regex"]
        with pytest.raises(Unsupported) as unsupported:
            runner.compile(Constraint("lark", "start:"))
        assert unsupported.value.field == "constraint"
        assert runner.compile(FORM) == 1


def test_forgotten_constraints_go_with_the_next_compilation_unless_compiled_again():
    """The fake returns how many constraints are compiled."""
    with loaded() as runner:
        first, second = Constraint("choice", "a"), Constraint("choice", "b")
        assert runner.compile(first) == 1
        assert runner.compile(second) == 2
        runner.forget(first)
        assert runner.compile(FORM) == 2  # `FORM` and the second
        runner.forget(second)
        forgets = runner._take_forgets()
        assert runner.compile(second) == 2
        runner._to_forget += forgets  # as if another thread's compilation sent these too late
        assert runner.compile(first) == 3
        runner.forget(Constraint("choice", "never compiled"))
        assert runner.compile(first) == 3


# ---- errors in the process that do not end it


def test_running_out_of_memory_in_a_step_is_a_memory_error_and_the_worker_lives():
    for fault in ("memory", "address space"):
        with loaded(fault=fault) as runner:
            for number in range(3):
                with pytest.raises(MemoryError):
                    runner.execute(empty_plan(number))
            assert runner.is_alive


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("error", "LookupError: a detail"),
        ("exit", "SystemExit: 3"),
        ("unpicklable", "CannotPickle: its message cannot be shown"),
    ],
)
def test_an_exception_in_a_step_arrives_with_its_type_and_message(fault, text, caplog):
    with loaded(fault=fault) as runner:
        for number in range(2):
            with pytest.raises(WorkerProcessError) as raised:
                runner.execute(empty_plan(number))
            assert str(raised.value) == text
        assert runner.is_alive
    try:
        raise raised.value
    except WorkerProcessError:
        logging.getLogger("test").exception("it failed")
    assert "in do_wrong" in caplog.text
    assert "do_wrong" not in repr(raised.value)


def test_output_of_the_process_goes_to_standard_error_and_harms_nothing(capfd):
    with loaded(fault="print") as runner:
        runner.execute(empty_plan())
    written = capfd.readouterr()
    assert written.err == worker_fakes.STDERR_TEXT
    assert written.out == ""


# ---- loads that fail


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"load_fault": "refused"}, InvalidRequest, "model: is not liked"),
        ({"load_fault": "error"}, WorkerProcessError, "LookupError: a detail"),
        ({"load_fault": "memory"}, MemoryError, "all of it"),
        ({"load_fault": "exit"}, WorkerProcessError, "SystemExit: 3"),
        (
            {"load_fault": "unpicklable"},
            WorkerProcessError,
            "CannotPickle: its message cannot be shown",
        ),
        ({"load_fault": "segfault"}, SpawnFailed, r"was killed by signal 11 \(SIGSEGV\)"),
        ({"load_fault": "half"}, SpawnFailed, "ended with exit code 0"),
        ({"load_fault": "garbage"}, SpawnFailed, "could not be understood and was killed"),
    ],
    ids=lambda value: value.get("load_fault") if isinstance(value, dict) else "",
)
def test_a_load_that_fails_says_why_and_keeps_nothing(asked, kind, text):
    runner = process_runner(**asked)
    with pytest.raises(kind, match=text):
        load(runner)
    assert not runner.is_alive
    with pytest.raises(ShuttingDown):
        load(runner)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("tests.support.worker_fakes:make_nothing", "LookupError: nothing is made here"),
        ("tests.support.worker_fakes:is_not_there", "AttributeError"),
        ("there.is.no.such.module:make", "ModuleNotFoundError"),
    ],
)
def test_a_factory_that_cannot_be_used_is_an_error(factory, text):
    with pytest.raises(WorkerProcessError, match=text):
        load(ProcessRunner(factory, RunnerSpec("any")))


@pytest.mark.parametrize("left", range(5))
def test_without_a_descriptor_left_a_load_fails_with_the_reason(left):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    runner, used = process_runner(), set(open_fds())
    free = [number for number in range(len(used) + left + 1) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[left], hard))  # lower descriptors stay free
    try:
        with pytest.raises(SpawnFailed, match=r"no process can be started \(Too many open files\)"):
            load(runner)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        runner.close()


def test_a_close_during_a_load_ends_it(tmp_path):
    runner = process_runner(folder=str(tmp_path), load_s=worker_fakes.HANG_S)
    call = Call(load, runner)
    wait_for(tmp_path / "loading")
    runner.close()
    assert isinstance(call.outcome(), ShuttingDown)


def test_progress_that_raises_here_ends_the_load():
    def refuse(progress):
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        process_runner().load(refuse)


# ---- deaths ------------------------------------------------------------------------------------


def kill_starting(rng, folder):
    """Kill a worker while its process starts."""
    runner = process_runner()
    call = Call(load, runner)
    wait_until(lambda: runner.process is not None, SHORT_S)
    time.sleep(rng.uniform(0, 0.1))
    os.kill(runner.process.pid, signal.SIGKILL)
    error = call.outcome()
    assert isinstance(error, SpawnFailed)
    assert "its worker process was killed by signal 9 (SIGKILL; out of memory?)" in str(error)
    return runner


def kill_loading(rng, folder):
    """Kill a worker while it loads."""
    runner = process_runner(folder=str(folder), load_s=worker_fakes.HANG_S)
    call = Call(load, runner)
    wait_for(folder / "loading")
    time.sleep(rng.uniform(0, 0.02))
    os.kill(runner.process.pid, signal.SIGKILL)
    error = call.outcome()
    assert isinstance(error, SpawnFailed)
    assert "killed by signal 9" in str(error)
    return runner


def kill_idle(rng, folder):
    """Kill a worker between two steps."""
    runner = process_runner()
    load(runner)
    runner.execute(a_plan())
    time.sleep(rng.uniform(0, 0.02))
    look = select.poll()
    look.register(runner.sentinel, select.POLLIN)
    assert runner.is_alive
    assert not look.poll(0)
    os.kill(runner.process.pid, signal.SIGKILL)
    assert look.poll(1000 * SHORT_S)
    assert "killed by signal 9" in str(runner.lost())
    assert not runner.is_alive
    with pytest.raises(WorkerLost):
        runner.compile(FORM)
    return runner


def kill_executing(rng, folder):
    """Kill a worker in a long step, or at any instant of short steps without end."""
    step_s = rng.choice([0.0, 0.001, worker_fakes.HANG_S])
    runner = process_runner(folder=str(folder), step_s=step_s)
    load(runner)
    call = Call(repeat, runner.execute, empty_plan())
    wait_for(folder / "executing")
    time.sleep(rng.uniform(0, 0.05))
    os.kill(runner.process.pid, signal.SIGKILL)
    assert isinstance(call.outcome(), WorkerLost)
    return runner


def kill_compiling(rng, folder):
    """Kill a worker while it compiles a constraint."""
    runner = process_runner(folder=str(folder), compile_s=rng.choice([0.0, worker_fakes.HANG_S]))
    load(runner)
    calls = [Call(repeat, runner.compile, FORM) for _ in range(2)]
    calls.append(Call(repeat, runner.execute, empty_plan()))
    wait_for(folder / "compiling")
    time.sleep(rng.uniform(0, 0.05))
    os.kill(runner.process.pid, signal.SIGKILL)
    assert all(isinstance(call.outcome(), WorkerLost) for call in calls)
    return runner


def kill_closing(rng, folder):
    """Kill a worker while it closes."""
    runner = process_runner(folder=str(folder), close_s=rng.choice([0.0, worker_fakes.HANG_S]))
    load(runner)
    process = os.pidfd_open(runner.process.pid)  # as the worker may end and its id be reused
    try:
        call = Call(runner.close)
        time.sleep(rng.uniform(0, 0.02))
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        assert call.outcome() is None
    finally:
        os.close(process)
    return runner


KILLS = (
    kill_starting,
    kill_loading,
    kill_idle,
    kill_executing,
    kill_compiling,
    kill_closing,
)


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [5, pytest.param(17, marks=pytest.mark.full)])
@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.__name__)
def test_a_kill_at_any_instant_is_reported_and_leaves_nothing(kill, num_kills, tmp_path):
    for number in range(num_kills):
        before = inventory()
        folder = tmp_path / str(number)
        folder.mkdir()
        runner = kill(random.Random(f"{kill.__name__} {number}"), folder)
        assert not runner.is_alive
        with pytest.raises((WorkerLost, ShuttingDown)):
            runner.execute(empty_plan())
        runner.close()
        assert is_gone(runner.process.pid)
        check_left(before, f"number {number}")


async def test_a_trio_task_learns_at_once_that_an_idle_worker_died():
    runner = process_runner()
    try:
        await trio.to_thread.run_sync(load, runner)
        with trio.move_on_after(0.05) as scope:
            await trio.lowlevel.wait_readable(runner.sentinel)
        assert scope.cancelled_caught
        await trio.to_thread.run_sync(runner.execute, a_plan())
        os.kill(runner.process.pid, signal.SIGKILL)
        with trio.fail_after(SHORT_S):
            await trio.lowlevel.wait_readable(runner.sentinel)
        assert "killed by signal 9" in str(await trio.to_thread.run_sync(runner.lost))
    finally:
        await trio.to_thread.run_sync(runner.close)


@pytest.mark.parametrize("fault", ["hang", "hang with the lock"])
def test_a_hung_worker_can_be_killed_and_every_waiting_call_ends(fault, tmp_path):
    with loaded(fault=fault, folder=str(tmp_path)) as runner:
        step = Call(runner.execute, empty_plan())
        wait_for(tmp_path / "executing")
        began = time.monotonic()
        runner.kill("hung in a step and was killed")
        assert not runner.is_alive
        error = step.outcome(SHORT_S)
        assert time.monotonic() - began < SHORT_S
        assert isinstance(error, WorkerLost)
        assert str(error) == "the worker process hung in a step and was killed"
        assert error.retry_after_s is not None


def test_a_hung_worker_prints_its_stacks_on_request(tmp_path):
    printed = tmp_path / "stderr"
    with (
        standard_error_to(printed),
        loaded(fault="hang", folder=str(tmp_path)) as runner,
    ):
        step = Call(runner.execute, empty_plan())
        wait_for(tmp_path / "executing")
        runner.process.dump_stacks()
        wait_until(lambda: "in do_wrong" in printed.read_text(), SHORT_S)
        assert runner.is_alive
        runner.kill()
        assert isinstance(step.outcome(), WorkerLost)


@contextmanager
def standard_error_to(path):
    """Let this process and those that it starts write their standard error to a file.

    pytest's own capture may lose what a process writes while the test reads.
    """
    usual = os.dup(2)
    with open(path, "ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(usual, 2)
        os.close(usual)


@pytest.mark.parametrize("fault", ["garbage", "a lie", "huge"])
def test_a_worker_that_sends_a_malformed_answer_is_lost(fault, caplog):
    with loaded(fault=fault) as runner:
        with pytest.raises(WorkerLost, match="could not be understood and was killed"):
            runner.execute(empty_plan())
        assert not runner.is_alive
        assert is_gone(runner.process.pid)
        with pytest.raises(WorkerLost):
            runner.execute(empty_plan())
    assert "is given up" in caplog.text


def test_a_worker_that_ends_in_the_middle_of_an_answer_is_lost():
    with loaded(fault="half") as runner, pytest.raises(WorkerLost, match="exit code 0"):
        runner.execute(empty_plan())


def test_a_worker_that_receives_malformed_messages_ends_and_says_why(capfd):
    with loaded() as runner:
        runner._channel._socket.sendall(b"no message of ours, and long enough to be one")
        with pytest.raises(WorkerLost, match="ended with exit code 70"):
            runner.execute(empty_plan())
    assert "BadMessage" in capfd.readouterr().err


def test_a_plan_that_cannot_be_sent_loses_the_worker():
    with loaded() as runner:
        with pytest.raises(WorkerLost, match="could not be sent its next step"):
            runner.execute(empty_plan(number=lambda: None))
        assert not runner.is_alive


def test_a_close_during_a_hung_step_ends_the_waiting_call_and_the_process(tmp_path):
    with loaded(fault="hang", folder=str(tmp_path)) as runner:
        step = Call(runner.execute, empty_plan())
        wait_for(tmp_path / "executing")
        closing = Call(runner.close)
        assert isinstance(step.outcome(SHORT_S), ShuttingDown)
        assert closing.outcome(SHORT_S) is None
        assert is_gone(runner.process.pid)


def test_a_worker_that_died_before_its_close_is_lost_and_not_closed():
    """The engine closes a runner whose worker has died; a thread that waits for an answer may see
    that late. The old fault: an adapter's load failed with "the model was closed"."""
    with loaded() as runner:
        os.kill(runner.process.pid, signal.SIGKILL)
        assert isinstance(runner.lost(), WorkerLost)
        runner.close()
        assert "killed by signal 9" in str(runner.lost())
        for ask in (runner.execute, runner.adapters.measure):
            with pytest.raises(WorkerLost, match="killed by signal 9"):
                ask(empty_plan())
    with loaded() as runner:
        runner.close()
        with pytest.raises(ShuttingDown):
            runner.adapters.measure("any")


def test_many_may_close_and_kill_at_once():
    for _ in range(5):
        runner = process_runner()
        load(runner)
        calls = [Call(runner.close) for _ in range(4)] + [Call(runner.kill) for _ in range(4)]
        assert [call.outcome() for call in calls] == [None] * 8
        assert is_gone(runner.process.pid)


def test_an_idle_worker_closes_its_runner_before_it_ends(tmp_path):
    runner = process_runner(folder=str(tmp_path))
    load(runner)
    runner.close()
    assert (tmp_path / "closing").exists()


def test_ctrl_c_and_a_terminate_leave_the_worker_to_its_server():
    with loaded() as runner:
        assert (
            os.getsid(runner.process.pid) == runner.process.pid
        )  # a session of its own, which a terminal's signals do not reach
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(runner.process.pid, number)
        for number in range(3):
            runner.execute(a_plan(number))


def test_a_worker_has_no_descriptors_but_its_own(tmp_path):
    with (tmp_path / "a file of the server's").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        with loaded() as runner:
            runner.compile(FORM)
            runner.compile(FORM)
            fds = [os.readlink(one) for one in Path(f"/proc/{runner.process.pid}/fd").iterdir()]
    assert sum(name.startswith("socket:") for name in fds) == 3  # for steps, control and side jobs
    assert not [name for name in fds if str(tmp_path) in name]


PARENT = """
import sys, threading
from tests.support import process_fakes
asked = {"fault": sys.argv[2]} if sys.argv[2] else {}
runner = process_fakes.process_runner(folder=sys.argv[1], **asked)
runner.load(lambda progress: None)
print(runner.process.pid, flush=True)
if sys.argv[2]:
    runner.execute(process_fakes.empty_plan())
threading.Event().wait()
"""


@pytest.mark.parametrize("doing", ["", "hang", "hang with the lock"])
def test_a_worker_ends_with_its_server(doing, tmp_path):
    """A worker that did not notice would wait for a plan, or compute one, for ever."""
    command = [sys.executable, "-c", PARENT, str(tmp_path), doing]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    with server:
        pid = int(server.stdout.readline())
        if doing:
            wait_for(tmp_path / "executing")
        assert not is_gone(pid)
        server.kill()
        wait_until(lambda: is_gone(pid), SHORT_S, "the worker's end")


def test_the_threads_of_libraries_are_as_the_spec_says_unless_the_user_did(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with closing(ProcessRunner(process_fakes.MAKE, RunnerSpec("{}", threads=3))) as runner:
        load(runner)
        environment = Path(f"/proc/{runner.process.pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=3" in environment
    assert any(one.startswith(b"GOMP_SPINCOUNT=") for one in environment)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert child.environment_of(0)["OMP_NUM_THREADS"] == "5"


def test_a_process_finds_the_engine_wherever_its_server_was_started(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    with loaded() as runner:
        runner.execute(empty_plan())
    assert (child.ROOT / "engine" / "errors.py").is_file()
