"""What ``triolet embed`` and ``rerank`` share: many texts, and the calls that carry them.

Rule 1: there may be any number of texts. What one call does not take goes in several, one after the
other, and their results are numbered through. Rule 2: a text is an argument or a whole line; none
is left out, so that results can be put beside the lines they are of.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc

from engine.encode_requests import MAX_INPUTS
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

BYTES_MAX = 2 * 2**20  # of a call's texts: half of what a server takes (--max-message-bytes)
BAR_MIN = 100  # guess: fewer texts are done before anybody could read a bar
TEXT_WIDTH_MIN = 20  # guess: what of a text is worth a column


class Numbered(Protocol):
    """A result, with the place of its text."""

    index: int


Result = TypeVar("Result", bound=Numbered)


def texts_of(given: Sequence[str], file: str | None, what: str) -> list[str]:
    """The texts given as arguments, else the lines of ``file``, else those of standard input, which
    ``-`` means too. ``what``: texts or documents.

    Raises:
        ConfigError: there are none, or the file cannot be read.
    """
    if given and file is not None:
        raise ConfigError(f"give {what} as arguments or by --file, not both")
    if given and list(given) != ["-"]:
        return list(given)
    if file not in (None, "-"):
        found = _lines(_read(str(file)))
    elif not given and file is None and sys.stdin.isatty():
        raise ConfigError(f"there are no {what}; give some, or --file FILE (- for standard input)")
    else:
        found = _lines(sys.stdin.read())
    if not found:
        raise ConfigError(f"there are no {what} in {_name(file)}")
    return found


def _name(file: str | None) -> str:
    return "standard input" if file in (None, "-") else str(file)


def _read(file: str) -> str:
    try:
        return Path(file).expanduser().read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"--file {file} cannot be read: {error.strerror}") from None
    except UnicodeError:
        raise ConfigError(f"--file {file} is not UTF-8") from None


def _lines(text: str) -> list[str]:
    """As a shell counts lines; `str.splitlines` would also split at form feeds and the like."""
    return text.removesuffix("\n").split("\n") if text else []


def parts_of(texts: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """The texts in parts that a call takes each, with the place of each part's first."""
    first, size = 0, 0
    for place, text in enumerate(texts):
        num_bytes = len(text.encode())
        if place > first and (place - first == MAX_INPUTS or size + num_bytes > BYTES_MAX):
            yield first, texts[first:place]
            first, size = place, 0
        size += num_bytes
    yield first, texts[first:]


def results_of(
    texts: Sequence[str],
    ask: Callable[[Sequence[str], float | None], Any],
    timeout_s: float | None,
    advance: Callable[[], None],
) -> Iterator[Result]:
    """The results of the calls that ``ask`` makes, with a part and the seconds it may take; as they
    come. ``timeout_s`` holds for all together. ``advance`` is called at each."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    for first, part in parts_of(texts):
        left_s = None if end is None else max(0.0, end - time.monotonic())
        call = ask(part, left_s)
        try:
            for result in call:
                result.index += first
                advance()
                yield result
        except grpc.RpcError:
            if first:
                print(
                    f"triolet: in texts {first} to {first + len(part) - 1}, whose own numbers "
                    "begin at 0:",
                    file=sys.stderr,
                )
            raise
        finally:
            call.cancel()


def in_order(results: Iterable[Result]) -> Iterator[Result]:
    """The results by the order of their texts, each as soon as those before it are there."""
    early: dict[int, Result] = {}
    place = 0
    for result in results:
        early[result.index] = result
        while place in early:
            yield early.pop(place)
            place += 1


@contextlib.contextmanager
def progress(what: str, total: int, *, is_quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar on the terminal, if there is one and enough to do; ``is_quiet``: never. Gives what
    tells it that one more is done."""
    if is_quiet or total < BAR_MIN or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # by default rich would take standard output away to itself
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def fitted(text: str, taken: int) -> str:
    """The text on one line, and on a terminal in what ``taken`` columns leave of one."""
    line = " ".join(text.split())
    if not sys.stdout.isatty():
        return line
    room = max(TEXT_WIDTH_MIN, shutil.get_terminal_size().columns - taken)
    return line if len(line) <= room else f"{line[: room - 1]}…"
