"""Triolet's engine: structured-concurrency scheduling of language models on Trio.

`engine.public` has the package's public names. It is imported when one of them is first used,
because it imports the whole engine: a worker process, or a command that only calls a server, needs
a few modules of `engine` and would wait for all of them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        # `from engine import logs` calls this first, and must import no more than that file.
        if name == "__all__" or not (name.startswith("_") or find_spec(f"engine.{name}")):
            from engine import public

            if hasattr(public, name):
                globals()[name] = value = getattr(public, name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        from engine import public

        return sorted({*globals(), *public.__all__})
