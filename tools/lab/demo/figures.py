"""The parts that the measurements of the demo models share: shares, bars, and the report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SIZE_BYTES_MAX = 4 * 1000 * 1000  # of an encoder's files

Figures = dict[str, float | int]


def share(outcomes: Iterable[bool]) -> float:
    """Return the share of outcomes that are true."""
    results = [bool(outcome) for outcome in outcomes]
    return round(sum(results) / max(1, len(results)), 4)


def size_of(folder: Path) -> int:
    """Return the total size of a model's files in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def missed_bars(
    figures: Figures, bars: Mapping[str, float], size_bytes_max: int = SIZE_BYTES_MAX
) -> list[str]:
    """Return a line for each bar that is missed. Figures must not be below their bars, nor the size
    above its bar."""
    missed = [f"{key} {figures[key]} < {bar}" for key, bar in bars.items() if figures[key] < bar]
    if figures["size_bytes"] > size_bytes_max:
        missed.append(f"size_bytes {figures['size_bytes']} > {size_bytes_max}")
    return missed


def read_options(doc: str | None, model: Path, count: int) -> argparse.Namespace:
    """Parse the options of a measurement: model, seed, count, json, verbose."""
    options = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    options.add_argument("--model", type=Path, default=model)
    options.add_argument("--seed", type=int, default=0, help="of the held-out texts (default 0)")
    options.add_argument("--count", type=int, default=count, help=f"of them (default {count})")
    options.add_argument("--json", type=Path, help="also write the figures here")
    options.add_argument("--verbose", action="store_true", help="print what went wrong")
    return options.parse_args()


def print_measured(
    given: argparse.Namespace,
    measured: tuple[Figures, Sequence[str]],
    bars: Mapping[str, float],
    size_bytes_max: int = SIZE_BYTES_MAX,
) -> int:
    """Print the figures, with --verbose also the lines that say what went wrong, and return the
    exit code of `report`."""
    figures, wrong = measured
    for line in wrong if given.verbose else ():
        print(line)
    return report(figures, bars, given.json, size_bytes_max)


def report(
    figures: Figures,
    bars: Mapping[str, float],
    file: Path | None,
    size_bytes_max: int = SIZE_BYTES_MAX,
) -> int:
    """Print the figures, write them into `file` if there is one, and return the exit code: 1 if a
    bar is missed."""
    for key, value in figures.items():
        bar = f"   (bar: {bars[key]})" if key in bars else ""
        print(f"{key:32} {value}{bar}")
    missed = missed_bars(figures, bars, size_bytes_max)
    for line in missed:
        print(f"MISSED: {line}")
    if file:
        file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 1 if missed else 0
