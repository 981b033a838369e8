"""``triolet draw``: draws images of a prompt and writes them to files.

Rule 1: a file is written when its image is complete, and never in part. Rule 2: however the command
ends, the call ends with it, and so does the server's work.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from engine.errors import ConfigError
from grpc_service.cli.bars import bar
from grpc_service.cli.client import message_from, run_client
from grpc_service.cli.texts import images_of
from grpc_service.client import messages

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

    from google.protobuf.message import Message

    from grpc_service.client import Client

    Events = Iterable[messages.GenerateImageResponse]

STANDARD_OUTPUT = "-"
SUFFIXES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


def run(args: argparse.Namespace) -> int:
    """Draw the images and write their files. Return the exit code.

    Raises:
        ConfigError: the output, the size or the source is wrong.
    """
    paths = paths_of(args.output, args.n or 1)
    request = request_of(args)

    def job(client: Client) -> None:
        with client.generate_image(request, timeout=args.timeout) as stream:
            with bar("drawing", is_quiet=args.json) as update:
                seen = list(save_all(stream, paths, update, as_json=args.json))
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
    apply. Without --format, the file's suffix decides the format."""
    width, height = (None, None) if args.size is None else args.size
    name = args.format or SUFFIXES.get(Path(args.output).suffix.lower(), "png")
    source = None
    if args.image is not None:
        [file] = images_of([args.image])
        source = messages.ImageSource(image=file.read())
    return message_from(
        messages.GenerateImageRequest,
        args,
        negative_prompt=args.negative,
        width=width,
        height=height,
        source=source,
        format=f"IMAGE_FORMAT_{name.upper()}",
    )


def save_all(
    events: Events, paths: list[Path | None], update: Callable[..., Any], *, as_json: bool
) -> Iterator[str]:
    """Write each image to its file as soon as it is complete. Yield the lines to print: one for
    each file. With ``as_json``: one for each event but progress; the parts of an image are one
    line, with the file's name.

    Raises:
        CallError: the call failed. ConfigError: a file cannot be written.
    """
    data, started = bytearray(), messages.ImageStarted()
    for event in events:
        match event.WhichOneof("event"):
            case "started":
                started = event.started
                if as_json:
                    yield _json_line("started", started)
            case "progress":
                update(completed=event.progress.step, total=event.progress.steps)
            case "part":
                data += event.part.data
                if event.part.last:
                    index, size = event.part.index, len(data)
                    path = paths[index]
                    _save(bytes(data), path)
                    data.clear()
                    file = None if path is None else str(path)
                    if as_json:
                        yield _json_line("image", {"index": index, "file": file, "bytes": size})
                    else:
                        pixels = f"{started.width} × {started.height}"
                        where = file or "standard output"
                        yield f"{where}: {pixels}, {_size(size)}, seed {started.seed}"
            case "finished":
                if as_json:
                    yield _json_line("finished", event.finished)


def _json_line(name: str, content: Message | dict[str, object]) -> str:
    if not isinstance(content, dict):
        content = json_format.MessageToDict(content, preserving_proto_field_name=True)
    return json.dumps({name: content}, ensure_ascii=False)


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
