"""Nothing but `Pool.ensure` can start a load (R101): the product's sources, looked through."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Who may call each step on the way to a load, as file:function.
CALLERS = {
    # what `_revive` brings back was loaded by `ensure`, and died
    "_begin_load": {"engine/pool.py:ensure", "engine/pool.py:_revive"},
    "_revive": {"engine/pool.py:_run_load", "engine/pool.py:_note_end"},
    "_note_death": {"engine/pool.py:_note_failure", "engine/pool.py:_note_end"},
    "_run_load": {"engine/pool.py:_begin_load"},
    "_spawn_all": {"engine/pool.py:_run_load"},
    "_load_replica": {"engine/pool.py:_spawn_all"},
    "_make_runner": {"engine/pool.py:_prepare"},
}
# where a runner's `load` is called: the second is the process of the first's
LOADS = {"engine/pool.py:_load_replica", "engine/model/child_main.py:_load"}


def functions(tree):
    """Every method and function by name; what is nested in one is its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield part
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def uses():
    """(attribute, file:function) of every attribute that the product's functions use."""
    for package in ("engine", "grpc_service"):
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            for function in functions(tree):
                where = f"{path.relative_to(ROOT)}:{function.name}"
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute):
                        yield node, where


def test_every_way_to_a_load_begins_with_ensure():
    """Or with the death of what was loaded so."""
    found = {name: set() for name in CALLERS}
    for node, where in uses():
        if node.attr in found and not isinstance(node.ctx, ast.Store):
            found[node.attr].add(where)
    assert found == CALLERS


def test_only_the_pool_loads_a_runner():
    """Of all that is called load, only a runner's is a load: `json.load` and the like are not."""
    found = {
        where
        for node, where in uses()
        if node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id == "runner"
    }
    assert found == LOADS
