"""Runs Python code in an interpreter of its own, for tests of imports and of exits."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def output_of(code, *arguments, limit_s=120, is_silent=False, **options):
    """Return what the code prints. It must succeed, and with ``is_silent`` write no errors."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    options = {"cwd": ROOT, "text": True, "timeout": limit_s} | options
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stderr
    assert not (is_silent and done.stderr)
    return done.stdout


def imported_by(code):
    """Return the names of the modules that are imported when the code has run silently."""
    printed = output_of(f"{code}\nimport sys; print(*sys.modules, sep='\\n')", is_silent=True)
    return set(printed.split("\n"))
