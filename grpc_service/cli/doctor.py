"""``triolet doctor``: reports what a server finds on this machine, and whether it could run.

Rule 1: a finding is a value. One function prints them all, and the exit code follows from `is_fit`.
Rule 2: torch is imported in a process of its own, so that a torch that crashes is a finding, too.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from engine.limits.cpu import cpu_limit
from engine.limits.memory import default_limit, usable_bytes
from grpc_service.pem import PemError, validity_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

PACKAGES = ("torch", "transformers", "grpcio", "trio", "protobuf", "tokenizers")
MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = 1 * 2**30  # guess: Python with torch needs about half of it before any model
CPU_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni"),
    *("asimd", "asimddp", "i8mm", "sve"),
)
BF16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang")
TORCH_TIMEOUT_S = 120  # guess: a first import from a slow disk
# The process imports from where this one does, and not from its working directory: there, a file
# called engine.py would be taken for ours.
SAME_PATH = "import json, sys\nsys.path[:] = json.loads(sys.argv[1])\n"
ASK_TORCH = """
import json, torch
from huggingface_hub.constants import HF_HUB_CACHE
devices = []
if torch.cuda.is_available():
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
from engine.worker.forward import native
try:
    library, missing = native.load(), ""
    kernels, integers = native.kind(library), native.integer_kind(library)
    origin, uncached = native.origin(library), native.uncached()
except native.Unavailable as error:
    kernels, integers, origin, missing, uncached = "", "", "", str(error), ""
