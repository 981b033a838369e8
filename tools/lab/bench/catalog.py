"""Which benches there are, and what each one measures.

A bench is a module beside this file that assigns ``MEASURES``: the files and folders of the
repository that it measures. Figures say whether one of these had changes that were not committed.
``MEASURES`` is read from the module's text, because importing a bench takes seconds and needs the
development tools.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
FIGURES = ROOT / "tools" / "lab" / "figures"
FOLDER = Path("tools") / "lab" / "bench"


def names(root: Path = ROOT) -> list[str]:
    """Return the names of all benches: their modules, with hyphens."""
    return sorted(
        path.stem.replace("_", "-")
        for path in (root / FOLDER).glob("*.py")
        if _assigned(path) is not None
    )


def measured_paths(name: str, root: Path = ROOT) -> tuple[str, ...]:
    """Return the paths that the bench ``name`` measures, and its own file."""
    path = FOLDER / f"{name.replace('-', '_')}.py"
    return (*(_assigned(root / path) or ()), path.as_posix())


def purpose(name: str, root: Path = ROOT) -> str:
    """Return what the bench ``name`` measures: the first paragraph of its docstring."""
    path = root / FOLDER / f"{name.replace('-', '_')}.py"
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


@cache
def _assigned(path: Path) -> tuple[str, ...] | None:
    """Return what a module assigns to ``MEASURES``, or None."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MEASURES":
            return tuple(ast.literal_eval(node.value))
    return None
