"""The memory that the process may use, its ledger, and how many replicas fit (R116, R117, R119)."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig, ModelConfig
from engine.errors import EngineBug
from engine.memory_limit import default_limit, usable_bytes
from engine.pool.memory import MemoryLedger, plan_workers
from engine.worker.factory import runner_spec


@pytest.mark.parametrize(
    ("reserved", "each", "limit", "granted"),
    [
        (0, 2, 4, 2),  # both fit, to the last byte
        (0, 2, 3, 1),
        (0, 2, 2, 1),
        (0, 2, 1, 0),
        (1, 2, 5, 2),
        (1, 2, 4, 1),
        (3, 2, 4, 0),
        (9, 2, 4, 0),  # measured memory may exceed the limit
        (0, 0, 4, 2),
    ],
)
def test_how_many_of_two_replicas_fit(reserved, each, limit, granted):
    """R117: two if they fit, else one, else none; the limit itself fits."""
    assert plan_workers(reserved, each, limit, wanted=2) == granted


def test_each_device_has_its_own_limit():
    """R87."""
    ledger = MemoryLedger(10)
    ledger.add_device("cuda:0", 5)
    ledger.add_device("cuda:0", 99)  # has a limit already
    a, b = ledger.reserve("a", {"cpu": 10}), ledger.reserve("b", {"cuda:0": 5})
    assert [ledger.free(device) for device in ("cpu", "cuda:0")] == [0, 0]
    a.measured(4)
    assert (ledger.free(), ledger.peak()) == (6, 10)
    a.release()
    b.release()
    assert (ledger.total_reserved, ledger.total_limit) == (0, 15)


def test_a_device_without_a_limit_of_its_own_has_the_cpus():
    ledger = MemoryLedger(10)
    ledger.add_device("mps", None)
    assert ledger.limit("mps") == 10


def test_never_is_more_reserved_than_the_limit():
    """R81."""
    ledger = MemoryLedger(10)
    ledger.reserve("a", {"cpu": 8})
    with pytest.raises(EngineBug):
        ledger.reserve("b", {"cpu": 3})
    assert ledger.reserved() == 8


def test_a_reservation_on_several_devices_is_made_measured_and_released_as_one():
    ledger = MemoryLedger(10)
    for device in ("cuda:0", "cuda:1"):
        ledger.add_device(device, 8)
    ledger.reserve("a", {"cuda:1": 5})
    with pytest.raises(EngineBug):
        ledger.reserve("b", {"cuda:0": 4, "cuda:1": 4})
    assert ledger.reserved("cuda:0") == 0
    reservation = ledger.reserve("b", {"cuda:0": 4, "cuda:1": 2})
    reservation.measured(9)
    assert (reservation.on("cuda:0"), reservation.on("cuda:1"), reservation.on("cpu")) == (6, 3, 0)
    assert (ledger.reserved("cuda:0"), ledger.reserved("cuda:1")) == (6, 8)
    reservation.release()
    assert (ledger.reserved("cuda:0"), ledger.reserved("cuda:1")) == (0, 5)


def test_measured_memory_may_exceed_the_limit_and_nothing_is_free_then():
    ledger = MemoryLedger(10)
    ledger.reserve("a", {"cpu": 8}).measured(12)
    assert (ledger.reserved(), ledger.free()) == (12, 0)


def test_a_reservation_is_released_once():
    """R119."""
    reservation = MemoryLedger(10).reserve("a", {"cpu": 8})
    reservation.release()
    for job in (reservation.release, lambda: reservation.measured(1)):
        with pytest.raises(EngineBug):
            job()
    assert reservation.ledger.reserved() == 0


# ---- what the process may use ----------------------------------------------------------------

GIB = 2**30
NONE_IN_V1 = 9223372036854771712  # what version 1 writes for a group without a limit
V2 = "30 20 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory"
OTHERS = (
    "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n22 1 8:1 / / rw - ext4 /dev/x rw"
)
V2_FILE = "sys/fs/cgroup/{}/memory.max"
V1_FILE = "sys/fs/cgroup/memory/{}/memory.limit_in_bytes"
UNIT = "system.slice/triolet.service"
POD = "kubepods/burstable/pod7/triolet"


def tree(root, group, mount="", limits=None, form=V2_FILE):
    """Make the files of a machine with 16 GiB, whose process has these lines of /proc/self/cgroup
    and of mountinfo. ``limits`` has the text of each group's limit, by the folder of the group."""
    files = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n"}
    files |= {"proc/self/cgroup": group, "proc/self/mountinfo": f"{OTHERS}\n{mount}\n"}
    files |= {form.format(folder): f"{limit}\n" for folder, limit in (limits or {}).items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


TREES = {
    "a unit of systemd with MemoryMax": (
        f"0::/{UNIT}", V2.format(top="/"), {UNIT: 4 * GIB, "system.slice": "max"}, V2_FILE, 4,
    ),
    "a slice with less than its unit": (
        f"0::/{UNIT}", V2.format(top="/"), {UNIT: 4 * GIB, "system.slice": 3 * GIB}, V2_FILE, 3,
    ),
    "a pod with less than its container": (
        f"0::/{POD}", V2.format(top="/"), {POD: "max", "kubepods/burstable/pod7": 2 * GIB},
        V2_FILE, 2,
    ),
    "groups without a limit": (
        f"0::/{UNIT}", V2.format(top="/"), {UNIT: "max", "system.slice": "max"}, V2_FILE, 16,
    ),
    "a limit above the machine's memory": (
        f"0::/{UNIT}", V2.format(top="/"), {UNIT: 64 * GIB}, V2_FILE, 16,
    ),
    "a container with a namespace of its own": (
        "0::/", V2.format(top="/"), {"": 5 * GIB}, V2_FILE, 5,
    ),
    "a container without a namespace of its own": (
        "0::/docker/abc", V2.format(top="/docker/abc"), {"": 5 * GIB}, V2_FILE, 5,
    ),
    "a group inside such a container": (
        "0::/docker/abc/worker", V2.format(top="/docker/abc"), {"": 5 * GIB, "worker": GIB},
        V2_FILE, 1,
    ),
    "a container whose group is not among those that it sees": (
        "0::/docker/abc", V2.format(top="/docker/xyz"), {"": 6 * GIB}, V2_FILE, 6,
    ),
    "version 1": (
        f"9:memory:/{UNIT}\n3:cpu,cpuacct:/\n0::/", V1.format(top="/"),
        {"": NONE_IN_V1, "system.slice": NONE_IN_V1, UNIT: 7 * GIB}, V1_FILE, 7,
    ),
    "version 1, nested": (
        f"4:hugetlb,memory:/{UNIT}", V1.format(top="/"), {"system.slice": GIB, UNIT: 7 * GIB},
        V1_FILE, 1,
    ),
    "version 1 without a limit": (
        f"9:memory:/{UNIT}", V1.format(top="/"), {"": NONE_IN_V1, UNIT: NONE_IN_V1}, V1_FILE, 16,
    ),
    "a container of version 1": (
        "9:memory:/docker/abc", V1.format(top="/docker/abc"), {"": 5 * GIB}, V1_FILE, 5,
    ),
    "version 1 beside an empty version 2": (
        f"9:memory:/{UNIT}\n0::/", f"{V1.format(top='/')}\n{V2.format(top='/')}",
        {UNIT: 7 * GIB}, V1_FILE, 7,
    ),
    "a folder with a space": (
        "0::/my group:1", V2.format(top="/").replace("/sys/fs/cgroup", "/sys/fs/c\\040g"),
        {"my group:1": GIB}, "sys/fs/c g/{}/memory.max", 1,
    ),
    "another group's limit": (
        f"0::/{UNIT}", V2.format(top="/"), {"user.slice": GIB, f"{UNIT}/below": GIB}, V2_FILE, 16,
    ),
    "no mount": (f"0::/{UNIT}", "", {UNIT: GIB}, V2_FILE, 16),
    "no group is named": ("", V2.format(top="/"), {"": GIB}, V2_FILE, 1),
}  # fmt: skip


@pytest.mark.parametrize(("group", "mount", "limits", "form", "gib"), TREES.values(), ids=TREES)
def test_the_smallest_limit_of_the_process_and_of_those_above_it_counts(
    tmp_path, group, mount, limits, form, gib
):
    """R116: the default is 0.80 of that."""
    root = tree(tmp_path, group, mount, limits, form)
    assert usable_bytes(root) == gib * GIB
    assert default_limit(root) == int(0.8 * gib * GIB)


def test_without_the_files_of_groups_the_machines_memory_counts(tmp_path):
    root = tree(tmp_path, "")
    for name in ("cgroup", "mountinfo"):
        (root / "proc/self" / name).unlink()
    assert usable_bytes(root) == 16 * GIB


def test_a_machine_that_does_not_say_its_memory_is_an_error(tmp_path):
    root = tree(tmp_path, "")
    (root / "proc/meminfo").write_text("MemFree: 1 kB\n")
    with pytest.raises(OSError, match="how much memory"):
        usable_bytes(root)


def test_the_shipped_models_have_a_small_kv_pool_unless_the_operator_sets_its_size(tmp_path):
    def kv_bytes(model, **fields):
        config = EngineConfig(models=(ModelConfig(str(model)),), memory_limit=16 * GIB, **fields)
        return runner_spec(config.models[0], config).kv_bytes

    assert kv_bytes("demo-stories") == 128 * 2**20
    assert kv_bytes("demo-stories", kv_cache_memory=GIB) == GIB
    assert kv_bytes(tmp_path) is None  # the runner decides, once it knows the model
