"""Where the process of a command starts: Ctrl-C ends it quietly while it is still importing.

Rule 1: nothing of ours is imported before the signal is seen to; this file is small for that.

An import that is interrupted prints a traceback, or leaves half a module behind. So until a command
is there to hear of Ctrl-C (`hear_ctrl_c`), the signal ends the process as it ends any program.
"""

from __future__ import annotations

import signal
import sys
import threading


def main() -> int:
    """The command ``triolet``; its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not one that is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from grpc_service.cli.main import main as run_command

    return run_command()


def hear_ctrl_c() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again, if `main` made it something else."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
