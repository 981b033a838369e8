"""Who may import whom: every file of the product is parsed, and every import is judged.

The law is the table in `tools/rooms.txt`; how to read it stands at its top.

- An import inside a function counts like one at the top, unless `LAZY` has it.
- An import under TYPE_CHECKING never runs: it needs no arrow, but may name only its own room and
  the rooms above it. Libraries are judged wherever the import stands.
- Imports are absolute. Whatever the table allows is used by some file.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import engine
from engine import public
from tests.support.programs import imported_by
from tools.rooms import (
    FIRST_PARTY,
    PRODUCT,
    ROOT,
    Import,
    Room,
    imports_of,
    is_within,
    modules,
    parse,
    product_modules,
    room_of,
    rooms,
)

# The generated protos make their names when they are imported.
MADE_AT_IMPORT = "grpc_service._generated"

# Standard modules that the core may not import: it has no clock, no I/O and no threads.
IMPURE = {
    *("threading", "multiprocessing", "concurrent", "subprocess", "signal"),
    *("time", "datetime", "random", "secrets", "uuid"),
    *("os", "pathlib", "io", "socket", "logging", "contextvars", "importlib"),
}

# Imports that bring torch, and stand in functions, which run only for a torch model: `import
# engine`, an engine of fakes, and the arithmetic of specs work without it.
LAZY = {
    "engine.api.engine": {
        *("engine.worker.factory", "engine.worker.load.capability", "engine.worker.load.resolve"),
    },
    "engine.worker.factory": {
        *(
            "engine.worker.text.runner",
            "engine.worker.text.rank_runners",
            "engine.worker.text.vision.runner",
        ),
        *("engine.worker.image_generation.runner", "engine.worker.encode.runner"),
        "engine.worker.encode.files",
    },
}


def offences(module: str, source: str) -> list[str]:
    """Return every rule that an import breaks in ``source``, the text of ``module``'s file."""
    return [
        f"{module} imports {found.target}: {reason}"
        for found in imports_of(source)
        for reason in _reasons(module, found)
    ]


def _reasons(module: str, found: Import) -> Iterator[str]:
    top = found.target.split(".")[0]
    if found.is_relative:
        yield "relative imports hide the room they reach into"
    elif top in PRODUCT:
        yield from _reasons_of_ours(module, found)
    elif top in FIRST_PARTY:
        yield "the product knows neither its tests nor its tools"
    elif top == "asyncio" or top not in sys.stdlib_module_names:
        if top not in room_of(module).libraries:
            yield f"not a library of {room_of(module).name}"
    elif top in IMPURE and is_within(module, "engine.core"):
        yield "the core is pure"


def _reasons_of_ours(module: str, found: Import) -> Iterator[str]:
    own, other = room_of(module), room_of(found.target)
    if _is_lazy(module, found):
        return
    if found.is_type_only:
        if other.place > own.place and not is_within(found.target, _folder(own)):
            yield f"{other.name} stands below {own.name} in tools/rooms.txt"
    elif own is not other and other.name not in own.arrows:
        yield f"tools/rooms.txt has no arrow from {own.name} to {other.name}"


def _is_lazy(module: str, found: Import) -> bool:
    return found.is_in_function and found.target in LAZY.get(module, ())


def _folder(room: Room) -> str:
    """Return a room's folder: for a room of one file, the package that has the file."""
    path = modules().get(room.name)
    return room.name.rpartition(".")[0] if path and path.name != "__init__.py" else room.name


# ---- the rules, on the files there are -------------------------------------------------------


def test_imports_only_what_its_layer_may():
    found = (offences(module, modules()[module].read_text()) for module in product_modules())
    assert [one for offences_of_module in found for one in offences_of_module] == []


def _edges(module: str) -> set[str]:
    """Return the modules of ours that ``module`` imports when it runs, lazily or not."""
    return {
        found.target
        for found in imports_of(modules()[module].read_text())
        if not found.is_type_only and found.target.split(".")[0] in PRODUCT
    }


def test_every_arrow_of_the_table_is_used():
    used = {
        (room_of(module).name, room_of(target).name)
        for module in product_modules()
        for target in _edges(module)
    }
    allowed = {(room.name, arrow) for room in rooms().values() for arrow in room.arrows}
    assert allowed - used == set(), "take them out of tools/rooms.txt"


def test_every_library_of_the_table_is_used():
    used = {
        (room_of(module).name, found.target.split(".")[0])
        for module in product_modules()
        for found in imports_of(modules()[module].read_text())
    }
    unused = {(room.name, name) for room in rooms().values() for name in room.libraries} - used
    assert unused <= {("grpc_service._generated", "google"), ("grpc_service._generated", "grpc")}


def test_every_room_is_a_file_or_a_folder():
    assert [
        name
        for name in rooms()
        if name not in modules() and not (ROOT / name.replace(".", "/")).is_dir()
    ] == []


def test_no_import_circle_even_a_lazy_one():
    edges = {name: _edges(name) for name in modules() if name.split(".")[0] != "tests"}
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError


