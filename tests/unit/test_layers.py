"""Who may import whom: every file of the product parsed, every import judged.

`ALLOWED` holds the first-party edges, one design decision each; `BANNED` what a package must not
name at all. An import inside a function counts like one at the top, unless `LAZY` gives the reason
why it stands there. An import under TYPE_CHECKING runs never and binds only readers: it may cross
`ALLOWED`, but not name what is banned. Imports are absolute.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("engine", "grpc_service")
FIRST_PARTY = (*PRODUCT, "tests", "tools")

VOCABULARY = {"engine.core.types", "engine.core.events"}  # the core's values, public by nature
ENGINE_PUBLIC = {
    "engine.api",
    "engine.config",
    "engine.encode_requests",
    "engine.errors",
    "engine.logs",
    "engine.heap",
    "engine.memory",
    "engine.quota",
    "engine.requests",
    "engine.shift",
    "engine.status",
    "engine.sync",
    "engine.telemetry",
    "engine.threads",
    "engine.watchdog",
    *VOCABULARY,
}
ALLOWED: dict[str, set[str]] = {
    "engine.errors": set(),
    "engine.logs": set(),
    "engine.heap": set(),
    "engine.memory": {"engine.errors"},
    "engine.quota": {"engine.errors"},
    "engine.status": set(),
    "engine.threads": set(),
    "engine.watchdog": set(),
    "engine.config": {"engine.errors"},
    "engine.core": {"engine.errors", "engine.config"},
    "engine.requests": {"engine.errors", *VOCABULARY},
    "engine.metrics": {"engine.status", *VOCABULARY},
    "engine.telemetry": {"engine.core", "engine.status"},
    "engine.encode_requests": {"engine.errors", "engine.requests", *VOCABULARY},
    "engine.model": {
        "engine.core",
        "engine.errors",
        "engine.config",
        "engine.logs",  # how a worker process writes its lines
        "engine.heap",
        "engine.memory",
        "engine.status",  # what a model is for
    },
    "engine.loop": {
        *("engine.core", "engine.errors", "engine.config", "engine.telemetry", "engine.watchdog"),
    },
    "engine.replica": {
        "engine.core",
        "engine.config",
        "engine.constraints",
        "engine.loop",  # a replica is a loop with what serves it
        "engine.status",
        "engine.telemetry",
    },
    "engine.entry": {"engine.core", "engine.replica", "engine.status"},
    "engine.load_watch": {"engine.core", "engine.entry"},
    "engine.governor": {"engine.core", "engine.entry", "engine.errors", "engine.memory"},
    "engine.pool": {
        "engine.core",
        "engine.errors",
        "engine.config",
        "engine.entry",
        "engine.governor",
        "engine.load_watch",
        "engine.loop",
        "engine.memory",
        "engine.replica",
        "engine.status",
    },
    "engine.constraints": {"engine.core", "engine.errors"},
    "engine.answers": set(),
    "engine.shift": set(),
    "engine.apart": {"engine.answers", "engine.requests", *VOCABULARY},
    "engine.generation": {
        "engine.answers",
        "engine.apart",
        "engine.core",
        "engine.errors",
        "engine.logs",
        "engine.requests",
    },
    "engine.encoding": {
        "engine.core",
        "engine.encode_requests",
        "engine.generation",  # what requests of all kinds share
        "engine.requests",
    },
    "engine.prompts": {
        "engine.answers",
        "engine.core",
        "engine.errors",
        "engine.requests",
        "engine.shift",
    },
    "engine.encode_inputs": {
        "engine.core",
        "engine.encode_requests",
        "engine.errors",
        "engine.prompts",
    },
    "engine.supervisor": {
        "engine.core",
        "engine.errors",
        "engine.config",
        "engine.encode_inputs",
        "engine.encode_requests",
        "engine.encoding",
        "engine.generation",
        "engine.prompts",
        "engine.logs",
        "engine.metrics",
        "engine.quota",
        "engine.requests",
        "engine.status",
    },
    "engine.api": {
        "engine.config",
        "engine.core",
        "engine.errors",
        "engine.generation",
        "engine.pool",
        "engine.quota",
        "engine.requests",
        "engine.status",
        "engine.supervisor",
        "engine.telemetry",
        "engine.threads",
        "engine.watchdog",
    },
    "engine.handles": {
        "engine.api",
        "engine.encode_requests",
        "engine.errors",
        "engine.requests",
        "engine.shift",
        *VOCABULARY,
    },
    "engine.sync": {
        "engine.api",
        "engine.config",
        "engine.encode_requests",
        "engine.encoding",
        "engine.errors",
        "engine.handles",
        "engine.requests",
        *VOCABULARY,
    },
    "engine": {"engine"},  # the public face: re-exports only (`test_engine_only_re_exports`)
    "grpc_service": ENGINE_PUBLIC,
    "grpc_service.front": set(),  # protocols
}

MODEL_LIBRARIES = {
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "sentence_transformers",
    "llguidance",
}
GRPC = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "google"}
IMPURE = {
    *("asyncio", "threading", "multiprocessing", "concurrent", "subprocess", "signal"),
    *("time", "datetime", "random", "secrets", "uuid"),
    *("os", "pathlib", "io", "socket", "logging", "contextvars", "importlib"),
}
BANNED: dict[str, set[str]] = {
    "engine": {*GRPC, "asyncio", "grpc_service", "tests", "tools"},
    "engine.core": {*IMPURE, *MODEL_LIBRARIES, "numpy", "trio", "engine.model"},
    "engine.model": {"trio"},
    "grpc_service": {*MODEL_LIBRARIES, "numpy", "asyncio", "engine.model", "tests", "tools"},
    "grpc_service.codec": {"grpc", "trio"},
    "grpc_service.front": {"grpc", "h2", "trio"},
    "grpc_service.encode_codec": {"grpc", "trio"},
    "grpc_service.framing": {"h2", "socket", "trio"},
    "grpc_service.http2": {"engine", "grpc", "socket", "trio"},
    "grpc_service.later": {"grpc", "trio"},
    "grpc_service.snapshots": {"grpc", "trio"},
}
MODEL_ONLY = "engine.model"  # the one package of `engine` that may name MODEL_LIBRARIES
TRIO_AWARE = {
    *(
        f"engine.{name}"
        for name in ("generation", "loop", "pool", "prompts", "supervisor", "threads")
    ),
    *(f"engine.{name}" for name in ("api", "constraints", "handles", "sync")),
    *(f"engine.{name}" for name in ("entry", "governor", "load_watch", "replica")),
    *(f"grpc_service.{name}" for name in ("bridge", "connections", "server", "sockets")),
    *(f"grpc_service.{name}" for name in ("health", "metrics", "servicer", "watching")),
    "grpc_service.cli.startup",
}
THREAD_ENTRY = "engine.threads"

LAZY: dict[tuple[str, str], str] = {
    ("engine.api", "engine.model.factory"): (
        "the default runner: torch enters only when a torch model is asked for, so that "
        "`import engine`, and an engine of fakes, work without it"
    ),
    ("engine.api", "engine.model.capability"): "as the factory: an engine of fakes has no files",
    ("engine.model.factory", "engine.model.runner"): "the spec's arithmetic needs no torch",
    ("engine.model.factory", "engine.model.encoders"): "the spec's arithmetic needs no torch",
}


@dataclass(frozen=True)
class Import:
    """One import statement's target. ``is_relative`` ones are wrong whatever they name."""

    target: str
    is_type_only: bool = False
    is_in_function: bool = False
    is_relative: bool = False


