"""Inference of triolet.v1: generating, encoding, drawing, and turning text into tokens.

Rule: a handler gets the request decoded (`translators`), calls the engine, and encodes the answer.
Every end other than success is an exception, which `grpc_service.access.interceptor` turns into a
status.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequest
from engine.requests.encode.values import EmbedStreamRequest
from grpc_service.rpc.errors import RpcError
from grpc_service.services import (
    classify_codec,
    encode_codec,
    image_generation_codec,
    text_codec,
    text_encoder,
)
from grpc_service.services.call_writer import CallWriter, encode_in_thread
from grpc_service.services.error_status import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.requests.encode.classify_values import ClassifyRequest
    from engine.requests.encode.values import EmbedRequest, IndexedInput, RerankRequest
    from engine.requests.image_generation.values import DrawRequest
    from engine.requests.text.values import GenerateRequest
    from grpc_service._generated.triolet.v1 import common_pb2
    from grpc_service.access.rpc_record import Rpc
    from grpc_service.rpc.call import Call
    from grpc_service.services.backend import Backend


class Inference:
    """Generates text, encodes texts, draws images, and converts between text and tokens
    (inference.proto)."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def Generate(self, request: GenerateRequest, rpc: Rpc) -> None:
        """Stream what the model generates. Raises `Disconnected` if the client has ended the call.

        Cancellation: ends the request.
        """
        writer = self._text_writer(
            rpc,
            token_ids=bool(request.output.token_ids),
            is_large=request.output.prompt_logprobs is not None,
            is_kept=request.resume_window_s is not None,
        )
        serving = writer.serve(self._backend.engine, request)
        del request  # the stream alone keeps the request
        await serving

    async def Attach(self, request: common_pb2.AttachRequest, rpc: Rpc) -> None:
        """Stream the remaining events of a Generate request whose call was lost.

        Raises:
            RequestNotFound: the caller has no such stream.
            InvalidRequest: events that the client lacks are not kept any more.
            Disconnected: the client has ended the call.
        Cancellation: ends the request, unless the connection is lost again.
        """
        detached = self._backend.engine.detached
        received = text_codec.decode_received(request)
        stream = detached.attachable(
            request.request_id,
            request.attach_token,
            rpc.quota,
        )
        output = stream.request.output
        writer = self._text_writer(
            rpc,
            token_ids=bool(output.token_ids),
            is_large=output.prompt_logprobs is not None,
            is_kept=True,
        )
        timeout_s = clients_timeout(rpc.call.time_remaining())
        detached.attach(stream, writer, received, timeout_s)
        try:
            await writer.run(stream)
        finally:
            detached.uncount(stream)

    def _text_writer(
        self, rpc: Rpc, *, token_ids: bool, is_large: bool, is_kept: bool
    ) -> CallWriter:
        """Return the writer of a Generate stream. ``is_kept``: if the connection is lost before the
        client has the end, the client may take the stream up again."""
        return CallWriter(
            rpc,
            self._backend.unread_calls,
            partial(text_encoder.encode_events, token_ids=token_ids),
            text_encoder.ShortDelta(token_ids=token_ids).encode,
            is_large=is_large,
            is_kept=is_kept,
        )

    async def Embed(self, request: EmbedRequest, rpc: Rpc) -> None:
        """Stream one vector for each input. Raises `Disconnected` if the client has ended the call.

        Cancellation: ends the request.
        """
        writer = CallWriter(rpc, self._backend.unread_calls, encode_codec.EmbedEncoder())
        await writer.serve(self._backend.engine, request)

    async def EmbedStream(self, first: encode_codec.StreamedInputs, rpc: Rpc) -> None:
        """Stream a vector or an error for each input of the client's stream. Raises `Disconnected`
        if the client has ended the call.

        Raises:
            InvalidRequest: the first message has no parameters.
        Cancellation: ends the request.
        """
        if first.parameters is None:
            raise InvalidRequest.of("parameters", "are not set in the first message")
        request = EmbedStreamRequest(first.parameters, _InputSource(first.inputs, rpc).read)
        writer = CallWriter(rpc, self._backend.unread_calls, encode_codec.EmbedStreamEncoder())
        await writer.serve(self._backend.engine, request)

    async def Rerank(self, request: RerankRequest, rpc: Rpc) -> None:
        """Stream each document's score. Raises `Disconnected` if the client has ended the call.

        Cancellation: ends the request.
        """
        writer = CallWriter(rpc, self._backend.unread_calls, encode_codec.encode_scores)
        await writer.serve(self._backend.engine, request)

    async def Classify(self, request: ClassifyRequest, rpc: Rpc) -> None:
        """Stream the labels or entities of each input. Raises `Disconnected` like `Embed`.

        Cancellation: ends the request.
        """
        writer = CallWriter(rpc, self._backend.unread_calls, classify_codec.ClassifyEncoder())
        await writer.serve(self._backend.engine, request)

    async def GenerateImage(self, request: DrawRequest, rpc: Rpc) -> None:
        """Stream a drawing's progress, and its images in parts. Raises `Disconnected` like `Embed`.

        Cancellation: ends the request.
        """
        writer = CallWriter(rpc, self._backend.unread_calls, image_generation_codec.encode_drawing)
        await writer.serve(self._backend.engine, request)

    async def Tokenize(self, request: dict[str, Any], rpc: Rpc) -> common_pb2.TokenizeResponse:
        """Return the tokens of a text or a chat.

        Cancellation: safe; the tokens are dropped.
        """
        spans, max_model_len = await self._backend.engine.tokenize(**request, origin=rpc.origin)
        # in a thread: 100,000 tokens take a third of a second to encode
        return await encode_in_thread(partial(text_encoder.encode_tokens, spans, max_model_len))

    async def Detokenize(self, request: dict[str, Any], rpc: Rpc) -> common_pb2.DetokenizeResponse:
        """Return the text of token ids.

        Cancellation: safe; the text is dropped.
        """
        text = await self._backend.engine.detokenize(**request, origin=rpc.origin)
        return text_encoder.encode_text(text)


