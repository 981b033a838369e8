"""The entry point of every command: while the process imports, Ctrl-C ends it with a sentence.

Rule 1: this file is small, because nothing of ours may be imported before the signal is set.

An import that is interrupted prints a traceback, or leaves half a module behind. Therefore the
signal ends the process until the command calls `raise_on_ctrl_c`.
"""

from __future__ import annotations

import os
import signal
import sys

EXIT_INTERRUPTED = 130


def end_at_once(*_: object) -> None:
    """End the process at once; while it imports, nothing has to end in order."""
    try:
        os.write(2, b"triolet: interrupted\n")
    finally:  # also if standard error is closed
        os._exit(EXIT_INTERRUPTED)


def main() -> int:
    """Run the command ``triolet`` and return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored
        signal.signal(signal.SIGINT, end_at_once)
    from grpc_service.cli.main import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
