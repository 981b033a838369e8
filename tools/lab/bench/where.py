"""Profiles a decode: samples from outside which line the engine executes.

py-spy (`triolet[measure]`) samples the engine's thread 200 times per second while s135 decodes 1, 8
and 32 sequences from a context of 128, with the kernels and with the stock modules. An operation of
torch or one of our kernels counts for the line of Python that called it. A row is the share of one
line, the `TOP` largest of each batch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

from engine.errors import install_command
from engine.worker.forward.native import SWITCH
from tools.lab.bench.frame import Row
from tools.lab.bench.step import settings
from tools.lab.peers.process import OURS, EngineProcess

MEASURES = ("engine/core", "engine/worker", "engine/kernels")

BATCHES = (1, 8, 32)
WAYS = {"kernels": "", "stock": "off"}  # the kernels' switch in the environment
TOP = 6
RATE = 200
WINDOW_S = int(os.environ.get("BENCH_WINDOW_S", "6"))
STEPS = 40
# A frame as py-spy writes it: function (path:line)
FRAME = re.compile(r"(?P<function>[^;]+) \((?P<path>[^;()]+):(?P<line>\d+)\)")


def py_spy() -> str:
    """Return the command's path, first beside the interpreter, then on the search path."""
    beside = Path(sys.executable).parent / "py-spy"
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise SystemExit(f"py-spy is not installed: {install_command('measure')}")
    return found


def shares(stacks: str) -> Counter[str]:
    """Count the samples of each innermost line, for the stacks inside a decode."""
    found: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [match for one in stack.split(";") if (match := FRAME.fullmatch(one))]
        if not any(frame["function"].endswith("decode") for frame in frames):
            continue
        last = frames[-1]
        where = "/".join(Path(last["path"]).parts[-2:])
        found[f"{last['function']}, {where}:{last['line']}"] += int(count)
    return found


def sample(engine: EngineProcess, batch: int) -> Counter[str]:
    """Sample the engine while it decodes, for about `WINDOW_S`."""
    engine.ask("decode", f"where {batch}", batch, 129, STEPS)  # the prompts are cached from here on
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "stacks"
        command = [py_spy(), "record", "-p", str(engine.pid), "-r", str(RATE), "-f", "raw"]
        looking = subprocess.Popen(
            [*command, "-d", str(WINDOW_S), "-o", str(file)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        done = threading.Event()
        threading.Thread(target=lambda: (looking.wait(), done.set()), daemon=True).start()
        while not done.is_set():
            engine.ask("decode", f"where {batch}", batch, 129, STEPS)
        return shares(file.read_text())


def rows_of(way: str) -> list[Row]:
    """Return the rows of a way to compute, which is a key of `WAYS`."""
    os.environ[SWITCH] = WAYS[way]
    engine = EngineProcess(OURS, settings("s135", max(BATCHES)))
    rows = []
    try:
        for batch in BATCHES:
            counts = sample(engine, batch)
            total = counts.total()
            rows += [
                Row(f"s135 {way}, B={batch}: {where}", 100 * count / total, "%", n=count)
                for where, count in counts.most_common(TOP)
            ]
    finally:
        engine.close()
    return rows


def run() -> list[Row]:
    """Return the bench's rows."""
    py_spy()
    return [row for way in WAYS for row in rows_of(way)]
