"""Makes tables of the benches' results.

    python -m tools.lab.bench.tables JSON…     prints every row of the files
    python -m tools.lab.bench.tables --check   exits 1 if a page shows other figures than the files
    python -m tools.lab.bench.tables --write   writes the figures into the pages

A printed table has a row for each measurement and a column for each engine or way to compute. Rows
without these are listed separately.

A page has the parts that `tools.lab.bench.claims` describes: the lines between ``<!-- figures: NAME
…-->`` and ``<!-- figures: end -->``. A part is the command, the table, and where it was measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.lab.bench.catalog import FIGURES, ROOT
from tools.lab.bench.claims import CLAIMS, FILES

if TYPE_CHECKING:
    from tools.lab.bench.claims import Claim, Line

# The names that may follow the last colon of a row's name, and then have a column of their own:
# engines, and the ways to compute the same model.
ENGINES = (
    *("triolet", "llama.cpp", "ik_llama.cpp", "openvino"),
    *("vllm", "transformers", "transformers-cb"),
)
WAYS = tuple(
    f"{dtype}{form}" for dtype in ("float32", "bfloat16") for form in ("", " int8", " int4")
)
KINDS = ("int8", "int4", "Q8_0", "Q4_0", "Q4_K_M")  # our quantized weights, and llama.cpp's
COLUMNS = (*ENGINES, *WAYS, *KINDS)
LINE_LENGTH = 100  # of a page's text
PART = re.compile(r"<!-- figures: (?P<name>[\w-]+)[^\n]*-->\n.*?<!-- figures: end -->", re.DOTALL)
HEAD = "<!-- figures: {}, made by `python -m tools.lab.bench.tables --write` -->"
END = "<!-- figures: end -->"
PAGES = tuple(dict.fromkeys(claim.page for claim in CLAIMS))

# ---- printed: every row


def rounded(value: float, digits: int) -> str:
    """Return a number rounded to so many significant digits; from 1,000 on, to an integer."""
    short = float(f"{value:.{digits}g}")
    return f"{round(value)}" if value >= 1000 else f"{short:g}"


def figure(row: dict[str, Any] | None) -> str:
    """Return a cell: the median, bold if a bar was missed, and its spread."""
    if row is None or row["value"] is None:
        return "–"
    spread = f" ± {rounded(row['spread'], 2)}" if row["n"] > 1 and row["spread"] else ""
    return f"{median(row)}{spread}"


def median(row: dict[str, Any] | None) -> str:
    """Return a cell without the spread."""
    if row is None or row["value"] is None:
        return "–"
    text = rounded(row["value"], 3)
    return f"**{text}**" if row["pass"] is False else text


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


def printed(file: Path) -> str:
    """Return the tables of a file below its name."""
    rows = json.loads(file.read_text("utf-8"))["rows"]
    return "\n".join([f"## {file.stem}", "", *tables(rows), ""])


# ---- in pages: the rows that a claim names


def part(claim: Claim) -> str:
    """Return what a page shows of a claim: the commands, the table, and where it was measured. If
    the claim has a ``brief``, that and a column with the benches' names replace the commands. A
    claim without its files is not measured yet.

    Raises:
        KeyError: A row of the claim is not in its file.
    """
    if not all((FIGURES / f"{name}.json").exists() for name in claim.files):
        return "Not measured yet."
    data = {name: json.loads((FIGURES / f"{name}.json").read_text("utf-8")) for name in claim.files}
    rows = {name: {row["name"]: row for row in one["rows"]} for name, one in data.items()}
    shown = [one for one in claim.lines if not one.is_new or set(one.rows) & set(rows[one.file])]
    columns, ends = claim.columns, [""] * len(shown)
    if claim.brief:
        columns, ends = (*columns, "bench"), [f" `{data[one.file]['bench']}` |" for one in shown]
    table = [
        f"| | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
        *(_line(one, rows[one.file]) + end for one, end in zip(shown, ends, strict=True)),
    ]
    if claim.brief:
        return "\n".join([*table, "", *_wrapped(f"{claim.brief} {_briefly(data)}")])
    commands = ["```sh", *(_command(name, one["bench"]) for name, one in data.items()), "```"]
    return "\n".join([*commands, "", *table, "", *_wrapped(_origins(data))])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, LINE_LENGTH, break_on_hyphens=False, break_long_words=False)


def _command(name: str, bench: str) -> str:
    only = f'BENCH_ONLY="{FILES[name].only}" ' if FILES[name].only else ""
    line = f"{only}python -m tools.lab.bench {bench} --json tools/lab/figures/{name}.json"
    return line if len(line) <= LINE_LENGTH else line.replace(" python", " \\\n    python", 1)


def _line(line: Line, rows: dict[str, dict[str, Any]]) -> str:
    cells = []
    for index, name in enumerate(line.rows):
        if name is not None and name not in rows:
            raise KeyError(f"{line.file}.json has no row {name!r}")
        has_spread = index in line.spread or index - len(line.rows) in line.spread
        cells.append((figure if has_spread else median)(None if name is None else rows[name]))
    unit = f", {line.unit}" if line.unit else ""
    return f"| {line.label}{unit} | {' | '.join(cells)} |"


def _origins(data: dict[str, dict[str, Any]]) -> str:
    """Return on which machine the files of a claim were measured, when, and at which commits."""
    times: dict[str, list[str]] = {}
    for name, one in data.items():
        when, load = one["machine"]["when"].split()[0], one["machine"]["load"]
        times.setdefault(_machine(name, one), []).append(
            f"{when} at commit {one['commit']}, load {load}"
        )
    found = "; ".join(f"on {machine} {', '.join(at)}" for machine, at in times.items())
    return f"Measured {found}."


def _briefly(data: dict[str, dict[str, Any]]) -> str:
    machines = " and ".join(dict.fromkeys(_machine(name, one) for name, one in data.items()))
    days = sorted(one["machine"]["when"].split()[0] for one in data.values())
    return f"On {machines}, {days[0]} to {days[-1]}, by `python -m tools.lab.bench BENCH`."


def _machine(name: str, data: dict[str, Any]) -> str:
    where = data["machine"]
    kind = FILES[name].machine or ", ".join(where.get("has", ()))
    return f"{where['cores']} cores of {where['cpu']}" + (f" ({kind})" if kind else "")


def _filled(match: re.Match[str]) -> str:
    claims = {claim.name: claim for claim in CLAIMS}
    name = match["name"]
    return f"{HEAD.format(name)}\n{part(claims[name])}\n{END}"


def written(page: str, text: str) -> str:
    """Return the ``text`` of a page with its parts made from the figures.

    Raises:
        ValueError: The page does not have a part for each of its claims, once and in their order.
        KeyError: There is no such row in a claim's file.
    """
    wanted = [claim.name for claim in CLAIMS if claim.page == page]
    if (found := [match["name"] for match in PART.finditer(text)]) != wanted:
        raise ValueError(f"{page} has the parts {found} and not {wanted}")
    return PART.sub(_filled, text)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.lab.bench.tables")
    parser.add_argument("files", type=Path, nargs="*", metavar="JSON")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare the pages with the figures")
    mode.add_argument("--write", action="store_true", help="write the figures into the pages")
    args = parser.parse_args(argv)
    for file in args.files:
        print(printed(file))
    code = 0
    for page in PAGES if args.check or args.write else ():
        text = (ROOT / page).read_text("utf-8")
        wanted = written(page, text)
        if args.write:
            (ROOT / page).write_text(wanted, "utf-8")
        elif text != wanted:
            hint = "run python -m tools.lab.bench.tables --write"
            print(f"{page} shows other figures; {hint}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
