"""The evidence of each requirement exists: a test that cites it, a bench's row, a page's heading.

In docs/requirements.md, the point below a requirement names what would fail, or be wrong, without
it. A test cites a requirement in its docstring, in its body, or in a comment above it.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs") / "requirements.md"

ITEM = re.compile(r"^- \*\*R(\d+)\*\* (.+?)(?=^- \*\*|^#|\Z)", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
SCRIPT = re.compile(r"`(tests/golden/\w+\.txt)`")
BENCH = re.compile(r'`(tools/lab/bench/\w+\.py)`(?:, row "([^"]+)")?')
HEADING = re.compile(r"\[[^\]]+\]\(([\w./-]+\.md)#([\w-]+)\)")
DEPARTURE = re.compile(r"\bdeparture ([a-z])\b")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
RANGE = re.compile(r"\bR\d{1,3} ?[-–] ?R?\d{1,3}\b")
SEARCHED = ("engine", "grpc_service", "proto", "deploy", "docs", "tests", "tools")
SUFFIXES = (".py", ".md", ".proto", ".txt", ".sh", ".h", ".cpp", ".yaml", "")


def faults(root: Path) -> Iterator[str]:
    """Yield what is wrong with the evidence of the requirements in ``root``."""
    for number, item in ITEM.findall((root / PAGE).read_text()):
        points = item.split("\n  - ")[1:]
        if len(points) != 1:
            yield f"R{number} has {len(points)} points of evidence"
            continue
        yield from (f"R{number}: {why}" for why in _faults_of(root, number, points[0]) if why)


def _faults_of(root: Path, number: str, point: str) -> Iterator[str]:
    """Yield what is wrong with each part of one point of evidence; "" for a part that is right."""
    line = " ".join(point.split())
    found = [TEST.findall(line), SCRIPT.findall(line), BENCH.findall(line), HEADING.findall(line)]
    if not any(found):
        yield "its evidence names no test, bench or page"
    tests, scripts, benches, headings = found
    yield from (_fault_of_test(root, *test, number) for test in tests)
    yield from (_fault_of_file(root, script, number) for script in scripts)
    yield from (_fault_of_bench(root, *bench, number) for bench in benches)
    yield from (_fault_of_heading(root, *heading) for heading in headings)
    for letter in DEPARTURE.findall(line):
        if f"\n- **{letter}. " not in (root / "docs" / "decisions.md").read_text():
            yield f"there is no departure {letter}"


def cites(text: str, number: str) -> bool:
    """Return whether a text names a requirement."""
    return re.search(rf"(?<!\w)R{number}(?!\w)", text) is not None


@cache
def _parsed(path: Path) -> ast.Module | None:
    return ast.parse(path.read_text()) if path.exists() else None


def _fault_of_test(root: Path, path: str, name: str, number: str) -> str:
    tree = _parsed(root / path)
    node = None if tree is None else next((one for one in tree.body if name in _names(one)), None)
    if node is None:
        return f"{path} has no {name}"
    decorators = getattr(node, "decorator_list", [])
    if "pytest.mark.full" in map(ast.unparse, decorators):
        return f"{name} runs only with --full"
    lines = (root / path).read_text().splitlines()
    first = min([one.lineno for one in decorators] + [node.lineno]) - 1
    while lines[first - 1].startswith("#"):
        first -= 1
    text = "\n".join(lines[first : node.end_lineno])
    return "" if cites(text, number) else f"{path}::{name} does not cite it"


def _names(node: ast.stmt) -> set[str]:
    """Return what a statement at the top of a test file defines."""
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {getattr(node, "name", "")}


def _fault_of_file(root: Path, path: str, number: str) -> str:
    if not (root / path).exists():
        return f"there is no {path}"
    return "" if cites((root / path).read_text(), number) else f"{path} does not cite it"


def _fault_of_bench(root: Path, path: str, row: str, number: str) -> str:
    if not (why := _fault_of_file(root, path, number)) and row:
        tree = _parsed(root / path)
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        if not any(isinstance(text, str) and row in text for text in texts):
            return f"{path} has no row {row!r}"
    return why


def _fault_of_heading(root: Path, page: str, anchor: str) -> str:
    path = root / "docs" / page
    if not path.exists():
        return f"there is no {page}"
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-") for text in headings}
    return "" if anchor in anchors else f"{page} has no heading #{anchor}"


def test_each_requirement_has_evidence_that_exists():
    """R99."""
    assert list(faults(ROOT)) == []


def test_requirements_are_cited_one_by_one_and_not_in_ranges():
    files = [
        path
        for folder in SEARCHED
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in SUFFIXES
        if not {"node_modules", "__pycache__", "figures", "third_party"} & set(path.parts)
    ]
    found = {
        path.relative_to(ROOT).as_posix(): line
        for path in [*files, ROOT / "README.md", ROOT / "CHANGELOG.md"]
        for line in path.read_text(errors="replace").splitlines()
        if RANGE.search(line)
        # the page's headings and its table of sources
        if path != ROOT / PAGE or not line.startswith(("#", "|"))
    }
    assert found == {}


# ---- the checker itself ----------------------------------------------------------------------


TESTS = '''
"""Tests of R8."""


def test_cites():
    """R7: as it should."""


# R7
@pytest.mark.parametrize("n", [1])
def test_is_cited_above(n):
    pass


def test_cites_another():
    """R77, xR7."""


# R7
@pytest.mark.full
def test_is_long():
    pass


# R7, R8
TestMachine = Machine.TestCase
'''


@pytest.fixture
def faults_of(tmp_path):
    """Return a function that returns the faults of a requirement with this evidence."""
    for path, text in {
        "tests/unit/test_a.py": TESTS,
        "tests/golden/a.txt": "# Source: R7.\n",
        "tools/lab/bench/a.py": '"""Measures (R7)."""\nrow = row_of(f"time, {n} rows", [])\n',
        "docs/page.md": "# Page\n\n## Who may call?\n\n```\n# no heading\n```\n",
        "docs/decisions.md": "## Departures\n\n- **a. One** (D1).\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def find(evidence):
        (tmp_path / PAGE).write_text(f"# R\n\n- **R7** What holds.\n{evidence}\n\n## Next\n")
        return list(faults(tmp_path))

    return find


@pytest.mark.parametrize(
    "evidence",
    [
        "`tests/unit/test_a.py::test_cites`",
        "`tests/unit/test_a.py::test_is_cited_above`,\n    `tests/unit/test_a.py::TestMachine`",
        "`tests/golden/a.txt`",
        "`tools/lab/bench/a.py`",
        '`tools/lab/bench/a.py`, row\n    "rows"',
        "[page.md: Who may call](page.md#who-may-call). This is departure a.",
    ],
)
def test_evidence_that_is_there_is_no_fault(faults_of, evidence):
    assert faults_of(f"  - {evidence}") == []


@pytest.mark.parametrize(
    ("evidence", "fault"),
    [
        ("", "R7 has 0 points of evidence"),
        ("  - `tests/golden/a.txt`\n  - `tests/golden/a.txt`", "R7 has 2 points of evidence"),
        ("  - It is so.", "R7: its evidence names no test, bench or page"),
        ("  - `tests/unit/test_b.py::test_cites`", "R7: tests/unit/test_b.py has no test_cites"),
        ("  - `tests/unit/test_a.py::test_b`", "R7: tests/unit/test_a.py has no test_b"),
        (
            "  - `tests/unit/test_a.py::test_cites_another`",
            "R7: tests/unit/test_a.py::test_cites_another does not cite it",
        ),
        ("  - `tests/unit/test_a.py::test_is_long`", "R7: test_is_long runs only with --full"),
        ("  - `tests/golden/b.txt`", "R7: there is no tests/golden/b.txt"),
        ("  - `tools/lab/bench/b.py`", "R7: there is no tools/lab/bench/b.py"),
        (
            '  - `tools/lab/bench/a.py`, row "memory"',
            "R7: tools/lab/bench/a.py has no row 'memory'",
        ),
        ("  - [no](page.md#no-heading)", "R7: page.md has no heading #no-heading"),
        ("  - [no](other.md#page)", "R7: there is no other.md"),
        ("  - `tests/golden/a.txt`: departure b.", "R7: there is no departure b"),
    ],
)
def test_evidence_that_is_missing_is_a_fault(faults_of, evidence, fault):
    assert faults_of(evidence) == [fault]


def test_a_range_is_found():
    for text in (f"(R{1}–R{9})", f"R{24}-R{78}, R141", f"R{3}–{5}"):
        assert RANGE.search(text)
    for text in ("R1, R9", "R1 – a sentence", "D4–D7", "s135-1"):
        assert not RANGE.search(text)
