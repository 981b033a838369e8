"""Counts the bytes of images in a request before it is parsed.

Only images may make a request larger than --max-message-bytes. The bytes are judged before they are
parsed: parsing 16 MiB of empty inputs would stop every stream for longer than a token takes, while
the bytes of images are only copied.

Rule: a loop here ends after `FIELDS_MAX` fields, whatever the bytes say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.requests.encode.values import MAX_INPUTS
from grpc_service._generated.triolet.v1 import images_pb2, inference_pb2, vectors_pb2
from grpc_service.rpc.errors import MessageTooLarge
from grpc_service.services.value_counts import FIXED32, FIXED64, LENGTH_DELIMITED, varint

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

FIELDS_MAX = 2 * MAX_INPUTS  # fields examined in a request; images beyond them do not count
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}


def _path(request: type[Message], *names: str) -> tuple[int, ...]:
    """Return the numbers of the fields on the way from the request to the bytes of an image."""
    message: Any = request.DESCRIPTOR
    path: list[int] = []
    for name in names:
        field = message.fields_by_name[name]
        message = field.message_type
        path.append(field.number)
    return tuple(path)


EMBED = _path(vectors_pb2.EmbedRequest, "inputs", "image")
DRAW = _path(images_pb2.GenerateImageRequest, "source", "image")
GENERATE = _path(inference_pb2.GenerateRequest, "chat", "messages", "parts", "image")
TOKENIZE = _path(inference_pb2.TokenizeRequest, "chat", "messages", "parts", "image")
# The methods whose requests may have images, and the fields that lead to these.
IMAGE_FIELDS = {
    "Embed": EMBED,
    "EmbedStream": _path(vectors_pb2.EmbedStreamRequest, "inputs", "input", "image"),
    "Generate": GENERATE,
    "GenerateImage": DRAW,
    "Tokenize": TOKENIZE,
}


def judge_of(path: tuple[int, ...], max_bytes: int) -> Callable[[bytes], None]:
    """Return a function that checks the bytes of a request: without the images that the fields of
    ``path`` lead to, it may have ``max_bytes``. The function raises MessageTooLarge."""

    def judge(data: bytes) -> None:
        if len(data) <= max_bytes:
            return
        size = len(data) - image_bytes_of(data, path)
        if size > max_bytes:
            raise MessageTooLarge(
                f"the request has {size} bytes beside its images, of at most {max_bytes}"
            )

    return judge


def image_bytes_of(data: bytes, path: tuple[int, ...] = EMBED) -> int:
    """Return how many bytes of a request are images, to which the fields of ``path`` lead. The
    count ends where the bytes are found to be no message. An image counts only if its message has
    no other field."""
    return _Count(data).inside(path, 0, len(data))


class _Count:
    """Counts the bytes of images. ``_left`` is how many fields it may still look at."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = FIELDS_MAX

    def inside(self, path: tuple[int, ...], at: int, end: int) -> int:
        """Return the bytes of images in the message from ``at`` to ``end``."""
        total, data = 0, self._data
        try:
            while at < end and self._left > 0:
                self._left -= 1
                tag, at = varint(data, at)
                kind = tag & 7
                if kind in FIXED_BYTES:
                    at += FIXED_BYTES[kind]
                    continue
                length, start = varint(data, at)
                if kind != LENGTH_DELIMITED:
                    if kind:  # a group, which no request has
                        break
                    at = start
                    continue
                at = start + length
                if tag >> 3 != path[0] or at > end:
                    continue
                if len(path) > 2:
                    total += self.inside(path[1:], start, at)
                    continue
                inner, begin = varint(data, start)
                size, begin = varint(data, begin)
                if inner == path[1] << 3 | LENGTH_DELIMITED and begin + size == at:
                    total += size
        except (IndexError, ValueError):
            pass
        return total
