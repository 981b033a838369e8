"""The drawn worlds reach nearly all of the core and its loop: they test only what they reach."""

import subprocess
import sys

import pytest

from tests.support.programs import ROOT


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_simulation_alone_covers_the_core():
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulator.measure_coverage", "--seeds", "40"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
