"""The folders of this process's control groups (cgroups), which limit its memory and CPU time.

A process belongs to a control group. The group and each group above it may have limits: a unit's of
systemd, a container's, a pod's. /proc/self/cgroup names the group, and /proc/self/mountinfo says
where groups are mounted as folders, and which group is the top folder of a mount. In a container
that is mostly the container's own group.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

V1, V2 = "cgroup", "cgroup2"  # the types of the file systems of cgroups 1 and 2


def folders_of(controller: str, root: Path = Path("/")) -> Iterator[tuple[str, Path]]:
    """Yield the folder of the process's group in each version of cgroups, and the folders of all
    groups above it, each with its version, `V1` or `V2`. ``controller`` is the resource that the
    groups limit: "memory" or "cpu". /proc is read below ``root``."""
    groups = _groups(controller, root)
    for version, top, folder in _mounts(controller, root):
        group = groups.get(version, top)
        # In a container, a top that is not above the group is the container's own group.
        below = group.relative_to(top) if group.is_relative_to(top) else PurePosixPath()
        for place in (below, *below.parents):
            yield version, folder / place


def read_text(path: Path) -> str:
    """Return a file's text, or "" if there is no such file or it may not be read. The text may
    contain names that are not Unicode."""
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""


def _groups(controller: str, root: Path) -> dict[str, PurePosixPath]:
    """Return the process's group by version of cgroups, where that version limits the resource."""
    folders = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            folders[V2] = PurePosixPath(path)
        elif controller in controllers.split(","):
            folders[V1] = PurePosixPath(path)
    return folders


def _mounts(controller: str, root: Path) -> Iterator[tuple[str, PurePosixPath, Path]]:
    """Yield each mount of groups that may have the controller: its version, the group that is its
    top, and its folder under ``root``."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        place, _, what = line.partition(" - ")
        version, _, rest = what.partition(" ")
        options = rest.rpartition(" ")[2]
        if version == V2 or (version == V1 and controller in options.split(",")):
            top, folder = (_unescaped(field) for field in place.split(" ")[3:5])
            yield version, PurePosixPath(top), root / folder.lstrip("/")


def _unescaped(field: str) -> str:
    """Return a field of mountinfo, in which a space is written as an octal number."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
