"""Runners for worker processes in tests: factories that `ChildRunner` names, which import no torch.

What the fake does is JSON in the spec's model name; `spec_of` writes it. Whatever must be known in
the test's process goes by files in ``folder``: a phase that is reached touches a file of its name.
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

from engine.core.encode_types import EncoderKind
from engine.core.plan import AdmittedSequence, BlockDelta, Logits, Row, RunnerSpec, StepPlan
from engine.core.types import Sampling, Stops
from engine.errors import FieldViolation, InvalidRequest, Unsupported
from engine.model.child import ChildRunner
from engine.model.fake import FakeRunner, FakeScript
from engine.model.fake_encoder import FakeEncoder
from tests.support.core_driver import Driver, make_request
from tests.support.wire import wait_until

MAKE = "tests.support.child_fakes:make"
NUM_BLOCKS, BLOCK_SIZE = 64, 16
HANG_S = 600.0
STDERR_TEXT = "a line on standard output\n"


class CannotPickle(Exception):
    """Neither its value nor its text is to be had."""

    def __init__(self):
        super().__init__("x", lambda: None)

    def __str__(self):
        raise ValueError("no text either")

    def __reduce__(self):
        raise TypeError("cannot be pickled")


def spec_of(**asked):
    return RunnerSpec(model=json.dumps(asked))


def child(**asked):
    """An unloaded runner whose process does what is asked."""
    return ChildRunner(MAKE, spec_of(**asked))


@contextlib.contextmanager
def loaded(**asked):
    """A loaded one, closed at the end."""
    runner = child(**asked)
    try:
        runner.load(lambda progress: None)
        yield runner
    finally:
        runner.close()


def make(spec, capability):
    """The factory."""
    asked = json.loads(spec.model)
    if asked.get("kind"):
        return FakeEncoder(EncoderKind(asked["kind"]))
    return ScriptedRunner(asked)


def make_nothing(spec, capability):
    """A factory that fails."""
    raise LookupError("nothing is made here")


class ScriptedRunner(FakeRunner):
    """Reaches its phases as ``asked`` says: ``step_s``, ``load_s`` and ``compile_s`` are seconds,
    ``fault`` what goes wrong in every step, ``meets`` the file that a step waits for."""

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
    """In the worker process."""
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
    wait_until(path.exists, timeout_s, f"{path.name}")


def is_gone(pid):
    """No such process, or one that is dead and waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


# ---- plans


def a_plan(number=0, sequence=None):
    """A step that admits a sequence and gives it its first token."""
    sequence = number if sequence is None else sequence
    admitted = AdmittedSequence(sequence, (1, 2, 3), Sampling(temperature=0.0), Stops(8))
    row = Row(sequence, 0, 3, BlockDelta(0, (sequence % NUM_BLOCKS,)), Logits.LAST)
    return StepPlan(number, (row,), admitted=(admitted,))


def empty_plan(number=0):
    """A step of no rows."""
    return StepPlan(number, ())


class Recorder:
    """A loaded runner that keeps every plan it gives on, and what came of it."""

    def __init__(self, runner):
        self._runner = runner
        self.steps = []

    def load(self, progress):
        """It is."""

    def execute(self, plan):
        result = self._runner.execute(plan)
        self.steps.append((plan, result))
        return result


def drive(runner, *, constraint=None):
    """Varied requests through a scheduler and a loaded runner; every plan and what came of it. Some
    follow ``constraint``, which the runner compiles."""
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
