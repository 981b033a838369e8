"""Lets one thread at a time import modules of torch, transformers and other large libraries.

Models load in threads beside each other. These libraries' modules import each other in circles, and
many of them only when a function first needs them. Where two threads wait for modules of each
other, Python gives one of them a module that is half made, and its load fails.

Rule: whatever may import a module of such a library is decorated. Reading weights and steps do not.
"""

from __future__ import annotations

from functools import wraps
from threading import RLock
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

lock = RLock()  # held by the thread that imports


def holds_import_lock(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs while no other thread is in such a function."""

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return function(*args, **kwargs)

    return alone