@cache
def imports_of(source: str) -> tuple[Import, ...]:
    """Every import of a file, wherever it stands."""
    return tuple(_imports(ast.parse(source), is_type_only=False, is_in_function=False))


def _imports(node: ast.AST, *, is_type_only: bool, is_in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        is_guarded = isinstance(node, ast.If) and _is_type_checking(node) and child in node.body
        type_only = is_type_only or is_guarded
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, type_only, is_in_function)
        elif isinstance(child, ast.ImportFrom):
            for target in sorted(_targets(child)):
                yield Import(target, type_only, is_in_function, is_relative=child.level > 0)
        else:
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _imports(
                child, is_type_only=type_only, is_in_function=is_in_function or is_function
            )


def _targets(node: ast.ImportFrom) -> set[str]:
    """What ``from a import b`` names: ``a.b`` where that is a module of ours, else ``a``."""
    module = node.module or ""
    return {
        full if full in modules() else module
        for full in (f"{module}.{alias.name}" for alias in node.names)
    }


def _is_type_checking(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def modules() -> dict[str, Path]:
    """Every first-party module by name; generated code is not ours to judge."""
    found = {}
    for top in FIRST_PARTY:
        for path in (ROOT / top).rglob("*.py"):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if "_generated" in parts or "node_modules" in parts:
                continue
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


def product_modules() -> list[str]:
    return [name for name in modules() if name.split(".")[0] in PRODUCT]


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def package_of(module: str) -> str:
    """The row of `ALLOWED` that judges a module: the longest that holds it."""
    if module == "engine":
        return "engine"
    rows = [row for row in ALLOWED if row != "engine" and is_within(module, row)]
    assert rows, f"{module} has no row in ALLOWED: say what it may import"
    return max(rows, key=len)


def offences(module: str, source: str) -> list[str]:
    """Every rule that an import of ``source``, as the file of ``module``, breaks."""
    return [
        f"{module} imports {found.target}: {reason}"
        for found in imports_of(source)
        for reason in _reasons(module, found)
    ]


def _reasons(module: str, found: Import) -> list[str]:
    target, top = found.target, found.target.split(".")[0]
    if found.is_relative:
        return ["relative imports hide the layer they reach into"]
    if (module, target) in LAZY and found.is_in_function:
        return []
    reasons = [
        f"banned in {package}"
        for package, names in BANNED.items()
        if is_within(module, package) and any(is_within(target, name) for name in names)
    ]
    in_engine = is_within(module, "engine") and not is_within(module, MODEL_ONLY)
    if in_engine and top in MODEL_LIBRARIES:
        reasons.append(f"only {MODEL_ONLY} may")
    if top == "trio" and not found.is_type_only and module not in TRIO_AWARE:
        reasons.append("not one of the files that may wait")
    if top in PRODUCT and not found.is_type_only:
        package = package_of(module)
        if not any(is_within(target, allowed) for allowed in {*ALLOWED[package], package}):
            reasons.append(f"no edge from {package} in ALLOWED")
    return reasons


# ---- the rules, on the files there are -------------------------------------------------------


@pytest.mark.parametrize("module", product_modules())
def test_imports_only_what_its_layer_may(module):
    assert offences(module, modules()[module].read_text()) == []


def test_lazy_imports_are_still_there():
    for (module, target), reason in LAZY.items():
        found = imports_of(modules()[module].read_text())
        assert Import(target, is_in_function=True) in found, f"{module} → {target}: {reason}"


def test_engine_only_re_exports():
    tree = ast.parse(modules()["engine"].read_text())
    kinds = {type(node) for node in tree.body}
    assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, "engine/__init__.py only re-exports"


WAYS_INTO_A_THREAD = {"to_thread", "start_thread_soon"}


def _enters_a_thread(tree: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr in WAYS_INTO_A_THREAD)
        or (isinstance(node, ast.alias) and WAYS_INTO_A_THREAD & {*node.name.split(".")})
        for node in ast.walk(tree)
    )


