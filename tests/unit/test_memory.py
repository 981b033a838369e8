"""The memory that the process may use, the ledger of reservations, and how many replicas fit."""

import pytest

from engine.config import EngineConfig, ModelConfig
from engine.errors import EngineBug
from engine.limits.memory import default_limit, usable_bytes
from engine.pool.memory import MemoryLedger, plan_workers
from engine.worker.factory import runner_spec
from tests.support.control_groups import GIB, TREES, write_tree


@pytest.mark.parametrize(
    ("reserved", "each", "limit", "granted"),
    [
        (0, 2, 4, 2),  # two replicas fill the limit exactly
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
    """Two replicas if they fit, else one, else none; replicas may fill the limit exactly."""
    assert plan_workers(reserved, each, limit, wanted=2) == granted


def test_each_device_has_its_own_limit():
    ledger = MemoryLedger(10)
    ledger.add_device("cuda:0", 5)
    ledger.add_device("cuda:0", 99)  # ignored: the device already has a limit
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
    reservation = MemoryLedger(10).reserve("a", {"cpu": 8})
    reservation.release()
    for job in (reservation.release, lambda: reservation.measured(1)):
        with pytest.raises(EngineBug):
            job()
    assert reservation.ledger.reserved() == 0


# ---- what the process may use ----------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_the_smallest_limit_of_the_process_and_of_those_above_it_counts(tmp_path, tree):
    """The default of `--memory-limit` is 0.80 of that limit."""
    root = write_tree(tmp_path, tree, "memory")
    assert usable_bytes(root) == tree.smallest * GIB
    assert default_limit(root) == int(0.8 * tree.smallest * GIB)


def test_without_the_files_of_groups_the_machines_memory_counts(tmp_path):
    root = write_tree(tmp_path, TREES["no control groups"], "memory")
    for name in ("cgroup", "mountinfo"):
        (root / "proc/self" / name).unlink()
    assert usable_bytes(root) == 16 * GIB


def test_a_machine_that_does_not_say_its_memory_is_an_error(tmp_path):
    root = write_tree(tmp_path, TREES["no control groups"], "memory")
    (root / "proc/meminfo").write_text("MemFree: 1 kB\n")
    with pytest.raises(OSError, match="how much memory"):
        usable_bytes(root)


def test_the_shipped_models_have_a_small_kv_pool_unless_the_operator_sets_its_size(tmp_path):
    def kv_bytes(model, **fields):
        config = EngineConfig(models=(ModelConfig(str(model)),), memory_limit=16 * GIB, **fields)
        return runner_spec(config.models[0], config).kv_bytes

    assert kv_bytes("demo-stories") == 128 * 2**20
    assert kv_bytes("demo-stories", kv_cache_memory=GIB) == GIB
    assert kv_bytes(tmp_path) is None  # the runner sets the size when it has read the model
