"""Tests in forked workers have the results that they have in one process (`support/workers.py`)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CONFTEST = """
from tests.conftest import pytest_addoption, pytest_configure
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


def run(folder, *args):
    """Run the files' tests; return the exit code and the output."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
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
    assert "1 failed, 25 passed, 1 skipped, 3 errors" in out


@pytest.mark.slow
def test_files_of_workers_that_died_are_not_lost(tmp_path):
    code, out = run(tmp_path, "--workers", "1", "-rE")
    assert code == 1
    assert "ERROR test_c.py::test_many[7] - the worker that had taken the file died" in out
    assert "ERROR test_d.py::test_last" in out
