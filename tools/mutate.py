"""Check that the core's tests notice changes: `python -m tools.mutate` makes 100 of them.

Each mutant is one random change of the core or of `POOL` (a comparison, a sum, a constant, a
condition, a dropped call, a dropped result), made in a copy of the tree. The quick tests and a few
simulated worlds run against the copy until one fails. Survivors are printed.
`tools/mutation_survivors.md` names the survivors that no test can notice, with the reasons. The
exit code is 1 below the bar.

`--seed` draws other mutants. `--only TEXT`, which may be given several times, runs those whose name
contains one of the texts, and `--list` runs none.
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
POOL = [ROOT / "engine" / "pool" / name for name in ("backoff.py", "routing.py")]
EXPLAINED = ROOT / "tools" / "mutation_survivors.md"
BAR = 90.0  # per cent
LONGEST = 90  # characters of a name
COPIED = ("engine", "grpc_service", "tools", "tests", "pyproject.toml")
TIMEOUT_S = 240.0  # of one command, after which a mutant counts as killed
PYTHON = [sys.executable, "-W", "ignore"]
UNIT = [
    f"tests/unit/test_{name}.py"
    for name in (
        *("backoff", "drafts", "encode_scheduler", "guests", "invariants"),
        *("lifecycle", "moving", "prefix", "prompt_images", "routing", "scheduler"),
        *("image_generation_scheduler", "states", "step_times", "types", "vocabulary"),
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
    """A change. ``name`` has its place and the change, and depends only on the function's text."""

    name: str
    path: Path
    source: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file, each with its whole changed source."""
    tree = ast.parse(path.read_text())
    for place, function in _functions(tree):
        seen: dict[str, int] = {}
        for node in ast.walk(function):
            for old, new, put in _changes(node, function):
                text = f"{_module(path)}.{place}: {old} → {new}"
                seen[text] = seen.get(text, 0) + 1
                name = text if seen[text] == 1 else f"{text} ({seen[text]})"
                undo = put()
                yield Mutant(name, path, ast.unparse(ast.fix_missing_locations(tree)))
                undo()


def _module(path: Path) -> str:
    """Return a file's name below its room: ``text.blocks``, ``pool.routing``."""
    room = CORE if path.is_relative_to(CORE) else CORE.parent
    return ".".join(path.relative_to(room).with_suffix("").parts)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and not _is_protocol(node):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name != "__repr__":
                    yield f"{node.name}.{inner.name}", inner


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)


def _changes(node: ast.AST, function: ast.AST):  # noqa: ANN202
    """Yield (old text, new text, a function that makes the change and returns its undoing)."""

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
    """Return the text of the smallest statement with a constant, to name the mutant."""
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
    """Draw ``count`` mutants; a file with twice as many possible ones gets twice as many."""
    paths = [*sorted(CORE.rglob("*.py")), *POOL]
    every = [mutant for path in paths for mutant in mutants_of(path)]
    return random.Random(seed).sample(every, min(count, len(every)))


def run(mutant: Mutant, tree: Path) -> str:
    """Return which command failed for the mutant and so killed it, or ""."""
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
    """Copy what the tests need into a folder of its own, so that nobody else sees a mutant."""
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "node_modules", ".hypothesis")
    for name in COPIED:
        source, target = ROOT / name, Path(folder) / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)
    return Path(folder)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="mutants to draw")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="run only drawn mutants whose name contains this; may be given several times",
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = parse(argv)
    drawn = [
        mutant
        for mutant in draw(args.seed, args.count)
        if args.only is None or any(text in mutant.name for text in args.only)
    ]
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
        print(f"  survived without an explanation: {name}")
    return 1 if killed < BAR or open_ones else 0


def run_clean(trees: SimpleQueue[Path]) -> str:
    """Return which command fails without any mutant, or ""."""
    tree = trees.get()
    path = CORE / "text" / "admission.py"
    try:
        return run(Mutant("unchanged", path, path.read_text()), tree)
    finally:
        trees.put(tree)


if __name__ == "__main__":
    sys.exit(main())
