"""Virtual environments in the user's cache, for packages that the project's own must not have."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triolet-tests"


def virtual_environment(name, *installs, timeout_s, python=sys.executable, sees_ours=False):
    """Return the folder of an environment; make it unless it is there.

    Each of ``installs`` is the arguments of one ``pip install``. With ``sees_ours`` it also has the
    packages of the running interpreter. The test fails if a command fails or takes longer than
    ``timeout_s``.
    """
    venv = CACHE / name
    done = venv / "installed"
    if done.exists():
        return venv
    shutil.rmtree(venv, ignore_errors=True)
    _run([python, "-m", "venv", venv], timeout_s)
    if sees_ours:
        [site] = (venv / "lib").glob("python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages") or "site-" in path]
        (site / "triolet.pth").write_text("\n".join(ours) + "\n")
    for arguments in installs:
        pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
        _run([*pip, *arguments], timeout_s)
    done.touch()
    return venv


def _run(argv, timeout_s):
    made = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s)
    if made.returncode:
        pytest.fail(f"{' '.join(map(str, argv))} failed: {made.stderr[-1000:]}")
