"""The newer Pythons that pyproject.toml admits run the engine, the server and its clients, too.

Each has an environment of its own, in the user's cache, with the versions of constraints.txt. If it
cannot be installed, the test fails; a Python that this machine lacks is skipped by name.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.environments import virtual_environment
from tests.support.programs import ROOT

INSTALL_TIMEOUT_S = 600
TESTS_TIMEOUT_S = 1500
USABLE = "import sys, venv, ensurepip, ssl, sqlite3; print(*sys.version_info[:3], sep='.')"
# Python releases that start no thread once the main thread has ended (CPython's issue 113964), so
# that an engine left open shows a traceback at exit. README.md says so.
STARTING_NO_THREADS_AT_EXIT = ("3.12.0", "3.12.1", "3.12.2")
# Tests of all that differs between releases of Python: syntax and typing, pickles, threads,
# signals, both event loops, generated protos, compiled kernels beside torch, servers and clients.
TESTS = (
    *("tests/unit", "tests/golden", "tests/property", "tests/conformance/test_torch_runner.py"),
    *(f"tests/service/test_{name}.py" for name in ("aio", "blocking", "generate", "signals")),
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(INSTALL_TIMEOUT_S + TESTS_TIMEOUT_S)]


def find_python(version):
    """Return an interpreter of this version that can make environments, from PATH or from pyenv,
    and its release; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    places = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for place in filter(None, places):
        done = subprocess.run([place, "-c", USABLE], capture_output=True, text=True)
        release = done.stdout.strip()
        if done.returncode == 0 and release.startswith(f"{version}."):
            return place, release
    return None


def environment_of(python, version):
    """Return the interpreter of an environment with this checkout and its development tools; make
    it unless it is there."""
    wanted = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    stamp = hashlib.sha256(wanted + bytes(ROOT)).hexdigest()[:12]
    constraints = ROOT / "constraints.txt"
    [torch] = [line for line in constraints.read_text().split() if line.startswith("torch==")]
    # torch comes first and alone, so that no other package decides its build
    venv = virtual_environment(
        f"python-{version}-{stamp}",
        ["-c", constraints, torch],
        ["-c", constraints, "-e", f"{ROOT}[dev]"],
        python=python,
        timeout_s=INSTALL_TIMEOUT_S,
    )
    return venv / "bin" / "python"


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_a_newer_python_runs_it(version, tmp_path):
    found = find_python(version)
    if found is None:
        pytest.skip(f"this machine has no Python {version} that can make environments")
    python, release = found
    own = environment_of(python, version)
    argv = [own, "-m", "pytest", "-q", "-m", "not full and not alone and not interop", *TESTS]
    if release in STARTING_NO_THREADS_AT_EXIT:
        argv += ["-k", "not engine_left_open"]
    ran = subprocess.run(
        [*argv, "-o", f"cache_dir={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TESTS_TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    print(f"Python {release}: {ran.stdout.splitlines()[-1]}")
