"""The progress bars of client commands, on standard error if that is a terminal."""

from __future__ import annotations

import contextlib
import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from grpc_service.client import messages


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


def until_first_token(
    events: Iterable[messages.GenerateResponse],
) -> Iterator[messages.GenerateResponse]:
    """Yield the events of a stream, and show those of its progress as a bar."""
    with contextlib.ExitStack() as shown:
        update: Callable[..., Any] | None = None
        for event in events:
            if not event.HasField("progress"):
                shown.close()
                update = None
                yield event
                continue
            text, done, total = _describe(event.progress)
            update = update or shown.enter_context(bar(text))
            update(description=text, completed=done, total=total or None)


def _describe(progress: messages.PromptProgress) -> tuple[str, int, int]:
    """Return the text of a bar, and how much is done of how much; 0 of what is not known."""
    if progress.phase == "load":
        done, total = progress.loaded_bytes // 2**20, progress.total_bytes // 2**20
        return "loading the model, MiB", done, total
    text = "reading the prompt"
    if progress.position:
        text = f"place {progress.position} in the queue"
    if progress.HasField("first_token"):
        text += f", about {math.ceil(progress.first_token.ToTimedelta().total_seconds())} s left"
    return text, progress.computed_tokens, progress.prompt_tokens
