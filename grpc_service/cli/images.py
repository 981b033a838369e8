"""Images in the messages of ``triolet chat`` and ``triolet generate --chat``.

Rule: files are read once, when their message is made; the server's errors about an image are shown
with the image's file in place of the field.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from grpc_service.cli.texts import images_of
from grpc_service.client import CallError, messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    # Role, content, images, and a message's other fields.
    Turn = Mapping[str, Any]

IMAGE_FIELD = re.compile(r"chat\.messages\[(\d+)\]\.parts\[(\d+)\]\.image")

OTHERS = ("tool_calls", "tool_call_id", "name")  # fields of messages that turns have as they are


class SentImage(NamedTuple):
    """An image file's path, and its bytes as they are sent."""

    path: str
    data: bytes


def read_images(paths: Iterable[str], name: str = "--image ") -> list[SentImage]:
    """Return the files at these paths. ``name`` goes before a path in messages.

    Raises:
        ConfigError: a path is no file, or the file is empty or cannot be read.
    """
    return [SentImage(image.path, image.read()) for image in images_of(paths, name)]


def user_turn(text: str, images: Sequence[SentImage]) -> Turn:
    """Return a user's message: the images, and then the text."""
    return {"role": "user", "content": text, "images": tuple(images)}


def message_of(turn: Turn) -> messages.Message:
    """Return the message to send."""
    role, content, images = str(turn["role"]), str(turn["content"]), _images_of(turn)
    if not images:
        others: dict[str, Any] = {name: value for name, value in turn.items() if name in OTHERS}
        return messages.Message(role=role, content=content, **others)
    parts = [messages.MessagePart(image=image.data) for image in images]
    if content:
        parts.append(messages.MessagePart(text=content))
    return messages.Message(role=role, parts=parts)


@contextmanager
def naming_files(turns: Sequence[Turn]) -> Iterator[None]:
    """In a `CallError` of a call with these messages, put the files of images in the place of their
    fields."""

    def path_of(match: re.Match[str]) -> str:
        index, number = int(match[1]), int(match[2])
        images = _images_of(turns[index]) if index < len(turns) else ()
        return images[number].path if number < len(images) else match[0]

    try:
        yield
    except CallError as error:
        error.violations = tuple(
            v._replace(field=IMAGE_FIELD.sub(path_of, v.field)) for v in error.violations
        )
        error.args = (IMAGE_FIELD.sub(path_of, str(error)),)
        raise


def _images_of(turn: Turn) -> Sequence[SentImage]:
    return [image for image in turn.get("images", ()) if isinstance(image, SentImage)]
