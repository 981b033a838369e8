"""Picks the file that a command about a demo model runs: by its first argument, else the stories'.

Rule 1: only the chosen file is imported, as each brings libraries of its own.
"""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

DEFAULT = "stories"


def chosen(argv: list[str], names: list[str]) -> tuple[str, list[str]]:
    """The model that the arguments name, and the other arguments."""
    if argv and argv[0] in names:
        return argv[0], argv[1:]
    if argv and not argv[0].startswith("-"):
        sys.exit(f"{argv[0]!r} is no demo model; choose one of {', '.join(names)}")
    return DEFAULT, argv


def run_chosen(modules: dict[str, str]) -> NoReturn:
    """Runs the chosen module's `main` with the other arguments, and exits with what it returns."""
    name, rest = chosen(sys.argv[1:], list(modules))
    sys.argv = [f"{sys.argv[0]} {name}", *rest]
    sys.exit(importlib.import_module(modules[name]).main())
