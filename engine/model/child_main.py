"""A worker process: `python -m engine.model.child_main NAME LINE DOOR`, started by `ChildRunner`.

LINE and DOOR are descriptors of sockets. On the line, this thread is told what to load and then one
step after another; the line's end is the end. Through the door come further lines, for compiling
constraints beside the steps, each served by a thread of its own.

Rule 1: a plan that was taken up is answered, or the process ends: where an answer cannot be given,
nobody could know what took effect. Rule 2: it does not outlive its server, whatever either does:
standard input is a pipe that the server holds open, and its end is a SIGKILL from the kernel, which
no step can hold up. (The parent's death signal of prctl would come when the *thread* ends that
started this process.) Rule 3: Ctrl-C and SIGTERM are the server's, which drains first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from engine import logs
from engine.heap import settle_heap
from engine.model import frames
from engine.model.frames import Estimated, Line, LineEnded, LineGarbled, Loaded, raised

if TYPE_CHECKING:
    from engine.core.types import Constraint
    from engine.model.frames import Compile, Setup

EXIT_LOST = 70  # EX_SOFTWARE of sysexits.h
SERVERS_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")

log = logging.getLogger(__name__)


def main() -> NoReturn:
    """Serve until the line ends."""
    name, line_fd, door_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for signal_name in SERVERS_SIGNALS:
        signal.signal(getattr(signal, signal_name), signal.SIG_IGN)
    die_with_the_server(sys.stdin.fileno())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # what `ChildRunner.dump_stacks` asks for
    logs.request_id.set(f"worker {name}")
    code = EXIT_LOST
    try:
        Worker(name, own_socket(line_fd), own_socket(door_fd)).serve()
        code = 0
    except LineEnded:  # in the middle of an answer: nobody wants it any more
        code = 0
    except BaseException:
        log.exception("the worker process of %s ends", name)
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End now: what torch and others do at an interpreter's end takes time and gains nothing."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def die_with_the_server(fd: int) -> None:
    """Be killed when the pipe's other end is closed. Where the kernel cannot do it (any but
    Linux), the door's end does, as soon as its thread has Python's lock."""
    if not hasattr(fcntl, "F_SETSIG"):
        return
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    look = select.poll()
    look.register(fd, select.POLLIN)
    if look.poll(0):  # it was closed before the kernel had been told
        leave(EXIT_LOST)


def own_socket(fd: int) -> socket.socket:
    """A descriptor's socket, which no process started here inherits."""
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


def make_runner(setup: Setup) -> Any:
    """Call the factory; importing it may import torch."""
    module, _, function = setup.factory.partition(":")
    return getattr(importlib.import_module(module), function)(setup.spec, setup.capability)


def own_bytes() -> int:
    """Memory that no other process shares with this one; 0 where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


class Worker:
    """One runner and its lines."""

    def __init__(self, name: str, line: socket.socket, door: socket.socket) -> None:
        self._name = name
        self._line = Line(line)
        self._door = door
        self._setup: Any = None
        self._runner: Any = None
        self._compiled = _Compiled()

    def serve(self) -> None:
        """Answer what comes on the line, until the server closes it."""
        name, setup = self._line.receive()
        if name != "setup":
            raise LineGarbled(f"{name} before setup")
        sys.path.extend(entry for entry in setup.path if entry not in sys.path)
        logs.configure(setup.log_level, "json" if setup.is_json else "human")
        threading.Thread(target=self._keep_the_door, name="door", daemon=True).start()
        self._setup = setup
        while True:
            try:
                name, value = self._line.receive()
            except LineEnded:
                if self._runner is not None:
                    self._runner.close()
                return
            self._answer(name, value)

    def _answer(self, name: str, value: Any) -> None:
        if name == "step":
            self._step(value)
            return
        if name not in ("estimate", "load"):
            raise LineGarbled(f"{name} is no request")
        try:
            if self._runner is None:
                self._runner = make_runner(self._setup)
            if name == "estimate":
                self._line.send("estimated", Estimated(self._runner.estimate(), own_bytes()))
            else:
                self._line.send("loaded", self._load())
        except LineEnded:
            raise
        except BaseException as error:
            self._line.send("raised", raised(error))

    def _load(self) -> Loaded:
        runner, before = self._runner, own_bytes()
        info = runner.load(lambda progress: self._line.send("progress", progress))
        settle_heap()  # 0.4 s with torch, which no step should wait for
        return Loaded(info, before, runner.tokenizer, getattr(runner, "encoder_tokenizer", None))

    def _step(self, plain: Any) -> None:
        plan = frames.plan_of(plain)
        try:
            result = self._runner.execute(plan)
        except BaseException as error:
            self._line.send("raised", raised(error))
            return
        self._line.send("done", frames.plain_result(result))

    # ---- beside the steps

    def _keep_the_door(self) -> None:
        """A thread for every line that comes through the door; its end is the server's."""
        while True:
            data, fds, _, _ = socket.recv_fds(self._door, 1, 1)
            if not data:
                leave(EXIT_LOST)
            for fd in fds:
                line = Line(own_socket(fd))
                threading.Thread(target=self._serve_beside, args=(line,), daemon=True).start()

    def _serve_beside(self, line: Line) -> None:
        logs.request_id.set(f"worker {self._name}")
        with contextlib.suppress(LineEnded):
            while True:
                _, asked = line.receive()
                try:
                    size = self._compile(asked)
                except BaseException as error:  # a panic of a library in Rust is no Exception
                    line.send("raised", raised(error))
                else:
                    line.send("compiled", size)
        line.close()

    def _compile(self, asked: Compile) -> int:
        for constraint, number in asked.forgets:
            if self._compiled.try_forget(constraint, number):
                self._runner.forget(constraint)
        self._compiled.begin(asked.constraint, asked.number)
        try:
            size: int = self._runner.compile(asked.constraint)
        except BaseException:
            self._compiled.try_forget(asked.constraint, asked.number + 1)
            raise
        return size


class _Compiled:
    """Which compilation of a constraint came last, by the server's numbers: a forget that was made
    before it, and comes after it by another line, is void."""

    def __init__(self) -> None:
        self._latest: dict[Constraint, int] = {}
        self._lock = threading.Lock()  # of the numbers; held for no work, and by no step

    def begin(self, constraint: Constraint, number: int) -> None:
        with self._lock:
            self._latest[constraint] = max(number, self._latest.get(constraint, 0))

    def try_forget(self, constraint: Constraint, number: int) -> bool:
        """Whether it is to be forgotten."""
        with self._lock:
            if self._latest.get(constraint, 0) >= number:
                return False
            self._latest.pop(constraint, None)
            return True


if __name__ == "__main__":
    main()
