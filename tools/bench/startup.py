"""Measures the time from the start of the server's process until the server is ready.

The floor is a process that only imports torch, the model's transformers class, grpc and trio. Every
process is a second start: an earlier one has read the same files. The clock is outside, from
creating the process until its line of output. The model is s135 in bfloat16 (0.27 GB). Further rows
are the server without arguments, whose text model is small: until it serves text, and until its
encoders are loaded, too.
"""

from __future__ import annotations

import subprocess
import sys
import time

from tools.bench.checkpoints import checkpoint
from tools.bench.frame import Row, repeat_in_turn, row_of
from tools.bench.served import served
from tools.bench.wire import ROOT

MEASURES = ("engine", "grpc_service")

FLOOR = """
import torch, grpc, trio
from transformers.models.llama.modeling_llama import LlamaForCausalLM
print("ready", flush=True)
"""
DEMOS = ("demo-stories", "demo-embed", "demo-rerank")
BAR_S = 6.0
BAR_FLOOR = 1.3


def floor() -> float:
    """Return the seconds until the imports are done."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", FLOOR], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if line != "ready\n":
        raise RuntimeError("the floor's process failed")
    return seconds


def until_ready(*models: str) -> float:
    """Return the seconds until the server is ready and every model's health is SERVING."""
    start = time.perf_counter()
    with served([(model, model.rsplit("/", 1)[-1]) for model in models]):
        return time.perf_counter() - start


def run() -> list[Row]:
    """Return the bench's rows."""
    model = str(checkpoint("s135"))
    ours, bare, text, demos = repeat_in_turn(
        [
            lambda: until_ready(model),
            floor,
            lambda: until_ready(DEMOS[0]),
            lambda: until_ready(*DEMOS),
        ]
    )
    ratios = [mine / least for mine, least in zip(ours, bare, strict=True)]
    return [
        row_of("second start, s135", ours, "s", bar=BAR_S),
        row_of("floor: torch, the model's class, grpc, trio", bare, "s"),
        row_of("second start against the floor", ratios, "×", bar=BAR_FLOOR),
        row_of("second start, the story model", text, "s"),
        row_of("second start, all three demo models loaded", demos, "s"),
    ]
