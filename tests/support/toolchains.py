"""Install tools of other languages where they are missing.

These are npm's packages beside the interop tests, and from Debian's packages Ruby with gRPC, a
compiler and an emulator for ARM, Prometheus, nginx and haproxy.

Rule 1: a tool that cannot be installed fails the test with a sentence that says what is missing; a
skipped test proves nothing. Rule 2: npm's packages stay in tests/interop. Debian's packages belong
to the machine, and only root may install them.
"""

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs import ROOT

INTEROP = ROOT / "tests" / "interop"
NODE_MODULES = INTEROP / "node_modules"
BUF = NODE_MODULES / ".bin" / "buf"
INSTALL_TIMEOUT_S = 240  # guess: minutes on a slow line; below pytest's own timeout of 300 s
LEAVE_OUT = 'or leave these tests out with -m "not interop"'

# Ruby, its gRPC, and the generator of Ruby code from protos, which grpcio-tools lacks.
DEBIAN_PACKAGES = (
    "ruby",
    "ruby-grpc",
    "ruby-google-protobuf",
    "protobuf-compiler",
    "protobuf-compiler-grpc",
    "libprotobuf-dev",
)
# A C++ compiler for 64-bit ARM with its libraries, and an emulator for its programs.
ARM_PACKAGES = ("g++-aarch64-linux-gnu", "qemu-user")
ARM_TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64")
ARM_LIBRARIES = "/usr/aarch64-linux-gnu"
GO_PACKAGES = ("golang-go", "golang-google-grpc-dev")
GO_GRPC = Path("/usr/share/gocode/src/google.golang.org/grpc")
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])  # the PATH of root
RUBY_PLUGIN = "grpc_ruby_plugin"
RUBY_NEEDS = ("grpc", "google/protobuf", "google/rpc/error_details_pb")
NAMES_OF_PROTOS = ("classes", "common", "images", "inference", "vectors")
PROTOS = tuple(f"triolet/v1/{name}.proto" for name in NAMES_OF_PROTOS)


# ---- npm -------------------------------------------------------------------------------------


def need_npm() -> None:
    """Have npm install what package.json pins, unless exactly those versions are there."""
    with (INTEROP / "package.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two npm in one folder break each other
        if missing := missing_npm_packages():
            _install_from_npm(missing)


def missing_npm_packages() -> list[str]:
    """Return the packages that are not installed in the version that package.json pins: all, if npm
    was interrupted before it wrote its last file, the list of its packages."""
    pinned = json.loads((INTEROP / "package.json").read_text())["devDependencies"]
    is_whole = (NODE_MODULES / ".package-lock.json").exists()
    return [
        name for name, version in pinned.items() if not is_whole or _npm_version(name) != version
    ]


def _npm_version(package: str) -> str | None:
    manifest = NODE_MODULES / package / "package.json"
    return json.loads(manifest.read_text())["version"] if manifest.exists() else None


def _install_from_npm(wanted: list[str]) -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.fail(
            "the interop tests need Node.js with npm, which is not on PATH; install it, "
            + LEAVE_OUT,
            pytrace=False,
        )
    code, said = _run([npm, "install", "--no-audit", "--no-fund"], INTEROP)
    missing = missing_npm_packages()
    if code or missing:
        pytest.fail(
            f"npm install in tests/interop, for {', '.join(wanted)}, ended with status {code}; "
            f"missing then: {', '.join(missing) or 'nothing'}\n{said}",
            pytrace=False,
        )


# ---- Debian ----------------------------------------------------------------------------------


def need_ruby() -> None:
    """Have apt-get install Ruby, its gRPC and its protoc, unless they are there."""
    _need_debian("Ruby", missing_for_ruby, DEBIAN_PACKAGES, LEAVE_OUT)


def need_arm() -> tuple[str, str, str]:
    """Have apt-get install a compiler and an emulator for ARM, unless they are there. Return their
    paths, and the folder of ARM's libraries."""
    _need_debian("ARM", missing_for_arm, ARM_PACKAGES, 'or leave them out with -m "not full"')
    compiler, emulator = (shutil.which(name) for name in ARM_TOOLS)
    assert compiler
    assert emulator
    return compiler, emulator, ARM_LIBRARIES


def compile_go(source: Path, program: Path) -> Path:
    """Compile a Go program that uses grpc-go, by Debian's packages; return where it is."""
    _need_debian("Go", missing_for_go, GO_PACKAGES, 'or leave them out with -m "not full"')
    go = os.environ | {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOFLAGS": ""}
    build = ["go", "build", "-o", str(program), str(source)]
    done = subprocess.run(build, env=go | {"GOCACHE": str(program.parent)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return program


def missing_for_go() -> list[str]:
    """Return which of Go's compiler and library are missing."""
    missing = [] if shutil.which("go") else ["go"]
    return missing if GO_GRPC.is_dir() else [*missing, str(GO_GRPC)]


def need_programs(*packages: str, leave_out: str = 'or leave them out with -m "not full"') -> None:
    """Have apt-get install Debian's packages, unless the programs of their names are there."""
    _need_debian(
        " and ".join(packages),
        lambda: [name for name in packages if shutil.which(name, path=PATH) is None],
        packages,
        leave_out,
    )


def missing_for_arm() -> list[str]:
    """Return which of ARM's compiler and emulator are missing."""
    return [name for name in ARM_TOOLS if shutil.which(name) is None]


def _need_debian(
    what: str, missing: Callable[[], list[str]], packages: tuple[str, ...], leave_out: str
) -> None:
    if not missing():
        return
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        pytest.fail(
            f"the {what} tests need {', '.join(missing())}; on Debian, `sudo apt-get "
            f"install --no-install-recommends {' '.join(packages)}` brings them, {leave_out}",
            pytrace=False,
        )
    lock = ("-o", "DPkg::Lock::Timeout=120")  # another process may be installing
    install = [apt, *lock, "install", "-y", "--no-install-recommends", *packages]
    code, said = _run(install)
    if code:  # the package lists are probably missing or old
        _run([apt, *lock, "update"])
        code, said = _run(install)
    if code or missing():
        pytest.fail(
            f"apt-get install {' '.join(packages)} ended with status {code}; missing then: "
            f"{', '.join(missing()) or 'nothing'}\n{said}",
            pytrace=False,
        )


def missing_for_ruby() -> list[str]:
    """Return which of Ruby, its libraries and protoc are missing."""
    missing = [name for name in ("ruby", "protoc", RUBY_PLUGIN) if shutil.which(name) is None]
    if "ruby" not in missing:
        missing += [
            f"Ruby's {name}"
            for name in RUBY_NEEDS
            if subprocess.run(["ruby", "-e", f"require '{name}'"], capture_output=True).returncode
        ]
    return missing


def make_ruby_stubs(out: Path) -> Path:
    """Write Ruby's stubs of our protos to ``out``, by the command of docs/clients.md."""
    need_ruby()
    command = [
        *("protoc", "-I", "proto", f"--ruby_out={out}", f"--grpc_out={out}"),
        f"--plugin=protoc-gen-grpc={shutil.which(RUBY_PLUGIN)}",
        *PROTOS,
    ]
    code, said = _run(command, ROOT)
    assert code == 0, said
    return out


def _run(command: list[str], cwd: Path | None = None) -> tuple[int, str]:
    """Return a command's exit status and its output."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"{' '.join(command)} did not end in {INSTALL_TIMEOUT_S} s", pytrace=False)
    return done.returncode, done.stdout + done.stderr
