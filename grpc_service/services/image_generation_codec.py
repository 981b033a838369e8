"""Translates GenerateImage's messages into the engine's values, and back. Pure, like
`grpc_service.services.text_codec`, whose rules hold here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import FieldViolation, InvalidRequest
from engine.requests.image_generation.values import (
    DrawingFinished,
    DrawingStarted,
    DrawRequest,
    GeneratedImage,
    Progress,
)
from grpc_service._generated.triolet.v1 import images_pb2
from grpc_service.services.text_codec import given
from grpc_service.services.text_encoder import durations_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.requests.image_generation.values import ImageGenerationEvent

    Response = images_pb2.GenerateImageResponse

PART_BYTES = 256 * 1024  # bytes of a file in one message; other calls' messages wait behind it
FORMATS = {
    images_pb2.IMAGE_FORMAT_UNSPECIFIED: "",
    images_pb2.IMAGE_FORMAT_PNG: "png",
    images_pb2.IMAGE_FORMAT_JPEG: "jpeg",
    images_pb2.IMAGE_FORMAT_WEBP: "webp",
}
FORMAT_NUMBERS = {name: number for number, name in FORMATS.items()}
OPTIONAL = (
    *("width", "height", "steps", "guidance", "seed", "n", "strength"),
    *("quality", "preview_every", "priority"),
)


def decode_generate_image(
    message: images_pb2.GenerateImageRequest, timeout_s: float | None = None
) -> DrawRequest:
    """Return the engine's request. Its ranges are not checked yet (`DrawRequest.validate`).

    Raises:
        InvalidRequest: The format is no value of ImageFormat.
    """
    request = DrawRequest(
        model=message.model,
        prompt=message.prompt,
        negative_prompt=message.negative_prompt,
        source=message.source.image if message.HasField("source") else None,
        scheduler=message.scheduler,
        format=FORMATS.get(message.format, ""),
        request_id=message.request_id,
        timeout_s=timeout_s,
        check=False,
        **given(message, *OPTIONAL),
    )
    if message.format not in FORMATS:
        unknown = FieldViolation("format", f"is {message.format}, which is no ImageFormat")
        raise InvalidRequest([unknown, *request.violations()])
    return request


def encode_drawing(events: Sequence[ImageGenerationEvent]) -> list[Response]:
    """Return the messages of events that are ready together: one for each, and for an image as many
    as its file has parts."""
    return [message for event in events for message in _messages(event)]


def _messages(event: ImageGenerationEvent) -> Iterator[Response]:
    match event:
        case DrawingStarted():
            started = images_pb2.ImageStarted(**event._asdict())
            yield images_pb2.GenerateImageResponse(started=started)
        case Progress():
            preview = event.preview or b""
            progress = images_pb2.ImageProgress(step=event.step, steps=event.steps, preview=preview)
            yield images_pb2.GenerateImageResponse(progress=progress)
        case GeneratedImage():
            yield from _parts(event)
        case DrawingFinished():
            yield images_pb2.GenerateImageResponse(finished=_finished(event))


def _parts(image: GeneratedImage) -> Iterator[Response]:
    size = len(image.data)
    for at in range(0, size, PART_BYTES):
        part = images_pb2.ImagePart(
            index=image.index,
            data=image.data[at : at + PART_BYTES],
            last=at + PART_BYTES >= size,
            format=FORMAT_NUMBERS[image.format],
        )
        yield images_pb2.GenerateImageResponse(part=part)


def _finished(event: DrawingFinished) -> images_pb2.ImageFinished:
    timings = durations_of(event.timings, prefill="encode", decode="draw")
    return images_pb2.ImageFinished(
        seed=event.seed,
        usage=images_pb2.ImageUsage(**event.usage._asdict()),
        timings=images_pb2.ImageTimings(**timings),
    )
