"""Runners for worker processes in tests: factories for `ProcessRunner`, which import no torch.

The spec's model name is JSON that says what the fake does; `spec_of` writes it. The worker process
reports to the test through files in ``folder``: each phase that it reaches creates a file with the
phase's name.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from engine.core.text.plan import AdmittedSequence, BlockDelta, Logits, Row, StepPlan
from engine.core.text.types import Sampling, Stops
from engine.errors import FieldViolation, InvalidRequest, Unsupported
from engine.worker.fakes.encoder import FakeEncoder
from engine.worker.fakes.text import FakeRunner, FakeScript
from engine.worker.interface import EncoderKind, RunnerSpec
from engine.worker.process.runner import ProcessRunner
from tests.support.core_driver import Driver, make_request
from tests.support.wire import wait_until

MAKE = "tests.support.process_fakes:make"
NUM_BLOCKS, BLOCK_SIZE = 64, 16
HANG_S = 600.0
STDERR_TEXT = "a line on standard output\n"


class CannotPickle(Exception):
    """An exception that can be neither pickled nor converted to text."""

    def __init__(self):
        super().__init__("x", lambda: None)

    def __str__(self):
        raise ValueError("no text either")

    def __reduce__(self):
        raise TypeError("cannot be pickled")


def spec_of(**asked):
    """Return the spec of a fake with this behaviour."""
    return RunnerSpec(model=json.dumps(asked))


def process_runner(**asked):
    """Return an unloaded runner whose process has this behaviour."""
    return ProcessRunner(MAKE, spec_of(**asked))


@contextlib.contextmanager
def loaded(**asked):
    """Yield a loaded runner whose process has this behaviour, and close it at the end."""
    runner = process_runner(**asked)
    try:
        runner.load(lambda progress: None)
        yield runner
    finally:
        runner.close()


def make(spec, capability):
    """Make a fake, in the worker process."""
    asked = json.loads(spec.model)
    if asked.get("kind"):
        return FakeEncoder(EncoderKind(asked["kind"]))
    return ScriptedRunner(asked)


def make_nothing(spec, capability):
    """Fail to make anything."""
    raise LookupError("nothing is made here")


class ScriptedRunner(FakeRunner):
    """A fake whose phases take time or fail, as ``asked`` says.

    ``step_s``, ``load_s`` and ``compile_s`` are seconds, ``fault`` is what goes wrong in every
    step, and ``meets`` names a file that each step waits for.
    """

    def __init__(self, asked):
        script = FakeScript(step_s=asked.get("step_s", 0.0), load_s=asked.get("load_s", 0.0))
        super().__init__(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=512, script=script
        )
        self._asked = asked
        self._folder = Path(asked["folder"]) if "folder" in asked else None

    def load(self, progress):
        self._reach("loading")
        if "load_fault" in self._asked:
            do_wrong(self._asked["load_fault"])
        return super().load(progress)

    def estimate(self):
        if "estimate_fault" in self._asked:
            do_wrong(self._asked["estimate_fault"])
        return super().estimate()

    def compile(self, constraint):
        self._reach("compiling")
        time.sleep(self._asked.get("compile_s", 0.0))
        if constraint.kind == "regex":
            raise InvalidRequest.of(constraint.field, "is never right")
        if constraint.kind == "lark":
            raise Unsupported("never", field="constraint")
        super().compile(constraint)
        return len(self.compiled)

    def execute(self, plan):
        self._reach("executing")
        if "meets" in self._asked:
            wait_for(self._folder / self._asked["meets"])
        if "fault" in self._asked:
            do_wrong(self._asked["fault"])
        return super().execute(plan)

    def close(self):
        self._reach("closing")
        time.sleep(self._asked.get("close_s", 0.0))

    def _reach(self, phase):
        if self._folder is not None:
            (self._folder / f"{phase}{self._asked.get('name', '')}").touch()


def do_wrong(fault):
    """Do what ``fault`` names, in the worker process."""
    line_fd = int(sys.argv[2])
    match fault:
        case "refused":
            raise InvalidRequest([FieldViolation("model", "is not liked")])
        case "memory":
            raise MemoryError("all of it")
        case "address space":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
            bytearray(1 << 32)
        case "error":
            raise LookupError("a detail")
        case "exit":
            sys.exit(3)
        case "unpicklable":
            raise CannotPickle
        case "hang":
            time.sleep(HANG_S)
        case "hang with the lock":
            import ctypes

            ctypes.PyDLL(None).sleep(int(HANG_S))
        case "garbage":
            os.write(line_fd, b"what a library prints where it should not")
        case "a lie":
            os.write(line_fd, b"tri1" + (4).to_bytes(8, "little") + b"lies")
        case "half":
            os.write(line_fd, b"tri1" + (1000).to_bytes(8, "little") + b"half of it")
            os._exit(0)
        case "huge":
            os.write(line_fd, b"tri1" + (1 << 60).to_bytes(8, "little"))
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "print":
            sys.stdout.write(STDERR_TEXT)
            sys.stdout.flush()
        case _:
            raise AssertionError(fault)


def wait_for(path, timeout_s=30.0):
    """Wait until a file exists."""
    wait_until(path.exists, timeout_s, f"{path.name}")


def is_gone(pid):
    """Return whether the process is gone, or is dead and waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


# ---- plans


def a_plan(number=0, sequence=None):
    """Return a step that admits a sequence and gives it its first token."""
    sequence = number if sequence is None else sequence
    admitted = AdmittedSequence(sequence, (1, 2, 3), Sampling(temperature=0.0), Stops(8))
    row = Row(sequence, 0, 3, BlockDelta(0, (sequence % NUM_BLOCKS,)), Logits.LAST)
    return StepPlan(number, (row,), admitted=(admitted,))


def empty_plan(number=0):
    """Return a step without rows."""
    return StepPlan(number, ())


class Recorder:
    """A loaded runner that keeps every plan that it executes, with the result."""

    def __init__(self, runner):
        self._runner = runner
        self.steps = []

    def load(self, progress):
        """Do nothing: the runner is loaded."""

    def execute(self, plan):
        """Execute the plan, and keep it with its result."""
        result = self._runner.execute(plan)
        self.steps.append((plan, result))
        return result


def drive(runner, *, constraint=None):
    """Run varied requests through a scheduler and a loaded runner; return plans with results.

    Some requests follow ``constraint``, which the runner compiles.
    """
    recorder = Recorder(runner)
    driver = Driver(
        runner=recorder,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        max_num_seqs=6,
        max_num_batched_tokens=40,
    )
    if constraint is not None:
        runner.compile(constraint)
    for number in range(12):
        sampling = Sampling(
            temperature=0.7 if number % 5 else 0.0,
            seed=number if number % 2 else None,
            logprobs=number % 3 or None,
            prompt_logprobs=2 if number % 4 == 0 else None,
        )
        prompt = range(5 + number, 30 + 7 * number)
        asked = {"constraint": constraint} if number % 3 == 1 else {}
        driver.submit(
            make_request(
                f"r{number}", prompt, max_tokens=9, n=1 + number % 3, sampling=sampling, **asked
            )
        )
    driver.run()
    return recorder.steps
