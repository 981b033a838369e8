"""Inference of triolet.v1: generating, encoding, drawing, and turning text into tokens.

Rule: a handler decodes the request, asks the engine, and encodes the answer. Every end other than
success is an exception, which `grpc_service.access.interceptor` turns into a status.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import trio

from engine.requests.quota import Origin
from grpc_service.rpc.receipt import wait_received
from grpc_service.services import draw_codec, encode_codec, text_codec, text_encoder
from grpc_service.services.call_writer import CallWriter, encode_in_thread

if TYPE_CHECKING:
    from engine.requests.kind import ClientRequest
    from grpc_service._generated.triolet.v1 import common_pb2, images_pb2, inference_pb2
    from grpc_service.access.rpc_record import Rpc
    from grpc_service.services.backend import Backend


class Inference:
    """Generates text, encodes texts, draws images, and converts between text and tokens
    (inference.proto)."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def Generate(self, request: inference_pb2.GenerateRequest, rpc: Rpc) -> None:
        """Stream what the model generates. Raises as `_serve`.

        Cancellation: ends the request.
        """
        arrived_at = trio.current_time()
        asked = text_codec.decode_generate(request, clients_timeout(rpc.call.time_remaining()))
        is_large = request.output.HasField("prompt_logprobs")
        writer = self._text_writer(
            rpc,
            token_ids=request.output.token_ids,
            is_large=is_large,
            is_kept=asked.resume_window_s is not None,
        )
        del request  # its images were copied, and it is as large as they are
        await self._serve(asked, rpc, writer, arrived_at)

    async def Attach(self, request: common_pb2.AttachRequest, rpc: Rpc) -> None:
        """Stream the rest of what a Generate request generates, after its call was lost.

        Raises:
            RequestNotFound: the caller has no such stream.
            InvalidRequest: what the client lacks is not kept any more.
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
            wait_received=wait_received if is_kept else None,
        )

    async def Embed(self, request: inference_pb2.EmbedRequest, rpc: Rpc) -> None:
        """Stream one vector for each input. Raises as `_serve`.

        Cancellation: ends the request.
        """
        arrived_at = trio.current_time()
        asked = encode_codec.decode_embed(request, clients_timeout(rpc.call.time_remaining()))
        del request  # its images were copied, and it is as large as they are
        writer = CallWriter(rpc, self._backend.unread_calls, encode_codec.EmbedEncoder())
        await self._serve(asked, rpc, writer, arrived_at)

    async def Rerank(self, request: inference_pb2.RerankRequest, rpc: Rpc) -> None:
        """Stream one score for each document. Raises as `_serve`.

        Cancellation: ends the request.
        """
        arrived_at = trio.current_time()
        asked = encode_codec.decode_rerank(request, clients_timeout(rpc.call.time_remaining()))
        writer = CallWriter(rpc, self._backend.unread_calls, encode_codec.encode_scores)
        await self._serve(asked, rpc, writer, arrived_at)

    async def GenerateImage(self, request: images_pb2.GenerateImageRequest, rpc: Rpc) -> None:
        """Stream the progress of a drawing, and its images in parts. Raises as `_serve`.

        Cancellation: ends the request.
        """
        arrived_at = trio.current_time()
        asked = draw_codec.decode_draw(request, clients_timeout(rpc.call.time_remaining()))
        del request  # its source was copied, and it is as large as that
        writer = CallWriter(rpc, self._backend.unread_calls, draw_codec.encode_drawing)
        await self._serve(asked, rpc, writer, arrived_at)

    async def _serve(
        self, request: ClientRequest, rpc: Rpc, writer: CallWriter, arrived_at: float
    ) -> None:
        """Submit a request and write its events until the call ends. ``arrived_at`` is when its
        timeout was what it says, on Trio's clock.

        Raises:
            Disconnected: the client has ended the call.
        Cancellation: ends the request.
        """
        backend = self._backend
        stream = backend.engine.submit(
            request,
            buffer=backend.engine.config.stream_buffer,
            reader=writer,
            arrived_at=arrived_at,
            origin=Origin(rpc.request_id, rpc.quota),
        )
        await writer.run(stream)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, rpc: Rpc
    ) -> common_pb2.TokenizeResponse:
        """Return the tokens of a text or a chat.

        Cancellation: safe; the tokens are dropped.
        """
        given = text_codec.decode_tokenize(request)
        spans, max_model_len = await self._backend.engine.tokenize(request.model, **given)
        # off the loop: 100,000 tokens take a third of a second to encode
        return await encode_in_thread(partial(text_encoder.encode_tokens, spans, max_model_len))

    async def Detokenize(
        self, request: common_pb2.DetokenizeRequest, rpc: Rpc
    ) -> common_pb2.DetokenizeResponse:
        """Return the text of token ids.

        Cancellation: safe; the text is dropped.
        """
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        ids = tuple(request.ids)
        text = await self._backend.engine.detokenize(request.model, ids, skip_special_tokens=skip)
        return text_encoder.encode_text(text)


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
