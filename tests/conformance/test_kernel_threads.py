"""The threads of a text model's kernels change from step to step, and its numbers do not."""

from __future__ import annotations

import os
from itertools import cycle
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from engine.worker.forward.thread_state import kernel_threads, thread_state  # noqa: E402
from engine.worker.interface import RunnerSpec  # noqa: E402
from engine.worker.kernel_threads import KernelThreads, RunQueueWaits  # noqa: E402
from engine.worker.text_runner import TorchRunner  # noqa: E402
from tests.support.mini_planner import MiniPlanner  # noqa: E402
from tests.support.model_zoo import seeded_prompt  # noqa: E402

pytestmark = pytest.mark.model


class Changing:
    """Chooses another number of threads for each step."""

    def __init__(self, counts):
        self._counts, self.used = cycle(counts), []

    @property
    def count(self):
        self.used.append(next(self._counts))
        return self.used[-1]

    def note(self, rows, seconds):
        """Take no notice."""

    def close(self):
        """Do nothing."""


def outputs(runner, info, counts):
    """Return the logits of all steps of some sequences, as bytes."""
    runner._threads = Changing(counts)
    found, forward = [], runner._forward

    def keep(batch):
        logits = forward(batch)
        found.append((kernel_threads(), logits.numpy().tobytes()))
        return logits

    runner._forward = keep
    planner = MiniPlanner(runner, info, seed=3, chunks=40)
    for length in (70, 9, 33):
        planner.add(seeded_prompt(length), 6)
    planner.run()
    runner._forward = forward
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "lfm2"])
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_a_count_that_changes_between_steps_changes_no_bit(zoo, name, quantization):
    spec = RunnerSpec(str(zoo.directory(name)), kv_bytes=1 << 24, threads=4,
                      quantization=quantization, speculation="off")  # fmt: skip
    runner = TorchRunner(spec)
    info = runner.load(lambda _progress: None)
    alone = outputs(runner, info, [1])
    changing = outputs(runner, info, [1, 3, 4, 2, 7])
    runner.close()
    assert {count for count, _ in alone} == {1}
    assert {count for count, _ in changing} == {1, 2, 3, 4, 7}
    assert [one for _, one in alone] == [one for _, one in changing]


def test_the_kernels_threads_are_those_of_one_call():
    with thread_state(2, torch.device("cpu"), 5):
        assert (kernel_threads(), torch.get_num_threads()) == (5, 2)
    assert kernel_threads() == 2


def rows(*counts):
    return [SimpleNamespace(count=count) for count in counts]


def test_a_fixed_number_stays_and_makes_no_system_call(monkeypatch):
    monkeypatch.setattr(RunQueueWaits, "seconds", None)
    for threads in (KernelThreads(4, varies=False), KernelThreads(1, varies=True)):
        for _ in range(50):
            threads.note(rows(1), 0.02)
        assert threads.count in (4, 1)


def test_the_system_is_asked_at_most_every_20_ms(monkeypatch):
    """A look is one system call for each thread."""
    now, looks = [10.0], []
    monkeypatch.setattr("engine.worker.kernel_threads.perf_counter", lambda: now[0])
    threads = KernelThreads(4, varies=True)
    monkeypatch.setattr(threads, "_waits", SimpleNamespace(seconds=lambda: looks.append(0) or 0.0))
    for _ in range(1000):
        now[0] += 0.001
        threads.note(rows(1), 0.001)
    assert len(looks) <= 1000 / 20 + 1


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="Linux does not count here")
def test_the_waits_of_a_thread_are_those_that_linux_counts():
    waits, files = RunQueueWaits(), len(os.listdir("/proc/self/fd"))
    assert waits.seconds() == 0.0  # the first look
    assert waits.seconds() >= 0.0
    waits.close()
    waits.close()
    assert len(os.listdir("/proc/self/fd")) == files


def test_where_the_system_does_not_count_waits_nothing_is_said(monkeypatch):
    def refused(*args):
        raise FileNotFoundError

    monkeypatch.setattr("engine.worker.kernel_threads.os.open", refused)
    assert RunQueueWaits().seconds() is None
