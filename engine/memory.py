"""What memory this process may use, and when it looks for garbage.

Source: R116 (0.80 of the memory, container limits respected), D16.
"""

from __future__ import annotations

import gc
from pathlib import Path

LIMIT_FRACTION = 0.80  # R116

GC_THRESHOLDS = (50_000, 20, 100)
"""A step of 1,024 rows makes thousands of tuples that live until the next; at Python's 700 it was
looked through for cycles in mid-plan, and was a third slower (`python -m tools.bench schedule`)."""

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


def collect_rarely() -> None:
    """For a process that will serve, before its imports: looking for garbage among what torch and
    transformers make while they are imported is a tenth of a start's time."""
    gc.set_threshold(*GC_THRESHOLDS)


def settle_heap() -> None:
    """For a process that serves, when its models have loaded: what start-up made is never looked
    through for garbage again (a full look at torch's and transformers' objects stops every thread
    for a tenth of a second), and what steps make less often. Not for a library to do unasked."""
    gc.collect()
    gc.freeze()
    collect_rarely()
