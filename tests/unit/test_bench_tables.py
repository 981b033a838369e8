"""The benches' command line, and the tables of `docs/performance.md` that are made from their JSON:
nothing else of the page changes."""

import json
import sys
from pathlib import Path

import pytest

from tools.bench import tables
from tools.bench.__main__ import main, names
from tools.bench.frame import Row, report

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
        Row("prefill: triolet", 1.0, "tokens/s"),
    ]
    write(tmp_path / "figures" / "step.json", rows, capsys)
    text = page_after(tmp_path, monkeypatch)
    assert text.startswith("Before.\n<!-- table: step decode -->\n")
    assert "| decode B=8 | 300 ± 3 | 200 ± 2 | tokens/s |" in text
    assert "| decode B=8: against the best | 1.5 ± 0.1 | × | ≥ 1, met |" in text
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


def test_a_missed_bar_stands_out_and_a_missing_figure_is_a_dash():
    assert tables.figure({"value": 1.0, "spread": 0.0, "n": 1, "pass": False}) == "**1**"
    assert tables.figure({"value": None}) == "–"


def test_every_bench_of_the_readme_is_there():
    readme = (Path(__file__).parents[2] / "tools" / "README.md").read_text()
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
