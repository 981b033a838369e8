"""A runner that lives in a process of its own, behind the protocols of `Runner` and `EncodeRunner`.

What a process buys: its death, by a crash of a library or the kernel's want of memory, is one
replica's; a hung step can be killed; and steps of several replicas do not share Python's lock.

Rule 1: imports no torch; the process makes its own runner from a reference (`frames.Setup`).
Rule 2: a step takes no lock of ours and starts no thread: the caller's thread writes the plan and
waits for the answer, with Python's lock released (R35, R66). Rule 3: a worker is lost once: whoever
finds out first ends and reaps the process, and everyone hears the same. Rule 4: no thread of ours
is left, as none is made.

Who talks where: `load` and `execute` on the first line, by one thread at a time; each `compile` on
a line of its own, which is kept for the next, so that neither waits for the other (a line goes to
the process through the door, a socket for passing descriptors). `forget` says nothing: it rides
with the next `compile`, as it is called where nothing may wait.

The tokenizers come over once, pickled, and work here. Asked over there, each text would take a hop
of 0.05 ms at the least (`python -m tools.bench child`), and wait for Python's lock beside a step,
where encoding a line takes 0.03 ms; and a dead worker could be asked nothing. Read from the model's
files here, they would be made by another way than those the model runs with, an encoder's above
all, which sentence-transformers makes. 128,000 tokens are 6 MB and take 0.1 s to write and 0.4 to
read, as long as from their file (0.5). None of it imports torch: rendering a first chat imports
parts of transformers alone (0.9 s, 33 MB).

What the process writes, to standard output too, goes to the server's standard error: nothing is
lost when it crashes, and nobody has to read a pipe.

Source: D3, D8, D13, D17, R37, R63, R141.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from engine import logs
from engine.errors import EngineBug, ShuttingDown, SpawnFailed, WorkerLost
from engine.memory import CPU
from engine.model import frames
from engine.model.frames import Compile, Line, LineEnded, LineGarbled, Loaded, Raised, Setup
from engine.model.resolve import short_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.core.encode_types import EncodePlan, EncodeResult, EncoderTokenizer
    from engine.core.plan import (
        LoadProgress,
        MemoryEstimate,
        RunnerSpec,
        StepPlan,
        StepResult,
        Tokenizer,
    )
    from engine.core.types import Constraint
    from engine.status import Capability

PROGRAM = "engine.model.child_main"
ROOT = Path(__file__).resolve().parents[2]  # where `engine` is found
# For an idle worker that is ten times what it needs; a guess for one in a step.
CLOSE_LIMIT_S = 1.0
# Between the end of a dying process's lines and its exit code are milliseconds.
DEATH_LIMIT_S = 1.0
# The kernel ends a killed process at once, unless a device's driver holds it.
KILL_LIMIT_S = 5.0
RETRY_AFTER_S = 1.0

log = logging.getLogger(__name__)


class ChildRunner:
    """`engine.core.plan.Runner` and `engine.core.encode_types.EncodeRunner` over another process.

    Life: 1. made, holding nothing; 2. `estimate`, or else `load`, starts the process; 3. `load`;
    4. `execute`, any number of times; 5. `close`, after which nothing is held. From its death on,
    whenever that is, only `close` is of use; `is_alive` tells, and ``sentinel`` whoever waits.

    ``factory`` is ``module:function``; called in the process with the spec and the capability, the
    function gives an unloaded runner. `close`, `kill`, `is_alive`, `dump_stacks` and `rss_bytes`
    belong to every thread at any time.
    """

    def __init__(
        self, factory: str, spec: RunnerSpec, capability: Capability | None = None
    ) -> None:
        self._factory = factory
        self._spec = spec
        self._capability = capability
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None
        self._door: socket.socket | None = None
        self._loaded: Loaded | None = None
        self._is_closed = False
        self._killed_why = ""
        self._how = ""  # how the process ended, once it is reaped
        self._ending = threading.Lock()  # starting, ending and reaping; never taken in a step
        self._lines_lock = threading.Lock()  # of the two below; held for no work
        self._idle_lines: list[Line] = []
        self._all_lines: set[Line] = set()
        self._numbers = itertools.count(1)
        self._to_forget: list[tuple[Constraint, int]] = []

    # ---- the protocol

    def estimate(self) -> MemoryEstimate:
        """Start the process and have it estimate; it stays, for `load`. On the CPU, what the
        process takes beside its model (torch's own, 0.3 GB) is counted in.

        Raises:
            SpawnFailed, ShuttingDown, Exception: as `load`.
        """
        told = self._ask_first("estimate", "estimated", lambda progress: None)
        found: MemoryEstimate = told.estimate
        if found.device != CPU:
            return found
        return replace(found, num_bytes=found.num_bytes + told.process_bytes)

    def load(self, progress: Callable[[LoadProgress], None]) -> Any:
        """Have the model loaded, in a process that is started if there was no `estimate`; a
        `ModelInfo`, or an encoder's `EncoderInfo`, whose memory is counted as there.

        Raises:
            SpawnFailed: it cannot be served, or the process died; one sentence says why.
            ShuttingDown: it was closed meanwhile. Exception: what else the load raised there.
                Nothing is kept in any case.
        """
        if self._loaded is not None:
            raise EngineBug("a worker process is loaded once")
        told = self._ask_first("load", "loaded", progress)
        self._loaded = told
        if told.info.device != CPU:
            return told.info
        return replace(told.info, memory_bytes=told.info.memory_bytes + told.process_bytes)

    def _ask_first(
        self, request: str, answer: str, progress: Callable[[LoadProgress], None]
    ) -> Any:
        """Ask what comes before steps; whatever fails ends the process."""
        try:
            line = self._start()
            line.send(request, None)
            name, value = line.receive()
            while name == "progress":
                progress(value)
                name, value = line.receive()
            if name != answer:
                raise _error_of(name, value)
            return value
        except (LineEnded, LineGarbled) as error:
            failure = self._failed_load(error)
            self.close()
            raise failure from error
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's, in this process; it outlives the worker."""
        return self._known().tokenizer

    @property
    def encoder_tokenizer(self) -> EncoderTokenizer:
        """As `tokenizer`, for inputs of an encoder."""
        found = self._known().encoder_tokenizer
        if found is None:
            raise EngineBug("a text model has no tokenizer for inputs")
        return found

    @overload
    def execute(self, plan: StepPlan) -> StepResult: ...
    @overload
    def execute(self, plan: EncodePlan) -> EncodeResult: ...
    def execute(self, plan: StepPlan | EncodePlan) -> StepResult | EncodeResult:
        """Have a plan computed; the thread waits without Python's lock.

        Raises:
            WorkerLost: the process died, with the plan or before; nothing more comes of it.
            ShuttingDown: it was closed. MemoryError, Exception: as the runner there raised it, an
                exception that is not ours as `frames.ChildError`; the worker lives on.
        """
        line = self._line
        if line is None:
            raise EngineBug("a step before the load")
        try:
            line.send("step", frames.plain_plan(plan))
            name, value = line.receive()
            if name == "done":
                return frames.result_of(value)
            failure = _error_of(name, value)
        except Exception as error:
            # whatever it is, nobody knows what took effect there
            raise self._lost_by(error) from error
        raise failure

    def compile(self, constraint: Constraint) -> int:
        """Compile over there, beside steps and other constraints.

        Raises:
            InvalidRequest, Unsupported, Exception: as the runner there.
            WorkerLost, ShuttingDown: as `execute`.
        """
        forgets = tuple(self._take_forgets())
        asked = Compile(constraint, next(self._numbers), forgets)
        line = self._take_line()
        try:
            line.send("compile", asked)
            name, value = line.receive()
            failure = None if name == "compiled" else _error_of(name, value)
        except (LineEnded, LineGarbled) as error:
            self._drop_line(line)
            raise self._lost_by(error) from error
        except BaseException:  # it was not sent
            self._drop_line(line)
            raise
        self._keep_line(line)
        if failure is not None:
            raise failure
        size: int = value
        return size

    def forget(self, constraint: Constraint) -> None:
        """Have it forgotten with the next `compile`. Never waits."""
        self._to_forget.append((constraint, next(self._numbers)))

    def close(self) -> None:
        """End the process and give everything back. It has `CLOSE_LIMIT_S` to end its step and
        close its runner, then it is killed; one that is idle takes up to 0.1 s. Idempotent;
        whoever waits in another call raises ShuttingDown at once.
        """
        self._is_closed = True
        self._end(CLOSE_LIMIT_S)
        with self._ending:
            process, door = self._process, self._door
            if door is not None:
                door.close()
            if process is not None and process.stdin is not None:
                process.stdin.close()

    # ---- beside the protocol

    @property
    def pid(self) -> int | None:
        """The process's, once it was started."""
        process = self._process
        return None if process is None else process.pid

    @property
    def is_alive(self) -> bool:
        """Started, and neither dead nor given up. A look of a microsecond."""
        process = self._process
        given_up = self._is_closed or self._killed_why
        return process is not None and not given_up and process.poll() is None

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process is dead, and not before. It is given
        back by `close`: stop waiting for it first."""
        if self._door is None or self._door.fileno() < 0:
            raise EngineBug("there is no process to wait for")
        return self._door.fileno()

    def lost(self) -> WorkerLost | ShuttingDown:
        """Why `execute` would fail, of a worker that is dead; reaps it, which takes up to
        `DEATH_LIMIT_S`, and ends it if it is not dead yet."""
        if self._is_closed:
            return ShuttingDown("the model was closed")
        self._end(DEATH_LIMIT_S)
        if self._is_closed:
            return ShuttingDown("the model was closed")
        return WorkerLost(f"the worker process {self._how}", retry_after_s=RETRY_AFTER_S)

    def kill(self, why: str = "did not answer and was killed") -> None:
        """End a process that hangs, at once and without waiting: `execute` raises WorkerLost, even
        if the kernel cannot end the process yet. ``why`` goes on from "the worker process"."""
        process = self._process
        if process is None:
            return
        self._killed_why = self._killed_why or why
        with contextlib.suppress(OSError):
            process.kill()
        self._close_lines()

    def dump_stacks(self) -> None:
        """Have the process write what its threads do to standard error, whatever they hold."""
        process = self._process
        if process is not None and self._loaded is not None and self.is_alive:
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGUSR1)

    def rss_bytes(self) -> int:
        """What the process has in memory; 0 if there is none, or the system does not tell."""
        process = self._process
        if process is None or not self.is_alive:
            return 0
        try:
            text = Path(f"/proc/{process.pid}/statm").read_text()
        except OSError:
            return 0
        return int(text.split()[1]) * resource.getpagesize()

    # ---- starting

    def _start(self) -> Line:
        """The line, of a process that is started if there is none.

        Raises:
            SpawnFailed: the system gave none. ShuttingDown: it was closed. Nothing is held.
        """
        with self._ending:
            if self._is_closed:
                raise ShuttingDown("the model was closed")
            if self._line is not None:
                return self._line
            try:
                line = self._line = self._start_process()
            except OSError as error:
                raise SpawnFailed(
                    f"the model {self._name!r} cannot be loaded: no process can be started "
                    f"({error.strerror})",
                    log_detail=repr(error),
                ) from error
        with contextlib.suppress(LineEnded):  # whoever asks next hears of it
            line.send("setup", self._setup())
        return line

    def _start_process(self) -> Line:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            line, their_line = socket.socketpair()
            ours.enter_context(line), theirs.enter_context(their_line)
            door, their_door = socket.socketpair()
            ours.enter_context(door), theirs.enter_context(their_door)
            self._process = self._popen(their_line.fileno(), their_door.fileno())
            ours.pop_all()
            self._door = door
            return Line(line)

    def _popen(self, line: int, door: int) -> subprocess.Popen[bytes]:
        # -P: what lies in the working directory is no module of ours
        command = [sys.executable, "-P", "-m", PROGRAM, self._name, str(line), str(door)]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # nothing is written to it: it ends with this process
            stdout=2,
            pass_fds=(line, door),
            env=self._environment(),
            start_new_session=True,  # a terminal's Ctrl-C is the server's
        )

    def _environment(self) -> dict[str, str]:
        """This process's own (GOMP_SPINCOUNT is in it: D13), threads of libraries that look there,
        and where `engine` is, if it is not installed. The user's own setting wins."""
        environment = dict(os.environ)
        if self._spec.threads:
            environment.setdefault("OMP_NUM_THREADS", str(self._spec.threads))
        installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        if str(ROOT) not in installed:
            others = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([others] if others else [])])
        return environment

    def _setup(self) -> Setup:
        root = logging.getLogger()
        is_json = any(isinstance(one.formatter, logs.JsonFormatter) for one in root.handlers)
        path = tuple(os.path.abspath(entry) for entry in sys.path)
        level = root.getEffectiveLevel()
        return Setup(self._factory, self._spec, self._capability, path, level, is_json)

    def _failed_load(self, error: BaseException) -> BaseException:
        """What a load raises for what went wrong in it."""
        if not isinstance(error, LineEnded | LineGarbled):
            return error
        lost = self._lost_by(error)
        if isinstance(lost, ShuttingDown):
            return lost
        return SpawnFailed(
            f"the model {self._name!r} cannot be loaded: its worker process {self._how}"
        )

    @property
    def _name(self) -> str:
        return short_name(self._spec.model)

    def _known(self) -> Loaded:
        if self._loaded is None:
            raise EngineBug("the tokenizer was asked for before the model was loaded")
        return self._loaded

    # ---- answers

    def _lost_by(self, error: Exception) -> WorkerLost | ShuttingDown:
        """The worker is given up, because of ``error``."""
        if not isinstance(error, LineEnded):
            log.error("the worker process of %s is given up: %r", self._name, error)
            what = "be understood" if isinstance(error, LineGarbled) else "be told its next step"
            self.kill(f"could not {what} and was killed")
        return self.lost()

    # ---- lines for constraints

    def _take_forgets(self) -> list[tuple[Constraint, int]]:
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._to_forget.pop())
        return taken

    def _take_line(self) -> Line:
        """An idle line, or a new one.

        Raises:
            WorkerLost, ShuttingDown: there is nobody at the other end.
        """
        with self._lines_lock:
            if self._idle_lines:
                return self._idle_lines.pop()
            door = self._door
            if not (self._is_closed or self._killed_why or door is None):
                with contextlib.suppress(OSError):
                    return self._pass_line(door)
        raise self.lost()

    def _pass_line(self, door: socket.socket) -> Line:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(door, [b"+"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        line = Line(ours)
        self._all_lines.add(line)
        return line

    def _keep_line(self, line: Line) -> None:
        with self._lines_lock:
            if line in self._all_lines:
                self._idle_lines.append(line)

    def _drop_line(self, line: Line) -> None:
        with self._lines_lock:
            self._all_lines.discard(line)
        line.close()

    def _close_lines(self) -> None:
        with self._lines_lock:
            lines = [*self._all_lines, *([self._line] if self._line is not None else [])]
            self._all_lines.clear()
            self._idle_lines.clear()
        for line in lines:
            line.close()

    # ---- the end

    def _end(self, patience_s: float) -> None:
        """End and reap the process, once; it has ``patience_s`` to end by itself."""
        self._close_lines()
        with self._ending:
            self._close_lines()  # of a process that was only starting
            process = self._process
            if process is None or self._how:
                return
            if not _has_ended(process, 0.0 if self._killed_why else patience_s):
                process.kill()
                if not _has_ended(process, KILL_LIMIT_S):
                    log.error("the kernel does not end process %d of %s", process.pid, self._name)
            self._how = self._killed_why or how_it_ended(process.returncode)


def _error_of(name: str, value: object) -> Exception:
    """What an answer says was raised there.

    Raises:
        LineGarbled: it does not say.
    """
    if name == "raised" and isinstance(value, Raised):
        return value.error()
    raise LineGarbled(f"an answer {name!r}")


def _has_ended(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def how_it_ended(code: int | None) -> str:
    """An exit code in words that go on from "the worker process"."""
    if code is None:
        return "does not end"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else "no name"
    cause = "; out of memory?" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}{cause})"