class _InputSource:
    """Reads the inputs of an EmbedStream: ``first`` ones, and then those of further messages."""

    def __init__(self, first: Sequence[IndexedInput], rpc: Rpc) -> None:
        assert rpc.read_next is not None, "the method takes a stream"
        self._first: Sequence[IndexedInput] = first
        self._read_next = rpc.read_next

    async def read(self) -> Sequence[IndexedInput] | None:
        """Return the next inputs; None behind the last ones.

        Raises:
            TrioletError: the client sent something else, or it cannot be kept.
        Cancellation: safe.
        """
        if self._first:
            first, self._first = self._first, ()
            return first
        try:
            message: encode_codec.StreamedInputs | None = await self._read_next()
        except RpcError as error:
            raise explain(error)[0] from None
        if message is None:
            return None
        if message.parameters is not None:
            raise InvalidRequest.of("parameters", "are set after the first message")
        return message.inputs


def translators() -> dict[str, Callable[[Call], Callable[[Any], Any]]]:
    """Return `Method.translate` of each method whose handler takes an engine's value."""
    return {
        "Generate": _timed(text_codec.decode_generate),
        "Embed": _timed(encode_codec.decode_embed),
        "EmbedStream": _timed(encode_codec.decode_embed_stream),
        "Rerank": _timed(encode_codec.decode_rerank),
        "Classify": _timed(classify_codec.decode_classify),
        "GenerateImage": _timed(image_generation_codec.decode_generate_image),
        "Tokenize": lambda _: text_codec.decode_tokenize,
        "Detokenize": lambda _: text_codec.decode_detokenize,
    }


def _timed(decode: Callable[[Any, float | None], Any]) -> Callable[[Call], Callable[[Any], Any]]:
    """Return a translator that passes ``decode`` the message and the seconds of the client's
    timeout that are left when the request has come."""

    def translate(call: Call) -> Callable[[Any], Any]:
        timeout_s = clients_timeout(call.time_remaining())
        return lambda message: decode(message, timeout_s)

    return translate


def clients_timeout(remaining_s: float | None) -> float | None:
    """Return the least time that may be left until the client's own timer ends the call, given the
    ``remaining_s`` seconds of the timeout that it sent; None without a timeout.

    A timeout of a second or more is sent in three digits, rounded up: 10.01 s arrive as 10.1 s, and
    the client would end the call long before the server's status arrives (D18). A shorter timeout
    is sent in milliseconds. Measured: of ten clients with 1 to 10.1 s, four saw no details without
    this.
    Source: grpc/src/core, timeout_encoding.cc.
    """
    if remaining_s is None or remaining_s < 1:
        return remaining_s
    return remaining_s - 10.0 ** (math.floor(math.log10(remaining_s)) - 2)
