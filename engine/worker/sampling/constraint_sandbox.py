"""The runner's side of the sandbox in which clients' own constraints are compiled first.

The sandbox is one or more processes that run `engine.worker.sampling.sandbox_main`. They compile
clients' constraints, which may take too long, take too much memory, or crash the process.

Rule 1: each question, a line of JSON, gets an answer, or its process is killed. Rule 2: a process
serves one thread at a time; it is kept for the next question, and replaced after it has died.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import EngineBug, Overloaded, ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAM = Path(__file__).with_name("sandbox_main.py")
# Processor seconds and bytes that compiling one constraint may take. A schema of a thousand
# properties takes 0.3 s.
SECONDS_MAX = 1.0
MEMORY_MAX = 256 << 20
# Seconds to wait for the answers to the setup and to a grammar. `SECONDS_MAX` of processor time end
# a process long before, unless other processes take the machine's processor time.
START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of compiling a grammar in the sandbox. ``error`` says why the grammar cannot be
    compiled, or is empty. ``num_bytes`` is the memory of the compiled grammar, and ``token_s`` the
    longest processor time that filling a mask took, in seconds."""

    error: str = ""
    num_bytes: int = 0
    token_s: float = 0.0


class ConstraintSandbox:
    """The sandbox of one model. It has as many processes as threads that call `try_grammar` at
    once. Every method may be called from any thread."""

    def __init__(
        self,
        tokenizer: str,
        vocab: int,
        ends: Sequence[int] | None,
        limits: Mapping[str, int | bool],
    ) -> None:
        self._setup = {
            "tokenizer": tokenizer,
            "vocab": vocab,
            "ends": ends,
            "limits": dict(limits),
            "seconds": SECONDS_MAX,
            "memory": MEMORY_MAX,
        }
        self._lock = threading.Lock()  # guards the fields below
        self._idle: list[_SandboxProcess] = []
        self._all: set[_SandboxProcess] = set()
        self._is_closed = False

    def try_grammar(self, grammar: str) -> Trial:
        """Compile a grammar in the sandbox. Waits at most `ANSWER_LIMIT_S`, and `START_LIMIT_S`
        more where a process must be started.

        Raises:
            Overloaded: There was no answer in time. ShuttingDown: The sandbox was closed meanwhile.
        """
        process = self._take()
        try:
            answer = process.ask(grammar, ANSWER_LIMIT_S)
        except BaseException:
            self._drop(process)
            self._check_open()
            raise
        with self._lock:
            self._check_open()
            self._idle.append(process)
        if "signal" in answer:
            return Trial(_why_it_died(answer["signal"]))
        return Trial(answer["error"], answer["bytes"], answer["token_s"])

    def close(self) -> None:
        """Kill every process; a `try_grammar` under way raises ShuttingDown. Idempotent."""
        with self._lock:
            self._is_closed = True
            processes = list(self._all)
            self._all.clear()
            self._idle.clear()
        for process in processes:
            process.close()

    def _take(self) -> _SandboxProcess:
        """Return an idle process, or a new one that has built its tokenizer."""
        with self._lock:
            self._check_open()
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                self._all.discard(process)
                process.close()
            process = _SandboxProcess()
            self._all.add(process)
        try:
            answer = process.ask(self._setup, START_LIMIT_S)
        except BaseException:
            self._drop(process)
            raise
        if answer.get("error") != "":
            raise EngineBug(f"a sandbox process answered its setup with {answer}")
        return process

    def _check_open(self) -> None:
        if self._is_closed:
            raise ShuttingDown("the model was closed")

    def _drop(self, process: _SandboxProcess) -> None:
        with self._lock:
            self._all.discard(process)
        process.close()


class _SandboxProcess:
    """One process of the sandbox. It answers one question at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal must interrupt only the server
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: object, limit_s: float) -> dict[str, Any]:
        """Send one line of JSON, and return the line that answers it.

        Raises:
            Overloaded: There was no answer within ``limit_s`` seconds, or the process died.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            answers = select.poll()
            answers.register(process.stdout, select.POLLIN)
            if not answers.poll(1000 * limit_s):
                raise Overloaded("the server had no time to compile the constraint")
            line = process.stdout.readline()
        except (OSError, ValueError):  # the process died, or `close` was called meanwhile
            line = b""
        if not line:
            raise Overloaded("the process that compiles constraints was ended")
        return json.loads(line)

    def close(self) -> None:
        """Kill and reap the process, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a question that was not sent is lost
                    pipe.close()


def _why_it_died(number: int) -> str:
    if number == signal.SIGPROF:
        return f"takes more than {SECONDS_MAX:g} s to compile"
    return "nests too deeply, or takes too much memory to compile"
