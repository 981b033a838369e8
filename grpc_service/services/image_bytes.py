"""How many bytes of a request are images, before it is parsed.

Only images may make a request larger than --max-message-bytes. The bytes are judged before they are
parsed: parsing 16 MiB of empty inputs would stop every stream for longer than a token takes, while
the bytes of images are only copied.

Rule: a loop here ends after `FIELDS_MAX` fields, whatever the bytes say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.requests.encode_values import MAX_INPUTS
from grpc_service._generated.triolet.v1 import inference_pb2
from grpc_service.rpc.errors import MessageTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable

FIELDS_MAX = 2 * MAX_INPUTS  # of a message; those beyond it count as no images
VARINT_BYTES_MAX = 10
LENGTH_DELIMITED = 2  # protobuf's wire type
INPUTS = inference_pb2.EmbedRequest.DESCRIPTOR.fields_by_name["inputs"].number
IMAGE = inference_pb2.EmbedInput.DESCRIPTOR.fields_by_name["image"].number


def judge_embed(max_bytes: int) -> Callable[[bytes], None]:
    """Return a function that checks the bytes of an EmbedRequest: without its images it may have
    ``max_bytes``. The function raises MessageTooLarge."""

    def judge(data: bytes) -> None:
        if len(data) <= max_bytes:
            return
        size = len(data) - image_bytes_of(data)
        if size > max_bytes:
            raise MessageTooLarge(
                f"the request has {size} bytes beside its images, of at most {max_bytes}"
            )

    return judge


def image_bytes_of(data: bytes) -> int:
    """Return how many bytes of an EmbedRequest are images. Bytes that are no message have none from
    the place on where that shows."""
    total = at = 0
    try:
        for _ in range(FIELDS_MAX):
            if at >= len(data):
                break
            tag, at = _varint(data, at)
            length, start = _varint(data, at)
            if tag & 7 != LENGTH_DELIMITED:
                if tag & 7:  # of 4 or 8 bytes: an EmbedRequest has no such field
                    break
                at = start
                continue
            at = start + length
            if tag >> 3 == INPUTS and at <= len(data):
                inner, begin = _varint(data, start)
                size, begin = _varint(data, begin)
                if inner == IMAGE << 3 | LENGTH_DELIMITED and begin + size == at:
                    total += size
    except (IndexError, ValueError):
        pass
    return total


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of protobuf's encoding, and the place behind it."""
    number = 0
    for shift in range(0, 7 * VARINT_BYTES_MAX, 7):
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise ValueError("a number that does not end")
