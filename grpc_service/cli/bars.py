"""The progress bars of client commands, on standard error if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(
    text: str, total: float | None = None, *, is_quiet: bool = False, of_bytes: bool = False
) -> Iterator[Callable[..., Any]]:
    """Show a bar, unless ``is_quiet``. Yield the function that updates it, with the arguments of
    rich's `Progress.update`: ``completed``, ``advance``, ``total``, ``description``."""
    if is_quiet or not sys.stderr.isatty():
        yield lambda **_: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    counts = DownloadColumn() if of_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), counts, TimeElapsedColumn())
    # By default rich would redirect standard output.
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False
    ) as bars:
        yield partial(bars.update, bars.add_task(text, total=total))
