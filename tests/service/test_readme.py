"""The snippets of the README and of docs/ run as they are printed, on a server of shipped models.

A fenced block is executed if the comment above it says so: ``<!-- runs, prints: TEXT -->``, ``<!--
runs with TOOL, prints: TEXT -->``. A block that others import says which file it is: ``<!-- the
file NAME -->``. Any other block in a language that could run here must say why it does not: ``<!--
not run: REASON -->``.

Four things differ from what a reader types. The addresses are those of the test's servers. The
folder is not the repository's root, but a copy of the files that the snippets use, so that the
files they write are gone afterwards. Python runs in a process that has already imported torch. And
`grpcurl`, if it is not installed, is `buf curl`, which takes the same request from the same
reflection service.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.config import DEMO_MODELS
from tests.support import prestarted, toolchains
from tests.support.programs import ROOT
from tests.support.server import SERVING_IMPORTS, openai_port_of, real
from tests.support.wire import SERVING, health, wait_until
from tools.lab.demo.drawings import held_out_drawing, png_of

ADDRESS = "127.0.0.1:50051"
OPENAI_ADDRESS = "127.0.0.1:8000"
SECOND_ADDRESS = "127.0.0.1:50052"  # the address of a server with models that take images
LIMIT_S = 120
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
RUNS = re.compile(r"runs(?: with (?P<tool>\w+))?, prints: (?P<prints>.+)")
FILE = re.compile(r"the file (?P<name>[\w.]+)")
NOT_RUN = re.compile(r"not run: .+|figures: .+")  # "figures:" marks the block of a bench's table
PRELUDE = """
set -euo pipefail
triolet() {
    case "$1" in
        doctor) "$PYTHON" -m grpc_service "$@" --port 0 ;;
        inspect | serve) "$PYTHON" -m grpc_service "$@" ;;
        *) "$PYTHON" -m grpc_service "$@" --server "$ADDRESS" ;;
    esac
}
"""
GRPCURL_BY_BUF = """
grpcurl() {
    [ "$1" = -plaintext ] && shift
    local data='{}'
    if [ "$1" = -d ]; then data=$2; shift 2; fi
    [ "$data" = @ ] && data=@-
    "$BUF" curl --protocol grpc --http2-prior-knowledge -d "$data" "http://$1/$2"
}
"""


PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LANGUAGES = {"sh", "python", "js", "ruby"}


@dataclass(frozen=True)
class Snippet:
    """One block of a page; ``mark`` is the text of the comment above it."""

    page: str
    line: int
    mark: str
    language: str
    text: str

    @property
    def runs(self) -> re.Match[str] | None:
        """The match of a mark that says that the block runs, or None."""
        return RUNS.fullmatch(self.mark)

    @property
    def file(self) -> str:
        """The name of the file whose content the block shows, or ""."""
        found = FILE.fullmatch(self.mark)
        return found["name"] if found else ""


def snippets(path: Path) -> list[Snippet]:
    """Return the blocks of a page."""
    page = path.read_text()
    return [
        Snippet(
            path.name,
            page.count("\n", 0, found.start("text")) + 1,
            found["mark"] or "",
            found["language"],
            found["text"],
        )
        for found in BLOCK.finditer(page)
    ]


SNIPPETS = [snippet for path in PAGES for snippet in snippets(path)]
RUNNING = [
    pytest.param(
        snippet,
        id=f"{snippet.page} line {snippet.line}",
        marks=[
            *([pytest.mark.interop] if snippet.runs["tool"] else []),
            *([] if snippet.page == "README.md" else [pytest.mark.slow]),
        ],
    )
    for snippet in SNIPPETS
    if snippet.runs
]


def test_every_block_of_code_runs_or_says_why_not():
    silent = [
        f"{snippet.page} line {snippet.line}"
        for snippet in SNIPPETS
        if snippet.language in LANGUAGES
        if not (snippet.runs or snippet.file or NOT_RUN.fullmatch(snippet.mark))
    ]
    assert silent == [], "mark these blocks as this file says"
    in_readme = [one for one in SNIPPETS if one.page == "README.md" and one.runs]
    assert {snippet.language for snippet in in_readme} == {"sh", "python"}
    assert {snippet.language for snippet in SNIPPETS if snippet.runs} == LANGUAGES


@pytest.fixture(scope="module")
def server():
    """Run `triolet serve` as in the README, until all three models are ready."""
    with real("--openai-port", "0", model=None) as one:
        for name in DEMO_MODELS:
            wait_until(lambda name=name: health(one.channel, f"model/{name}") == SERVING, 90)
        yield one


@pytest.fixture(scope="module")
def second_server():
    """Run the second server of docs/clients.md, until its two models are ready."""
    with real("--model", "demo-see", model="demo-clip") as one:
        for name in ("demo-clip", "demo-see"):
            wait_until(lambda name=name: health(one.channel, f"model/{name}") == SERVING, 90)
        yield one


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder in which the snippets run."""
    folder = tmp_path_factory.mktemp("snippets")
    (folder / "proto").symlink_to(ROOT / "proto")
    (folder / "node_modules").symlink_to(toolchains.NODE_MODULES)
    (folder / "one.png").write_bytes(png_of(held_out_drawing(0, 0)))
    for snippet in SNIPPETS:
        if snippet.file:
            (folder / snippet.file).write_text(snippet.text)
    return folder


