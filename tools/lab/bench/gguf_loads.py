"""Measures how long a server takes to be ready with a GGUF file, and its memory meanwhile: the
first time, the second time, and without a cache of packed weights.

The files are those of `tools.lab.bench.gguf_shapes`: q05 of 0.4 GB, and q4b of 2.5 GB. They, and
what was packed, are in the system's cache of files. The floor only imports libraries (bench
`startup`). Memory is sampled every `SAMPLE_S` from the process's start until it is ready. Anonymous
memory is what the system cannot drop or share: mapped files do not count. From both kinds of memory
that of a server of the story model is subtracted.

`BENCH_ONLY` is a regular expression that selects shapes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.lab.bench.frame import Row, repeat_in_turn, row_of
from tools.lab.bench.gguf_shapes import random_gguf
from tools.lab.bench.served import READY, START_LIMIT_S
from tools.lab.bench.startup import STORIES, floor
from tools.lab.bench.wire import END_LIMIT_S, ROOT
from tools.lab.peers.environments import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable

MEASURES = ("engine", "grpc_service")

SAMPLE_S = 0.01
KV_BYTES = 256 << 20
MB = 1e6
# Of the second start there is a bar for q05 as a share of the floor, and for q4b beyond the floor.
RATIO_BAR, BEYOND_BAR_S = {"q05": 1.3}, {"q4b": 0.5}
FIRST_BAR_S = {"q05": 4.0, "q4b": 8.0}
ANONYMOUS_BAR, LEAST_BAR_MB = 0.3, 150.0  # of the file's size
WITHOUT_BAR, RESIDENT_BAR = 1.2, 1.1


@dataclass(frozen=True)
class Start:
    """What one start took. ``anonymous`` and ``resident`` are the most, and at the end, in MB."""

    seconds: float
    anonymous: float
    resident: float


def memory_of(pid: int) -> dict[str, float]:
    """Return the fields of a process's status that are sizes, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: int(size) * 1024 / MB for name, size in re.findall(r"(\w+):\s+(\d+) kB", text)}


def start_server(model: str, cache: str) -> Start:
    """Start a server, wait until it is ready, and end it."""
    argv = [sys.executable, "-m", "grpc_service", "serve", "--port", "0", "--model", model]
    argv += ["--packed-cache", cache, "--kv-cache-memory", str(KV_BYTES)]
    begin, most, ended = time.perf_counter(), [0.0], threading.Event()
    process = subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"TRIOLET_LOG": "ERROR"}
    )

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            most[0] = max(most[0], memory_of(process.pid).get("RssAnon", 0.0))

    sampler = threading.Thread(target=sample)
    killer = threading.Timer(START_LIMIT_S, process.kill)
    sampler.start()
    killer.start()
    try:
        assert process.stdout is not None
        is_ready = any(READY.search(line) for line in process.stdout)
        seconds = time.perf_counter() - begin
        if not is_ready:
            raise RuntimeError("the server did not start")
        return Start(seconds, most[0], memory_of(process.pid)["VmRSS"])
    finally:
        ended.set()
        sampler.join()
        killer.cancel()
        process.terminate()
        process.communicate(timeout=END_LIMIT_S)


def starts_of(model: str, folder: Path) -> list[Callable[[], Start]]:
    """Return the functions that start a server for the first time, for the second time, and without
    a cache."""

    def first() -> Start:
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        return start_server(model, str(folder))

    return [first, lambda: start_server(model, str(folder)), lambda: start_server(model, "off")]


def rows_of(name: str) -> list[Row]:
    """Return the rows of one shape."""
    file = random_gguf(name)
    size = file.stat().st_size / MB
    root = cache_folder("triolet-bench")
    with tempfile.TemporaryDirectory(prefix="packed-", dir=root) as parent:
        folder = Path(parent) / "cache"
        folder.mkdir(mode=0o700)
        first, second, plain = starts_of(str(file), folder)
        made, mapped, packed, bare, small = repeat_in_turn(
            [
                first,
                second,
                plain,
                lambda: Start(floor(), 0, 0),
                lambda: start_server(STORIES, "off"),
            ]
        )
    base = min(one.anonymous for one in small)
    resident = min(one.resident for one in small)
    floors = [one.seconds for one in bare]
    least = max(ANONYMOUS_BAR * size, LEAST_BAR_MB)
    beyond = [one.seconds - least for one, least in zip(mapped, floors, strict=True)]
    ratios = [one.seconds / least for one, least in zip(mapped, floors, strict=True)]
    return [
        row_of(f"{name}: first start", _seconds(made), "s", bar=FIRST_BAR_S[name]),
        row_of(f"{name}: second start", _seconds(mapped), "s"),
        row_of(f"{name}: start without a cache", _seconds(packed), "s"),
        row_of(f"{name}: floor", floors, "s"),
        row_of(f"{name}: start of the story model", _seconds(small), "s"),
        row_of(f"{name}: second start, of the floor", ratios, "×", bar=RATIO_BAR.get(name)),
        row_of(f"{name}: second start, beyond the floor", beyond, "s", bar=BEYOND_BAR_S.get(name)),
        row_of(f"{name}: anonymous memory, first start", [o.anonymous - base for o in made], "MB",
               bar=least),
        row_of(f"{name}: anonymous memory, second start", [o.anonymous - base for o in mapped],
               "MB"),
        row_of(f"{name}: anonymous memory without a cache, of the file",
               [(o.anonymous - base) / size for o in packed], "×", bar=WITHOUT_BAR),
        row_of(f"{name}: resident memory when ready, of the file",
               [(o.resident - resident) / size for o in mapped], "×", bar=RESIDENT_BAR),
    ]  # fmt: skip


def _seconds(starts: list[Start]) -> list[float]:
    return [one.seconds for one in starts]


def run() -> list[Row]:
    """Return the bench's rows."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise there is no second start
    wanted = re.compile(os.environ.get("BENCH_ONLY", ""))
    return [row for name in FIRST_BAR_S if wanted.search(name) for row in rows_of(name)]
