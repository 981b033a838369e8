"""Draw the states of a sequence from the table that decides them.

    python -m tools.draw_lifecycle            prints the diagram (Mermaid)
    python -m tools.draw_lifecycle --check    exits 1 if engine/README.md shows another one
    python -m tools.draw_lifecycle --write    writes it into engine/README.md

Rule 1: the drawing comes from `engine.core.text.lifecycle.TRANSITIONS`; there is no second list.
"""

from __future__ import annotations

import sys

from engine.core.text.lifecycle import TRANSITIONS, State
from tools.shown import Shown


def draw() -> str:
    """Return the diagram: one line for each pair of states, with the events that lead from the
    first to the second."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.WAITING.name}"]
    for state, ways in TRANSITIONS.items():
        for target in dict.fromkeys(ways.values()):
            events = ", ".join(event.name for event, end in ways.items() if end is target)
            lines.append(f"    {state.name} --> {target.name}: {events}")
        if not ways:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(lines)


SHOWN = Shown("lifecycle", "tools.draw_lifecycle", draw, str(__doc__).splitlines()[0])

if __name__ == "__main__":
    sys.exit(SHOWN.main())
