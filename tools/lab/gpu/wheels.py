"""Completes the packages that a machine without a network has, from a folder of wheels.

Rule: a distribution that the machine has is never replaced, since the builds of torch and
transformers there fit its GPU. Only missing ones are installed, into a folder of their own.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# The modules that the phases import, by the name of their distribution.
NEEDED = {
    "torch": "torch", "transformers": "transformers", "tokenizers": "tokenizers",
    "safetensors": "safetensors", "numpy": "numpy", "llguidance": "llguidance", "jinja2": "Jinja2",
    "huggingface_hub": "huggingface_hub", "trio": "trio", "outcome": "outcome",
    "sniffio": "sniffio", "sortedcontainers": "sortedcontainers", "attr": "attrs", "idna": "idna",
}  # fmt: skip


def complete(wheels: Path | None, target: Path) -> list[str]:
    """Install what is missing from the folder ``wheels`` into ``target``, and return the files
    that were installed.

    Raises:
        SystemExit: pip failed.
    """
    files = sorted(wheels.glob("*.whl")) if wheels else []
    missing = [file for file in files if not _has(file.name.partition("-")[0])]
    if missing:
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        argv += ["--disable-pip-version-check", "--target", str(target), *map(str, missing)]
        if subprocess.run(argv, check=False).returncode:
            raise SystemExit(f"pip could not install the wheels of {wheels}")
    return [file.name for file in missing]


def lacking(target: Path) -> list[str]:
    """Return the distributions that neither the machine nor ``target`` has."""
    return [
        name
        for module, name in NEEDED.items()
        if importlib.util.find_spec(module) is None
        and not (target / module).exists()
        and not (target / f"{module}.py").exists()
    ]


def versions() -> dict[str, str]:
    """Return the version of every distribution that the machine itself has."""
    return {name: version(name) for name in NEEDED.values() if _has(name)}


def _has(distribution: str) -> bool:
    try:
        return bool(version(re.sub(r"[-_.]+", "-", distribution)))
    except PackageNotFoundError:
        return False
