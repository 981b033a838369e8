"""The README's snippets run as they stand, against a server of the shipped model.

A fenced block is executed when the comment above it says so:
``<!-- runs, prints: TEXT -->``, ``<!-- runs with TOOL, prints: TEXT -->``. Any other block of shell
or Python must say why not: ``<!-- not run: REASON -->``.
Two things differ from what a reader types: the address is the test server's, and `grpcurl`, where
it is not installed, is `buf curl`, which takes the same request from the same reflection service.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.interop import conftest as interop
from tests.support.server import real

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:50051"
LIMIT_S = 120
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
RUNS = re.compile(r"runs(?: with (?P<tool>\w+))?, prints: (?P<prints>.+)")
NOT_RUN = re.compile(r"not run: .+")
PRELUDE = """
set -euo pipefail
triolet() {
    case "$1" in
        doctor) "$PYTHON" -m grpc_service "$@" --port 0 ;;
        serve) "$PYTHON" -m grpc_service "$@" ;;
        *) "$PYTHON" -m grpc_service "$@" --server "$ADDRESS" ;;
    esac
}
"""
GRPCURL_BY_BUF = """
grpcurl() {
    [ "$1" = -plaintext ] && shift
    local data='{}'
    if [ "$1" = -d ]; then data=$2; shift 2; fi
    "$BUF" curl --protocol grpc --http2-prior-knowledge -d "$data" "http://$1/$2"
}
"""


@dataclass(frozen=True)
class Snippet:
    """One block of the page; ``mark`` is what the comment above it says."""

    line: int
    mark: str
    language: str
    text: str

    @property
    def runs(self) -> re.Match[str] | None:
        return RUNS.fullmatch(self.mark)


def snippets(page: str) -> list[Snippet]:
    return [
        Snippet(
            page.count("\n", 0, found.start("text")) + 1,
            found["mark"] or "",
            found["language"],
            found["text"],
        )
        for found in BLOCK.finditer(page)
    ]


README = snippets((ROOT / "README.md").read_text())
RUNNING = [
    pytest.param(
        snippet,
        id=f"line {snippet.line}",
        marks=[pytest.mark.interop] if snippet.runs["tool"] else [],
    )
    for snippet in README
    if snippet.runs
]


def test_every_block_of_code_runs_or_says_why_not():
    silent = [
        snippet.line
        for snippet in README
        if snippet.language in ("sh", "python")
        and not (snippet.runs or NOT_RUN.fullmatch(snippet.mark))
    ]
    assert silent == [], f"README.md, lines {silent}: mark the blocks as this file says"
    assert {snippet.language for snippet in README if snippet.runs} == {"sh", "python"}


@pytest.fixture(scope="module")
def server():
    with real(model="demo-stories") as one:
        yield one


@pytest.mark.model
@pytest.mark.parametrize("snippet", RUNNING)
def test_a_snippet_runs(server, snippet):
    text = snippet.text.replace(ADDRESS, server.address)
    env = os.environ | {"ADDRESS": server.address, "PYTHON": sys.executable}
    if snippet.language == "python":
        command = [sys.executable, "-W", "error", "-c", text]
    else:
        command = ["bash", "-c", f"{PRELUDE}{_tool(snippet.runs['tool'], env)}{text}"]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert snippet.runs["prints"] in done.stdout


def _tool(name: str | None, env: dict[str, str]) -> str:
    """What must be defined for ``name`` to be a command."""
    if name is None or shutil.which(name):
        return ""
    assert name == "grpcurl", f"nothing stands in for {name}"
    if not interop.is_installed():
        interop.install()
    env["BUF"] = str(interop.BUF)
    return GRPCURL_BY_BUF
