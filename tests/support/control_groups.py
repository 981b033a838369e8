"""Trees of control groups as files, for the limits of memory and of CPU time alike.

A limit is a number of units: of GiB, or of cores. None is a group without a limit.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

GIB = 2**30
MACHINE = 16  # units that the machine has
NO_MEMORY_LIMIT_IN_V1 = 9223372036854771712
V2 = "30 20 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {top} /sys/fs/cgroup/CONTROLLER rw,nosuid - cgroup cgroup rw,CONTROLLER"
OTHERS = (
    "36 31 0:33 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio\n"
    "22 1 8:1 / / rw - ext4 /dev/x rw"
)
V2_FOLDER = "sys/fs/cgroup/{}"
V1_FOLDER = "sys/fs/cgroup/CONTROLLER/{}"
UNIT = "system.slice/triolet.service"
POD = "kubepods/burstable/pod7/triolet"


class Tree(NamedTuple):
    """A process's line of /proc/self/cgroup, a line of mountinfo, each group's limit by the group's
    folder, and the smallest limit on the process, or `MACHINE`."""

    group: str
    mount: str
    limits: Mapping[str, float | None]
    folder: str
    smallest: float


TREES = {
    "a unit of systemd with a limit": Tree(
        f"0::/{UNIT}", V2.format(top="/"), {UNIT: 4, "system.slice": None}, V2_FOLDER, 4
    ),
    "a slice with less than its unit": Tree(
        f"0::/{UNIT}", V2.format(top="/"), {UNIT: 4, "system.slice": 3}, V2_FOLDER, 3
    ),
    "a pod with less than its container": Tree(
        f"0::/{POD}", V2.format(top="/"), {POD: None, "kubepods/burstable/pod7": 2}, V2_FOLDER, 2
    ),
    "groups without a limit": Tree(
        f"0::/{UNIT}", V2.format(top="/"), {UNIT: None, "system.slice": None}, V2_FOLDER, MACHINE
    ),
    "a limit above what the machine has": Tree(
        f"0::/{UNIT}", V2.format(top="/"), {UNIT: 64}, V2_FOLDER, MACHINE
    ),
    "a container with a namespace of its own": Tree(
        "0::/", V2.format(top="/"), {"": 5}, V2_FOLDER, 5
    ),
    "a container without a namespace of its own": Tree(
        "0::/docker/abc", V2.format(top="/docker/abc"), {"": 5}, V2_FOLDER, 5
    ),
    "a group inside such a container": Tree(
        "0::/docker/abc/worker", V2.format(top="/docker/abc"), {"": 5, "worker": 1}, V2_FOLDER, 1
    ),
    "a container whose group is not among those that it sees": Tree(
        "0::/docker/abc", V2.format(top="/docker/xyz"), {"": 6}, V2_FOLDER, 6
    ),
    "version 1": Tree(
        f"9:CONTROLLER:/{UNIT}\n3:blkio:/\n0::/", V1.format(top="/"),
        {"": None, "system.slice": None, UNIT: 7}, V1_FOLDER, 7,
    ),
    "version 1, nested": Tree(
        f"4:hugetlb,CONTROLLER:/{UNIT}", V1.format(top="/"), {"system.slice": 1, UNIT: 7},
        V1_FOLDER, 1,
    ),
    "version 1 without a limit": Tree(
        f"9:CONTROLLER:/{UNIT}", V1.format(top="/"), {"": None, UNIT: None}, V1_FOLDER, MACHINE
    ),
    "a container of version 1": Tree(
        "9:CONTROLLER:/docker/abc", V1.format(top="/docker/abc"), {"": 5}, V1_FOLDER, 5
    ),
    "version 1 beside an empty version 2": Tree(
        f"9:CONTROLLER:/{UNIT}\n0::/", f"{V1.format(top='/')}\n{V2.format(top='/')}",
        {UNIT: 7}, V1_FOLDER, 7,
    ),
    "a folder with a space": Tree(
        "0::/my group:1", V2.format(top="/").replace("/sys/fs/cgroup", "/sys/fs/c\\040g"),
        {"my group:1": 1}, "sys/fs/c g/{}", 1,
    ),
    "another group's limit": Tree(
        f"0::/{UNIT}", V2.format(top="/"), {"user.slice": 1, f"{UNIT}/below": 1}, V2_FOLDER,
        MACHINE,
    ),
    "no mount": Tree(f"0::/{UNIT}", "", {UNIT: 1}, V2_FOLDER, MACHINE),
    "no group is named": Tree("", V2.format(top="/"), {"": 1}, V2_FOLDER, 1),
    "no control groups": Tree("", "", {}, V2_FOLDER, MACHINE),
}  # fmt: skip


def write_tree(root: Path, tree: Tree, controller: str) -> Path:
    """Write the files of a machine with `MACHINE` GiB whose groups limit ``controller``, "memory"
    or "cpu". Return ``root``."""
    mounts = f"{OTHERS}\n{tree.mount}\n"
    files = {"proc/meminfo": f"MemTotal:  {MACHINE * GIB >> 10} kB\nMemFree: 1 kB\n"}
    files |= {"proc/self/cgroup": tree.group, "proc/self/mountinfo": mounts}
    for group, limit in tree.limits.items():
        is_v1 = tree.folder == V1_FOLDER
        limits = _memory(limit, is_v1) if controller == "memory" else _cpu(limit, is_v1)
        files |= {f"{tree.folder.format(group)}/{name}": text for name, text in limits.items()}
    for name, text in files.items():
        path = root / name.replace("CONTROLLER", controller)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("CONTROLLER", controller))
    return root


def _memory(limit: float | None, is_v1: bool) -> dict[str, str]:
    if is_v1:
        size = NO_MEMORY_LIMIT_IN_V1 if limit is None else int(limit * GIB)
        return {"memory.limit_in_bytes": f"{size}\n"}
    return {"memory.max": "max\n" if limit is None else f"{int(limit * GIB)}\n"}


def _cpu(limit: float | None, is_v1: bool) -> dict[str, str]:
    """Return the files of a CPU quota, whose period is half the usual one."""
    period = 50_000
    if is_v1:
        quota = -1 if limit is None else int(limit * period)
        return {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": f"{period}\n"}
    quota_text = "max" if limit is None else f"{int(limit * period)}"
    return {"cpu.max": f"{quota_text} {period}\n"}


CPU_GROUPS = Path("/sys/fs/cgroup/cpu")  # where systems mount control groups of version 1


def may_make_groups() -> bool:
    """Return whether this process may make control groups of version 1 that limit CPU time."""
    return (CPU_GROUPS / "cpu.cfs_quota_us").exists() and os.access(CPU_GROUPS, os.W_OK)


@contextmanager
def cpu_group(quota: float) -> Iterator[Path]:
    """Make a control group with a quota of so many cores. A process joins it by writing its number
    to the file cgroup.procs of the folder that the block gets. All must have left when the block
    ends."""
    folder = CPU_GROUPS / f"triolet-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text(str(int(quota * 100_000)))
        yield folder
    finally:
        folder.rmdir()
