"""Every name in code type exists, in docstrings, comments, pages and protos.

A dotted name of ours, such as ``engine.replica.loop.EngineLoop``, is looked up in its module, a
file among the files, a flag among the flags. Any other word must be defined or used by some code,
or occur in the protos, the kernels or the deployment files. `FOREIGN` has the names of other
projects that our pages and comments mention and our code does not use.
"""

import argparse
import ast
import builtins
import keyword
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import pytest

from grpc_service.cli.main import build_parser
from tools.rooms import PRODUCT, ROOT, modules

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),  # the changelog keeps old names
    *(ROOT / folder / "README.md" for folder in ("engine", "tools", "tools/lab", "tests")),
    *sorted((ROOT / "docs").glob("*.md")),
]
PROTOS = sorted((ROOT / "proto" / "triolet").rglob("*.proto"))
KERNELS = sorted((ROOT / "engine" / "kernels").glob("*.[hc]*"))
DEPLOYMENT = sorted((ROOT / "deploy").iterdir())

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"``([^`\n]+)``|`([^`\n]+)`")
WORD = re.compile(r"[A-Za-z_]\w*")
NUMBER = re.compile(r"[RDEI]\d+")  # of a requirement, decision or invariant
COMMENT = re.compile(r"(?:^|\s)# .*")
NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?")
FILE = re.compile(r"[\w-]+\.(?:py|pyi|md|sh|toml|txt|proto|json|cpp|h|png|yaml|grammar)")
COMMAND = re.compile(r"triolet (\w+)")
FLAG = re.compile(r"--[a-z][\w-]*")

# Names that our pages and comments mention and our code does not use, by the project they are from.
FOREIGN = {
    "pip's environment": {"PIP_EXTRA_INDEX_URL"},
    "transformers": {
        *("_keys_to_ignore_on_load_unexpected", "generate_batch", "sliding_window_overlay"),
    },
    "torch": {"mha_varlen_fwd"},
    "trio": {"SSLStream", "MemorySendChannel"},
    "vllm": {"LLMEngine"},
    "smg": {"--enable-igw", "--tokenizer-path"},
    "Ray Serve": {"request_router_kwargs"},
    "Node.js": {"Long"},
    "FastAPI": {"lifespan"},
    "the processor and the system": {
        *("madvise", "vscalefps", "vpdpbusd", "vpmaddubsw", "vdpbf16ps", "sdot", "smmla", "bfdot"),
    },
    "llama.cpp": {
        "llama_vocab",
        "llama_tensor_get_type_impl",
        "tensor_type_fallback",
        "use_more_bits",
    },
    "GPTQ, AWQ and compressed-tensors": {"qlinear_cuda_old", "packing_utils", "actorder"},
    "English words, of which the demo's grammar writes forms": {
        *("being", "chases", "chasing", "cries", "hugging", "owls", "ponies"),
    },
    "what a user writes there": {"HOST"},
    "gRPC in Ruby and Java": {"to_rpc_status", "grpc_tools_ruby_protoc"},
}
FOREIGN_PACKAGES = {"com", "vllm"}  # any name in these packages is accepted


@dataclass
class Names:
    """What the repository defines and uses."""

    words: set[str] = field(default_factory=set)
    top: dict[str, set[str]] = field(default_factory=dict)  # top-level names by module
    strings: set[str] = field(default_factory=set)
    flags: set[str] = field(default_factory=set)

    def knows(self, name: str) -> bool:
        """Return whether a word or a dotted name is there."""
        parts = name.split(".")
        if "_generated" in parts or parts[0] in FOREIGN_PACKAGES or name in self.strings:
            return True
        if not all(part in self.words for part in parts):
            return False
        if parts[0] not in PRODUCT or len(parts) < 3:
            return True
        size = max(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in self.top)
        return size == len(parts) or parts[size] in self.top[".".join(parts[:size])]