print(json.dumps({"devices": devices, "kernels": kernels, "integers": integers, "origin": origin,
                  "missing": missing, "uncached": uncached, "hub": HF_HUB_CACHE}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``advice`` says what to do about it. Only a finding whose ``is_fit``
    is False keeps the server from running, or its clients from connecting."""

    name: str
    value: str
    is_fit: bool = True
    advice: str = ""


def run(args: argparse.Namespace) -> int:
    """Print the report. Return the exit code: 1 if something would keep the server from
    running."""
    findings = list(examine(args.host, args.port, args.tls_cert))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False))
    else:
        for finding in findings:
            mark = "ok " if finding.is_fit else "BAD"
            advice = f" – {finding.advice}" if finding.advice else ""
            print(f"{mark} {finding.name:<16}{finding.value}{advice}")
    return 0 if all(finding.is_fit for finding in findings) else 1


def examine(host: str, port: int, tls_cert: str) -> Iterator[Finding]:
    """Yield all findings in the order of the report; ``tls_cert`` is "" for a server without
    TLS."""
    yield _python()
    yield from map(_package, PACKAGES)
    yield from _bytecode()
    yield Finding("cores", str(cpu_limit()))  # how many threads compute, and what limits them
    yield _memory()
    yield _processor(_cpu_flags(Path("/proc/cpuinfo")))
    yield _temporary_folder()
    yield from _torch()
    yield _spin_count()
    yield _compiler()
    yield _port(host, port)
    if tls_cert:
        yield _certificate(tls_cert)


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        return Finding("python", version, False, "install Python 3.11 or newer")
    if not __debug__:
        return Finding("python", f"{version} -O", False, "run without -O and PYTHONOPTIMIZE")
    return Finding("python", version)


def _package(name: str) -> Finding:
    try:
        return Finding(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", False, "install Triolet's dependencies")


def _bytecode() -> Iterator[Finding]:
    """Report an environment in which every process compiles the source text of its libraries."""
    torch = util.find_spec("torch")
    if not sys.dont_write_bytecode or torch is None or not torch.cached:
        return
    if not Path(torch.cached).exists():
        advice = (
            "PYTHONDONTWRITEBYTECODE is set, so that each server and worker process compiles torch "
            "and transformers for seconds; unset it, or run python -m compileall on site-packages"
        )
        yield Finding("bytecode", "none is kept", advice=advice)


def _memory() -> Finding:
    usable = usable_bytes()
    text = f"{usable / 2**30:.1f} GiB, of which models may use {default_limit() / 2**30:.1f} GiB"
    if usable < MIN_MEMORY_BYTES:
        return Finding("memory", text, False, "give the process at least 1 GiB")
    return Finding("memory", text)


def _cpu_flags(path: Path) -> set[str]:
    """Return the features that the kernel lists: ``flags`` on x86, ``Features`` on ARM."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return set()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def _processor(flags: set[str]) -> Finding:
    features = [name for name in (*CPU_FEATURES, *BF16_FEATURES) if name in flags]
    bf16 = "bf16 in hardware" if flags & set(BF16_FEATURES) else "no bf16: auto means float32"
    return Finding("processor", f"{platform.machine()}, {' '.join(features) or 'plain'}; {bf16}")


def _torch() -> Iterator[Finding]:
    command = [sys.executable, "-P", "-c", SAME_PATH + ASK_TORCH, json.dumps(sys.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        yield Finding("devices", "unknown", False, f"torch took over {TORCH_TIMEOUT_S} s to import")
        return
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Finding("devices", "unknown", False, f"torch does not work: {why}")
        return
    report = json.loads(done.stdout)
    yield Finding("devices", ", ".join(["cpu", *report["devices"]]))
    yield _downloads(report["hub"])
    if report["kernels"]:
        again = report["uncached"] and f"compiled again at every start: {report['uncached']}"
        value = f"compiled kernels, {report['kernels']} ({report['origin']})"
        yield Finding("attention", value, advice=again)
        yield Finding("quantized weights", f"compiled kernels, {report['integers']}")
    else:
        advice = f"{report['missing']}; models run without the kernels, several times slower"
        yield Finding("attention", "reference", advice=advice)


def _downloads(directory: str) -> Finding:
    """Report the Hugging Face cache; a server of local models needs none."""
    another = "Hub models cannot be downloaded; name a folder in HF_HOME"
    if directory.startswith("~"):
        return Finding("downloads", "this user has no home directory", advice=another)
    place = Path(directory).absolute()
    existing = next(parent for parent in (place, *place.parents) if os.path.exists(parent))
    if os.access(existing, os.W_OK | os.X_OK):
        return Finding("downloads", directory)
    return Finding("downloads", f"{directory} cannot be written", advice=another)


def _temporary_folder() -> Finding:
    try:
        return Finding("temporary files", tempfile.gettempdir())
    except FileNotFoundError:
        advice = "name a folder in TMPDIR; torch cannot be imported without one"
        return Finding("temporary files", "no folder can be written", False, advice)


def _spin_count() -> Finding:
    """Report GOMP_SPINCOUNT, which `engine.worker` sets before torch is imported."""
    own = os.environ.get("GOMP_SPINCOUNT")
    return Finding("GOMP_SPINCOUNT", f"{own}, from the environment" if own else "set at start")


def _compiler() -> Finding:
    wanted = [os.environ[name].split()[0] for name in ("CXX", "CC") if os.environ.get(name)]
    for name in (*wanted, *COMPILERS):
        path = shutil.which(name)
        if path:
            return Finding("compiler", path)
    return Finding("compiler", "none", advice="install one for faster steps; models run without it")


def _port(host: str, port: int) -> Finding:
    name = f"{host}:{port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host.strip("[]"), port))
            listener.listen()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        advice = "another server may run there; choose with --port"
        return Finding("port", f"{name}: {why.lower()}", False, advice)
    return Finding("port", f"{name} is free")


def _certificate(file: str) -> Finding:
    try:
        validity = validity_of(file, time.time())
    except PemError as error:
        return Finding("certificate", str(error), False, "choose with --tls-cert")
    value = f"{file} {validity.sentence}"
    if validity.is_valid and not validity.expires_soon:
        return Finding("certificate", value)
    return Finding("certificate", value, validity.is_valid, "renew it, and restart the server")
