"""How much memory this process may use."""

from __future__ import annotations

from pathlib import Path

CPU = "cpu"  # the device whose memory this is
LIMIT_FRACTION = 0.80  # R116

_CGROUP_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def usable_bytes() -> int:
    """Return how many bytes this process may use: the machine's memory, or the limit of its
    container if that is lower.

    Raises:
        OSError: the machine's memory is not known.
    """
    limits = [_machine_bytes()]
    for path in _CGROUP_FILES:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" stands for no limit
            limits.append(int(text))
    return min(limits)


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say how much memory the machine has")


def default_limit() -> int:
    """Return the default of --memory-limit, in bytes. Raises as `usable_bytes`."""
    return int(usable_bytes() * LIMIT_FRACTION)
