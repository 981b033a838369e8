"""The team of threads that computes a step: every task is done once, whichever thread is late.

The driver's steps change their number of threads from one to the next, as a worker's do, and some
threads sleep inside of tasks and between loops.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from engine.worker.forward import native

DRIVER = Path(__file__).parents[1] / "support" / "team_driver.cpp"
LIMIT_S = 120
FLAGS = ("-std=c++17", "-O1", "-g", "-w", "-Wno-psabi", "-march=native", "-pthread")


def build(to, *flags, sources=native.SOURCES):
    """Compile the driver with the kernels of ``sources``, and return its path."""
    command = [native.find_compiler(), *FLAGS, *flags, f"-I{sources}", "-o", str(to), str(DRIVER)]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    return to


def drive(driver, seed, steps, callers):
    """Run the driver's steps. Return the driver's output and exit code, None if it hangs."""
    command = [str(driver), str(seed), str(steps), str(callers)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "", None
    return done.stdout + done.stderr, done.returncode


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return build(tmp_path_factory.mktemp("team") / "driver")


@pytest.mark.parametrize(("seed", "callers"), [(1, 1), (2, 1), (3, 4)])
def test_every_task_is_done_once_with_any_number_of_threads(driver, seed, callers):
    """The driver prints its number of threads: at most five helpers for each caller are started."""
    printed, code = drive(driver, seed, 1000, callers)
    assert code == 0
    assert int(printed) <= 1 + 6 * callers


@pytest.mark.slow
def test_no_thread_reads_what_another_writes(tmp_path):
    driver = build(tmp_path / "driver", "-fsanitize=thread")
    printed, code = drive(driver, 7, 1500, 2)
    assert code == 0, printed


FAULTS = {
    "nobody waits for the end of a loop": ("        wait_for(phase);\n    }\n", "    }\n"),
    "a helper goes on in a step that has ended": (
        "if (!place.replace(WAITING, INSIDE)) throw Expelled();", "",
    ),
    "a task is taken twice": ("if (!taken.compare_exchange_weak(seen, seen + 1)) continue;", ""),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("line", "planted"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(tmp_path, line, planted):
    sources = tmp_path / "kernels"
    shutil.copytree(native.SOURCES, sources)
    text = (sources / "team.h").read_text()
    assert text.count(line) == 1
    (sources / "team.h").write_text(text.replace(line, planted))
    assert drive(build(tmp_path / "driver", sources=sources), 1, 2000, 2)[1] != 0
