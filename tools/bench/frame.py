"""The frame of every bench: rows with bars, repeats, medians, and a description of the machine.

Rule 1: a figure is the median of at least `REPEATS` runs; the row has its spread and n. Rule 2: a
bar that could not be checked (because a peer is missing) is ``pass: null``, and this is printed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPEATS = 5
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Row:
    """One figure. ``bar`` is a limit in ``unit``; ``better`` (lower or higher) is the good side."""

    name: str
    value: float | None
    unit: str
    bar: float | None = None
    better: str = "lower"
    spread: float = 0.0
    n: int = 0
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the bar is met; None without a bar or a value."""
        if self.bar is None or self.value is None:
            return None
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


def row_of(
    name: str,
    samples: Sequence[float],
    unit: str,
    *,
    bar: float | None = None,
    better: str = "lower",
    note: str = "",
) -> Row:
    """Return a row with the median of ``samples`` and their spread, largest minus smallest."""
    return Row(
        name,
        statistics.median(samples),
        unit,
        bar,
        better,
        max(samples) - min(samples),
        len(samples),
        note,
    )


def percentile(times: Sequence[float], share: float) -> float:
    """Return the smallest time that a ``share`` of all times does not exceed."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def repeat(measure: Callable[[], float], repeats: int = REPEATS) -> list[float]:
    """Call ``measure`` once to warm up, then ``repeats`` times, and return those results."""
    measure()
    return [measure() for _ in range(repeats)]


def repeat_in_turn(
    measures: Sequence[Callable[[], float]], repeats: int = REPEATS
) -> list[list[float]]:
    """Call several measures in turn, A B A B …, so that a drift of the machine affects all alike.
    Return the results of each."""
    for measure in measures:
        measure()
    samples: list[list[float]] = [[] for _ in measures]
    for _ in range(repeats):
        for index, measure in enumerate(measures):
            samples[index].append(measure())
    return samples


def machine() -> dict[str, object]:
    """Describe the machine and the time of the measurement."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT", ""),
    }


def commit() -> str:
    """Return the measured commit, with a + if the working tree differs from it."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        "+" if git("status", "--porcelain") else ""
    )


def report(bench: str, rows: Sequence[Row], json_file: str | None) -> int:
    """Print the table and write the JSON. Return the exit code: 1 if a bar was missed, else
    0."""
    where = machine()
    print(f"{bench} at {commit()} on {where['cpu']}, {where['cores']} cores, load {where['load']}")
    for row in rows:
        verdict = {True: "pass", False: "MISS", None: ""}[row.passed]
        sign = "≤" if row.better == "lower" else "≥"
        bar = "" if row.bar is None else f"{sign} {row.bar:g}"
        value = "not measured" if row.value is None else f"{row.value:.4g} ± {row.spread:.2g}"
        print(f"  {row.name:44s} {value:>20s} {row.unit:10s} {bar:10s} {verdict:5s} {row.note}")
    if json_file:
        data = {
            "bench": bench,
            "commit": commit(),
            "machine": where,
            "rows": [{**asdict(row), "pass": row.passed} for row in rows],
        }
        Path(json_file).write_text(json.dumps(data, indent=1) + "\n")
    missed = [row.name for row in rows if row.passed is False]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0
