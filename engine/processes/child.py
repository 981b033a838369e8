"""Starts a process of the server's own, and says how it ended.

The process's program begins with `engine.processes.inside.live_with_the_server`. Nothing is written
to its standard input: the kernel kills the process when that is closed, and so whenever the server
ends. What the process writes, to standard output too, goes to the server's standard error. So
nothing is lost when the process crashes, and nobody has to read a pipe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]  # the folder that `engine` is imported from


def start_child(
    module: str, arguments: Sequence[str], fds: Sequence[int], threads: int = 0
) -> subprocess.Popen[bytes]:
    """Start ``python -m module arguments``, which gets the descriptors ``fds`` with the same
    numbers. ``threads`` is how many threads its libraries use; 0 leaves that to them.

    Raises:
        OSError: the system has no process or no descriptor left.
    """
    return subprocess.Popen(
        # -P: a file in the working directory must not be imported in place of a module of ours
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=2,
        pass_fds=fds,
        env=environment_of(threads),
        start_new_session=True,  # Ctrl-C in a terminal goes to the server alone
    )


def how_it_ended(code: int | None) -> str:
    """Return an exit code in words that continue "the process"."""
    if code is None:
        return "does not end"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else "no name"
    cause = "; out of memory?" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}{cause})"


def environment_of(threads: int) -> dict[str, str]:
    """Return this process's environment (with GOMP_SPINCOUNT, D13), plus the thread count that
    OpenMP reads, unless the user has set it, and the folder of `engine`, if it is not installed."""
    environment = dict(os.environ)
    if threads:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if str(ROOT) not in installed:
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([others] if others else [])])
    return environment