def test_a_room_may_import_only_rooms_above_it():
    with pytest.raises(ValueError, match="only rooms above"):
        parse("engine.a < b\nengine.b")
    table = parse("engine.b\nengine.a < b\n         ; torch")
    assert table["engine.a"].arrows == {"engine.b"}
    assert table["engine.a"].libraries == {"torch"}


def test_lazy_imports_are_still_there():
    for module, targets in LAZY.items():
        found = {
            one.target for one in imports_of(modules()[module].read_text()) if one.is_in_function
        }
        assert targets - found == set()


def test_engine_only_re_exports_and_imports_nothing_before_it_is_used():
    assert engine.__all__ == public.__all__
    assert set(engine.__all__) <= set(dir(engine))
    assert all(getattr(engine, name) is getattr(public, name) for name in engine.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = engine.nothing
    kinds = {type(node) for node in ast.parse(modules()["engine.public"].read_text()).body}
    assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, "engine/public.py only re-exports"
    code = "import engine.errors, grpc_service.cli.main, engine.worker.process.main\n"
    heavy = {"trio", "numpy", "grpc", "engine.public", "engine.api"}
    assert not heavy & imported_by(f"{code}from engine import logs")


class Names(NamedTuple):
    """What a file names: an attribute both alone and after its owner, as ``loop.submit``."""

    attributes: frozenset[str]
    imported: frozenset[str]
    called: frozenset[str]


@cache
def names_in(module: str) -> Names:
    tree = ast.parse(modules()[module].read_text())
    attributes: set[str] = set()
    imported: set[str] = set()
    called: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            attributes |= _forms(node)
        elif isinstance(node, ast.alias):
            imported |= {*node.name.split(".")}
        elif isinstance(node, ast.Call):
            called |= _forms(node.func)
    return Names(frozenset(attributes), frozenset(imported), frozenset(called))


def _forms(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Attribute):
        owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
        return {node.attr, f"{owner}.{node.attr}"}
    return {node.id} if isinstance(node, ast.Name) else set()


THREAD_ENTRIES = {
    "engine.replica.threads": "for every program that runs Trio",
    "grpc_service.ray.ingress": "in Serve's proxy, which runs asyncio and no engine",
}
WAYS_INTO_A_THREAD = {"to_thread", "start_thread_soon"}


def test_only_threads_enters_a_thread():
    found = {
        name: names_in(name).attributes | names_in(name).imported for name in product_modules()
    }
    assert {name for name in found if WAYS_INTO_A_THREAD & found[name]} == THREAD_ENTRIES.keys()


MAKES_THREADS = {"Thread", "ThreadPoolExecutor"}
OWN_THREADS = {
    "engine.api.portal": "Trio's own thread, for programs that do not run Trio",
    "engine.replica.watchdog": "it watches the steps, and waits for none",
    "engine.worker.process.main": "a process of its own, without Trio",
    "engine.worker.sampling.sandbox_main": "a process of its own, without Trio",
    "grpc_service.cli.batch": "a command, which sends requests beside each other",
    "grpc_service.cli.generate": "a command, which asks for a file's prompts beside each other",
    "engine.worker.forward.packed_cache": "hash a file on all cores; sync it beside a load",
    "engine.worker.text.placed_model": "check packed weights beside a load, which waits for it",
    "engine.worker.text.runner": "builds a tokenizer beside a load's first step, which waits",
    "grpc_service.cli.linking": "links a library while the server imports its modules",
    "grpc_service.app.tracing": "the last flush to a collector, left behind if that is mute",
}


def test_only_these_make_threads_beside_those_of_trio():
    made = {name for name in product_modules() if MAKES_THREADS & names_in(name).called}
    assert made == OWN_THREADS.keys()


# Attributes that hand a request to a worker or load a model, and the modules that may use them.
# "runner.load" is the attribute `load` of what is called `runner`, "execute" that of anything.
ONE_WAY_IN = {
    "_begin_load": {"engine.pool.loads"},  # for `ensure`, and after a replica's death
    "load_replicas": {"engine.pool.loads"},
    "runner.load": {"engine.pool.loader", "engine.worker.process.main"},
    "loop.submit": {"engine.requests.stream"},
    "_commands": {"engine.replica.loop"},
    "execute": {
        "engine.replica.loop",
        "engine.worker.process.main",  # in the worker's own process
    },
}


def test_there_is_one_way_to_a_worker_and_only_its_loop_executes_a_step():
    """Handles and services submit to the supervisor, and a request's stream submits to the
    replica's loop. Only the pool loads models."""
    assert {
        name: {module for module in product_modules() if name in names_in(module).attributes}
        for name in ONE_WAY_IN
    } == ONE_WAY_IN


def test_no_home_directory_is_taken_for_granted():
    """`Path.home` and `getuser` raise for a user without an entry in the passwd file."""
    raising = {"home", "expanduser", "getuser"}
    found = {
        (module, node.lineno)
        for module in product_modules()
        for node in ast.walk(ast.parse(modules()[module].read_text()))
        if isinstance(node, ast.Attribute) and node.attr in raising
        if ast.unparse(node) != "os.path.expanduser"
    }
    assert found == set()


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
    """D7: `Sequence` alone changes states, by the transition table."""
    writers = {
        name
        for name, tree in _core().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr == "state"
    }
    assert writers == {"engine.core.text.sequence"}


# ---- torch, where it must not be -------------------------------------------------------------

TORCHLESS_TESTS = ("tests.unit", "tests.property", "tests.golden", "tests.simulation")


def test_tests_of_the_core_reach_no_torch():
    """Imports inside functions count, except those that `LAZY` lists."""
    to_do = [name for name in modules() if any(is_within(name, one) for one in TORCHLESS_TESTS)]
    reached = dict.fromkeys(to_do, "")  # module: the module that imports it
    while to_do:
        name = to_do.pop()
        for found in imports_of(modules()[name].read_text()) if name in modules() else ():
            if not (found.is_type_only or _is_lazy(name, found)):
                parts = found.target.split(".")
                targets = [".".join(parts[: end + 1]) for end in range(len(parts))]
                to_do += [one for one in targets if one not in reached]
                reached |= {one: name for one in targets if one not in reached}
    assert {name: reached[name] for name in ("torch", "transformers") if name in reached} == {}


@pytest.mark.parametrize(
    "module",
    [
        *("engine", "grpc_service.cli.main", "engine.worker.fakes.text"),
        *("engine.worker.process.runner", "engine.worker.process.main"),
    ],
)
def test_importing_brings_no_torch(module):
    heavy = {"torch", "transformers", "tokenizers", "numpy", "asyncio"}
    assert not heavy & imported_by(f"import {module}")


# Protocols, codecs and policies without I/O ("sans-I/O", like h2), so that tests need no loop.
SANS_IO = (
    *("grpc_service.rpc.http2", "grpc_service.rpc.framing", "grpc_service.services.text_codec"),
    *(
        "engine.requests.text.answers.choice_parser",
        "engine.requests.text.values",
        "engine.pool.routing",
    ),
)


def test_protocols_codecs_and_policies_import_no_loop():
    assert not {"trio", "asyncio"} & imported_by(f"import {', '.join(SANS_IO)}")


# ---- the checks: each finds a planted offence --------------------------------------------------


CORE = "engine.core.text.step_builder"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (CORE, "import trio"),
        (CORE, "def f():\n    import random"),
        (CORE, "from .types import Request"),
        (CORE, "if TYPE_CHECKING:\n    import torch"),
        (CORE, "if TYPE_CHECKING:\n    pass\nelse:\n    from engine import pool"),
        (CORE, "if TYPE_CHECKING:\n    from engine.replica.loop import EngineLoop"),
        ("engine.errors", "from engine.config import EngineConfig"),
        ("engine.replica.loop", "from engine.worker.fakes.text import FakeRunner"),
        ("engine.api.engine", "from engine.worker.factory import make_runner"),
        ("grpc_service.services.text_codec", "import tests.support"),
    ],
)
def test_a_planted_import_is_an_offence(module, source):
    assert offences(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (CORE, "from engine.core.text.types import Request"),
        (CORE, "if TYPE_CHECKING:\n    from engine.config import EngineConfig"),
        ("engine.replica.loop", "import trio"),
        ("engine.api.engine", "def f():\n    from engine.worker.factory import make_runner"),
    ],
)
def test_what_a_layer_may_is_no_offence(module, source):
    assert offences(module, source) == []


