"""Tasks that tests run in the process that decodes images; that process imports this module."""

import os
import time
from pathlib import Path

LONG_S = 20.0


def end_by(number: int, data: bytes) -> bytes:
    """Kill this process by a signal: if data is a path, only if its file exists, and delete it."""
    path = Path(os.fsdecode(data))
    if path.exists() or not path.is_absolute():
        path.unlink(missing_ok=True)
        os.kill(os.getpid(), number)
    return data


def fail(data: bytes) -> bytes:
    raise ZeroDivisionError("a bug")


def about_the_process(data: bytes) -> tuple[int, int, bytes]:
    return os.getpid(), os.nice(0), data


def slow(data: bytes) -> bytes:
    time.sleep(LONG_S)
    return data


def slowly_reversed(data: bytes) -> bytes:
    time.sleep(0.003)
    return data[::-1]
