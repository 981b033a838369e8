"""Where the process of a command starts: Ctrl-C ends it quietly while it is still importing.

Rule 1: this file is small, because nothing of ours may be imported before the signal is set.

An import that is interrupted prints a traceback, or leaves half a module behind. Therefore the
signal ends the process, as it ends any program, until the command calls `raise_on_ctrl_c`.
"""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command ``triolet`` and return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from grpc_service.cli.main import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
