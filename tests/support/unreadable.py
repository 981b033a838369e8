"""Files that cannot be read, each for a reason that the system gives to root, too."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

NOBODY = 65534


def _folder(path: Path) -> None:
    path.mkdir()


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _gone(path: Path) -> None:
    path.symlink_to("nowhere")


def _forbidden(path: Path) -> None:
    path.write_text("secret")
    path.chmod(0)


# What a path can have in the place of a file, and the error when it is read.
FAULTS: dict[str, tuple[Callable[[Path], None], int]] = {
    "a folder": (_folder, errno.EISDIR),
    "a link to itself": (_loop, errno.ELOOP),
    "a link to nothing": (_gone, errno.ENOENT),
    "without a permission": (_forbidden, errno.EACCES),
}


def reason(fault: str) -> str:
    """Return the system's message for a fault."""
    return os.strerror(FAULTS[fault][1])


@contextmanager
def as_nobody() -> Iterator[None]:
    """Give up root's right to read everything, if the process has it."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@contextmanager
def broken(path: Path, fault: str) -> Iterator[None]:
    """Have something that cannot be read in the place of a file."""
    aside = path.with_name(f".{path.name}.aside")
    if os.path.lexists(path):
        path.rename(aside)
    path.parent.mkdir(parents=True, exist_ok=True)
    FAULTS[fault][0](path)
    try:
        with as_nobody() if FAULTS[fault][1] == errno.EACCES else nullcontext():
            yield
    finally:
        path.rmdir() if path.is_dir() else path.unlink()
        if aside.exists():
            aside.rename(path)


@contextmanager
def open_folder() -> Iterator[Path]:
    """Yield a folder that any user may enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="triolet-unreadable-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
