"""How many threads the process computes with: its cores, within its control groups' quotas."""

import os
import subprocess
import sys

import pytest

from engine.config import EngineConfig, ModelConfig, WorkerConfig
from engine.limits.cpu import CpuLimit, cpu_limit
from engine.status import Capability
from engine.worker import factory
from tests.support.control_groups import (
    MACHINE,
    TREES,
    cpu_group,
    may_make_groups,
    write_tree,
)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_the_smallest_quota_of_the_process_and_of_those_above_it_counts(tmp_path, tree):
    limit = cpu_limit(write_tree(tmp_path, tree, "cpu"), range(MACHINE))
    assert limit.threads == tree.smallest
    assert (limit.quota is None or limit.quota >= MACHINE) == (tree.smallest == MACHINE)


@pytest.mark.parametrize(
    ("cores", "quota", "threads"),
    [
        *((64, 0.1, 1), (64, 0.5, 1), (64, 1, 1), (64, 1.01, 2), (64, 1.5, 2), (64, 2, 2)),
        *((64, 63.5, 64), (64, 200, 64), (64, None, 64), (1, 1.5, 1), (1, None, 1)),
    ],
)
def test_a_part_of_a_core_counts_as_a_whole_one(cores, quota, threads):
    assert CpuLimit(cores, cores, quota).threads == threads


def test_hyper_threads_of_one_core_count_once(tmp_path):
    """The machine has four cores: processors 0 to 3, and 4 to 7 as their second threads."""
    for one in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{one}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{one % 4},{one % 4 + 4}\n")
    for processors, cores in ((range(8), 4), ((0, 4), 1), ((0, 1, 4), 2), ((6,), 1), ((2, 3), 2)):
        limit = cpu_limit(tmp_path, processors)
        assert (limit.cores, limit.processors, limit.threads) == (cores, len(processors), cores)


def test_a_system_that_does_not_tell_its_cores_has_one_for_each_processor(tmp_path):
    assert cpu_limit(tmp_path, {3, 5}) == CpuLimit(2, 2)


def test_without_a_word_the_processors_are_those_that_this_process_may_run_on():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cpu_limit().threads == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert cpu_limit().processors == len(allowed)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (CpuLimit(2, 2), "2 threads: 2 cores"),
        (CpuLimit(1, 1), "1 thread: 1 core"),
        (CpuLimit(64, 64, 1.5), "2 threads: CPU quota 1.5 of 64 cores"),
        (CpuLimit(64, 64, 0.25), "1 thread: CPU quota 0.25 of 64 cores"),
        (CpuLimit(4, 8), "4 threads: 4 cores with 8 hyper-threads"),
        (CpuLimit(4, 8, 6), "4 threads: 4 cores with 8 hyper-threads"),
    ],
)
def test_the_limit_says_what_was_taken_and_why(limit, text):
    assert str(limit) == text


def test_models_that_generate_share_the_threads_and_an_encoder_has_one(monkeypatch):
    monkeypatch.setattr(factory, "cpu_limit", lambda: CpuLimit(8, 8, 6))
    text = ModelConfig("a", capability=Capability.TEXT_TO_TEXT)
    two = ModelConfig("b", capability=Capability.TEXT_TO_TEXT, workers=(WorkerConfig(count=2),))
    encoder = ModelConfig("e", capability=Capability.TEXT_EMBEDDING)
    own = ModelConfig("o", capability=Capability.RERANK, threads=5)
    config = EngineConfig(models=(text, two, encoder, own))
    assert [factory.threads_for(one, config) for one in config.models] == [2, 2, 1, 5]
    assert factory.threads_for(text, EngineConfig(models=(text, encoder))) == 6


@pytest.mark.skipif(not may_make_groups(), reason="this process may make no control groups")
@pytest.mark.parametrize("quota", [0.5, 1.5])
def test_a_process_in_a_real_group_finds_its_quota(quota):
    program = (
        "import sys; open(sys.argv[1], 'w').write('0')\n"
        "from engine.limits.cpu import cpu_limit; print(cpu_limit().quota)"
    )
    with cpu_group(quota) as folder:
        command = [sys.executable, "-c", program, str(folder / "cgroup.procs")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) == quota
