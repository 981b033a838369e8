"""Puts buf, which needs npm, at the disposal of the interop tests."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
BUF = HERE / "node_modules" / ".bin" / "buf"
PACKAGE = "@bufbuild/buf"
INSTALL_TIMEOUT_S = 240  # guess: minutes on a slow line; below pytest's own timeout of 300 s


@pytest.fixture(scope="session")
def buf() -> Path:
    """Path of the buf command, installed by npm beside this file when it is not there yet."""
    if not is_installed():
        install()
    return BUF


def is_installed() -> bool:
    """Whether buf is there in exactly the version that package.json pins."""
    manifest = HERE / "node_modules" / PACKAGE / "package.json"
    if not (BUF.exists() and manifest.exists()):
        return False
    pinned = json.loads((HERE / "package.json").read_text())["devDependencies"][PACKAGE]
    return bool(json.loads(manifest.read_text())["version"] == pinned)


def install() -> None:
    """Runs npm in this folder. What goes wrong fails the test: one skipped would prove nothing."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.fail(
            "the interop tests need npm (it comes with Node.js), which is not on PATH; install it, "
            'or leave these tests out with -m "not interop"',
            pytrace=False,
        )
    command = [npm, "install", "--no-audit", "--no-fund"]
    try:
        done = subprocess.run(
            command, cwd=HERE, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"npm install did not end within {INSTALL_TIMEOUT_S} s", pytrace=False)
    if done.returncode or not is_installed():
        pytest.fail(
            f"npm install in tests/interop ended with status {done.returncode} and "
            f"{'installed' if is_installed() else 'did not install'} the pinned {PACKAGE}:\n"
            f"{done.stdout}{done.stderr}",
            pytrace=False,
        )
