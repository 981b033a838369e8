"""Do the core's tests notice a changed core? `python -m tools.mutate` changes it 100 times.

Each mutant is one drawn change of `engine/core/*.py` (a comparison, a sum, a constant, a condition,
a dropped call, a dropped result), made in a copy of the tree; the quick tests and a few simulated
worlds run against it until one fails. Survivors are printed; those that change nothing one could
see are explained, by name, in `tools/mutation_survivors.md`. The exit code is 1 below the bar.

`--seed` draws other mutants, `--only TEXT` runs those whose name contains it, `--list` runs none.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
CORE = ROOT / "engine" / "core"
EXPLAINED = ROOT / "tools" / "mutation_survivors.md"
BAR = 90.0  # per cent killed
LONGEST = 90  # characters of a statement in a name
COPIED = ("engine", "grpc_service", "tools", "tests", "pyproject.toml")
TIMEOUT_S = 240.0  # for one command; a mutant that hangs is killed by it
PYTHON = [sys.executable, "-W", "ignore"]
UNIT = [
    f"tests/unit/test_{name}.py"
    for name in (
        *("books", "breaker", "encode_scheduler", "lifecycle", "prefix", "rate"),
        *("restarts", "routing", "scheduler", "types"),
    )
]
COMMANDS = (
    [*PYTHON, "-m", "pytest", "-x", "-q", "tests/golden", *UNIT, "tests/property"],
    [*PYTHON, "-m", "tools.simulate", "-x", "--requests", "60", "--seeds", "12"],
)
SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """``name`` stays the same while the function's text does: its place, then the change."""

    name: str
    path: Path
    source: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file, each with its whole changed source."""
    tree = ast.parse(path.read_text())
    for place, function in _functions(tree):
        seen: dict[str, int] = {}
        for node in ast.walk(function):
            for old, new, put in _changes(node, function):
                text = f"{path.stem}.{place}: {old} → {new}"
                seen[text] = seen.get(text, 0) + 1
                name = text if seen[text] == 1 else f"{text} ({seen[text]})"
                undo = put()
                yield Mutant(name, path, ast.unparse(ast.fix_missing_locations(tree)))
                undo()


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and not _is_protocol(node):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name != "__repr__":
                    yield f"{node.name}.{inner.name}", inner


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


def _changes(node: ast.AST, function: ast.AST):  # noqa: ANN202
    """(old text, new text, a function that makes the change and returns one that undoes it)."""

    def setting(target: ast.AST, field: str, value: object, index: int | None = None):  # noqa: ANN202
        def put():  # noqa: ANN202
            holder = getattr(target, field)
            if index is None:
                setattr(target, field, value)
                return lambda: setattr(target, field, holder)
            before, holder[index] = holder[index], value
            return lambda: holder.__setitem__(index, before)

        return put

    def changed(field: str, value: object, index: int | None = None):  # noqa: ANN202
        old = _text(node)
        twin = copy.deepcopy(node)
        if index is None:
            setattr(twin, field, value)
        else:
            getattr(twin, field)[index] = value
        return old, _text(twin), setting(node, field, value, index)

    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            for swap in SWAPS.get(type(op), ()):
                yield changed("ops", swap(), index)
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)):
        for swap in SWAPS.get(type(node.op), ()):
            if not (isinstance(node, ast.BinOp) and _is_text(node)):
                yield changed("op", swap())
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
        yield changed("func", ast.Name(NAMES[node.func.id], ast.Load()))
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        twin = ast.UnaryOp(ast.Not(), node.test)
        yield f"if {_text(node.test)}", f"if {_text(twin)}", setting(node, "test", twin)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield (
            f"{node.value} in {_line_text(node, function)}",
            str(value),
            setting(node, "value", value),
        )
    elif isinstance(node, ast.Return) and not isinstance(node.value, (ast.Constant, type(None))):
        yield changed("value", ast.Constant(None))
    for field in ("body", "orelse"):
        block = getattr(node, field, None)
        for index, statement in enumerate(block if isinstance(block, list) else ()):
            is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            if is_call or isinstance(statement, ast.AugAssign):
                yield _text(statement), "pass", setting(node, field, ast.Pass(), index)


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _line_text(node: ast.AST, function: ast.AST) -> str:
    """The smallest statement around a constant: a number alone says nothing."""
    around = [
        statement
        for statement in ast.walk(function)
        if isinstance(statement, ast.stmt) and any(inner is node for inner in ast.walk(statement))
    ]
    smallest = min(around, key=lambda statement: len(ast.dump(statement)))
    return _text(smallest)[:60]


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(inner, (ast.JoinedStr, ast.Tuple)) for inner in ast.walk(node))


def draw(seed: int, count: int) -> list[Mutant]:
    """``count`` mutants of all there are, each file in proportion."""
    every = [mutant for path in sorted(CORE.glob("*.py")) for mutant in mutants_of(path)]
    return random.Random(seed).sample(every, min(count, len(every)))


def run(mutant: Mutant, tree: Path) -> str:
    """Which command killed it, or nothing."""
    target = tree / mutant.path.relative_to(ROOT)
    before = target.read_text()
    target.write_text(mutant.source)
    env = {**os.environ, "PYTHONPATH": str(tree), "HYPOTHESIS_PROFILE": "mutate"}
    try:
        for command in COMMANDS:
            try:
                done = subprocess.run(
                    command, cwd=tree, env=env, capture_output=True, timeout=TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired:
                return "time"
            if done.returncode != 0:
                return command[command.index("-m") + 1]
        return ""
    finally:
        target.write_text(before)


def copy_tree(folder: str) -> Path:
    """What the tests need, in a folder of its own, so that nobody else sees a mutant."""
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "node_modules", ".hypothesis")
    for name in COPIED:
        source, target = ROOT / name, Path(folder) / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)
    return Path(folder)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="mutants to draw")
    parser.add_argument("--only", default="", help="of those drawn, the ones with this in the name")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    drawn = [mutant for mutant in draw(args.seed, args.count) if args.only in mutant.name]
    if args.list:
        print("\n".join(mutant.name for mutant in drawn))
        return 0
    explained = EXPLAINED.read_text() if EXPLAINED.exists() else ""
    survivors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for worker in range(args.workers):
            trees.put(copy_tree(f"{folder}/{worker}"))
        if (clean := run_clean(trees)) != "":
            print(f"the unchanged tree fails: {clean}")
            return 2

        def judge(mutant: Mutant) -> tuple[Mutant, str, float]:
            tree, began = trees.get(), time.monotonic()
            try:
                return mutant, run(mutant, tree), time.monotonic() - began
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(args.workers) as pool:
            for number, (mutant, killer, seconds) in enumerate(pool.map(judge, drawn), 1):
                verdict = f"killed by {killer}" if killer else "SURVIVED"
                print(f"{number:3d} {seconds:5.1f} s {verdict:24s} {mutant.name}", flush=True)
                if not killer:
                    survivors.append(mutant.name)
    killed = 100.0 * (1 - len(survivors) / max(1, len(drawn)))
    open_ones = [name for name in survivors if f"`{name}`" not in explained]
    print(f"{len(drawn)} mutants, {killed:.0f} % killed; the bar is {BAR:g} %")
    for name in open_ones:
        print(f"  survived, and is not explained: {name}")
    return 1 if killed < BAR or open_ones else 0


def run_clean(trees: SimpleQueue[Path]) -> str:
    """What fails without any mutant."""
    tree = trees.get()
    path = CORE / "policy.py"
    try:
        return run(Mutant("unchanged", path, path.read_text()), tree)
    finally:
        trees.put(tree)


if __name__ == "__main__":
    sys.exit(main())
