"""Runners in worker processes, which import little: a test starts many such processes.

The spec's model name is JSON that says what the fake does. The fake reports to the test through
files in ``folder``: each phase that it reaches creates a file with the phase's name.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from engine.errors import FieldViolation, InvalidRequest, Unsupported
from engine.status import Capability
from engine.worker.fakes.encode import FakeEncoder
from engine.worker.fakes.text import FakeRunner, FakeScript

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


def make(spec, capability):
    """Make a fake, in the worker process. A rank of a group also does what ``ranks`` says of it;
    the names of the files that it makes end with its number."""
    asked = json.loads(spec.model)
    if spec.tp > 1:
        own = asked.get("ranks", {}).get(str(spec.rank), {})
        return FakeRank(asked | {"name": str(spec.rank)} | own, spec)
    if asked.get("kind"):
        return FakeEncoder(Capability(asked["kind"]))
    return ScriptedRunner(asked)


def make_nothing(spec, capability):
    """Fail to make anything."""
    raise LookupError("nothing is made here")


class ScriptedRunner(FakeRunner):
    """A fake whose phases take time or fail, as ``asked`` says.

    ``step_s``, ``load_s`` and ``compile_s`` are seconds, ``fault`` is what goes wrong in every
    step, and ``meets`` names a file that each step waits for. ``adapters`` are those of a
    `FakeScript`. In a ``folder``, the load of an adapter creates a file ``adapter`` with the
    process's id behind it, and waits for the file ``free`` or ``free`` with that id.
    """

    def __init__(self, asked):
        names = ("step_s", "load_s", "adapters")
        script = FakeScript(**{name: asked[name] for name in names if name in asked})
        super().__init__(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=512, script=script
        )
        self._asked = asked
        self._folder = Path(asked["folder"]) if "folder" in asked else None
        if "adapters" in asked and self._folder is not None:
            self._load_adapter, self.adapters.load = self.adapters.load, self._load_when_free

    def _load_when_free(self, directory):
        (self._folder / f"adapter{os.getpid()}").touch()
        free = [self._folder / "free", self._folder / f"free{os.getpid()}"]
        while not any(one.exists() for one in free):
            time.sleep(0.005)
        return self._load_adapter(directory)

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
            while not (self._folder / self._asked["meets"]).exists():
                time.sleep(0.005)
        if "fault" in self._asked:
            do_wrong(self._asked["fault"])
        return super().execute(plan)

    def close(self):
        self._reach("closing")
        time.sleep(self._asked.get("close_s", 0.0))

    def _reach(self, phase):
        if self._folder is not None:
            (self._folder / f"{phase}{self._asked.get('name', '')}").touch()


class FakeRank(ScriptedRunner):
    """A rank of a group. Its collectives are files: each waits for those of the other ranks, as in
    `engine.worker.forward.collectives`. ``alone`` names a fault in this rank's steps before the
    collective, ``late`` one after it."""

    def __init__(self, asked, spec):
        super().__init__(asked)
        self._spec = spec
        self.num_collectives = 0

    def load(self, progress):
        info = super().load(progress)
        self._meet()
        return info

    def execute(self, plan):
        self._reach("executing")
        if "alone" in self._asked and plan.plan_id == self._asked.get("at", plan.plan_id):
            do_wrong(self._asked["alone"])
        self._meet()
        if "late" in self._asked and plan.plan_id == self._asked.get("at", plan.plan_id):
            do_wrong(self._asked["late"])
        return super().execute(plan)

    def _meet(self):
        self.num_collectives += 1
        own = self._folder / f"met{self.num_collectives}-{self._spec.rank}"
        own.touch()
        others = [
            self._folder / f"met{self.num_collectives}-{rank}" for rank in range(self._spec.tp)
        ]
        while not all(other.exists() for other in others):
            time.sleep(0.002)


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
