"""Draw the rooms of the product and who imports whom, from the imports in the files.

    python -m tools.draw_rooms            prints the drawing (Mermaid)
    python -m tools.draw_rooms --check    exits 1 if engine/README.md shows another one
    python -m tools.draw_rooms --write    writes it into engine/README.md

Rule 1: every arrow is an import that some file has; `tools/rooms.txt` only says what the rooms are.
A dotted arrow is an import inside a function, which runs when it is needed.

Rule 2: three kinds of import are omitted, because nobody could read the rest: imports for types,
which never run; the single files that any room may need (`COMMON`); and an import of B by A if
other arrows already lead from A to B.
"""

from __future__ import annotations

import sys
from collections import defaultdict

from tools.rooms import PRODUCT, imports_of, line_of, modules, product_modules
from tools.rooms import lines as rooms
from tools.shown import Shown

COMMON = {
    *("engine.errors", "engine.status", "engine.logs", "engine.config"),
    *("engine.gc_tuning", "engine.memory_limit"),
}
BOXES = ("grpc_service", "engine", "engine.core", "engine.worker")  # one inside the other
Arrow = tuple[str, str]


def arrows() -> dict[Arrow, bool]:
    """Return which room imports which, and whether a file does so outside of functions."""
    found: dict[Arrow, bool] = defaultdict(bool)
    for module in product_modules():
        for imported in imports_of(modules()[module].read_text()):
            if not imported.is_type_only and imported.target.split(".")[0] in PRODUCT:
                own, other = line_of(module).room, line_of(imported.target).room
                if own != other and COMMON.isdisjoint((own, other)):
                    found[own, other] |= not imported.is_in_function
    return found


def reduced(arrows: set[Arrow]) -> set[Arrow]:
    """Return the arrows without those that other arrows make superfluous."""
    kept = set(arrows)
    for source, target in sorted(arrows):
        kept.remove((source, target))
        if not _leads(kept, source, target):
            kept.add((source, target))
    return kept


def _leads(arrows: set[Arrow], source: str, target: str) -> bool:
    reached = {source}
    while more := {end for begin, end in arrows if begin in reached} - reached:
        reached |= more
    return target in reached


def draw() -> str:
    """Return the drawing: a box for each package, in it its rooms, and then the arrows."""
    found = arrows()
    drawn = [name for name in rooms() if any(name in arrow for arrow in found)]
    lines = ["flowchart TD", *_box("grpc_service", drawn), *_box("engine", drawn)]
    for source, target in sorted(reduced(set(found))):
        arrow = "-->" if found[source, target] else "-.->"
        lines.append(f"    {_id(source)} {arrow} {_id(target)}")
    return "\n".join(lines)


def _box(name: str, drawn: list[str], indent: str = "    ") -> list[str]:
    """Return the lines of a box: what is directly in it, and the boxes inside it."""
    lines = [f'{indent}subgraph box_{_id(name)} ["{name.replace(".", "/")}"]']
    for room in drawn:
        if max((box for box in BOXES if _is_in(room, box)), key=len) == name:
            label = room.removeprefix(f"{name}.").replace(".", "/")
            lines.append(f'{indent}    {_id(room)}["{"*.py" if room == name else label}"]')
    for box in BOXES:
        if box.rpartition(".")[0] == name:
            lines += _box(box, drawn, f"{indent}    ")
    return [*lines, f"{indent}end"]


def _id(name: str) -> str:
    return name.replace(".", "_")


def _is_in(room: str, box: str) -> bool:
    return room == box or room.startswith(f"{box}.")


SHOWN = Shown("rooms", "tools.draw_rooms", draw, str(__doc__).splitlines()[0])

if __name__ == "__main__":
    sys.exit(SHOWN.main())
