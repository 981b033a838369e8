"""Starts, watches, kills and reaps a worker process of the operating system.

The process runs `engine.worker.process.main`. It has three connections to this one: the main
channel, on which requests are answered one after another; the control socket, which passes the
descriptors of side channels and whose end shows that the process is dead; and its standard input,
which keeps it alive (`engine.processes.child`).

Rule 1: the process is killed and reaped once. Rule 2: no thread is made for it.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import socket
import subprocess
import threading
from pathlib import Path

from engine.processes.channel import Channel
from engine.processes.child import how_it_ended, start_child
from engine.worker.process.side_channels import SideChannels

PROGRAM = "engine.worker.process.main"
# Seconds for a closed worker to end. An idle one needs a tenth; not tuned for one in a step.
CLOSE_LIMIT_S = 1.0
# Seconds to wait for a dying process's exit code: its channels close some milliseconds earlier.
DEATH_LIMIT_S = 1.0
# Seconds to wait for a killed process: it ends at once, unless a device's driver delays it.
KILL_LIMIT_S = 5.0

log = logging.getLogger(__name__)


class WorkerProcess:
    """A process that was started, from then until it is reaped.

    Life: 1. the constructor starts it; 2. it dies by itself, or `kill` or `end` ends it; 3.
        `close`, after which no descriptor is held. Every method may be called from any thread at
        any time. ``channel`` is the main channel; ``side_channels`` are for calls during steps.
    """

    def __init__(self, name: str, threads: int, inherits: tuple[int, ...] = ()) -> None:
        """Start the process. ``threads`` is the number of threads of its libraries; 0: their own
        defaults. The process also gets the descriptors ``inherits``, with the same numbers.

        Raises:
            OSError: The system has no process or no descriptor left. Nothing is held.
        """
        self.name = name
        self._is_given_up = False  # `kill` or `close` was called
        self._killed_why = ""
        self._end = ""  # How the process ended, once it is reaped.
        self._reaping = threading.Lock()  # Held while the process is ended; never taken in a step.
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            main, their_main = socket.socketpair()
            ours.enter_context(main), theirs.enter_context(their_main)
            control, their_control = socket.socketpair()
            ours.enter_context(control), theirs.enter_context(their_control)
            fds = (their_main.fileno(), their_control.fileno(), *inherits)
            arguments = (name, *map(str, fds[:2]))
            self._process = start_child(PROGRAM, arguments, fds, threads)
            ours.pop_all()
        self._control = control
        self.channel = Channel(main)
        self.side_channels = SideChannels(control)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and neither `kill` nor `close` was called. Costs 1 µs."""
        return not self._is_given_up and self._process.poll() is None

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process is dead, and not before; -1 after
        `close`, which closes it. Stop waiting for it before that."""
        return self._control.fileno()

    def kill(self, why: str) -> None:
        """Kill the process without waiting, even if the kernel cannot end it yet. Threads that wait
        on a channel are woken. ``why`` continues "the worker process"."""
        self._killed_why = self._killed_why or why
        self._is_given_up = True
        with contextlib.suppress(OSError):
            self._process.kill()
        self.ask_to_end()

    def end(self, patience_s: float) -> str:
        """Close the channels, which asks the process to end; reap it, and return how it ended, in
        words that continue "the worker process". After ``patience_s`` seconds it is killed. A
        process that is dead, or was killed, is reaped without that wait."""
        self.ask_to_end()
        with self._reaping:
            if not self._end:
                if not self._has_ended(0.0 if self._killed_why else patience_s):
                    self._process.kill()
                    if not self._has_ended(KILL_LIMIT_S):
                        log.error("the kernel does not end process %d of %s", self.pid, self.name)
                self._end = self._killed_why or how_it_ended(self._process.returncode)
            return self._end

    def close(self) -> None:
        """End the process within `CLOSE_LIMIT_S`, and close every descriptor. Idempotent."""
        self._is_given_up = True
        self.end(CLOSE_LIMIT_S)
        with self._reaping:
            self._control.close()
            if self._process.stdin is not None:
                self._process.stdin.close()

    def dump_stacks(self) -> None:
        """Have the process write the stacks of its threads to standard error, even if a thread
        holds the GIL. The process must have answered once: before that, the signal kills it.
        """
        if self.is_alive:
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGUSR1)

    def rss_bytes(self) -> int:
        """Return the process's resident memory in bytes; 0 if it is dead or that is unknown."""
        if not self.is_alive:
            return 0
        try:
            text = Path(f"/proc/{self.pid}/statm").read_text()
        except OSError:
            return 0
        return int(text.split()[1]) * resource.getpagesize()

    def ask_to_end(self) -> None:
        """Close the channels, which asks the process to end, and do not wait."""
        self.side_channels.close()
        self.channel.close()

    def _has_ended(self, limit_s: float) -> bool:
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True
