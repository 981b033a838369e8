"""Makes tables of the benches' results: `python -m tools.lab.bench.tables JSON…` prints them, and
`python -m tools.lab.bench.tables --write docs/performance.md` puts them into the page. A test
compares the page with its figures.

In a page, the lines between ``<!-- table: NAME REGEX -->`` and ``<!-- end -->`` are made from
``tools/lab/figures/NAME.json``. They contain the rows whose names the regular expression finds, and
the machine and the commit.

A table has a row for each measurement and a column for each engine or way to compute. Rows without
these are listed separately. Of rows with the same name, the last file's counts.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.lab.bench.catalog import FIGURES

if TYPE_CHECKING:
    from collections.abc import Iterable

PART = re.compile(
    r"(?P<head><!-- table: (?P<name>[\w-]+)(?: (?P<pattern>[^\n]*?))? -->)\n"
    r".*?(?P<tail><!-- end -->)",
    re.DOTALL,
)
# What follows the last colon of a row's name and has a column of its own: engines, and the ways to
# compute the same model.
ENGINES = ("triolet", "llama.cpp", "vllm", "transformers", "transformers-cb")
WAYS = tuple(
    f"{dtype}{form}" for dtype in ("float32", "bfloat16") for form in ("", " int8", " int4")
)
KINDS = ("int8", "int4", "Q8_0", "Q4_0", "Q4_K_M")  # of small weights: ours, and llama.cpp's
COLUMNS = (*ENGINES, *WAYS, *KINDS)
LINE_LENGTH = 100  # of the page's text


def figure(row: dict[str, Any] | None) -> str:
    """Return a cell: the median, bold if a bar was missed, and its spread."""
    if row is None or row["value"] is None:
        return "–"
    text = f"{row['value']:.3g}" if row["value"] < 1000 else f"{row['value']:.0f}"
    spread = f" ± {row['spread']:.2g}" if row["n"] > 1 and row["spread"] else ""
    return f"**{text}**{spread}" if row["pass"] is False else f"{text}{spread}"


def bar(row: dict[str, Any]) -> str:
    """Return a row's bar, whether it was met, and the worse quartile if it is known; or ""."""
    if row["bar"] is None:
        return ""
    sign = "≤" if row["better"] == "lower" else "≥"
    how = "met by a hair" if row.get("by_a_hair") else "met" if row["pass"] else "missed"
    worse = row.get("worse_quartile")
    return f"{sign} {row['bar']:g}, {how}" + ("" if worse is None else f"; quartile {worse:.3g}")


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Return the tables as lines of Markdown: the rows with engines first, then the others."""
    by_case: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    others = []
    for row in rows:
        case, _, engine = row["name"].rpartition(": ")
        if engine in COLUMNS:
            by_case.setdefault((case, row["unit"]), {})[engine] = row
        else:
            others.append(row)
    used = [one for one in COLUMNS if any(one in found for found in by_case.values())]
    lines = []
    if by_case:
        lines += [f"| | {' | '.join(used)} | |", "|---" * (len(used) + 2) + "|"]
        for (case, unit), found in by_case.items():
            cells = " | ".join(figure(found.get(engine)) for engine in used)
            lines.append(f"| {case} | {cells} | {unit} |")
        lines.append("")
    if others:
        lines += ["| | | | bar |", "|---|---|---|---|"]
        lines += [
            f"| {one['name']} | {figure(one)} | {one['unit']} | {bar(one)} |" for one in others
        ]
    return lines


def read(files: Iterable[Path], pattern: str = "") -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows whose names ``pattern`` finds, and descriptions of their origins."""
    found: dict[str, dict[str, Any]] = {}
    origins = []
    for file in files:
        data = json.loads(file.read_text())
        rows = {row["name"]: row for row in data["rows"] if re.search(pattern, row["name"])}
        found |= rows
        where = data["machine"]
        machine = f"{where['cpu']}, {where['cores']} cores, load {where['load']}"
        origin = f"{where['when']} on {machine}, commit {data['commit']}"
        if rows and origin not in origins:
            origins.append(origin)
    return list(found.values()), origins


def filled(match: re.Match[str], figures: Path) -> str:
    """Return a page's part with a new table."""
    name, pattern = match["name"], match["pattern"] or ""
    file = figures / f"{name}.json"
    rows, origins = read([file] if file.exists() else [], pattern)
    body = tables(rows) if rows else ["Not measured yet."]
    if origins:
        origin = f"Measured {'; '.join(origins)}."
        body += ["", *textwrap.wrap(origin, LINE_LENGTH, break_on_hyphens=False)]
    return "\n".join([match["head"], *body, match["tail"]])


def written(page: str, figures: Path) -> str:
    """Return a page with its tables made from the files in ``figures``."""
    return PART.sub(lambda part: filled(part, figures), page)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.lab.bench.tables")
    parser.add_argument("files", type=Path, nargs="*", metavar="JSON")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    args = parser.parse_args()
    if args.files:
        print("\n".join(tables(read(args.files)[0])))
    if args.write:
        page = args.write.read_text("utf-8")
        args.write.write_text(written(page, FIGURES), "utf-8")


if __name__ == "__main__":
    main()
