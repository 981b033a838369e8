"""Draws the states of a sequence from the table that decides them.

    python -m tools.draw_lifecycle            prints the diagram (Mermaid)
    python -m tools.draw_lifecycle --check    exits 1 if engine/README.md shows another one
    python -m tools.draw_lifecycle --write    puts it into engine/README.md

Rule 1: everything drawn comes from `engine.core.lifecycle.TRANSITIONS`; there is no second list.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.core.lifecycle import TRANSITIONS, State

README = Path(__file__).parent.parent / "engine" / "README.md"
BEGIN = "<!-- lifecycle: drawn by `python -m tools.draw_lifecycle --write` -->"
END = "<!-- lifecycle: end -->"


def draw() -> str:
    """The diagram: one line per way from a state to another, events that share one together."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.WAITING.name}"]
    for state, ways in TRANSITIONS.items():
        for target in dict.fromkeys(ways.values()):
            events = ", ".join(event.name for event, end in ways.items() if end is target)
            lines.append(f"    {state.name} --> {target.name}: {events}")
        if not ways:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(lines)


def embed(page: str, diagram: str) -> str:
    """``page`` with what stands between its markers replaced by ``diagram``.

    Raises:
        ValueError: the page does not hold each marker once, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    shown, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in shown + after or END in before + after:
        raise ValueError("the page needs both markers, once each and in order")
    return f"{before}{BEGIN}\n```mermaid\n{diagram}\n```\n{END}{after}"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tools.draw_lifecycle", description=__doc__.splitlines()[0]
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare with engine/README.md")
    mode.add_argument("--write", action="store_true", help="rewrite it there")
    args = parser.parse_args(argv)
    if not (args.check or args.write):
        print(draw())
        return 0
    page = README.read_text()
    wanted = embed(page, draw())
    if args.write:
        README.write_text(wanted)
    elif page != wanted:
        print(
            "engine/README.md shows other states than engine.core.lifecycle has; "
            "run python -m tools.draw_lifecycle --write",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
