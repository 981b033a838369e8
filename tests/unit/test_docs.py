"""The pages agree with the repository: cited numbers, named files, and parts made by tools.

What a page names in code type is checked if it is a path (``engine/core/text/plan.py``), or the
text of a link to a file; that file then has to define or mention it.
"""

import re
import subprocess
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tools import draw_lifecycle, draw_rooms, list_models, list_settings

LISTED = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md")
PAGES = [
    path
    for name in subprocess.check_output(LISTED, cwd=ROOT, text=True).splitlines()
    if (path := ROOT / name).exists()
]
SOURCES = [
    path
    for folder in ("engine", "grpc_service", "tests", "tools")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".sh", "") and path.is_file()
    if not {"_generated", "node_modules", "__pycache__"} & set(path.parts)
]
WORDS_MAX = {"README.md": 1_100, "docs/decisions.md": 7_000, "docs/performance.md": 2_500}
WORDS_OF_ALL_PAGES_MAX = 35_000
TOP_LEVEL = {".ci", "deploy", "docs", "engine", "grpc_service", "proto", "tests", "tools"}
FILE_SUFFIXES = (".py", ".md", ".sh", ".toml", ".txt", ".proto", ".json")

CITATION = re.compile(r"(?<![\w.`])D[1-9]\d?(?!\w)")
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"`([^`]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@cache
def prose(page: Path) -> str:
    """Return the page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_pages_are_short():
    words = {name_of(page): len(page.read_text().split()) for page in PAGES}
    assert {page: words[page] for page, most in WORDS_MAX.items() if words[page] > most} == {}
    assert sum(words.values()) <= WORDS_OF_ALL_PAGES_MAX


pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


# ---- decisions ---------------------------------------------------------------------------------


def test_every_decision_cited_exists():
    decisions = (ROOT / "docs" / "decisions.md").read_text()
    known = set(re.findall(r"^## (D\d+) ", decisions, re.MULTILINE))
    texts = {path: path.read_text(errors="replace") for path in SOURCES}
    texts |= {page: prose(page) for page in PAGES}
    assert {
        name_of(path): missing
        for path, text in texts.items()
        if (missing := set(CITATION.findall(text)) - known)
    } == {}


def test_citations_are_found():
    assert CITATION.findall("(R10, D6) R79-D5 D4–D7;") == ["D6", "D5", "D4", "D7"]
    assert CITATION.findall("`D1` x.D2 D0 D2048 noqa: E501 UTF8") == []


# ---- files -----------------------------------------------------------------------------------


def links(page: Path) -> list[tuple[str, str]]:
    """Return text and target of every link to a file of the repository."""
    return [
        (found["text"], found["target"].partition("#")[0])
        for found in LINK.finditer(prose(page))
        if "://" not in found["target"] and not found["target"].startswith("#")
    ]


@pages
def test_every_relative_link_leads_somewhere(page):
    dead = [target for _, target in links(page) if not (page.parent / target).exists()]
    assert dead == []


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in headings}


@pages
def test_every_anchor_is_a_heading_of_its_page(page):
    """Whoever renames a heading breaks the links of other pages to it."""
    lost = [
        found["target"]
        for found in LINK.finditer(prose(page))
        if "://" not in found["target"] and "#" in found["target"]
        if not _has_heading(page, *found["target"].split("#"))
    ]
    assert lost == []


def _has_heading(page: Path, path: str, anchor: str) -> bool:
    target = page.parent / path if path else page
    return target.is_dir() or anchor in anchors(prose(target))


def test_anchors_are_made_as_github_makes_them():
    assert anchors("## A GGUF file beside llama.cpp\n# `x`: it's D4\n") == {
        "a-gguf-file-beside-llamacpp",
        "x-its-d4",
    }


@pages
def test_code_that_links_to_a_file_is_in_that_file(page):
    lost = [
        (text, target)
        for text, target in links(page)
        if text.startswith("`") and not _defines(page.parent / target, text.strip("`"))
    ]
    assert lost == []


def _defines(path: Path, dotted: str) -> bool:
    source = path.read_text()
    return all(
        re.search(rf"^\s*(?:async )?(?:def|class) {re.escape(part)}\b", source, re.MULTILINE)
        for part in dotted.split(".")
        if part != "__post_init__"
    )


def paths_in(page: Path) -> list[str]:
    """Return what the page names in code type that reads as a path of the repository."""
    words = [word for code in CODE.findall(prose(page)) for word in code.split()]
    return [word for word in words if _is_path(word)]


def _is_path(word: str) -> bool:
    if "<" in word or "*" in word or not re.fullmatch(r"[\w./-]+", word):
        return False
    if "/" in word and word.split("/")[0] in TOP_LEVEL:
        return True
    return word.endswith(FILE_SUFFIXES) and word not in ("FILE.toml",)


def test_paths_are_distinguished_from_other_words():
    words = "core/text/plan.py pyproject.toml tools/test docs/ plan/result a/NAME --dtype a.b"
    assert [word for word in words.split() if _is_path(word)] == words.split()[:4]


@pages
def test_every_path_named_exists(page):
    missing = [
        path
        for path in paths_in(page)
        if not ((ROOT / path).exists() or (page.parent / path).exists())
    ]
    assert missing == []


@pages
def test_every_module_and_tool_named_exists(page):
    modules = re.findall(r"python -m ((?:tests|tools|engine|grpc_service)[\w.]*)", page.read_text())
    missing = [
        name
        for name in modules
        if not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
        and not (ROOT / name.replace(".", "/")).is_dir()
    ]
    assert missing == []


def test_the_functions_of_the_schedulers_pseudo_code_exist():
    page = (ROOT / "engine" / "README.md").read_text()
    named = re.findall(r"^(?:async )?def (\w+)\(.*\):  # ([\w/]+\.py)", page, re.MULTILINE)
    assert len(named) == len(re.findall(r"^(?:async )?def ", page, re.MULTILINE))
    assert [one for one in named if not _defines(ROOT / "engine" / one[1], one[0])] == []


def test_the_checks_are_run_and_a_warning_fails_its_test():
    """A ResourceWarning fails a test like any other warning."""
    script = (ROOT / "tools" / "test").read_text()
    for check in ('ruff" check .', 'ruff" format --check .', '/mypy"', "regen_proto.py --check"):
        assert check in script
    assert "tools/test" in (ROOT / ".ci" / "run").read_text()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert settings["pytest"]["ini_options"]["filterwarnings"] == ["error"]
    assert settings["mypy"]["strict"] is True


# ---- parts made by tools ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "shown", [draw_lifecycle.SHOWN, draw_rooms.SHOWN, list_models.SHOWN, list_settings.SHOWN]
)
def test_the_parts_of_pages_that_tools_make_are_up_to_date(shown, tmp_path):
    assert shown.main(["--check"]) == 0
    outdated = tmp_path / "README.md"
    outdated.write_text(shown.embed(shown.page.read_text(), "something else"))
    assert replace(shown, page=outdated).main(["--check"]) == 1
