"""Embed's and Rerank's messages to the engine's values and back. Pure, as `grpc_service.codec`,
whose rules hold here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.encode_requests import (
    MAX_INPUTS,
    Embedding,
    EmbedRequest,
    RerankRequest,
    Score,
)
from engine.errors import FieldViolation, InvalidRequest
from engine.requests import Started
from grpc_service._generated.triolet.v1 import inference_pb2
from grpc_service.later import refuse_later

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.encode_requests import EncodeEvent

VALUES_TAG = b"\x12"  # EmbedResponse.values: field 2, length-delimited


def decode_embed(
    message: inference_pb2.EmbedRequest, timeout_s: float | None = None
) -> EmbedRequest:
    """The engine's request, checked as far as that needs no model.

    Raises:
        Unsupported: an input is an image.
        InvalidRequest: with every broken field.
    """
    _check_count("inputs", len(message.inputs))
    refuse_later(message)
    found = [
        FieldViolation(f"inputs[{index}]", "set exactly one of text and token_ids")
        for index, one in enumerate(message.inputs)
        if one.WhichOneof("input") is None
    ]
    request = EmbedRequest(
        model=message.model,
        inputs=tuple(
            tuple(one.token_ids.ids) if one.HasField("token_ids") else one.text
            for one in message.inputs
        ),
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        normalize=message.normalize if message.HasField("normalize") else None,
        prompt_name=message.prompt_name,
        truncate=message.truncate if message.HasField("truncate") else None,
        request_id=message.request_id,
        priority=message.priority if message.HasField("priority") else None,
        timeout_s=timeout_s,
    )
    _validate(request, found)
    return request


def decode_rerank(
    message: inference_pb2.RerankRequest, timeout_s: float | None = None
) -> RerankRequest:
    """The engine's request, checked as far as that needs no model.

    Raises:
        InvalidRequest: with every broken field.
    """
    _check_count("documents", len(message.documents))
    refuse_later(message)
    request = RerankRequest(
        model=message.model,
        query=message.query,
        documents=tuple(message.documents),
        raw_scores=message.raw_scores if message.HasField("raw_scores") else None,
        truncate=message.truncate if message.HasField("truncate") else None,
        top_n=message.top_n if message.HasField("top_n") else None,
        request_id=message.request_id,
        priority=message.priority if message.HasField("priority") else None,
        timeout_s=timeout_s,
    )
    _validate(request, [])
    return request


def _check_count(field: str, count: int) -> None:
    """Refuse far too many before anything looks at each: a message may hold a million."""
    if count > MAX_INPUTS:
        raise InvalidRequest.of(field, f"has {count}, outside [1, {MAX_INPUTS}]")


def _validate(request: EmbedRequest | RerankRequest, found: list[FieldViolation]) -> None:
    try:
        request.validate()
    except InvalidRequest as error:
        found += error.violations
    if found:
        raise InvalidRequest(found)


class EmbedEncoder:
    """The messages of one Embed's stream: one per vector, the model's name in the first."""

    def __init__(self) -> None:
        self._model = ""

    def __call__(self, events: Sequence[EncodeEvent]) -> list[inference_pb2.EmbedResponse]:
        messages = []
        for event in events:
            if isinstance(event, Started):
                self._model = event.model
            elif isinstance(event, Embedding):
                messages.append(self._message(event))
        return messages

    def _message(self, event: Embedding) -> inference_pb2.EmbedResponse:
        message = inference_pb2.EmbedResponse(index=event.index, tokens=event.tokens)
        if self._model:
            message.model, self._model = self._model, ""
        # as they are packed: 384 numbers take 2 µs, and 20 one at a time
        numbers = event.values.tobytes()
        message.MergeFromString(VALUES_TAG + _varint(len(numbers)) + numbers)
        return message


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


def encode_scores(events: Sequence[EncodeEvent]) -> list[inference_pb2.RerankResponse]:
    """One message per score."""
    return [
        inference_pb2.RerankResponse(index=event.index, score=event.score)
        for event in events
        if isinstance(event, Score)
    ]
