"""Reads a model's files, and refuses a file that cannot be read with the reason.

Rule 1: every entry of a model's directory is meant to be read. A broken link, a folder in a file's
place, or a file without read permission is a `Refusal` with the system's reason; it does not count
as a missing file. Rule 2: only regular files are opened, because reading a pipe or a device may
never end.
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
    """Turn an OSError of the block into a refusal whose message names the file or folder ``name``.

    Raises:
        Refusal: The block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise Refusal(f"its {name} cannot be read ({reason})", detail=str(error)) from error


def has_file(path: Path) -> bool:
    """Return whether a directory has an entry of this name, whatever the entry is (rule 1).

    Raises:
        Refusal: The system cannot look the entry up.
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
        Refusal: The file cannot be read, or it is no regular file (rule 2).
    """
    with reading(name or path.name):
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # `open` raises for a folder
            raise OSError(errno.EINVAL, "it is not a regular file")
        with path.open("rb") as file:
            yield file


def begins_with(path: Path, magic: bytes, name: str = "") -> bool:
    """Return whether a file begins with the bytes ``magic``.

    Raises:
        Refusal: The file cannot be opened (`opened`).
    """
    with opened(path, name) as file:
        return file.read(len(magic)) == magic


def check_readable(path: Path) -> None:
    """Check a file before a library reads it, because the library's errors may lack the reason.

    Raises:
        Refusal: The file cannot be opened (`opened`).
    """
    begins_with(path, b"?")


def read_text(path: Path) -> str:
    """Return a file's text.

    Raises:
        Refusal: The file cannot be opened (`opened`), or its text is not UTF-8.
    """
    with opened(path) as file:
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(f"its {path.name} is not UTF-8", detail=str(error)) from error
