"""The benches' command line, their rows and verdicts, and the tables of README.md and of
docs/performance.md, which are made from their JSON."""

import json
import re
import sys
from dataclasses import asdict, replace

import pytest

from tests.support.programs import ROOT
from tools.lab.bench import tables
from tools.lab.bench.__main__ import main
from tools.lab.bench.catalog import FIGURES, names
from tools.lab.bench.claims import FILES, Claim, File, Line
from tools.lab.bench.frame import Row, report, row_of

KINDS = ("xeon", "zen3", "zen4", "zen5")  # kinds of machines, as the names of files of figures end

FIGURES_OF_TWO = {
    "bench": "step",
    "commit": "1234567",
    "machine": {"when": "2026-01-02 03:04 UTC", "cpu": "A CPU", "cores": 2, "load": 1.5},
    "rows": [
        asdict(row) | {"pass": row.passed}
        for row in (
            row_of("decode: triolet", (1234.5, 1300.25), "tokens/s"),
            row_of("decode: vllm", (0.123456,), "tokens/s"),
            row_of("decode: against the best", (0.8, 0.9, 1.0), "×", bar=1.0, better="higher"),
            Row("decode: llama.cpp", None, "tokens/s"),
        )
    ],
}
ROWS = ("decode: triolet", "decode: llama.cpp", "decode: vllm", "decode: against the best")
CLAIM = Claim(
    "two",
    "page.md",
    ("Triolet", "llama.cpp", "vLLM", "× the best"),
    (Line("decode", "tokens/s", ROWS, "two"),),
)
PART = """```sh
BENCH_ONLY="^decode" python -m tools.lab.bench step --json tools/lab/figures/two.json
```

| | Triolet | llama.cpp | vLLM | × the best |
|---|---|---|---|---|
| decode, tokens/s | 1267 | – | 0.123 | **0.9** ± 0.2 |

Measured on 2 cores of A CPU (Zen 9) 2026-01-02 at commit 1234567, load 1.5."""
PAGE = f"Before.\n{tables.HEAD.format('two')}\n{PART}\n{tables.END}\nAfter.\n"


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Return a folder with a page and the figures of the page's only claim."""
    (tmp_path / "two.json").write_text(json.dumps(FIGURES_OF_TWO))
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setitem(FILES, "two", File("Zen 9", "^decode"))
    monkeypatch.setattr(tables, "CLAIMS", (CLAIM,))
    monkeypatch.setattr(tables, "PAGES", ("page.md",))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "FIGURES", tmp_path)
    return tmp_path


# ---- the parts of pages ----------------------------------------------------------------------


def test_a_part_is_its_commands_a_table_and_where_it_was_measured(two):
    assert tables.part(CLAIM) == PART
    brief = tables.part(replace(CLAIM, brief="A model."))
    assert brief.endswith(
        "A model. On 2 cores of A CPU (Zen 9), 2026-01-02 to 2026-01-02, by "
        "`python -m tools.lab.bench\nBENCH`."
    )
    assert brief.count(" `step` |\n") == len(CLAIM.lines)
    assert "```" not in brief


def test_a_page_with_another_figure_is_noticed_and_written(two, capsys):
    assert tables.main(["--check"]) == 0
    (two / "page.md").write_text(PAGE.replace("1267", "1268").replace(", made by", " made by"))
    assert tables.main(["--check"]) == 1
    assert "page.md shows other figures; run python -m" in capsys.readouterr().err
    assert tables.main(["--write"]) == 0
    assert (two / "page.md").read_text() == PAGE


@pytest.mark.parametrize(
    "text", ["", PAGE + PAGE, PAGE.replace("two,", "three,"), PAGE.replace(tables.END, "")]
)
def test_a_page_has_a_part_for_each_of_its_claims(two, text):
    (two / "page.md").write_text(text)
    with pytest.raises(ValueError, match=r"page\.md has the parts"):
        tables.main(["--check"])


def test_a_claim_whose_row_is_not_in_its_file_cannot_be_shown(two):
    line = replace(CLAIM.lines[0], rows=("prefill", None, None, None))
    with pytest.raises(KeyError, match=r"two\.json has no row 'prefill'"):
        tables.part(replace(CLAIM, lines=(line,)))


def test_a_new_line_is_shown_once_its_file_has_a_row_of_it(two):
    new = replace(CLAIM.lines[0], label="memory", rows=("memory", None, None, None), is_new=True)
    claim = replace(CLAIM, lines=(*CLAIM.lines, new))
    assert tables.part(claim) == PART
    row = asdict(Row("memory", 149.0, "MB")) | {"pass": None}
    found = FIGURES_OF_TWO | {"rows": [*FIGURES_OF_TWO["rows"], row]}
    (two / "two.json").write_text(json.dumps(found))
    assert "| memory, tokens/s | 149 | – | – | – |" in tables.part(claim)


def test_the_pages_show_the_committed_figures():
    assert tables.main(["--check"]) == 0


# What a bench measures: a number with a unit of time, memory or speed, or a ratio.
MEASURED = re.compile(
    r"""(?<![\w.,-])\d[\d.,]*\s?
    (?: × | % | times\b | [nµm]?s\b | seconds?\b | minutes?\b | hours?\b
      | [KMGT]?i?B(?:/s)?\b | G?FLOP/s | [a-z]+/s\b )""",
    re.VERBOSE,
)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def measured_outside_parts(text):
    """Return the numbers with a unit, and the ratios, outside of code and of generated parts."""
    return MEASURED.findall(FENCED.sub("", tables.PART.sub("", text)))


@pytest.mark.parametrize("page", tables.PAGES)
def test_no_measured_number_stands_outside_the_parts_that_are_made_from_figures(page):
    """Nothing updates a figure that somebody writes into the text by hand."""
    assert measured_outside_parts((ROOT / page).read_text()) == []


@pytest.mark.parametrize(
    ("text", "is_measured"),
    [
        ("It makes 86.2 tokens/s.", True),
        ("the first token after 254 ms", True),
        ("a start takes 3.18 s", True),
        ("16 µs a message", True),
        ("285 MB, then 2 GiB", True),
        ("1.47 × of vLLM", True),
        ("1.5 times as fast", True),
        ("takes 10 % more", True),
        ("24.2 GB/s", True),
        ("8 sequences of 1,024 tokens, 134.5 million parameters, 4 bits", False),
        ("Python 3.11, Zen 4, s135, D4, Q8_0, 128 + n", False),
        ("```sh\nsleep 3 s\n```", False),
        (PAGE, False),
    ],
)
def test_measured_numbers_are_distinguished_from_others(text, is_measured):
    assert bool(measured_outside_parts(text)) == is_measured


# ---- printed tables, and JSON ----------------------------------------------------------------


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


def test_the_list_says_in_a_sentence_what_each_bench_measures(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["python -m tools.lab.bench", "list"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == names()
    for line in lines:
        assert re.fullmatch(r"[a-z-]+: (Measures|Profiles) .+\.", line)


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
    """A bar counts as just met if the median meets it and the worse quartile does not."""
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


def test_each_file_of_figures_is_one_benchs_on_one_kind_of_machine():
    for path in FIGURES.glob("*.json"):
        bench = json.loads(path.read_text())["bench"]
        own = path.stem.removeprefix(bench).removeprefix("-memory")  # memory may have its own file
        assert own == "" or own.removeprefix("-") in KINDS, path.stem
        assert bench in names()
