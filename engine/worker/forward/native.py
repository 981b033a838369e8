"""Builds and loads the compiled kernels of `engine/kernels/` (D12).

Rule 1: a wheel may have libraries for this processor (`engine.worker.forward.variants`). If not, a
library is built once for each source, compiler, set of flags and processor. It lies in the user's
cache directory and is put there by a rename, so that two servers that start at once both work.
Without such a directory, each start compiles the library and logs a warning. Rule 2: the server
starts without the kernels, too; `Unavailable` says in one sentence why they are missing. Rule 3:
the library is the processor's best, unless the environment variable `SWITCH` names one.

`load` compares the sizes of the structs (`engine.worker.forward.kernel_structs`) with those of the
library, so that a library of another layout is never called. Models load in several threads at
once; the thread that holds `_loading` loads the library for all. A call by ctypes releases the GIL.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import weakref
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import EngineBug
from engine.worker.forward import variants
from engine.worker.forward.kernel_structs import MIRRORED, SIGNATURES
from engine.worker.forward.user_cache import NoCache, private_folder, user_cache
from engine.worker.forward.variants import (
    COMPILERS,
    DIRECTORY,
    SWITCH,
    VARIANTS,
    features_of,
    find_built,
    variant_named,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = Path(__file__).resolve().parents[2] / "kernels"
FLAGS = (*variants.FLAGS, "-march=native")
COMPILE_TIMEOUT_S = 120  # Compiling takes 4 to 10 s.
OUT_OF_BOUNDS = 3  # A kernel returns this if an index is outside its bounds (bounds.h).


log = logging.getLogger(__name__)
_loading = threading.Lock()


class Unavailable(Exception):
    """The compiled kernels cannot be used; the message says why."""


class _LoadResult(NamedTuple):
    """The library of the kernels. ``missing`` says why there is none, and ``uncached`` why the next
    start must compile it again."""

    library: ctypes.CDLL | None
    missing: str = ""
    uncached: str = ""


@lru_cache(maxsize=1)
def _load_once() -> _LoadResult:
    try:
        library = _load()
    except Unavailable as error:
        return _LoadResult(None, str(error))
    if library.uncached:
        log.warning("the kernels are compiled at every start: %s", library.uncached)
    return library


def load() -> ctypes.CDLL:
    """Return the process's library. The first call loads it, and compiles it if necessary.

    Raises:
        Unavailable: The library cannot be used. Later calls raise the same error.
    """
    if _wanted() in ("off", "0"):
        raise Unavailable(f"{SWITCH} is off")
    with _loading:
        library = _load_once()
    if library.library is None:
        raise Unavailable(library.missing)
    return library.library


def loaded() -> ctypes.CDLL | None:
    """Return the library if the kernels are in use and `load` has loaded them. It loads nothing
    itself, because loading may have to compile the kernels."""
    if not _load_once.cache_info().currsize or _wanted() in ("off", "0"):
        return None
    return _load_once().library


def uncached() -> str:
    """Return why the next process must compile the library again; empty if it need not."""
    return _load_once().uncached


def new_arena(library: ctypes.CDLL, owner: object) -> int:
    """Return the address of a new arena, the kernels' scratch memory. It is freed with ``owner``.

    Raises:
        MemoryError: There is no memory for the arena.
    """
    arena = library.triolet_arena_new()
    if not arena:
        raise MemoryError("there is no memory for the kernels' arena")
    weakref.finalize(owner, library.triolet_arena_free, arena)
    return int(arena)


def kind(library: ctypes.CDLL) -> str:
    """Return the instructions that the library multiplies with: AMX, AVX512-BF16, AVX-512, AVX2,
    NEON-BF16, NEON or vectors."""
    return str(library.triolet_kind().decode())


def integer_kind(library: ctypes.CDLL) -> str:
    """Return the instructions that the library multiplies integers with: AVX512-VNNI, AVX-VNNI,
    AVX-512, AVX2, NEON-I8MM, NEON-DOTPROD, NEON or vectors."""
    return str(library.triolet_integer_kind().decode())


def origin(library: ctypes.CDLL) -> str:
    """Return the origin of the library, for people to read: "compiled here", or the variant of the
    wheel; with a remark if `SWITCH` chose the variant."""
    path = Path(library._name)
    place = f"from the wheel, {path.stem}" if path.parent.name == DIRECTORY else "compiled here"
    wanted = _wanted()
    return f"{place}, {wanted} by {SWITCH}" if wanted else place


def _wanted() -> str:
    """Return the variant that `SWITCH` names, or ""."""
    return os.environ.get(SWITCH, "").lower()


def check(status: int, what: str) -> None:
    """Raise the error of ``status``, the result of the kernel that computed ``what`` (a `Status` of
    engine/kernels/bounds.h). A failed sum over the ranks has raised its own error before.

    Raises:
        MemoryError: There was no memory for ``what``. EngineBug: An index is outside its bounds.
    """
    if status == OUT_OF_BOUNDS:
        raise EngineBug(f"an index is outside its bounds in {what}")
    if status:
        raise MemoryError(f"no memory for {what}")


def find_compiler() -> str:
    """Return the path of a C++ compiler: $CXX, or the first of `COMPILERS` that is installed.

    Raises:
        Unavailable: There is no compiler.
    """
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise Unavailable("there is no C++ compiler (c++, g++ or clang++)")


def _load() -> _LoadResult:
    if platform.system() != "Linux":
        raise Unavailable(f"they are built on Linux only, and this is {platform.system()}")
    name = _wanted()
    flags = _flags_of(name) if name else FLAGS
    built = find_built(SOURCES, _cpuinfo(), name)
    if built is not None:
        return _LoadResult(_open(built))
    compiler = find_compiler()
    file = f"kernels-{_key(compiler, flags)}.so"
    try:
        path = private_folder(user_cache("kernels")) / file
    except NoCache as error:
        with _needs_build_folder():
            private = tempfile.TemporaryDirectory(prefix="triolet-kernels-")
        with private as directory:
            path = Path(directory) / file
            _compile(compiler, flags, path)
            # The file is deleted with its folder: a library that is loaded does not need it.
            return _LoadResult(_open(path), uncached=str(error))
    if not path.exists():
        _compile(compiler, flags, path)
    return _LoadResult(_open(path))


@contextmanager
def _needs_build_folder() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"no folder to compile them in can be written: {error.strerror}"
        raise Unavailable(problem) from error


def _flags_of(name: str) -> tuple[str, ...]:
    """Return the compiler's flags for a variant.

    Raises:
        Unavailable: There is no variant of this name, or the processor cannot run it.
    """
    variant = variant_named(name)
    if variant is None:
        known = ", ".join(variant.name for variant in VARIANTS)
        raise Unavailable(f"{SWITCH} is {name}, and must be off or one of {known}")
    missing = sorted(set(variant.needs) - features_of(_cpuinfo()))
    if missing:
        raise Unavailable(f"{SWITCH} is {name}, and the processor has no {missing[0]}")
    return (*(flag for flag in FLAGS if flag != "-march=native"), *variant.flags)


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """Return a hash of what the library depends on: sources, flags, compiler and processor."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    real = Path(compiler).resolve()
    state = real.stat()
    digest.update(repr((flags, str(real), state.st_size, state.st_mtime_ns)).encode())
    digest.update(repr((platform.machine(), _processor())).encode())
    return digest.hexdigest()


def _processor() -> str:
    """Return the processor's model and features, or "" if the system does not say."""
    lines = _cpuinfo().splitlines()
    if not lines:
        return ""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    names = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    return repr([fields.get(name) for name in names])


def _cpuinfo() -> str:
    """Return the text of /proc/cpuinfo, or "" if it cannot be read."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    with _needs_build_folder():
        handle, scratch = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [compiler, *flags, "-o", scratch, str(SOURCES / "triolet.cpp")],
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
            raise Unavailable(f"{compiler} could not compile them: {reason}")
        os.replace(scratch, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{compiler} could not be run: {error}") from error
    finally:
        Path(scratch).unlink(missing_ok=True)


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Unavailable(f"the library {path.name} cannot be used: {error}") from error
    sizes = (ctypes.c_int64 * len(MIRRORED))()
    library.triolet_sizes(sizes)
    if list(sizes) != [ctypes.sizeof(struct) for struct in MIRRORED]:
        raise Unavailable(f"the library {path.name} has another layout than this program")
    return library
