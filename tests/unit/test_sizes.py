"""What a reader has to hold at once: classes, files and folders have an upper size.

A file or class that is too large is split so that each part has one purpose, never just to shorten
it. There is no exception.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.rooms import ROOT, modules, product_modules

METHODS_MAX = 25
LINES_MAX = 600
FILES_IN_ENGINE_MAX = 10
SUFFIXES = (".py", ".h", ".cpp", ".proto")


def methods(source: str) -> Iterator[tuple[str, int]]:
    """Yield every class of a file with the number of functions its body defines.

    Properties, overloads and special methods count; what an inner class or function defines does
    not.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
            yield node.name, sum(isinstance(child, kinds) for child in node.body)


def too_large_classes() -> dict[str, int]:
    return {
        f"{module}.{name}": count
        for module in product_modules()
        for name, count in methods(modules()[module].read_text())
        if count > METHODS_MAX
    }


def product_files() -> list[Path]:
    """Return the files that people write: not what is generated, nor third parties' protos."""
    return [
        path
        for top in ("engine", "grpc_service", "proto")
        for path in sorted((ROOT / top).rglob("*"))
        if path.suffix in SUFFIXES and not {"_generated", "third_party"} & set(path.parts)
    ]


def too_long_files() -> dict[str, int]:
    return {
        path.relative_to(ROOT).as_posix(): len(text.splitlines())
        for path in product_files()
        if len((text := path.read_text()).splitlines()) > LINES_MAX
    }


@pytest.mark.parametrize("found", [too_large_classes, too_long_files])
def test_nothing_is_too_large(found):
    assert found() == {}


def test_few_files_lie_directly_in_the_engine():
    files = [path.name for path in (ROOT / "engine").iterdir() if path.suffix == ".py"]
    assert len(files) <= FILES_IN_ENGINE_MAX


def test_methods_are_counted():
    source = (
        "class A:\n    x = 1\n    def __init__(self): ...\n    @property\n    def a(self): ...\n"
        "    async def b(self):\n        def inner(): ...\n    class B:\n        def c(self): ...\n"
    )
    assert dict(methods(source)) == {"A": 3, "B": 1}
