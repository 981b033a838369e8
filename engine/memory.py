"""What memory this process may use.

Source: R116 (0.80 of the memory, container limits respected), D16.
"""

from __future__ import annotations

from pathlib import Path

LIMIT_FRACTION = 0.80  # R116

_CGROUP_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def usable_bytes() -> int:
    """Bytes this process may use: the machine's memory, or its container's limit if lower."""
    limits = [_machine_bytes()]
    for path in _CGROUP_FILES:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" means no limit
            limits.append(int(text))
    return min(limits)


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError("the machine does not say how much memory it has")


def default_limit() -> int:
    """The default of --memory-limit."""
    return int(usable_bytes() * LIMIT_FRACTION)
