"""``triolet draw``: draws images of a prompt and writes them to files.

Rule 1: a file is written when its image is complete, and never in part. Rule 2: however the command
ends, the call ends with it, and so does the server's work.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import json_format

from engine.errors import ConfigError
from grpc_service.cli.client import run_client
from grpc_service.cli.texts import images_of
from grpc_service.client import messages

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

    from grpc_service.client import Client

    Events = Iterable[messages.GenerateImageResponse]
    Advance = Callable[[int, int], None]

STANDARD_OUTPUT = "-"
FORMATS = {
    "png": messages.IMAGE_FORMAT_PNG,
    "jpeg": messages.IMAGE_FORMAT_JPEG,
    "webp": messages.IMAGE_FORMAT_WEBP,
}
SUFFIXES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


def run(args: argparse.Namespace) -> int:
    """Draw the images and write their files. Return the exit code.

    Raises:
        ConfigError: the output, the size or the source is wrong.
    """
    paths = paths_of(args.output, args.n or 1)
    request = request_of(args)

    def job(client: Client) -> None:
        show = _JsonLines() if args.json else _Lines()
        with client.generate_image(request, timeout=args.timeout) as stream:
            with progress(is_quiet=args.json) as advance:
                seen = list(save_all(stream, paths, advance, show))
            for line in seen:
                print(line, file=sys.stderr if args.output == STANDARD_OUTPUT else sys.stdout)

    return run_client(args, job)


def paths_of(output: str, count: int) -> list[Path | None]:
    """Return the file of each image: ``output`` itself or, of several images, ``output`` with a
    number. None stands for standard output.

    Raises:
        ConfigError: the folder does not exist, or several images would go to standard output.
    """
    if output == STANDARD_OUTPUT:
        if count > 1:
            raise ConfigError("-o - takes one image; give a file's name, or leave out --n")
        return [None]
    path = Path(os.path.expanduser(output))
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"-o {output} is no file in a folder that exists")
    if count == 1:
        return [path]
    return [path.with_stem(f"{path.stem}-{number}") for number in range(1, count + 1)]


def request_of(args: argparse.Namespace) -> messages.GenerateImageRequest:
    """Return the request. Flags that are not given stay unset, so that the model's own values
    apply. The format is that of the file's name, if --format is not given."""
    width, height = (None, None) if args.size is None else args.size
    name = args.format or SUFFIXES.get(Path(args.output).suffix.lower(), "png")
    source = None
    if args.image is not None:
        [file] = images_of([args.image])
        source = messages.ImageSource(image=file.read())
    return messages.GenerateImageRequest(
        model=args.model,
        prompt=args.prompt,
        negative_prompt=args.negative,
        width=width,
        height=height,
        steps=args.steps,
        guidance=args.guidance,
        seed=args.seed,
        n=args.n,
        source=source,
        strength=args.strength,
        scheduler=args.scheduler,
        format=FORMATS[name],
        quality=args.quality,
    )


class _Lines:
    """Makes lines for people: one for each file."""

    def __init__(self) -> None:
        self._started = messages.ImageStarted()

    def started(self, event: messages.ImageStarted) -> Iterator[str]:
        self._started = event
        yield from ()

    def image(self, index: int, path: Path | None, size: int) -> Iterator[str]:
        one = self._started
        where = "standard output" if path is None else str(path)
        yield f"{where}: {one.width} × {one.height}, {_size(size)}, seed {one.seed}"

    def finished(self, event: messages.ImageFinished) -> Iterator[str]:
        yield from ()


class _JsonLines:
    """Makes a line of JSON for each event but progress. In place of an image's parts stands its
    file's name."""

    def started(self, event: messages.ImageStarted) -> Iterator[str]:
        yield self._line("started", _fields(event))

    def image(self, index: int, path: Path | None, size: int) -> Iterator[str]:
        file = None if path is None else str(path)
        yield self._line("image", {"index": index, "file": file, "bytes": size})

    def finished(self, event: messages.ImageFinished) -> Iterator[str]:
        yield self._line("finished", _fields(event))

    def _line(self, name: str, fields: dict[str, object]) -> str:
        return json.dumps({name: fields}, ensure_ascii=False)


def _fields(event: messages.ImageStarted | messages.ImageFinished) -> dict[str, object]:
    fields: dict[str, object] = json_format.MessageToDict(event, preserving_proto_field_name=True)
    return fields


def save_all(
    events: Events, paths: list[Path | None], advance: Advance, show: _Lines | _JsonLines
) -> Iterator[str]:
    """Write each image to its file as soon as it is complete. Yield the lines to print.

    Raises:
        CallError: the call failed. ConfigError: a file cannot be written.
    """
    data = bytearray()
    for event in events:
        match event.WhichOneof("event"):
            case "started":
                yield from show.started(event.started)
            case "progress":
                advance(event.progress.step, event.progress.steps)
            case "part":
                data += event.part.data
                if event.part.last:
                    path = paths[event.part.index]
                    _save(bytes(data), path)
                    yield from show.image(event.part.index, path, len(data))
                    data.clear()
            case "finished":
                yield from show.finished(event.finished)


def _save(data: bytes, path: Path | None) -> None:
    if path is None:
        sys.stdout.buffer.write(data)
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"-o {path} cannot be written: {error.strerror}") from None


def _size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"


@contextlib.contextmanager
def progress(*, is_quiet: bool) -> Iterator[Advance]:
    """Show a progress bar of the denoising steps, if standard error is a terminal and not
    ``is_quiet``. Yield the function to call with the steps that are done, and all steps."""
    if is_quiet or not sys.stderr.isatty():
        yield lambda step, steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("drawing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # By default rich would redirect standard output.
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False
    ) as bar:
        task = bar.add_task("drawing", total=None)
        yield lambda step, steps: bar.update(task, completed=step, total=steps)
