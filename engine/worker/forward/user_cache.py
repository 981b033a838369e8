"""Finds the folders of the user's cache, and opens folders and files that are the user's own."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path


class NoCache(Exception):
    """A folder cannot be used; the message says why."""


def user_cache(name: str) -> Path:
    """Return Triolet's folder of this name in the user's cache, which may not exist.

    Raises:
        NoCache: The user has no home directory.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if root.startswith("~"):
        raise NoCache("this user has no home directory; name a folder in XDG_CACHE_HOME")
    return Path(root) / "triolet" / name


def private_folder(folder: Path, *, is_secret: bool = False) -> Path:
    """Make a folder, if it is missing, and return it. Only this user may write there; if it
    ``is_secret``, only this user may read there, too.

    Raises:
        NoCache: Making it failed, other users may use it, or this user may not write there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise NoCache(_unwritable(folder, str(error.strerror))) from error
    if state.st_uid != os.getuid() or state.st_mode & (0o077 if is_secret else 0o022):
        what = "use it" if is_secret else "write there"
        raise NoCache(_unwritable(folder, f"other users may {what}"))
    if not os.access(folder, os.W_OK):
        raise NoCache(_unwritable(folder, "it is read-only"))
    return folder


def open_own(path: Path) -> int:
    """Open a file of this user that nobody else may write.

    Raises:
        OSError: The file is missing or unreadable. ValueError: It is another user's.
    """
    if path.is_symlink():
        raise ValueError("it is a link")
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    state = os.fstat(handle)
    is_own = state.st_uid == os.getuid() and not state.st_mode & 0o077
    if not is_own or not stat.S_ISREG(state.st_mode):
        os.close(handle)
        raise ValueError("it is not this user's own file")
    return handle


def read_own(path: Path, most: int) -> bytes:
    """Return at most so many bytes of a file, which is as in `open_own`."""
    handle = open_own(path)
    with os.fdopen(handle, "rb") as file:
        return file.read(most)


def try_lock(handle: int) -> bool:
    """Lock an open file for this process, and return whether no other one has it locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unwritable(folder: Path, why: str) -> str:
    return f"{folder} cannot keep them ({why}); name another folder in XDG_CACHE_HOME"
