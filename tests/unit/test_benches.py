"""The benches themselves: what they measure, and the simulated devices that some of them use."""

import json
import re
import subprocess
import sys
import threading
import time

import pytest
import trio

from tests.support.programs import ROOT
from tools.lab.bench import coldstart, simulated
from tools.lab.bench.catalog import FIGURES, measured_paths, names
from tools.lab.peers.process import memory_mb

BENCHES = ROOT / "tools" / "lab" / "bench"


# ---- the committed figures -------------------------------------------------------------------


def test_every_bench_says_what_it_measures():
    """Figures name their commit, with a + if a path that the bench measures had changes."""
    for path in BENCHES.glob("*.py"):
        has_run = re.search(r"^def run\(\)", path.read_text(), re.MULTILINE) is not None
        assert has_run == (path.stem.replace("_", "-") in names()), path.name
    for name in names():
        paths = measured_paths(name)
        assert f"tools/lab/bench/{name.replace('-', '_')}.py" in paths
        assert len(paths) > 1, f"{name} measures nothing"
        assert [one for one in paths if not (ROOT / one).exists()] == []


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.json")), ids=lambda path: path.stem)
def test_a_committed_figure_has_a_commit_a_date_a_bench_and_unique_rows(path):
    found = json.loads(path.read_text())
    assert found["bench"] in names()
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?", found["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", found["machine"]["when"])
    rows = [row["name"] for row in found["rows"]]
    assert sorted(set(rows)) == sorted(rows)


# ---- simulated devices, and memory that is sampled -------------------------------------------


@pytest.mark.parametrize(
    ("step", "leaves_the_gil"),
    [(simulated.release, True), (simulated.compute_in_python, True), (simulated.hold, False)],
)
def test_a_simulated_step_does_with_the_gil_what_it_says(step, leaves_the_gil):
    begun, ticks, is_over = threading.Event(), [], threading.Event()

    def tick():
        begun.set()
        while not is_over.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    begun.wait()
    start = time.monotonic()
    step(0.2)
    end = time.monotonic()
    is_over.set()
    thread.join()
    during = [at for at in ticks if start + 0.01 < at < end - 0.01]
    assert (len(during) > 0) == leaves_the_gil


def test_the_memory_of_an_engine_is_that_of_all_its_processes():
    """vLLM's engine is a process below the one that was started."""
    hold = "held = bytearray(64 << 20); print(1, flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "1\n"
        assert 67 < memory_mb(process.pid) < 200
        process.stdin.close()


def test_the_memory_of_a_cold_start_is_sampled_while_it_loads(monkeypatch):
    """Red if only the loaded model's memory is sampled: a load may take more."""

    class Wasteful(coldstart.HeavyRunner):
        def load(self, progress):
            info = super().load(progress)
            self.weights = b""
            return info

    monkeypatch.setattr(coldstart, "HeavyRunner", Wasteful)
    monkeypatch.setattr(coldstart, "BYTES", 32 << 20)
    monkeypatch.setattr(coldstart, "LOAD_S", 0.1)
    seen = trio.run(coldstart._wait_for_model, 3)
    assert seen.loads == coldstart.REPLICAS
    assert seen.reserved == 64
    assert seen.grown >= 32
