"""tools/test ends with the status that its tests and its static checks have."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Stands for Python: each call of pytest ends with the next status of a file.
PYTHON = """#!/bin/sh
[ "$2" = pytest ] || exit 0
cache=${4#cache_dir=}
mkdir -p "$cache/v/cache"
echo "{}" >"$cache/v/cache/lastfailed"
ends=$(dirname "$0")/pytest
status=$(head -n 1 "$ends")
sed -i 1d "$ends"
exit "${status:-9}"
"""


@pytest.mark.parametrize(
    ("again", "pytest_ends", "ruff_ends", "status", "says"),
    [
        ("", "0", 0, 0, "== static checks"),
        ("", "1 0", 0, 1, "== static checks"),
        ("1", "1 1", 0, 1, "== failed, once more"),
        ("1", "1 0", 0, 0, "== failed once and passed by themselves"),
        ("1", "2 0", 0, 1, "== static checks"),
        ("", "0", 1, 1, "== static checks"),
    ],
)
def test_the_status_is_that_of_tests_and_checks(
    tmp_path, again, pytest_ends, ruff_ends, status, says
):
    """A run in which nothing fails ends with 0, any other with 1."""
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
    command = ["bash", "tools/test"]
    environment = os.environ | {"TEST_AGAIN": again}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == status, run.stdout + run.stderr
    assert says in run.stdout
