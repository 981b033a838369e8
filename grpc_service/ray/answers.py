"""Inference of triolet.v1 by an engine for asyncio programs: messages in, messages out.

Rule: every end other than success is an exception. This file knows nothing of Ray.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.errors import RequestNotFound, Unsupported
from engine.status import ModelState
from grpc_service.services import (
    classify_codec,
    encode_codec,
    image_generation_codec,
    text_codec,
    text_encoder,
)
from grpc_service.services.inference import clients_timeout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from google.protobuf.message import Message

    from engine.api.aio import Engine
    from engine.api.crossing import Stream
    from engine.status import ModelStatus
    from grpc_service._generated.triolet.v1 import (
        classes_pb2,
        common_pb2,
        images_pb2,
        inference_pb2,
        vectors_pb2,
    )


class Answers:
    """Answers the calls of one replica. ``remaining_s`` of a call are the seconds until its
    client's deadline, None without one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(
        self, request: inference_pb2.GenerateRequest, remaining_s: float | None
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Yield what the model generates. Cancellation: ends the request.

        Raises:
            Unsupported: the client wants to attach to the stream later.
        """
        if request.HasField("resume_window"):
            raise Unsupported(
                "resume_window: behind Ray Serve, the loss of the connection ends the request; "
                "send it again with a continuation",
                field="resume_window",
            )
        decoded = _decode(text_codec.decode_generate, request, remaining_s)
        encode = partial(text_encoder.encode_events, token_ids=request.output.token_ids)
        async for message in _messages(self._engine.generate(decoded), encode):
            yield message

    async def attach(
        self, request: common_pb2.AttachRequest, remaining_s: float | None
    ) -> AsyncIterator[Any]:
        """Raise the error after which a client continues by Generate: no stream is kept.

        Raises:
            RequestNotFound: always.
        """
        raise RequestNotFound("behind Ray Serve no stream is kept; send the request again")
        yield

    async def embed(
        self, request: vectors_pb2.EmbedRequest, remaining_s: float | None
    ) -> AsyncIterator[vectors_pb2.EmbedResponse]:
        """Yield one vector for each input. Cancellation: ends the request."""
        decoded = _decode(encode_codec.decode_embed, request, remaining_s)
        stream = self._engine.embed(decoded)
        async for message in _messages(stream, encode_codec.EmbedEncoder()):
            yield message

    async def rerank(
        self, request: vectors_pb2.RerankRequest, remaining_s: float | None
    ) -> AsyncIterator[vectors_pb2.RerankResponse]:
        """Yield one score for each document. Cancellation: ends the request."""
        decoded = _decode(encode_codec.decode_rerank, request, remaining_s)
        async for message in _messages(self._engine.rerank(decoded), encode_codec.encode_scores):
            yield message

    async def classify(
        self, request: classes_pb2.ClassifyRequest, remaining_s: float | None
    ) -> AsyncIterator[classes_pb2.ClassifyResponse]:
        """Yield the labels or entities of each input. Cancellation: ends the request."""
        decoded = _decode(classify_codec.decode_classify, request, remaining_s)
        stream = self._engine.classify(decoded)
        async for message in _messages(stream, classify_codec.ClassifyEncoder()):
            yield message

    async def generate_image(
        self, request: images_pb2.GenerateImageRequest, remaining_s: float | None
    ) -> AsyncIterator[images_pb2.GenerateImageResponse]:
        """Yield the progress of a drawing, and its images in parts. Cancellation: ends the
        request."""
        decoded = _decode(image_generation_codec.decode_generate_image, request, remaining_s)
        async for message in _messages(
            self._engine.draw(decoded), image_generation_codec.encode_drawing
        ):
            yield message

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> common_pb2.TokenizeResponse:
        """Return the tokens of a text or a chat. Cancellation: safe; the tokens are dropped."""
        given = text_codec.decode_tokenize(request)
        spans, max_model_len = await self._engine.tokenize(**given)
        return text_encoder.encode_tokens(spans, max_model_len)

    async def detokenize(
        self, request: common_pb2.DetokenizeRequest
    ) -> common_pb2.DetokenizeResponse:
        """Return the text of token ids. Cancellation: safe; the text is dropped."""
        given = text_codec.decode_detokenize(request)
        return text_encoder.encode_text(await self._engine.detokenize(**given))


def trouble_of(models: Iterable[ModelStatus]) -> str:
    """Return why a replica with these models should be replaced; "" if it need not be."""
    for model in models:
        if model.is_hung:
            return f"a step of {model.name} hangs"
        if model.state is ModelState.FAILED:
            return f"{model.name} cannot be loaded: {model.error}"
    return ""


def _decode(
    decode: Callable[[Any, float | None], Any], message: Message, remaining_s: float | None
) -> Any:
    """Return the engine's request. The time that it takes to decode counts against its deadline."""
    began_at, timeout_s = time.monotonic(), clients_timeout(remaining_s)
    decoded = decode(message, timeout_s)
    if timeout_s is None:
        return decoded
    return replace(decoded, timeout_s=timeout_s - (time.monotonic() - began_at), check=False)


async def _messages(
    stream: Stream[Any], encode: Callable[[Sequence[Any]], Iterable[Any]]
) -> AsyncIterator[Any]:
    """Yield the messages of a stream's events. Cancellation, and dropping the iterator: ends the
    request."""
    async with stream:
        async for event in stream:
            for message in encode([event]):
                yield message
