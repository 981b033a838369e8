"""Puts compiled kernels into a wheel, so that a machine without a compiler runs compiled.

    TRIOLET_WHEEL_KERNELS=1 python -m pip wheel . --no-deps

builds a wheel for x86-64 Linux with a library for each of `VARIANTS`, which are in
`engine.worker.forward.variants`. Without the variable, the wheel is for every machine, and a server
compiles its kernels when it first starts. This is hatchling's build hook (`pyproject.toml`).

Where the wheel is built, only hatchling is installed, so that this file loads what it needs of the
engine by path.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "TRIOLET_WHEEL_KERNELS"
TAG = "py3-none-linux_x86_64"


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the libraries before a wheel is built, and forgets them afterwards."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels, and have the wheel take the libraries beside the kernels' sources.

        Raises:
            SystemExit: A wheel with libraries was asked for, and cannot be built here.
        """
        if os.environ.get(SWITCH) != "1" or version == "editable":
            return
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise SystemExit(f"{SWITCH} builds a wheel for x86-64 Linux, which this machine is not")
        sources = Path(self.root) / "engine" / "kernels"
        variants = runpy.run_path(
            str(Path(self.root) / "engine" / "worker" / "forward" / "variants.py")
        )
        compilers = variants["COMPILERS"]
        compiler = next(filter(None, map(shutil.which, compilers)), None)
        if compiler is None:
            raise SystemExit(f"{SWITCH} needs a C++ compiler ({', '.join(compilers)})")
        self._directory = tempfile.TemporaryDirectory()
        built = {one: Path(self._directory.name) / f"{one.name}.so" for one in variants["VARIANTS"]}
        common = [compiler, *variants["FLAGS"], str(sources / "triolet.cpp")]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(lambda one: _compile(common, one, built[one]), built))
        for one, path in built.items():
            build_data["force_include"][str(path)] = f"engine/kernels/{one.file}"
        build_data["pure_python"], build_data["tag"] = False, TAG

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled; the wheel has it."""
        directory = getattr(self, "_directory", None)
        if directory is not None:
            directory.cleanup()


def _compile(common: list[str], variant: Any, path: Path) -> None:
    argv = [*common, *variant.flags, "-o", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{common[0]} could not compile {variant.name}:\n{done.stderr}")
