"""Ctrl-C and SIGHUP in a command that has begun."""

from __future__ import annotations

import signal
import threading


def raise_on_ctrl_c() -> None:
    """Make Ctrl-C a KeyboardInterrupt again, if `grpc_service.cli.entry` made it end the
    process."""
    handler = signal.getsignal(signal.SIGINT)  # compared by name, as an import would be circular
    if _is_main_thread() and getattr(handler, "__name__", "") == "end_at_once":
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_hangups() -> None:
    """Ignore SIGHUP until the server handles it itself. Otherwise the signal would end a server
    that is still importing."""
    if _is_main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