@pytest.mark.model
@pytest.mark.parametrize("snippet", RUNNING)
def test_a_snippet_runs(request, folder, snippet):
    is_second = SECOND_ADDRESS in snippet.text
    server = request.getfixturevalue("second_server" if is_second else "server")
    address = server.address
    text = snippet.text.replace(SECOND_ADDRESS if is_second else ADDRESS, address)
    if OPENAI_ADDRESS in text:
        text = text.replace(OPENAI_ADDRESS, f"127.0.0.1:{openai_port_of(server)}")
    env = os.environ | {
        "ADDRESS": address,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "no_grpc_proxy": "127.0.0.1",
    }
    if snippet.language == "python":
        done = _run_python(text, env, folder)
    else:
        done = subprocess.run(
            _command(snippet, text, env, folder),
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode == 0, done.stderr
    assert snippet.runs["prints"] in done.stdout, done.stdout + done.stderr


def _run_python(text: str, env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code, with warnings as errors, in a process that has already imported torch."""
    (folder / "snippet.py").write_text(f"import warnings; warnings.simplefilter('error')\n{text}")
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        process = prestarted.start(
            "snippet", [], out, err, imports=SERVING_IMPORTS, cwd=folder, env=env
        )
        process.stdin.close()
        try:
            code = process.wait(LIMIT_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(
            text, code, (folder / "out").read_text(), (folder / "err").read_text()
        )


def _command(snippet: Snippet, text: str, env: dict[str, str], folder: Path) -> list[str]:
    """Return the command line that runs a snippet's ``text``; install missing tools."""
    if snippet.language == "js":
        toolchains.need_npm()
        return ["node", "-e", text]  # `require` looks in the working directory
    if snippet.language == "ruby":
        stubs = folder / "ruby_stubs"
        if not stubs.exists():
            stubs.mkdir()
            toolchains.make_ruby_stubs(stubs)
        return ["ruby", "-I", str(stubs), "-e", text]
    return ["bash", "-c", f"{PRELUDE}{_tool(snippet.runs['tool'], env)}{text}"]


def _tool(name: str | None, env: dict[str, str]) -> str:
    """Return the shell code that makes ``name`` a command."""
    if name == "protoc":
        toolchains.need_ruby()  # installs protoc and its plugins, too
        return ""
    if name is None or shutil.which(name):
        return ""
    assert name == "grpcurl", f"there is no replacement for {name}"
    toolchains.need_npm()
    env["BUF"] = str(toolchains.BUF)
    return GRPCURL_BY_BUF
