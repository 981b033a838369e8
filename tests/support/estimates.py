"""Compares a memory estimate with what was taken, which programs of their own measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent
LIMIT_S = 240


def check_estimate(program: str, directory: Path) -> None:
    """Run a program of this folder on a model; it ends with the estimate and what was taken, in
    bytes. Check that the estimate holds that, and is at most four times as much."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / program), str(directory)],
        capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=SUPPORT.parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    estimate, taken = map(int, done.stdout.split()[-2:])
    assert taken <= estimate <= 4 * taken, (estimate, taken)
