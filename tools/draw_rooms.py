"""Draw the rooms of the product in ten boxes and who imports whom, from the imports in the files.

    python -m tools.draw_rooms            prints the drawing (Mermaid)
    python -m tools.draw_rooms --check    exits 1 if engine/README.md shows another one
    python -m tools.draw_rooms --write    writes it into engine/README.md

Rule 1: every arrow is an import that some file has; `tools/rooms.txt` says what the rooms are, and
`BOXES` which of them share a box. A dotted arrow is an import inside a function, which runs when it
is needed.

Rule 2: three kinds of import are omitted, because nobody could read the rest: imports for types,
which never run; the rooms that any other may need (`COMMON`); and an import of B by A if other
arrows already lead from A to B.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import NamedTuple

from tools.rooms import PRODUCT, imports_of, modules, product_modules, room_of
from tools.shown import Shown

COMMON = (
    *("engine.errors", "engine.status", "engine.logs", "engine.config", "engine.gc_tuning"),
    *("engine.settings", "engine.limits", "engine.images", "engine.processes", "engine.kernels"),
    *("grpc_service._generated", "grpc_service.addresses", "grpc_service.pem"),
)


class Box(NamedTuple):
    """One box of the drawing: what it is for, and the rooms in it with all below them."""

    purpose: str
    rooms: tuple[str, ...]


BOXES = {
    "grpc_service": {
        "cli, app, ray": Box(
            "the commands; the server as a program",
            ("grpc_service", "grpc_service.cli", "grpc_service.app", "grpc_service.ray"),
        ),
        "client": Box("a client without the engine", ("grpc_service.client",)),
        "openai": Box("OpenAI's API over HTTP", ("grpc_service.openai",)),
        "services, access, vllm_engine": Box(
            "the RPCs, codecs, keys and limits",
            ("grpc_service.services", "grpc_service.access", "grpc_service.vllm_engine"),
        ),
        "rpc": Box("gRPC on h2: connections, calls, statuses", ("grpc_service.rpc",)),
    },
    "engine": {
        "api, kinds": Box(
            "what programs call; the parts of each kind of work",
            ("engine", "engine.api", "engine.aio", "engine.kinds"),
        ),
        "requests": Box("one task for each request", ("engine.requests",)),
        "pool": Box("loads, memory, leases", ("engine.pool",)),
        "replica": Box("one step at a time", ("engine.replica",)),
        "core": Box("decides; no torch, no Trio, no clock", ("engine.core",)),
        "worker": Box("runs the model", ("engine.worker",)),
    },
}
Arrow = tuple[str, str]


def box_of(room: str) -> str | None:
    """Return the name of the box that a room of the product is in; None if it is common.

    Raises:
        KeyError: The room is neither in a box nor common.
    """
    boxes = {
        one: name for group in BOXES.values() for name, box in group.items() for one in box.rooms
    }
    whole = room
    while room not in boxes and room not in COMMON:
        room, _, _ = room.rpartition(".")
        if room in ("", *PRODUCT):  # the box of a whole package is not for rooms below it
            raise KeyError(whole)
    return boxes.get(room)


def arrows() -> dict[Arrow, bool]:
    """Return each pair of boxes of which the first imports the second, and whether some file does
    so outside of functions."""
    found: dict[Arrow, bool] = defaultdict(bool)
    for module in product_modules():
        for imported in imports_of(modules()[module].read_text()):
            if not imported.is_type_only and imported.target.split(".")[0] in PRODUCT:
                own, other = (box_of(room_of(one).name) for one in (module, imported.target))
                if own is not None and other is not None and own != other:
                    found[own, other] |= not imported.is_in_function
    return found


def reduced(arrows: set[Arrow]) -> set[Arrow]:
    """Return the arrows without each one whose boxes a path of other arrows connects."""
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
    """Return the drawing: the boxes of each package, and then the arrows."""
    found = arrows()
    lines = ["flowchart TD"]
    for package, group in BOXES.items():
        lines.append(f'    subgraph box_{package} ["{package}"]')
        lines += [f'        {_id(name)}["{name}<br/>{box.purpose}"]' for name, box in group.items()]
        lines.append("    end")
    for source, target in sorted(reduced(set(found))):
        arrow = "-->" if found[source, target] else "-.->"
        lines.append(f"    {_id(source)} {arrow} {_id(target)}")
    return "\n".join(lines)


def _id(name: str) -> str:
    return name.partition(",")[0]


SHOWN = Shown("rooms", "tools.draw_rooms", draw, str(__doc__).splitlines()[0])

if __name__ == "__main__":
    sys.exit(SHOWN.main())
