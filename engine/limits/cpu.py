"""The number of CPU threads that this process should compute with.

It is the number of physical cores that the process may run on, because two hyper-threads of a core
share its units, but at most the CPU quota of its control groups.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.limits.control_groups import V1, folders_of, read_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """The CPU time that the process may use: ``cores``, their hardware threads (``processors``),
    and the ``quota`` in cores, None without a quota."""

    cores: int
    processors: int
    quota: float | None = None

    @property
    def threads(self) -> int:
        """The number of threads that all steps of the process should use together, at least 1. A
        quota is rounded up: a thread that runs only a part of the time computes more than none."""
        if self.quota is None:
            return self.cores
        return max(1, min(self.cores, math.ceil(self.quota)))

    def __str__(self) -> str:
        cores = _counted(self.cores, "core")
        if self.processors > self.cores:
            cores += f" with {self.processors} hyper-threads"
        quota = self.quota is not None and self.quota < self.cores
        why = f"CPU quota {self.quota:g} of {cores}" if quota else cores
        return f"{_counted(self.threads, 'thread')}: {why}"


def cpu_limit(root: Path = Path("/"), processors: Collection[int] | None = None) -> CpuLimit:
    """Return the limit of this process, read from files below ``root``. The process may run on
    ``processors``; None: the system is asked."""
    allowed = os.sched_getaffinity(0) if processors is None else processors
    cores = {_siblings(root, core) for core in allowed}
    return CpuLimit(len(cores), len(allowed), min(_quotas(root), default=None))


def _siblings(root: Path, processor: int) -> str:
    """Return the hardware threads of a processor's core as the system lists them, or the processor
    itself if that is not known."""
    folder = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    return read_text(folder / "thread_siblings_list").strip() or str(processor)


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas of the process's groups and of all groups above these, in cores. A group
    without a quota has the word "max", or in version 1 a negative number."""
    for version, folder in folders_of("cpu", root):
        if version == V1:
            quota = read_text(folder / "cpu.cfs_quota_us").strip()
            period = read_text(folder / "cpu.cfs_period_us").strip()
        else:
            quota, _, period = read_text(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            yield int(quota) / int(period)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
