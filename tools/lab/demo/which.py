"""Chooses which demo model's module a command runs: by its first argument, or else the stories'.

Rule: only the chosen file is imported, because each needs other libraries.
"""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

DEFAULT = "stories"


def chosen(argv: list[str], names: list[str]) -> tuple[str, list[str]]:
    """Return the model that the arguments name, and the other arguments."""
    if argv and argv[0] in names:
        return argv[0], argv[1:]
    if argv and not argv[0].startswith("-"):
        sys.exit(f"{argv[0]!r} is not a demo model; choose one of {', '.join(names)}")
    return DEFAULT, argv


def run_chosen(modules: dict[str, str]) -> NoReturn:
    """Run the chosen module's `main` with the other arguments, and exit with its result."""
    name, rest = chosen(sys.argv[1:], list(modules))
    sys.argv = [f"{sys.argv[0]} {name}", *rest]
    sys.exit(importlib.import_module(modules[name]).main())