def test_only_threads_enters_a_thread():
    found = {m for m in product_modules() if _enters_a_thread(ast.parse(modules()[m].read_text()))}
    assert found == {THREAD_ENTRY}


MAKES_THREADS = {"Thread", "ThreadPoolExecutor"}
OWN_THREADS = {
    "engine.sync": "Trio's own thread, for programs that block",
    "engine.watchdog": "it watches the steps, and waits for none",
    "engine.model.pinned": "steps of a backend that needs one thread: Trio's cache pins none; the "
    "job that `engine.threads` runs waits for it, so a step is joined all the same",
    "engine.model.child_main": "a process of its own, without Trio",
    "engine.model.vet": "a process of its own, without Trio",
    "grpc_service.tracing": "the last flush to a collector, left behind if that does not answer",
}


def _makes_a_thread(tree: ast.AST) -> bool:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = (getattr(call, "attr", getattr(call, "id", "")) for call in calls)
    return not MAKES_THREADS.isdisjoint(names)


def test_only_these_make_threads_beside_those_of_trio():
    found = {m for m in product_modules() if _makes_a_thread(ast.parse(modules()[m].read_text()))}
    assert found == OWN_THREADS.keys()


def _core() -> dict[str, ast.Module]:
    return {
        name: ast.parse(path.read_text())
        for name, path in modules().items()
        if is_within(name, "engine.core")
    }


