"""The benches' command line, their rows and verdicts, and the tables of `docs/performance.md` that
are made from their JSON: nothing else of the page changes."""

import json
import sys
from pathlib import Path

import pytest

from tools.lab.bench import stale, tables
from tools.lab.bench.__main__ import main
from tools.lab.bench.catalog import FIGURES, names
from tools.lab.bench.frame import Row, report, row_of

ROOT = Path(__file__).parents[2]
KINDS = ("xeon", "zen3", "zen4", "zen5")  # of machines; in the names of figures

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
    monkeypatch.setattr(tables, "FIGURES", tmp_path / "figures")
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
    readme = (ROOT / "tools" / "lab" / "README.md").read_text()
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
        monkeypatch.delitem(sys.modules, f"tools.lab.bench.{name}", raising=False)
    monkeypatch.setattr("sys.argv", ["python -m tools.lab.bench", "front"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (
        "the bench front needs the Python module uvloop; "
        "install the development tools: pip install -e '.[dev,measure]' -c constraints.txt"
    )


def test_a_missing_module_of_ours_is_no_missing_tool(monkeypatch):
    monkeypatch.setitem(sys.modules, "tools.lab.bench.wire", None)
    monkeypatch.delitem(sys.modules, "tools.lab.bench.front", raising=False)
    monkeypatch.setattr("sys.argv", ["python -m tools.lab.bench", "front"])
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


def test_the_page_of_figures_is_made_from_them():
    page = (ROOT / "docs" / "performance.md").read_text()
    assert tables.PART.search(page)
    assert tables.written(page, FIGURES) == page


def test_each_file_of_figures_is_one_benchs_on_one_kind_of_machine():
    for path in FIGURES.glob("*.json"):
        bench = json.loads(path.read_text())["bench"]
        assert path.stem == bench or path.stem.removeprefix(f"{bench}-") in KINDS, path.stem
        assert bench in names()


def test_stale_is_a_command(monkeypatch, capsys):
    monkeypatch.setattr(stale, "stale", lambda root: iter(["step: there are no figures"]))
    monkeypatch.setattr("sys.argv", ["python -m tools.lab.bench", "stale"])
    assert main() == 1
    assert capsys.readouterr().out == "step: there are no figures\n"
    monkeypatch.setattr(stale, "stale", lambda root: iter([]))
    assert main() == 0
    assert capsys.readouterr().out == "all figures are of what is measured now\n"
