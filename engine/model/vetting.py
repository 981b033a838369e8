"""The processes that try constraints first (`engine.model.vet`), as their server has them.

Rule 1: an answer comes, or the process is killed. Rule 2: a process serves one thread at a time;
it is kept for the next, and replaced when it died.
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

PROGRAM = Path(__file__).with_name("vet.py")
# Processor seconds and memory that compiling one constraint may take. A schema of a thousand
# properties takes 0.3 s.
SECONDS_MAX = 1.0
MEMORY_MAX = 256 << 20
# When no answer is to be waited for any more: the process has its processor time by then, unless
# the machine has none to give.
START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Vetted:
    """What came of trying a grammar: why it cannot be compiled (empty: it can), how much memory it
    took, and the longest processor time of a token's mask."""

    error: str = ""
    num_bytes: int = 0
    token_s: float = 0.0


class Vetters:
    """The vetting processes of one model: as many as threads ask at once. Any thread."""

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
        self._lock = threading.Lock()  # of the two lists; held for no work
        self._idle: list[_Vetter] = []
        self._all: set[_Vetter] = set()
        self._is_closed = False

    def vet(self, grammar: str) -> Vetted:
        """Try a grammar, for at most `ANSWER_LIMIT_S`.

        Raises:
            Overloaded: no answer in time. ShuttingDown: closed meanwhile.
        """
        vetter = self._take()
        try:
            said = vetter.ask(grammar, ANSWER_LIMIT_S)
        except BaseException:
            self._drop(vetter)
            self._check_open()
            raise
        with self._lock:
            self._check_open()
            self._idle.append(vetter)
        if "signal" in said:
            return Vetted(_why_it_died(said["signal"]))
        return Vetted(said["error"], said["bytes"], said["token_s"])

    def close(self) -> None:
        """End every process; whoever waits for one hears of it. Idempotent."""
        with self._lock:
            self._is_closed = True
            vetters = list(self._all)
            self._all.clear()
            self._idle.clear()
        for vetter in vetters:
            vetter.close()

    def _take(self) -> _Vetter:
        with self._lock:
            self._check_open()
            while self._idle:
                vetter = self._idle.pop()
                if vetter.is_alive:
                    return vetter
                self._all.discard(vetter)
                vetter.close()
            vetter = _Vetter()
            self._all.add(vetter)
        try:
            said = vetter.ask(self._setup, START_LIMIT_S)
        except BaseException:
            self._drop(vetter)
            raise
        if said.get("error") != "":
            raise EngineBug(f"a vetting process said {said}")
        return vetter

    def _check_open(self) -> None:
        if self._is_closed:
            raise ShuttingDown("the model was closed")

    def _drop(self, vetter: _Vetter) -> None:
        with self._lock:
            self._all.discard(vetter)
        vetter.close()


class _Vetter:
    """One process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is the server's
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: object, limit_s: float) -> dict[str, Any]:
        """Send one line, and wait for one."""
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
        except (OSError, ValueError):  # it died, or was closed meanwhile
            line = b""
        if not line:
            raise Overloaded("the process that compiles constraints was ended")
        said: dict[str, Any] = json.loads(line)
        return said

    def close(self) -> None:
        """Kill it and give its pipes back."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not sent is lost
                    pipe.close()


def _why_it_died(number: int) -> str:
    if number == signal.SIGPROF:
        return f"takes more than {SECONDS_MAX:g} s to compile"
    return "nests too deeply, or takes too much memory to compile"