def test_the_core_calls_nothing_impure():
    impure = {"open", "print", "input", "hash", "id", "eval", "exec", "__import__"}
    calls = [
        (name, node.func.id)
        for name, tree in _core().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert [(name, call) for name, call in calls if call in impure] == []


def test_only_the_sequence_writes_its_state():
    """D7: one table, one writer."""
    writers = {
        name
        for name, tree in _core().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr == "state"
    }
    assert writers == {"engine.core.sequence"}


# ---- torch, where it must not be -------------------------------------------------------------

TORCHLESS_TESTS = ("unit", "property", "golden", "simulation")


def reached_from(module: str) -> dict[str, str]:
    """Every module and library that importing ``module`` brings, by who brings it. Imports in
    functions count, but for those in `LAZY`."""
    reached = {module: ""}
    to_do = [module]
    while to_do:
        name = to_do.pop()
        if name not in modules():
            continue
        for found in imports_of(modules()[name].read_text()):
            if found.is_type_only or (name, found.target) in LAZY:
                continue
            for part in _with_parents(found.target):
                if part not in reached:
                    reached[part] = name
                    to_do.append(part)
    return reached


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


@pytest.mark.parametrize(
    "module",
    [
        name
        for name in modules()
        if name.split(".")[0] == "tests" and name.split(".")[1] in TORCHLESS_TESTS
    ],
)
def test_tests_of_the_core_reach_no_torch(module):
    found = reached_from(module)
    for library in ("torch", "transformers"):
        assert library not in found, f"{module} reaches {library} through {found[library]}"


@pytest.mark.parametrize(
    "module",
    [
        *("engine", "grpc_service.cli.main", "engine.model.fake"),
        *("engine.model.child", "engine.model.child_main", "engine.model.pinned"),
    ],
)
def test_importing_brings_no_torch(module):
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ---- the judge itself: a planted offence is found --------------------------------------------


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.core.planner", "import trio"),
        ("engine.core.planner", "from time import monotonic"),
        ("engine.core.planner", "def f():\n    import random"),
        ("engine.core.planner", "from engine.loop import EngineLoop"),
        ("engine.core.planner", "from .types import Request"),
        ("engine.core.planner", "if TYPE_CHECKING:\n    import torch"),
        ("engine.core.planner", "if TYPE_CHECKING:\n    pass\nelse:\n    from engine import pool"),
        ("engine.core.planner", "from engine import api"),
        ("engine.errors", "from engine.config import EngineConfig"),
        ("engine.loop", "import torch.nn"),
        ("engine.loop", "from engine.model.fake import FakeRunner"),
        ("engine.loop", "from engine.supervisor import Supervisor"),
        ("engine.requests", "import trio"),
        ("engine.supervisor", "from engine.pool import Pool"),
        ("engine.api", "from engine.model.factory import make_runner"),
        ("engine.model.runner", "import trio"),
        ("engine.model.runner", "import grpc"),
        ("grpc_service.servicer", "from engine.core.scheduler import Scheduler"),
        ("grpc_service.codec", "import trio"),
        ("grpc_service.server", "import asyncio"),
        ("grpc_service.http2", "import trio"),
        ("grpc_service.front", "if TYPE_CHECKING:\n    import grpc"),
        ("grpc_service.codec", "import tests.support"),
    ],
)
def test_a_planted_import_is_an_offence(module, source):
    assert offences(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.core.planner", "from engine.core.types import Request"),
        ("engine.core.planner", "if TYPE_CHECKING:\n    from engine.loop import Sink"),
        ("engine.loop", "import trio"),
        ("engine.api", "def f():\n    from engine.model.factory import make_runner"),
        ("engine.model.runner", "import torch"),
        ("grpc_service.servicer", "from engine.core.events import Tokens"),
    ],
)
def test_what_a_layer_may_is_no_offence(module, source):
    assert offences(module, source) == []