# ---- tools and tests -------------------------------------------------------------------------


@cache
def _bound_names(path: Path) -> frozenset[str] | None:
    """Return the names that a module binds at its top level. Return None if the source does not
    show all of them, because of `__getattr__` or `import *`."""
    names: set[str] = set()
    left: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while left:
        node = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        left += ast.iter_child_nodes(node)
    return None if names & {"__getattr__", "*"} else frozenset(names)


def _missing(source: str) -> list[str]:
    """Return the modules and names of ours that a file imports and that do not exist."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found += [name for name in names if _is_ours(name) and name not in modules()]
        elif isinstance(node, ast.ImportFrom) and node.module and _is_ours(node.module):
            names = [alias.name for alias in node.names]
            found += [f"{node.module}.{name}" for name in names if not _has(node.module, name)]
    return found


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in FIRST_PARTY and not module.startswith(MADE_AT_IMPORT)


def _has(module: str, name: str) -> bool:
    """Return whether a module of ours has a submodule, or binds a name."""
    if f"{module}.{name}" in modules():
        return True
    bound = _bound_names(modules()[module]) if module in modules() else frozenset()
    return bound is None or name in bound


def test_every_import_of_ours_is_there():
    """mypy reads the product alone, and no test imports every tool: red if a bench names a module
    that has moved."""
    missing = {
        name: _missing(path.read_text("utf-8"))
        for name, path in modules().items()
        if name.split(".")[0] not in PRODUCT
    }
    assert {name: found for name, found in missing.items() if found} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from engine.worker.process.channel import PROTOCOL",
        "from engine.config import NoConfig",
        "import engine.no_room",
        "if True:\n    from tools.lab.bench.frame import no_row",
    ],
)
def test_an_import_of_what_is_not_there_is_found(line):
    assert len(_missing(line)) == 1
