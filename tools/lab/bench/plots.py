"""Draws the benches' results: `python -m tools.lab.bench.plots FOLDER JSON…`; needs
`triolet[measure]`.

It takes the JSON files of `step`, `serve` and `workers`, several of each if they were measured in
parts. It writes ``throughput.png`` (decode tokens/s by batch), ``latency.png`` (time to the first
token and between tokens, by clients) and ``workers.png`` (throughput by devices) into the folder,
each if there are rows for it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

DECODE = re.compile(r"(?P<shape>\w+) decode B=(?P<batch>\d+) at 128: (?P<engine>[\w.]+)")
LATENCY = re.compile(
    r"(?P<clients>\d+) clients?, (?P<what>first token|between tokens) "
    r"(?P<part>p50|p99): (?P<engine>[\w.]+)"
)
WORKERS = re.compile(
    r"(?P<panel>simulated) (?P<devices>\d+) devices? (?P<what>against one|behind one lock)"
)
COLORS = {
    "triolet": "#c8442d",
    "llama.cpp": "#2b6ca3",
    "vllm": "#d39b22",
    "transformers": "#777777",
}
DPI = 110


@dataclass(frozen=True)
class Point:
    """A point of a line."""

    x: int
    value: float


def read_rows(files: list[Path]) -> tuple[list[dict[str, Any]], str]:
    """Return the measured rows of all files and a description of their origins. Of rows with the
    same name, the last file's counts."""
    found: dict[str, dict[str, Any]] = {}
    origins = set()
    for file in files:
        data = json.loads(file.read_text())
        origins.add(f"{data['machine']['cpu']}, {data['machine']['cores']} cores, {data['commit']}")
        for row in data["rows"]:
            if row["value"] is not None:
                found[row["name"]] = row
    return list(found.values()), "; ".join(sorted(origins))


def _series(
    rows: list[dict[str, Any]], pattern: re.Pattern[str], panel: str, line: str, x: str
) -> dict[str, dict[str, list[Point]]]:
    """Return panel → line → points in order, from the rows whose names match ``pattern``.
    ``panel``, ``line`` and ``x`` name groups of the pattern."""
    found: dict[str, dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if match := pattern.fullmatch(row["name"]):
            key = " ".join(match[part] for part in line.split())
            found[match[panel]][key].append(Point(int(match[x]), row["value"]))
    for lines in found.values():
        for points in lines.values():
            points.sort(key=lambda point: point.x)
    return found


def draw(
    panels: dict[str, dict[str, list[Point]]], labels: tuple[str, str], origin: str, file: Path
) -> None:
    """Draw a picture with its panels side by side and logarithmic axes."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.9), squeeze=False)
    for axis, (title, lines) in zip(axes[0], sorted(panels.items(), reverse=True), strict=True):
        for name, points in lines.items():
            engine, _, part = name.partition(" ")
            axis.plot(
                [point.x for point in points],
                [point.value for point in points],
                marker="o",
                color=COLORS.get(engine),
                linestyle="--" if part == "p99" else "-",
                label=name,
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        ticks = sorted({point.x for points in lines.values() for point in points})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set(title=title, xlabel=labels[0], ylabel=labels[1])
        axis.grid(which="both", alpha=0.2)
        axis.legend(fontsize=8)
    figure.text(0.01, 0.01, origin, fontsize=6, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)
    print(f"wrote {file}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.lab.bench.plots")
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="+", metavar="JSON")
    args = parser.parse_args()
    rows, origin = read_rows(args.files)
    decode = _series(rows, DECODE, "shape", "engine", "batch")
    latency = _series(rows, LATENCY, "what", "engine part", "clients")
    named = [row | {"name": f"simulated {row['name']}"} for row in rows]
    devices = _series(named, WORKERS, "panel", "what", "devices")
    if devices:
        draw(devices, ("devices", "times one"), origin, args.folder / "workers.png")
    if decode:
        labels = ("sequences decoded together", "tokens/s")
        draw(decode, labels, origin, args.folder / "throughput.png")
    if latency:
        draw(latency, ("clients", "ms"), origin, args.folder / "latency.png")


if __name__ == "__main__":
    main()
