"""Only `Loads.ensure` begins a load (R101), as the product's sources show."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Who may call each function on the way to a load, as file:function.
CALLERS = {
    # `revive` begins the load of a replica that `ensure` had loaded before and that died
    "_begin_load": {"engine/pool/loads.py:ensure", "engine/pool/loads.py:revive"},
    "revive": {"engine/pool/loads.py:_run_load", "engine/pool/pool.py:_replica_died"},
    "record_death": {"engine/pool/loads.py:_record_failure", "engine/pool/pool.py:_replica_died"},
    "_replica_died": {"engine/pool/pool.py:__init__"},
    "_run_load": {"engine/pool/loads.py:_begin_load"},
    "load_replicas": {"engine/pool/loads.py:_run_load"},
    "_load_replica": {"engine/pool/loader.py:load_replicas"},
    "_make_runner": {"engine/pool/loader.py:_make_candidate"},
}
# Who calls a runner's `load`. The second is the process of the first one's runner.
LOADS = {"engine/pool/loader.py:_load_replica", "engine/worker/process/main.py:_load"}


def functions(tree):
    """Yield every method and function. A function inside another belongs to the outer one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield part
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def uses():
    """Yield (attribute, file:function) for every attribute that the product's functions use."""
    for package in ("engine", "grpc_service"):
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            for function in functions(tree):
                where = f"{path.relative_to(ROOT)}:{function.name}"
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute):
                        yield node, where


def test_every_way_to_a_load_begins_with_ensure():
    """R101, R105: a load may also begin with the death of a replica that `ensure` had loaded."""
    found = {name: set() for name in CALLERS}
    for node, where in uses():
        if node.attr in found and not isinstance(node.ctx, ast.Store):
            found[node.attr].add(where)
    assert found == CALLERS


def test_only_the_pool_loads_a_runner():
    """R37: only a runner's `load` counts; `json.load` and similar functions load no model."""
    found = {
        where
        for node, where in uses()
        if node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id == "runner"
    }
    assert found == LOADS
