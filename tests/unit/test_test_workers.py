"""Tests in forked workers have the results that they have in one process (`support/workers.py`)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.programs import ROOT
from tests.support.workers import in_order

PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")

CONFTEST = """
from tests.conftest import pytest_addoption, pytest_configure, pytest_runtest_call
"""

FILES = {
    "test_a.py": """
import os, pytest
LIVES = []

@pytest.fixture(scope="module")
def shared():
    LIVES.append(os.getpid())
    yield
    print("torn down")

def test_one(shared): pass
def test_two(shared): assert LIVES == [os.getpid()]
def test_configures_logs(capsys):
    from engine import logs
    logs.configure()
def test_logs_to_no_closed_stream(capsys):
    import logging
    logging.getLogger("here").info("said")
    assert capsys.readouterr().err == ""
def test_fails(shared):
    print("what it printed")
    assert 1 == 2
@pytest.mark.skip(reason="a reason")
def test_skipped(): pass
""",
    "test_b.py": """
import os
def test_before(): pass
def test_dies(): os._exit(3)
def test_after(): pass
""",
    "test_c.py": """
import pytest
@pytest.fixture
def broken():
    yield
    raise ValueError("the teardown")
def test_with_a_broken_fixture(broken): pass
@pytest.mark.parametrize("value", range(20))
def test_many(value): pass
""",
    "test_d.py": "def test_last(): pass\n",
}


def write(folder, files):
    """Write the files of tests, and the conftest.py and pytest.ini that they need."""
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")


def run(folder, *args):
    """Run the files' tests; return the exit code and the output."""
    write(folder, FILES)
    done = subprocess.run([*PYTEST, *args], cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_results_are_those_of_one_process_and_a_death_fails_its_file(tmp_path):
    code, out = run(tmp_path, "--workers", "3", "-rA")
    assert code == 1
    for line in (
        "PASSED test_a.py::test_one",
        "PASSED test_a.py::test_two",
        "FAILED test_a.py::test_fails - assert 1 == 2",
        "PASSED test_b.py::test_before",
        "ERROR test_b.py::test_dies - its worker died with 3",
        "ERROR test_b.py::test_after - its worker died with 3",
        "ERROR test_c.py::test_with_a_broken_fixture - ValueError: the teardown",
        "PASSED test_c.py::test_many[19]",
        "PASSED test_d.py::test_last",
        "a reason",
        "what it printed",
    ):
        assert line in out, out
    assert "1 failed, 27 passed, 1 skipped, 3 errors" in out


def test_workers_take_the_longest_files_first():
    """Files whose tests compute are taken from the front, files whose tests wait from the back. Red
    if a long file lies in the middle: one worker then runs alone for minutes."""
    names = ("golden/a", "golden/b", "unit/c", "service/d", "service/e", "interop/f")
    files = [[SimpleNamespace(path=Path(name))] * (1 + (name == "unit/c")) for name in names]
    seconds = dict(zip(map(Path, names), (1.0, 5.0, 3.0, 0.5, 9.0, 4.0), strict=True))
    taken = [str(items[0].path) for items in in_order(files, seconds)]
    assert taken == ["unit/c", "golden/b", "golden/a", "service/d", "interop/f", "service/e"]
    assert in_order(files, {}) == files


def test_a_run_writes_how_long_its_files_took_and_the_next_one_reads_it(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/file_seconds.txt").write_text("9 21 test_c.py\n5 4 test_a.py\n")
    _, out = run(tmp_path, "--workers", "1", "-v", "--write-seconds", "0")
    first = [out.index(name) for name in ("test_c.py::", "test_a.py::", "test_b.py::")]
    assert first == sorted(first)
    written = (tmp_path / "tests/file_seconds.txt").read_text().splitlines()
    assert {tuple(line.split()[1:]) for line in written} >= {
        ("21", "test_c.py"),
        ("6", "test_a.py"),
    }
    run(tmp_path, "--workers", "1", "--write-seconds", "60")
    assert (tmp_path / "tests/file_seconds.txt").read_text() == ""


@pytest.mark.slow
def test_the_first_failure_ends_the_run_if_it_is_to(tmp_path):
    code, out = run(tmp_path, "--workers", "1", "-x")
    assert code == 1
    assert "stopping after 1 failures" in out


@pytest.mark.slow
def test_files_of_workers_that_died_are_not_lost(tmp_path):
    code, out = run(tmp_path, "--workers", "1", "-rE")
    assert code == 1
    assert "ERROR test_c.py::test_many[7] - the worker that had taken the file died" in out
    assert "ERROR test_d.py::test_last" in out


LONG = """
import pathlib, time
def test_long():
    pathlib.Path("begun").touch()
    try:
        time.sleep(60)
    finally:
        time.sleep(0.2)
        pathlib.Path("taken down").touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize("reached", ["all", "the parent"])
def test_an_interrupt_ends_the_workers_after_their_fixtures(tmp_path, reached):
    """One of the workers may have ended before the interrupt."""
    write(tmp_path, {"test_long.py": LONG})
    process = subprocess.Popen(
        [*PYTEST, "--workers", "3"],
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    limit = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    time.sleep(0.5)  # by now the other two workers have ended, without a test
    interrupt = os.killpg if reached == "all" else os.kill
    interrupt(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, out
    assert "INTERNALERROR" not in out
    assert (tmp_path / "taken down").exists() == (reached == "all")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
