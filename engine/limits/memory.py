"""The memory that this process may use: the machine's, or the limit of its control groups."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from engine.limits.control_groups import V1, V2, folders_of, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = "cpu"  # the name of the device whose memory this is
LIMIT_FRACTION = 0.80
LIMIT_FILES = {V2: "memory.max", V1: "memory.limit_in_bytes"}  # the file with a group's limit


def usable_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes this process may use: the machine's memory, or the smallest limit of
    the process's control groups if that is lower. Both are read from files below ``root``.

    Raises:
        OSError: The machine's memory is not known.
    """
    return min([_machine_bytes(root), *_group_limits(root)])


def default_limit(root: Path = Path("/")) -> int:
    """Return the default of --memory-limit, in bytes. Raises as `usable_bytes`."""
    return int(usable_bytes(root) * LIMIT_FRACTION)


def own_bytes() -> int:
    """Return the memory that only this process has, in bytes; 0 if it cannot be read."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _machine_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say how much memory the machine has")


def _group_limits(root: Path) -> Iterator[int]:
    """Yield the limits of the process's groups and of all groups above these. A group without a
    limit has the word "max", or in version 1 a number that is larger than any memory."""
    for version, folder in folders_of("memory", root):
        text = read_text(folder / LIMIT_FILES[version]).strip()
        if text.isdigit():
            yield int(text)
