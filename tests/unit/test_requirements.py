"""docs/requirements.md has each requirement in one row, and names tests that exist."""

import ast
import re
from pathlib import Path

from tests.support.programs import ROOT

PAGE = (ROOT / "docs" / "requirements.md").read_text()
ROWS = PAGE[PAGE.index("| requirements |") :].splitlines()[2:]
NUMBERS = re.compile(r"R(\d+)(?:–R(\d+))?")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def numbers(row: str) -> list[int]:
    """Return the numbers of the requirements that a row stands for."""
    found = NUMBERS.findall(row.split("|")[1])
    return [n for first, last in found for n in range(int(first), int(last or first) + 1)]


def names(path: Path) -> set[str]:
    """Return what a file of tests defines."""
    top = ast.parse(path.read_text()).body if path.exists() else []
    assigned = [target for node in top if isinstance(node, ast.Assign) for target in node.targets]
    return {str(getattr(node, "name", getattr(node, "id", ""))) for node in [*top, *assigned]}


def test_each_requirement_stands_in_one_row_of_a_short_table():
    assert len(ROWS) <= 60
    assert sorted(n for row in ROWS for n in numbers(row)) == list(range(1, 212))


def test_each_row_names_a_test_that_exists():
    kept = [row for row in ROWS if "| dropped: " not in row]
    assert [row for row in kept if not TEST.search(row)] == []
    named = [found for row in kept for found in TEST.findall(row)]
    assert [f"{path}::{name}" for path, name in named if name not in names(ROOT / path)] == []
