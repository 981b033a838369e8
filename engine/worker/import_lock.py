"""Lets one thread at a time import modules of torch, transformers and other large libraries.

Several models can load at once, each in a thread. These libraries' modules import each other in
circles, many of them only when a function first needs them. If two threads wait for each other's
modules, Python gives one of them a half-initialised module, and its load fails.

Rule: each function that may import such a module is decorated; reading weights and steps import
none.
"""

from __future__ import annotations

from functools import wraps
from threading import RLock
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

lock = RLock()  # held by the thread that may import


def holds_import_lock(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that no two threads run decorated functions at the same time."""

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return function(*args, **kwargs)

    return alone
