"""The benches' command line, their rows and verdicts, and the tables of `docs/performance.md` that
are made from their JSON: nothing else of the page changes."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench import stale, tables
from tools.bench.__main__ import main
from tools.bench.catalog import FIGURES, measured_paths, names
from tools.bench.frame import Row, report, row_of

ROOT = Path(__file__).parents[2]
BENCHES = ROOT / "tools" / "bench"

PAGE = """Before.
<!-- table: step decode -->
old
<!-- end -->
Between.
<!-- table: serve -->
<!-- end -->
More.
<!-- table: startup -->
<!-- end -->
"""


def write(file, rows, capsys):
    """Write rows as a bench does."""
    report("step", rows, str(file))
    capsys.readouterr()


def page_after(tmp_path, monkeypatch):
    """Return the page after its tables were written."""
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr("sys.argv", ["tables", "--write", str(page)])
    tables.main()
    return page.read_text()


def test_a_page_gets_the_rows_of_its_patterns_and_keeps_the_rest(tmp_path, monkeypatch, capsys):
    (tmp_path / "figures").mkdir()
    rows = [
        Row("decode B=8: triolet", 300.0, "tokens/s", spread=3.0, n=5),
        Row("decode B=8: vllm", 200.0, "tokens/s", spread=2.0, n=5),
        Row("decode B=8: against the best", 1.5, "×", 1.0, "higher", 0.1, 5),
        row_of("decode B=1: against the best", (0.8, 0.9, 1.2, 1.3), "×", bar=1.0, better="higher"),
        Row("prefill: triolet", 1.0, "tokens/s"),
    ]
    write(tmp_path / "figures" / "step.json", rows, capsys)
    text = page_after(tmp_path, monkeypatch)
    assert text.startswith("Before.\n<!-- table: step decode -->\n")
    assert "| decode B=8 | 300 ± 3 | 200 ± 2 | tokens/s |" in text
    assert "| decode B=8: against the best | 1.5 ± 0.1 | × | ≥ 1, met |" in text
    hair = "≥ 1, met by a hair; quartile 0.875"
    assert f"| decode B=1: against the best | 1.05 ± 0.5 | × | {hair} |" in text
    assert "old" not in text
    assert "prefill" not in text
    for name in ("serve", "startup"):
        assert f"<!-- table: {name} -->\nNot measured yet.\n<!-- end -->\n" in text
    assert "More." in text


def test_the_whole_measurement_counts_over_its_parts(tmp_path, monkeypatch, capsys):
    (tmp_path / "figures").mkdir()
    for name, value in (("step", 2.0), ("step-1", 1.0)):
        write(tmp_path / "figures" / f"{name}.json", [Row("decode", value, "ms")], capsys)
    assert "| decode | 2 | ms |  |" in page_after(tmp_path, monkeypatch)


def test_ways_to_compute_are_columns_as_engines_are():
    rows = [
        {
            "name": f"weights: {way}",
            "unit": "MB",
            "value": value,
            "spread": 0.0,
            "n": 1,
            "pass": None,
        }
        for way, value in (("float32 int8", 1.08), ("float32", 4.2))
    ]
    assert tables.tables(rows)[::2] == [
        "| | float32 | float32 int8 | |",
        "| weights | 4.2 | 1.08 | MB |",
    ]


def test_a_missed_bar_stands_out_and_a_missing_figure_is_a_dash():
    assert tables.figure({"value": 1.0, "spread": 0.0, "n": 1, "pass": False}) == "**1**"
    assert tables.figure({"value": None}) == "–"


def test_every_bench_of_the_readme_is_there():
    readme = (ROOT / "tools" / "README.md").read_text()
    for name in names():
        assert f"| `{name}` |" in readme


def test_json_holds_what_a_bar_decides(tmp_path, capsys):
    rows = [Row("met", 1.0, "s", 2.0), Row("missed", 3.0, "s", 2.0), Row("open", None, "s", 2.0)]
    assert report("step", rows, str(tmp_path / "j")) == 1
    assert "missed: missed" in capsys.readouterr().err
    found = json.loads((tmp_path / "j").read_text())["rows"]
    assert [row["pass"] for row in found] == [True, False, None]


def test_a_bench_without_the_development_tools_is_one_sentence_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)  # importing it fails, as if it were missing
    for name in ("front", "wire"):
        monkeypatch.delitem(sys.modules, f"tools.bench.{name}", raising=False)
    monkeypatch.setattr("sys.argv", ["python -m tools.bench", "front"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (
        "the bench front needs the Python module uvloop; "
        "install the development tools: pip install -e '.[dev,measure]' -c constraints.txt"
    )


def test_a_missing_module_of_ours_is_no_missing_tool(monkeypatch):
    monkeypatch.setitem(sys.modules, "tools.bench.wire", None)
    monkeypatch.delitem(sys.modules, "tools.bench.front", raising=False)
    monkeypatch.setattr("sys.argv", ["python -m tools.bench", "front"])
    with pytest.raises(ModuleNotFoundError):
        main()


# ---- rows and verdicts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "better", "worse_quartile", "verdict"),
    [
        ((1.0, 1.1, 1.2, 1.3, 1.4), "higher", 1.1, "pass"),
        ((0.8, 0.9, 1.2, 1.3, 1.4), "higher", 0.9, "by a hair"),
        ((0.7, 0.8, 0.9, 1.3, 1.4), "higher", 0.8, "MISS"),
        ((0.6, 0.7, 0.8, 0.9, 1.4), "lower", 0.9, "pass"),
        ((0.6, 0.7, 0.8, 1.1, 1.4), "lower", 1.1, "by a hair"),
        ((0.6, 0.7, 1.1, 1.2, 1.4), "lower", 1.2, "MISS"),
        ((0.9,), "lower", None, "pass"),
    ],
)
def test_a_bar_is_judged_by_the_median_and_the_worse_quartile(
    samples, better, worse_quartile, verdict
):
    """A bar that the median meets and the worse quartile does not is met by a hair."""
    row = row_of("ratio", samples, "×", bar=1.0, better=better)
    assert row.worse_quartile == pytest.approx(worse_quartile)
    assert row.verdict == verdict


def test_what_is_met_by_a_hair_is_said_and_is_no_failure(tmp_path, capsys):
    rows = [row_of("ratio", (0.8, 0.9, 1.2, 1.3), "×", bar=1.0, better="higher")]
    assert report("step", rows, str(tmp_path / "j")) == 0
    printed = capsys.readouterr().out
    assert "worse quartile 0.875" in printed
    assert "by a hair" in printed
    [row] = json.loads((tmp_path / "j").read_text())["rows"]
    assert row["pass"]
    assert row["by_a_hair"]
    assert row["worse_quartile"] == pytest.approx(0.875)


def test_two_rows_of_one_name_are_printed_and_not_written(tmp_path, capsys):
    rows = [Row("waiting", 0.5, "%"), Row("waiting", 0.7, "%")]
    with pytest.raises(SystemExit, match="two rows are called 'waiting'"):
        report("step", rows, str(tmp_path / "j"))
    assert "0.7" in capsys.readouterr().out
    assert not (tmp_path / "j").exists()


# ---- the names of rows, over all benches -----------------------------------------------------
#
# A bench's rows are known only when it has run. What can be seen before: a row that is made several
# times, in a loop or by a function that is called several times, names what differs from time to
# time.


class RowNames(ast.NodeVisitor):
    """Finds the rows of a module whose names cannot differ. ``faults`` says which and why."""

    def __init__(self, tree: ast.Module) -> None:
        self.faults: list[str] = []
        self._templates: set[str] = set()
        self._repeated: list[set[str]] = []  # names that differ from time to time, by scope
        self._calls: dict[str, int] = {}
        self._looped: set[str] = set()
        self._count_calls(tree, in_loop=False)
        self.visit(tree)

    def _count_calls(self, node, *, in_loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            self._calls[node.func.id] = self._calls.get(node.func.id, 0) + 1
            if in_loop:
                self._looped.add(node.func.id)
        inner = in_loop or isinstance(
            node, ast.For | ast.While | ast.comprehension | COMPREHENSIONS
        )
        for child in ast.iter_child_nodes(node):
            self._count_calls(child, in_loop=inner)

    def visit_FunctionDef(self, node):
        """A function that is called several times names one of its parameters in each row."""
        is_repeated = self._calls.get(node.name, 0) > 1 or node.name in self._looped
        parameters = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        outer, self._repeated = self._repeated, [parameters] if is_repeated else []
        for statement in node.body:
            self.visit(statement)
        self._repeated = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_For(self, node):
        """A loop's rows name what the loop goes over, or what is made of it."""
        self._visit_repeated([node.target], node.body)

    def visit_ListComp(self, node):
        """A comprehension's loops are loops."""
        self._visit_repeated([one.target for one in node.generators], [node.elt])

    visit_GeneratorExp = visit_ListComp

    def _visit_repeated(self, targets, body):
        self._repeated += [names_in(target) for target in targets]
        for child in body:
            self.visit(child)
        del self._repeated[-len(targets) :]

    def visit_Assign(self, node):
        """What is made of a name that differs does, too."""
        self.generic_visit(node)
        for scope in self._repeated:
            if names_in(node.value) & scope:
                scope |= set().union(*(names_in(target) for target in node.targets))

    def visit_Call(self, node):
        """Look at a row's name."""
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Name) and node.func.id in ("row_of", "Row")):
            return
        name, template = node.args[0], ast.unparse(node.args[0])
        if template in self._templates:
            self.faults.append(f"{template} is the name of two rows")
        self._templates.add(template)
        if template.lstrip("f").startswith(('" ', "' ")):
            self.faults.append(f"{template} does not stand by itself")
        for scope in self._repeated:
            if not names_in(name) & scope:
                self.faults.append(f"{template} is the name of a row for each of {sorted(scope)}")


