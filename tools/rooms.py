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
class Line:
    """A line of the table: a room, or a file of one."""

    name: str
    place: int  # the number of lines above it
    room: str  # the room itself, or the room of the file
    arrows: frozenset[str] = frozenset()
    libraries: frozenset[str] = frozenset()
    has_files: bool = False


def parse(table: str) -> dict[str, Line]:
    """Return the lines of a table by the whole name of what each is about.

    Raises:
        ValueError: A line names something that no line above it is about.
    """
    found: dict[str, Line] = {}
    room = line = None
    for text in table.splitlines():
        if text.startswith("#"):
            continue
        head, _, libraries = text.partition(";")
        head, *arrows = head.split("<")
        if head.strip():
            is_file = head.startswith(" ")
            name = f"{room.name}.{head.strip()}" if is_file and room else head.strip()
            line = Line(name, len(found), room.name if is_file and room else name)
            found[name] = line
            if is_file and room:
                room.has_files = True
            else:
                room = line
        if line:
            named = {_whole(name, line, found) for part in arrows for name in part.split()}
            line.arrows |= named
            line.libraries |= frozenset(libraries.split())
    return found


def _whole(name: str, line: Line, above: dict[str, Line]) -> str:
    package = line.name.split(".")[0] if line.room == line.name else line.room
    for whole in (f"{package}.{name}", name):
        if whole in above and whole != line.name:
            return whole
    raise ValueError(f"{line.name} may import only what a line above it is about, not {name}")


@cache
def lines() -> dict[str, Line]:
    """Return the lines of `tools/rooms.txt`."""
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
    """Return every import of a file, wherever it stands."""
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
    """Return every first-party module by name, without generated code."""
    found = {}
    for top in FIRST_PARTY:
        for path in (ROOT / top).rglob("*.py"):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if "_generated" in parts or "node_modules" in parts:
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


def line_of(module: str) -> Line:
    """Return the line of the table that a module belongs to: the longest name that holds it."""
    return lines()[max((name for name in lines() if is_within(module, name)), key=len)]
