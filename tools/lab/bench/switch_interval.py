"""Measures what the interpreter's switch interval changes (setswitchinterval of Python's sys).

A thread that wants the interpreter's lock asks for it after this time. A shorter one lets a step's
worker thread go on sooner beside an event loop that is busy with clients, and costs more switches.
Every bench of `BENCHES` runs once for each interval, in turn; its server and clients have the
interval, too, as every interpreter sets it when it starts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.lab.bench.frame import Row

MEASURES = ("engine/core", "engine/replica", "grpc_service/rpc", "grpc_service/services")
ROOT = Path(__file__).parents[3]
INTERVALS_MS = (5.0, 0.5)  # the first one is Python's own
# The rows that are shown of each bench, and what the bench runs with.
BENCHES = {
    "gap": ("prepared", {"BENCH_WINDOW_S": "1"}),
    "front-real": ("", {"BENCH_WINDOW_S": "3"}),
    "submit": ("p50", {"BENCH_COUNT": "50"}),
    "abuse": (
        "1 address: (p50|p99|tokens/s)",
        {"BENCH_WINDOW_S": "1.5", "BENCH_ONLY": "GET calls|rapid reset|table churn"},
    ),
}


def rows_of(bench: str, settings: dict[str, str], folder: Path, interval_ms: float) -> list[Row]:
    """Run a bench with an interval and return its rows."""
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.setswitchinterval({interval_ms / 1000})\n"
    )
    found = folder / "rows.json"
    found.unlink(missing_ok=True)
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "tools.lab.bench", bench, "--json", found],
        cwd=ROOT,
        env={**os.environ, **settings, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,  # a bar that is missed is no failure here
    )
    return [
        Row(
            f"{row['name']}, interval {interval_ms:g} ms",
            row["value"],
            row["unit"],
            better=row["better"],
            spread=row["spread"],
            n=row["n"],
        )
        for row in json.loads(found.read_text())["rows"]
    ]


def run() -> list[Row]:
    """Return the rows of every bench with every interval, those of one figure beside each other."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for bench, (pattern, settings) in BENCHES.items():
            found = [rows_of(bench, settings, Path(folder), interval) for interval in INTERVALS_MS]
            for same in zip(*found, strict=True):
                if re.search(pattern, same[0].name):
                    rows += same
    return rows