COMPREHENSIONS = ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp


def names_in(node):
    """Return the variables in an expression."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


@pytest.mark.parametrize("path", sorted(BENCHES.glob("*.py")), ids=lambda path: path.stem)
def test_a_rows_name_is_unique_in_its_bench(path):
    """The page once had the waiting of eight devices under "1 devices"."""
    assert RowNames(ast.parse(path.read_text())).faults == []


@pytest.mark.parametrize(
    ("source", "is_unique"),
    [
        ("for n in NS:\n  rows = [row_of(f'{n} devices', x, ''), row_of('waiting', x, '')]", False),
        ("for n in NS:\n  rows = [row_of(f'{n} devices', x, ''), row_of(f'{n}: w', x, '')]", True),
        ("for n in NS:\n  name = f'{n} devices'\n  rows = [row_of(f'{name}, p50', x, '')]", True),
        ("for n in NS:\n  for m in MS:\n    rows += [row_of(f'{m} rows', x, '')]", False),
        ("for n in NS:\n  for m in MS:\n    rows += [row_of(f'{m} of {n}', x, '')]", True),
        ("rows = [Row('a', 1.0, '') for n in NS]", False),
        ("rows = [Row(f'a {n}', 1.0, '') for n in NS]", True),
        ("rows = [Row('a', 1.0, ''), Row('a', 2.0, '')]", False),
        ("rows = [Row('  a', 1.0, '')]", False),
        ("def f(n):\n  return row_of('a', n, '')\nrows = [f(1), f(2)]", False),
        ("def f(n):\n  return row_of(f'a {n}', n, '')\nrows = [f(1), f(2)]", True),
        ("def f(n):\n  return row_of('a', n, '')\nrows = [f(1)]", True),
        ("def f(n):\n  return row_of('a', n, '')\nrows = [f(n) for n in NS]", False),
    ],
)
def test_names_that_cannot_differ_are_found(source, is_unique):
    assert (RowNames(ast.parse(source)).faults == []) == is_unique


# ---- the committed figures -------------------------------------------------------------------


def test_every_bench_says_what_it_measures():
    """`python -m tools.bench stale` compares these paths with the history."""
    for path in BENCHES.glob("*.py"):
        has_run = re.search(r"^def run\(\)", path.read_text(), re.MULTILINE) is not None
        assert has_run == (path.stem.replace("_", "-") in names()), path.name
    for name in names():
        paths = measured_paths(name)
        assert f"tools/bench/{name.replace('-', '_')}.py" in paths
        assert len(paths) > 1, f"{name} measures nothing"
        assert [one for one in paths if not (ROOT / one).exists()] == []


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.json")), ids=lambda path: path.stem)
def test_a_committed_figure_has_a_commit_a_date_a_bench_and_unique_rows(path):
    found = json.loads(path.read_text())
    assert found["bench"] in names()
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?", found["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", found["machine"]["when"])
    rows = [row["name"] for row in found["rows"]]
    assert sorted(set(rows)) == sorted(rows)


def test_every_benchs_figures_are_on_the_page_which_is_made_from_them():
    page = (FIGURES.parent / "performance.md").read_text()
    assert tables.written(page, FIGURES) == page
    shown = {found["name"] for found in tables.PART.finditer(page)}
    assert set(names()) - shown == set()
    parts = {re.sub(r"-\d+$", "", path.stem) for path in FIGURES.glob("*.json")}
    assert parts - shown == set()


# ---- figures that are older than what they measure -------------------------------------------


@pytest.fixture
def repository(tmp_path):
    """Return a function that commits files in a repository with one bench, and returns the
    commit."""

    def git(*args):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def commit(message, **files):
        for name, text in files.items():
            (tmp_path / name.replace("__", "/")).write_text(text)
        git("add", "-A")
        git("commit", "-qm", message)
        return git("rev-parse", "--short", "HEAD")

    for folder in ("docs/figures", "tools/bench", "engine", "rest"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").write_text("")
    (tmp_path / "tools" / "bench" / "step.py").write_text('MEASURES = ("engine",)\n')
    git("init", "-q")
    return commit


def figures_at(tmp_path, commit):
    """Write a bench's figures as if they had been measured at a commit."""
    found = {"bench": "step", "commit": commit, "machine": {"when": "2026-01-02 03:04 UTC"}}
    (tmp_path / "docs" / "figures" / "step.json").write_text(json.dumps(found))


