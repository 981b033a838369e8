"""How much memory this process may use.

A process belongs to a control group (cgroup). The group and each group above it may have a limit:
systemd's MemoryMax, a container's, a pod's. /proc/self/cgroup names the group, and
/proc/self/mountinfo says where groups are mounted as folders, and which group is the top folder of
a mount. In a container that is mostly the container's own group.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = "cpu"  # the device whose memory this is
LIMIT_FRACTION = 0.80  # R116
# The file with a group's limit, by the type of the mounted file system: version 2 and version 1.
LIMIT_FILES = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}


def usable_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes this process may use: the machine's memory, or the smallest limit of
    the process's control groups if that is lower. Tests pass another ``root`` of the files.

    Raises:
        OSError: the machine's memory is not known.
    """
    return min([_machine_bytes(root), *_group_limits(root)])


def default_limit(root: Path = Path("/")) -> int:
    """Return the default of --memory-limit, in bytes. Raises as `usable_bytes`."""
    return int(usable_bytes(root) * LIMIT_FRACTION)


def _machine_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say how much memory the machine has")


def _group_limits(root: Path) -> Iterator[int]:
    """Yield the limits of the process's groups and of all groups above these. A group without a
    limit has the word "max", or in version 1 a number that is larger than any memory."""
    groups = _groups(root)
    for kind, top, folder in _mounts(root):
        group = groups.get(kind, top)
        # A mount whose top is not above the group still shows, in a container, the container's own.
        below = group.relative_to(top) if group.is_relative_to(top) else PurePosixPath()
        for place in (below, *below.parents):
            text = _read(folder / place / LIMIT_FILES[kind]).strip()
            if text.isdigit():
                yield int(text)


def _groups(root: Path) -> dict[str, PurePosixPath]:
    """Return the process's group in each version whose groups limit memory."""
    found = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found["cgroup2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            found["cgroup"] = PurePosixPath(path)
    return found


def _mounts(root: Path) -> Iterator[tuple[str, PurePosixPath, Path]]:
    """Yield each mount of groups that limit memory: its type, the group that is its top, and its
    folder under ``root``."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        place, _, what = line.partition(" - ")
        kind, _, rest = what.partition(" ")
        options = rest.rpartition(" ")[2]
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            top, folder = (_unescaped(field) for field in place.split(" ")[3:5])
            yield kind, PurePosixPath(top), root / folder.lstrip("/")


def _unescaped(field: str) -> str:
    """Return a field of mountinfo, in which a space is written as an octal number."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _read(path: Path) -> str:
    """Return a file's text, or "" if there is no such file or it may not be read. The names of
    folders in it may be no Unicode."""
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""
