"""The frame of every bench: rows with bars, repeats, medians, and a description of the machine.

Rule 1: a figure is the median of at least `REPEATS` runs; the row has its spread, its worse
quartile and n. Rule 2: a bar that the median meets and the worse quartile does not is met by a
hair, and this is said. Rule 3: a bar that could not be checked (because a peer is missing) is
``pass: null``, and this is printed. Rule 4: the names of a bench's rows are unique.
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
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

REPEATS = 5
ROOT = Path(__file__).parents[3]

SeenT = TypeVar("SeenT")


@dataclass(frozen=True)
class Row:
    """One figure. ``bar`` is a limit in ``unit``; ``better`` (lower or higher) is the good side.
    A quarter of the samples are as bad as the ``worse_quartile``, or worse; None of one sample."""

    name: str
    value: float | None
    unit: str
    bar: float | None = None
    better: str = "lower"
    spread: float = 0.0
    n: int = 0
    note: str = ""
    worse_quartile: float | None = None

    @property
    def passed(self) -> bool | None:
        """Whether the median meets the bar; None without a bar or a value."""
        return self._meets(self.value)

    @property
    def by_a_hair(self) -> bool:
        """Whether the median meets the bar, and the worse quartile does not."""
        return bool(self.passed) and self._meets(self.worse_quartile) is False

    @property
    def verdict(self) -> str:
        """What is printed of the bar."""
        if self.by_a_hair:
            return "by a hair"
        return {True: "pass", False: "MISS", None: ""}[self.passed]

    def _meets(self, value: float | None) -> bool | None:
        if self.bar is None or value is None:
            return None
        return value <= self.bar if self.better == "lower" else value >= self.bar


def row_of(
    name: str,
    samples: Sequence[float],
    unit: str,
    *,
    bar: float | None = None,
    better: str = "lower",
    note: str = "",
) -> Row:
    """Return a row with the median of ``samples``, their worse quartile, and their spread, largest
    minus smallest."""
    worse = None
    if len(samples) > 1:
        first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
        worse = third if better == "lower" else first
    return Row(
        name,
        statistics.median(samples),
        unit,
        bar,
        better,
        max(samples) - min(samples),
        len(samples),
        note,
        worse,
    )


def percentile(times: Sequence[float], share: float) -> float:
    """Return the smallest time that a ``share`` of all times does not exceed."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def repeat(measure: Callable[[], SeenT], repeats: int = REPEATS) -> list[SeenT]:
    """Call ``measure`` once to warm up, then ``repeats`` times, and return those results."""
    measure()
    return [measure() for _ in range(repeats)]


def repeat_in_turn(
    measures: Sequence[Callable[[], SeenT]], repeats: int = REPEATS
) -> list[list[SeenT]]:
    """Call several measures in turn, so that a drift of the machine affects all alike, and each
    second turn backwards, so that none always follows the same one: A B C C B A … Return the
    results of each."""
    for measure in measures:
        measure()
    return in_turn(measures, repeats)


def in_turn(measures: Sequence[Callable[[], SeenT]], repeats: int = REPEATS) -> list[list[SeenT]]:
    """Do as `repeat_in_turn`, with measures that are warm."""
    samples: list[list[SeenT]] = [[] for _ in measures]
    there = list(zip(measures, samples, strict=True))
    for turn in range(repeats):
        for measure, found in reversed(there) if turn % 2 else there:
            found.append(measure())
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


def commit(paths: Sequence[str] = ()) -> str:
    """Return the measured commit, with a + if ``paths`` (by default all) are not as committed."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        "+" if git("status", "--porcelain", "--", *paths) else ""
    )


def report(
    bench: str,
    found: Iterable[Row],
    json_file: str | None,
    measured: Sequence[str] = (),
    about: Mapping[str, object] | None = None,
) -> int:
    """Print each row as soon as it is ``found``, and write the JSON. ``measured`` are the paths
    that the bench measures; ``about`` is written beside what is known of every machine. Return the
    exit code: 1 if a bar was missed, else 0.

    Raises:
        SystemExit: Two rows have the same name. Nothing is written.
    """
    where = machine() | dict(about or {})
    at = commit(measured)
    print(f"{bench} at {at} on {where['cpu']}, {where['cores']} cores, load {where['load']}")
    rows: list[Row] = []
    for row in found:
        print(_line(row), flush=True)
        if row.name in {one.name for one in rows}:
            raise SystemExit(f"{bench}: two rows are called {row.name!r}; rename one")
        rows.append(row)
    if json_file:
        data = {
            "bench": bench,
            "commit": at,
            "machine": where,
            "rows": [
                {**asdict(row), "pass": row.passed, "by_a_hair": row.by_a_hair} for row in rows
            ],
        }
        Path(json_file).write_text(json.dumps(data, indent=1) + "\n")
    missed = [row.name for row in rows if row.passed is False]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _line(row: Row) -> str:
    """Return a row as it is printed."""
    value = "not measured" if row.value is None else f"{row.value:.4g} ± {row.spread:.2g}"
    bar = ""
    if row.bar is not None:
        bar = f"{'≤' if row.better == 'lower' else '≥'} {row.bar:g}"
    worse = ""
    if bar and row.worse_quartile is not None:
        worse = f"worse quartile {row.worse_quartile:.4g}"
    line = f"  {row.name:44s} {value:>20s} {row.unit:10s} {bar:10s} {row.verdict:9s}"
    return f"{line} {'; '.join(filter(None, (worse, row.note)))}".rstrip()