def test_figures_are_old_when_what_they_measure_has_changed(tmp_path, repository):
    measured = repository("First")
    assert list(stale.stale(tmp_path)) == ["step: there are no figures"]
    figures_at(tmp_path, measured)
    repository("Something else", rest__file="1")
    assert list(stale.stale(tmp_path)) == []
    (tmp_path / "engine" / "file").write_text("1")
    head = f"step (step.json, {measured}, 2026-01-02 03:04 UTC): "
    assert list(stale.stale(tmp_path)) == [head + "changes that are not committed"]
    changed = repository("A faster step")
    [line] = stale.stale(tmp_path)
    assert line == f"{head}1 later commit, the last {changed} A faster step"


def test_figures_are_old_when_their_bench_has_changed(tmp_path, repository):
    figures_at(tmp_path, repository("First"))
    bench = {"tools__bench__step.py": 'MEASURES = ("engine",)\nROW = 1\n'}
    changed = repository("Another row", **bench)
    [line] = stale.stale(tmp_path)
    assert line.endswith(f"1 later commit, the last {changed} Another row")


def test_figures_of_a_dirty_tree_or_an_unknown_commit_are_old(tmp_path, repository):
    measured = repository("First")
    figures_at(tmp_path, f"{measured}+")
    [line] = stale.stale(tmp_path)
    assert line.endswith("it was measured with changes that were not committed")
    figures_at(tmp_path, "abcdef1")
    [line] = stale.stale(tmp_path)
    assert line.endswith("the commit abcdef1 is not in this repository")


def test_stale_is_a_command(monkeypatch, capsys):
    monkeypatch.setattr(stale, "stale", lambda root: iter(["step: there are no figures"]))
    monkeypatch.setattr("sys.argv", ["python -m tools.bench", "stale"])
    assert main() == 1
    assert capsys.readouterr().out == "step: there are no figures\n"
    monkeypatch.setattr(stale, "stale", lambda root: iter([]))
    assert main() == 0
    assert capsys.readouterr().out == "all figures are of what is measured now\n"
