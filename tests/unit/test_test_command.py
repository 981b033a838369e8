"""tools/test ends with the status that its tests and its static checks have."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Stands for Python: each call of pytest ends with the next status of a file.
PYTHON = """#!/bin/sh
[ "$2" = pytest ] || exit 0
ends=$(dirname "$0")/pytest
status=$(head -n 1 "$ends")
sed -i 1d "$ends"
exit "${status:-9}"
"""


@pytest.mark.parametrize(
    ("arguments", "pytest_ends", "ruff_ends", "status"),
    [
        ([], "0", 0, 0),
        ([], "1 0", 0, 1),
        (["--all"], "0 0", 0, 0),
        (["--all"], "1 0", 0, 1),
        (["--all"], "0 2", 0, 1),
        ([], "0", 1, 1),
    ],
)
def test_the_status_is_that_of_tests_and_checks(
    tmp_path, arguments, pytest_ends, ruff_ends, status
):
    """A run in which nothing fails ends with 0, any other with 1. No test runs a second time."""
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
    (programs / "pytest").write_text("".join(f"{end}\n" for end in pytest_ends.split()))
    stamp = "cat pyproject.toml constraints.txt | cksum >.venv/.triolet-dev"
    subprocess.run(["bash", "-c", stamp], cwd=tmp_path, check=True)
    command = ["bash", "tools/test", *arguments]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == status, run.stdout + run.stderr
    assert "== static checks" in run.stdout
    left = (programs / "pytest").read_text().split()
    assert left == pytest_ends.split()[len(arguments) + 1 :]
