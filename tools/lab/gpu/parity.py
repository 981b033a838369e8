"""Compares greedy tokens of every architecture on the device with transformers' on the CPU.

In float32 every token is compared, except where two are nearly tied. In bfloat16 only the first
token of each prompt is, and some differ by rounding; with wrong attention nearly all would differ.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from engine.worker.interface import RunnerSpec
from engine.worker.text.runner import TorchRunner
from tests.support.mini_planner import MiniPlanner
from tests.support.model_zoo import ZOO, Zoo
from tests.support.parity import Oracle, Tally
from tools.lab.bench.frame import Row

if TYPE_CHECKING:
    from pathlib import Path

    from tools.lab.gpu.target import Target

LENGTHS = (1, 17, 40, 200, 500)
NEW = 16
PROMPTS = 32
FIRST_MOST = 8  # first tokens of 32 that may differ in bfloat16; 4 do on a CPU
KV_BYTES = 1 << 24


def run(target: Target) -> None:
    """Measure every architecture that is selected."""
    zoo = Zoo(target.folder / "zoo")
    for name in ZOO:
        if not target.wants(f"parity, {name}"):
            continue
        directory = zoo.directory(name)
        oracle = Oracle(str(directory))
        exact, how = _tally(target.device, directory, oracle, "float32")
        near, _ = _tally(target.device, directory, oracle, "bfloat16")
        many = exact.compared
        share = f"{exact.skipped} of {many + exact.skipped} nearly tied"
        target.add(
            [
                Row(f"parity, {name}, float32: wrong tokens", len(exact.wrong), f"of {many}", 0,
                    n=many, note=f"{share}; {how}"),
                Row(f"parity, {name}, bfloat16: wrong first tokens", len(near.wrong),
                    f"of {near.compared}", FIRST_MOST, n=near.compared),
            ]
        )  # fmt: skip


def _tally(device: str, directory: Path, oracle: Oracle, dtype: str) -> tuple[Tally, str]:
    """Return the comparison of a model in one dtype, and the name of its attention."""
    runner = TorchRunner(
        RunnerSpec(str(directory), device=device, dtype=dtype, kv_bytes=KV_BYTES, threads=1)
    )
    info = runner.load(lambda _progress: None)
    draw = random.Random(dtype)
    planner = MiniPlanner(runner, info, seed=3, chunks=96)
    lengths, new = (LENGTHS, NEW) if dtype == "float32" else ((40,) * PROMPTS, 1)
    done = [planner.add([draw.randrange(1, 512) for _ in range(n)], new) for n in lengths]
    planner.run()
    tally = Tally()
    oracle.compare(done, tally)
    label = "" if runner._backend is None else runner._backend.label
    runner.close()
    return tally, f"{label} attention"
