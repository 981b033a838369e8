"""Read the rooms from `tools/rooms.txt`, and the imports from the files.

The test of the layers and `tools.draw_rooms` use this.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".txt")
PRODUCT = ("engine", "grpc_service")
FIRST_PARTY = (*PRODUCT, "tests", "tools")


@dataclass
class Room:
    """A room: which others and which libraries it may import."""

    name: str
    place: int  # the number of rooms above it
    arrows: frozenset[str] = frozenset()
    libraries: frozenset[str] = frozenset()


def parse(table: str) -> dict[str, Room]:
    """Return the rooms of a table by their whole names.

    Raises:
        ValueError: A line names something that is no room above it.
    """
    found: dict[str, Room] = {}
    room = None
    for text in table.splitlines():
        if text.startswith("#"):
            continue
        head, _, libraries = text.partition(";")
        head, *arrows = head.split("<")
        if head.strip():
            room = found[head.strip()] = Room(head.strip(), len(found))
        if room:
            room.arrows |= {_whole(name, room, found) for part in arrows for name in part.split()}
            room.libraries |= frozenset(libraries.split())
    return found


def _whole(name: str, room: Room, above: dict[str, Room]) -> str:
    package = room.name.split(".")[0]
    for whole in (f"{package}.{name}", name):
        if whole in above and whole != room.name:
            return whole
    raise ValueError(f"{room.name} may import only rooms above it, not {name}")


@cache
def rooms() -> dict[str, Room]:
    """Return the rooms of `tools/rooms.txt`."""
    return parse(TABLE.read_text())


@dataclass(frozen=True)
class Import:
    """The target of one import statement. A relative import is always an error."""

    target: str
    is_type_only: bool = False
    is_in_function: bool = False
    is_relative: bool = False


@cache
def imports_of(source: str) -> tuple[Import, ...]:
    """Return every import of a source text, also those inside functions."""
    return tuple(_imports(ast.parse(source), is_type_only=False, is_in_function=False))


def _imports(node: ast.AST, *, is_type_only: bool, is_in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        is_guarded = isinstance(node, ast.If) and _is_type_checking(node) and child in node.body
        type_only = is_type_only or is_guarded
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, type_only, is_in_function)
        elif isinstance(child, ast.ImportFrom):
            for target in sorted(_targets(child)):
                yield Import(target, type_only, is_in_function, is_relative=child.level > 0)
        else:
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _imports(
                child, is_type_only=type_only, is_in_function=is_in_function or is_function
            )


def _targets(node: ast.ImportFrom) -> set[str]:
    """Return the targets of ``from a import b``: ``a.b`` if that is a module, else ``a``."""
    module = node.module or ""
    return {
        full if full in modules() else module
        for full in (f"{module}.{alias.name}" for alias in node.names)
    }


def _is_type_checking(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def modules() -> dict[str, Path]:
    """Return every first-party module by name, without the code of the protos."""
    found = {}
    for top in FIRST_PARTY:
        for path in (ROOT / top).rglob("*.py"):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[:2] == ["grpc_service", "_generated"] or "node_modules" in parts:
                continue
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


def product_modules() -> list[str]:
    """Return the names of the product's modules."""
    return [name for name in modules() if name.split(".")[0] in PRODUCT]


def is_within(name: str, package: str) -> bool:
    """Return whether a module is the package or inside it."""
    return name == package or name.startswith(f"{package}.")


def room_of(module: str) -> Room:
    """Return the room that a module belongs to: the one with the longest matching name."""
    return rooms()[max((name for name in rooms() if is_within(module, name)), key=len)]
