"""The inputs of ``triolet embed`` and ``rerank``, many texts or images, and the calls for them.

Rule 1: there may be any number of texts. If one call cannot take them all, several calls are made
one after the other, and their results are numbered consecutively. Rule 2: a text is an argument or
a whole line. No line is left out, so that results can be matched with their lines. Rule 3: an image
is read from its file only for its call.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import time
from operator import gt
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from engine.errors import ConfigError
from engine.requests.encode.values import MAX_INPUTS
from grpc_service.cli.bars import bar
from grpc_service.client import CallError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from grpc_service.client import Stream

BYTES_MAX = 2 * 2**20  # bytes of the texts of a call: half of a server's --max-message-bytes
IMAGES_MAX = 64  # images of a call: a server bounds the memory of decoded images
IMAGE_BYTES_MAX = 6 * 2**20  # bytes of a call's images: half of a server's --max-image-bytes
BAR_MIN = 100  # texts for which a bar is shown. Guess: fewer take no time
TEXT_WIDTH_MIN = 20  # columns. Guess: a shorter beginning of a text is of no use


class ImageFile(NamedTuple):
    """An image that is given by its file. ``num_bytes`` is the file's size."""

    path: str
    num_bytes: int

    def read(self) -> bytes:
        """Return the file's bytes.

        Raises:
            ConfigError: the file cannot be read.
        """
        try:
            return Path(os.path.expanduser(self.path)).read_bytes()
        except OSError as error:
            raise ConfigError(f"--image {self.path} cannot be read: {error.strerror}") from None


def images_of(paths: Iterable[str], name: str = "--image ", hint: str = "") -> list[ImageFile]:
    """Return the images in these files. ``name`` goes before a path in messages, and ``hint``
    ends the message about a path that is no file.

    Raises:
        ConfigError: there is no such file, or its size is not readable or zero.
    """
    images = []
    for path in paths:
        whole = Path(os.path.expanduser(path))
        try:
            status = whole.stat()
        except OSError as error:
            raise ConfigError(f"{name}{path} cannot be read: {error.strerror}{hint}") from None
        if not stat.S_ISREG(status.st_mode):
            reason = os.strerror(errno.EISDIR) if whole.is_dir() else "it is not a regular file"
            raise ConfigError(f"{name}{path} cannot be read: {reason}{hint}")
        size = status.st_size
        if not size:
            raise ConfigError(f"{name}{path} is an empty file")
        images.append(ImageFile(path, size))
    return images


class Numbered(Protocol):
    """A result; ``index`` is the place of its text in the call."""

    index: int


Result = TypeVar("Result", bound=Numbered)
Input = TypeVar("Input", bound="str | ImageFile")


def texts_of(given: Sequence[str], file: str | None, what: str) -> list[str]:
    """Return the texts given as arguments, or else the lines of ``file``, or else the lines of
    standard input, as ``-`` means, too. ``what`` is the texts' name in messages.

    Raises:
        ConfigError: there are no texts, or the file cannot be read.
    """
    if given and file is not None:
        raise ConfigError(f"give {what} as arguments or by --file, not both")
    if given and list(given) != ["-"]:
        return list(given)
    if file not in (None, "-"):
        lines = _lines(_read(str(file)))
    elif not given and file is None and sys.stdin.isatty():
        raise ConfigError(
            f"there are no {what}; give some as arguments, or --file FILE (- is standard input)"
        )
    else:
        lines = _lines(sys.stdin.read())
    if not lines:
        raise ConfigError(f"there are no {what} in {_name(file)}")
    return lines


def _name(file: str | None) -> str:
    return "standard input" if file in (None, "-") else str(file)


def _read(file: str) -> str:
    try:
        return Path(os.path.expanduser(file)).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"--file {file} cannot be read: {error.strerror}") from None
    except UnicodeError:
        raise ConfigError(f"--file {file} is not UTF-8") from None


def _lines(text: str) -> list[str]:
    """Return the lines as a shell counts them; `str.splitlines` would also split at form feeds and
    other characters."""
    return text.removesuffix("\n").split("\n") if text else []


def parts_of(inputs: Sequence[Input]) -> Iterator[tuple[int, Sequence[Input]]]:
    """Yield texts and images in parts that fit one call each, after the index of the part's first
    input."""
    limits = (MAX_INPUTS, BYTES_MAX, IMAGES_MAX, IMAGE_BYTES_MAX)
    first, used = 0, [0, 0, 0, 0]
    for place, input_ in enumerate(inputs):
        if isinstance(input_, ImageFile):
            costs = (1, 0, 1, input_.num_bytes)
        else:
            costs = (1, len(str(input_).encode()), 0, 0)
        sums = [cost + before for cost, before in zip(costs, used, strict=True)]
        if place > first and any(map(gt, sums, limits)):
            yield first, inputs[first:place]
            first, sums = place, list(costs)
        used = sums
    yield first, inputs[first:]


def results_of(
    texts: Sequence[Input],
    ask: Callable[[Sequence[Input], float | None], Stream[Result]],
    timeout_s: float | None,
    advance: Callable[[], None],
) -> Iterator[Result]:
    """Yield the results of all calls as they come.

    ``ask`` makes a call for a part, with the seconds that it may take; ``timeout_s`` limits all
    calls together. ``advance`` is called after each result.

    Raises:
        CallError: a call failed; the numbers of its texts are printed.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    for first, part in parts_of(texts):
        left_s = None if end is None else max(0.0, end - time.monotonic())
        try:
            with ask(part, left_s) as stream:
                for result in stream:
                    result.index += first
                    advance()
                    yield result
        except CallError:
            if first:
                print(
                    f"triolet: in texts {first} to {first + len(part) - 1}, whose own numbers "
                    "begin at 0:",
                    file=sys.stderr,
                )
            raise


def in_order(results: Iterable[Result]) -> Iterator[Result]:
    """Yield the results in the order of their texts, each as soon as all before it have come."""
    early: dict[int, Result] = {}
    place = 0
    for result in results:
        early[result.index] = result
        while place in early:
            yield early.pop(place)
            place += 1


@contextlib.contextmanager
def progress(what: str, total: int, *, is_quiet: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar if there are enough texts, and not ``is_quiet``. Yield the function to
    call after each text."""
    with bar(what, total, is_quiet=is_quiet or total < BAR_MIN) as update:
        yield lambda: update(advance=1)


def fitted(text: str, taken: int) -> str:
    """Return the text on one line. On a terminal it is cut to the width without ``taken``
    columns."""
    line = " ".join(text.split())
    if not sys.stdout.isatty():
        return line
    room = max(TEXT_WIDTH_MIN, shutil.get_terminal_size().columns - taken)
    return line if len(line) <= room else f"{line[: room - 1]}…"
