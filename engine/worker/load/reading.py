"""Reads a model's files, and says why one cannot be read.

Rule 1: a name in a model's directory stands for a file that is meant to be read. If it is a link to
nothing or a folder, or needs a permission, that is a `Refusal` with the system's reason; it does
not count as a file that is missing. Rule 2: only regular files are opened, because reading a pipe
or a device may never end.
"""

from __future__ import annotations

import errno
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn an error of the system into a refusal that calls the file or the folder ``name``.

    Raises:
        Refusal: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise Refusal(f"its {name} cannot be read ({reason})", detail=str(error)) from error


def has_file(path: Path) -> bool:
    """Return whether a directory has an entry of this name, whatever the entry is (rule 1).

    Raises:
        Refusal: the system does not say.
    """
    try:
        with reading(path.name):
            path.lstat()
    except Refusal as refusal:
        if isinstance(refusal.__cause__, FileNotFoundError | NotADirectoryError):
            return False
        raise
    return True


@contextmanager
def opened(path: Path, name: str = "") -> Iterator[BinaryIO]:
    """Open a file, which messages call ``name``, by default the last part of its path.

    Raises:
        Refusal: it cannot be read, or it is no regular file (rule 2).
    """
    with reading(name or path.name):
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder, `open` says it itself
            raise OSError(errno.EINVAL, "it is not a regular file")
        with path.open("rb") as file:
            yield file


def begins_with(path: Path, magic: bytes, name: str = "") -> bool:
    """Return whether these are a file's first bytes.

    Raises:
        Refusal: as `opened`.
    """
    with opened(path, name) as file:
        return file.read(len(magic)) == magic


def check_readable(path: Path) -> None:
    """Check a file before a library reads it, whose errors may have no reason.

    Raises:
        Refusal: as `opened`.
    """
    begins_with(path, b"?")


def read_text(path: Path) -> str:
    """Return a file's text.

    Raises:
        Refusal: as `opened`, or it is not UTF-8.
    """
    with opened(path) as file:
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(f"its {path.name} is not UTF-8", detail=str(error)) from error
