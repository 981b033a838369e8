"""Measures the time from the start of the server's process until the server is ready, and its
memory then.

The floor is a process that only imports the libraries that a server of a compiled model uses. An
earlier process has read the same files, so that they are in the system's cache. The clock is in the
bench: from creating the process until its line of output. The first model is the story model of 4
MB, with which a server serves by default. Further rows are s135 in bfloat16 (0.27 GB), and the
server without arguments until its encoders are loaded, too. The environment variable STARTUP_BEFORE
names a checkout of another commit, which is then measured in turn with this one.

A start is mostly the import of torch: of 1.9 to 2.2 s inside the process, torch took 1.4 s, the
imports before it 0.4 to 0.6 s, and the load 0.06 to 0.08 s. Triolet's own modules took 0.3 s, half
of it for dataclasses. The server collects garbage less often during the imports, unlike the floor,
which saves about 0.3 s. Where PYTHONDONTWRITEBYTECODE is set, as in many containers, torch is
compiled at each start, which takes 6.5 s in all; `tools/serve` and `tools/test` unset it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tools.lab.bench.checkpoints import checkpoint
from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.served import serving
from tools.lab.bench.wire import ROOT

MEASURES = ("engine", "grpc_service")

LIBRARIES = (
    *("torch", "numpy", "trio", "h2.connection", "google.protobuf.message", "grpc"),
    *("tokenizers", "safetensors", "llguidance", "jinja2.sandbox"),
)
FLOOR = f"import {', '.join(LIBRARIES)}; print('ready', flush=True)"
STORIES = "demo-stories"
DEMOS = (STORIES, "demo-embed", "demo-rerank")
BEFORE = "STARTUP_BEFORE"
BAR_S = 2.5
BAR_FLOOR = 1.3
MIB = 1 << 20


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


class Start:
    """Starts the server of a checkout with some models, again and again. ``memory`` collects its
    resident MiB when it was ready."""

    def __init__(self, *models: str, root: Path = ROOT) -> None:
        self.models = [(model, model.rsplit("/", 1)[-1]) for model in models]
        self.root = root
        self.memory: list[float] = []

    def __call__(self) -> float:
        """Return the seconds until the server is ready and every model's health is SERVING."""
        start = time.perf_counter()
        with serving(self.models, root=self.root) as server:
            seconds = time.perf_counter() - start
            self.memory.append(_resident(server.pid))
        return seconds


def _resident(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def run() -> list[Row]:
    """Return the bench's rows."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise there is no second start
    stories, large, demos = Start(STORIES), Start(str(checkpoint("s135"))), Start(*DEMOS)
    before = os.environ.get(BEFORE)
    others = [Start(STORIES, root=Path(before))] if before else []
    text, bare, s135, three, *rest = repeat_in_turn([stories, floor, large, demos, *others])
    ratios = [mine / least for mine, least in zip(text, bare, strict=True)]
    rows = [
        row_of("second start, the story model", text, "s", bar=BAR_S),
        row_of("floor: the libraries that this imports", bare, "s"),
        row_of("second start against the floor", ratios, "×", bar=BAR_FLOOR),
        row_of("memory when ready, the story model", stories.memory[1:], "MiB"),
        row_of("second start, s135", s135, "s"),
        row_of("second start, all three demo models loaded", three, "s"),
    ]
    for one, seconds in zip(others, rest, strict=True):
        which = _commit(one.root)
        rows += [
            row_of(f"second start, the story model, at {which}", seconds, "s"),
            row_of(f"memory when ready, at {which}", one.memory[1:], "MiB"),
        ]
    return rows


def _commit(root: Path) -> str:
    """Return the commit of a checkout."""
    argv = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()
