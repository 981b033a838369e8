"""Ctrl-C in a command that has begun."""

from __future__ import annotations

import signal
import threading


def raise_on_ctrl_c() -> None:
    """Make Ctrl-C a KeyboardInterrupt again, if `grpc_service.cli.entry` made it end the
    process."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
