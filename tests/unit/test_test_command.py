"""tools/test ends with the status that its tests and its static checks have, and tools.mutate has
its tests."""

import shutil
import subprocess

import pytest

from tests.support.programs import ROOT
from tools import mutate

# Stands for Python: a call of pytest ends with the status in a file.
PYTHON = """#!/bin/sh
[ "$2" = pytest ] || exit 0
exit $(cat "$(dirname "$0")/pytest")
"""


@pytest.mark.parametrize("pytest_ends", [0, 1, 2])
@pytest.mark.parametrize("ruff_ends", [0, 1])
def test_the_status_is_that_of_tests_and_checks(tmp_path, pytest_ends, ruff_ends):
    """`tools/test` exits with 0 if tests and checks pass, otherwise with 1."""
    (tmp_path / "tools").mkdir()
    for name in ("tools/test", "tools/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    for name, text in {
        "python": PYTHON,
        "ruff": f"#!/bin/sh\nexit {ruff_ends}\n",
        "mypy": "#!/bin/sh\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (programs / "pytest").write_text(str(pytest_ends))
    stamp = "cat pyproject.toml constraints.txt | cksum >.venv/.triolet-dev"
    subprocess.run(["bash", "-c", stamp], cwd=tmp_path, check=True)
    run = subprocess.run(
        ["bash", "tools/test"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == bool(pytest_ends or ruff_ends), run.stdout + run.stderr
    assert "== static checks" in run.stdout


def test_the_tests_that_mutants_run_are_there():
    assert [one for one in mutate.UNIT if not (ROOT / one).is_file()] == []