@cache
def names() -> Names:
    found = Names()
    found.words |= {*dir(builtins), *keyword.kwlist, *sys.stdlib_module_names}
    for module, path in modules().items():
        if path.name == Path(__file__).name:
            continue  # this file names what does not exist
        code = SourceFileLoader(module, str(path)).get_code(module)  # cached bytecode, if any
        assert code
        _look_at(code, found)
        found.words |= set(module.split("."))
        found.top.setdefault(module, set()).update(code.co_names)
        parent, _, last = module.rpartition(".")
        found.top.setdefault(parent, set()).add(last)
    found.top["engine"] |= found.top["engine.public"]
    for path in PROTOS:
        found.words |= set(WORD.findall(re.sub(r"//.*", "", path.read_text())))
    for path in KERNELS:
        found.words |= set(WORD.findall(re.sub(r"//.*", "", path.read_text())))
    for path in (*DEPLOYMENT, ROOT / "pyproject.toml"):
        found.words |= set(WORD.findall(path.read_text()))
    found.flags |= {
        *_options(build_parser()),
        *filter(FLAG.fullmatch, found.strings),
        "--all",
        "--full",
    }
    found.words |= {flag[2:].replace("-", "_") for flag in found.flags}  # configuration keys
    foreign = {word for group in FOREIGN.values() for word in group}
    found.words |= foreign
    found.flags |= set(filter(FLAG.fullmatch, foreign))
    return found


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a command, and the names and options of its subcommands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield name
                yield from _options(command)


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstrings of a file, and the strings below fields."""
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            yield node.value


def _look_at(code: CodeType, found: Names) -> None:
    """Add what a module or function uses. A string with a space is not taken for a name."""
    found.words |= {code.co_name, *code.co_names, *code.co_varnames, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _look_at(constant, found)
        for text in constant if isinstance(constant, (tuple, frozenset)) else (constant,):
            if isinstance(text, str) and not re.search(r"\s", text):
                found.strings.add(text)
                found.words |= set(WORD.findall(text))


def unknown(text: str) -> list[str]:
    """Return the names in code type that do not exist."""
    spans = [double or single for double, single in SPAN.findall(text)]
    return [span for span in spans if not _is_known(span)]


@cache
def _is_known(span: str) -> bool:
    if FILE.fullmatch(span):
        return span in _files() or "NAME" in span
    if NUMBER.fullmatch(span):
        return True
    if match := NAME.fullmatch(span):
        return names().knows(match[1])
    if command := COMMAND.match(span):
        return {command[1], *FLAG.findall(span)} <= names().flags
    if span.startswith("--"):
        return set(FLAG.findall(span)) <= names().flags
    return True


@cache
def _files() -> frozenset[str]:
    """Return the names of all files of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return frozenset(line.rpartition("/")[2] for line in listed.splitlines())


def texts(path: Path) -> Iterator[str]:
    text = path.read_text()
    if path.suffix == ".md":
        yield FENCE.sub("", text)
    elif path.suffix in (".proto", ".h", ".cpp"):
        yield "\n".join(re.findall(r"//(.*)", text))
    else:
        yield from (str(found.value) for found in docstrings(ast.parse(text)))
        yield from COMMENT.findall(text)


WRITTEN = [
    *(path for path in PAGES if path.exists()),
    *(*PROTOS, *KERNELS),
    *(path for name, path in modules().items() if name.split(".")[0] in (*PRODUCT, "tools")),
]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_name_exists(path):
    assert [name for text in texts(path) for name in unknown(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        *("`EngineLoop.run`", "`engine.replica.loop.EngineLoop.run`", "`loop.EngineLoop`"),
        *("`tools/test --full`", "`--max-num-seqs 4`", "`triolet models load`", "`fixtures.py x`"),
        *("`chat.messages`", "`rooms.txt`", "``timeout_s``", "`trio.Event`", "`plan(now)` now"),
    ],
)
def test_an_existing_name_is_known(text):
    assert unknown(text) == []


@pytest.mark.parametrize(
    "text",
    [
        *("`EngineLoop.stroll_on`", "`engine.replica.lop`", "`engine.model.native`"),
        "`engine.replica.loop.AbsentLoop`",
        *(
            "`Lopsided`",
            "``drained_yesterday``",
            "`--no-such-flag`",
            "`triolet dance`",
            "`room.py`",
        ),
    ],
)
def test_an_unknown_name_is_found(text):
    assert unknown(text)
