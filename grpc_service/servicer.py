"""The three services of triolet.v1: decode, ask the engine, encode.

Rule 1: a handler knows the codec, `grpc_service.front`'s protocols and its context, nothing else.
Rule 2: every end but success is what a handler raises; `grpc_service.reception` tells the client.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from engine.threads import WorkerThreads
from grpc_service import codec, encode_codec, operations, snapshots
from grpc_service._generated.triolet.v1 import control_pb2, inference_pb2, models_pb2
from grpc_service.connections import Disconnected, methods_of
from grpc_service.status import ending_of
from grpc_service.watching import watch_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from google.protobuf.descriptor import ServiceDescriptor
    from google.protobuf.message import Message

    from grpc_service.connections import Context, Method
    from grpc_service.front import Call, Front

T = TypeVar("T")

INFERENCE: ServiceDescriptor = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
MODELS: ServiceDescriptor = models_pb2.DESCRIPTOR.services_by_name["Models"]
CONTROL: ServiceDescriptor = control_pb2.DESCRIPTOR.services_by_name["Control"]
SERVICE_NAMES = (INFERENCE.full_name, MODELS.full_name, CONTROL.full_name)

_encoding = trio.CapacityLimiter(2)  # guess: large answers at once, beside the model's own threads


class Inference:
    """Generation, encoders and tokens."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """One outstanding write; credit goes back when the client's transport took it (D1). The
        call is left when its status is given: one that cannot be is a zombie."""
        timeout_s = clients_timeout(context.time_remaining())
        call = self._front.generate(codec.decode_generate(request, timeout_s), context.peer)
        encode = partial(codec.encode_events, token_ids=request.output.token_ids)
        short = codec.ShortDelta(token_ids=request.output.token_ids)
        is_large = request.output.HasField("prompt_logprobs")
        await _carry(call, encode, context, short=short.encode, is_large=is_large)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> None:
        """As `Generate`; a vector is a message."""
        timeout_s = clients_timeout(context.time_remaining())
        asked = encode_codec.decode_embed(request, timeout_s)
        call = self._front.encode(asked, context.peer)
        await _carry(call, encode_codec.EmbedEncoder(), context)

    async def Rerank(self, request: inference_pb2.RerankRequest, context: Context) -> None:
        """As `Generate`; a score is a message."""
        timeout_s = clients_timeout(context.time_remaining())
        asked = encode_codec.decode_rerank(request, timeout_s)
        call = self._front.encode(asked, context.peer)
        await _carry(call, encode_codec.encode_scores, context)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        given = codec.decode_tokenize(request)
        spans, max_model_len = await self._front.engine.tokenize(request.model, **given)
        # off the loop: 100,000 tokens take a third of a second to encode
        return await _in_thread(partial(codec.encode_tokens, spans, max_model_len))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        ids = tuple(request.ids)
        text = await self._front.engine.detokenize(request.model, ids, skip_special_tokens=skip)
        return codec.encode_text(text)


class Models:
    """What is loaded, and loading it."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def ListModels(
        self, request: models_pb2.ListModelsRequest, context: Context
    ) -> models_pb2.ListModelsResponse:
        statuses = self._front.engine.list_models()
        return models_pb2.ListModelsResponse(models=map(snapshots.encode_model, statuses))

    async def GetModel(
        self, request: models_pb2.GetModelRequest, context: Context
    ) -> models_pb2.GetModelResponse:
        name = codec.decode_get_model(request)
        status = self._front.engine.get_model(name)
        return models_pb2.GetModelResponse(model=snapshots.encode_model(status))

    async def LoadModel(self, request: models_pb2.LoadModelRequest, context: Context) -> None:
        """Leaving it ends only the watching: a load is the server's (R115)."""
        name, replicas = operations.decode_load(request)
        watch = self._front.engine.watch_load(name, replicas)
        while (status := await watch.next()) is not None:
            await context.write(operations.encode_load(status))

    async def UnloadModel(
        self, request: models_pb2.UnloadModelRequest, context: Context
    ) -> models_pb2.UnloadModelResponse:
        name, drain_s = operations.decode_unload(request)
        await self._front.engine.unload_model(name, drain_s)
        return models_pb2.UnloadModelResponse()


class Control:
    """What is going on."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def GetStats(
        self, request: control_pb2.GetStatsRequest, context: Context
    ) -> control_pb2.GetStatsResponse:
        return snapshots.encode_statistics(self._front.statistics())

    async def WatchStats(self, request: control_pb2.WatchStatsRequest, context: Context) -> None:
        await watch_stats(self._front, context)

    async def Pause(
        self, request: control_pb2.PauseRequest, context: Context
    ) -> control_pb2.PauseResponse:
        mode = operations.decode_pause_mode(request)
        self._front.engine.pause(mode, request.model)
        return control_pb2.PauseResponse()

    async def Resume(
        self, request: control_pb2.ResumeRequest, context: Context
    ) -> control_pb2.ResumeResponse:
        self._front.engine.resume(request.model)
        return control_pb2.ResumeResponse()

    async def ResetPrefixCache(
        self, request: control_pb2.ResetPrefixCacheRequest, context: Context
    ) -> control_pb2.ResetPrefixCacheResponse:
        self._front.engine.reset_prefix_cache(request.model)
        return control_pb2.ResetPrefixCacheResponse()

    async def Abort(
        self, request: control_pb2.AbortRequest, context: Context
    ) -> control_pb2.AbortResponse:
        names = operations.decode_abort(request)
        outcomes = [self._front.engine.abort(name) for name in names]
        return operations.encode_aborts(names, outcomes)

    async def Explain(
        self, request: control_pb2.ExplainRequest, context: Context
    ) -> control_pb2.ExplainResponse:
        name = operations.decode_explain(request)
        explained = self._front.engine.explain(name)
        return operations.encode_explanation(explained)

    async def Drain(
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainResponse:
        """Answers when no request is left; the server stays up, refusing new ones."""
        timeout_s = operations.decode_drain(request)
        await self._front.engine.drain_in_background(timeout_s)
        return control_pb2.DrainResponse()


def methods(front: Front) -> list[Method]:
    """All of triolet.v1, for whoever calls: `grpc_service.reception` says who may."""
    return [
        *methods_of(INFERENCE, Inference(front)),
        *methods_of(MODELS, Models(front)),
        *methods_of(CONTROL, Control(front)),
    ]


# ---- what every stream has in common ---------------------------------------------------------


async def _carry(
    call: Call,
    encode: Callable[[Sequence[Any]], Sequence[Message]],
    context: Context,
    *,
    short: Callable[[Any], bytes | None] = lambda event: None,
    is_large: bool = False,
) -> None:
    """Write everything a request gives. ``short`` makes the bytes of a credited event that comes
    alone, faster (b"" for nothing to tell), or gives None. ``is_large``: the first events take long
    to encode, which is then done off the loop."""

    def write_short(event: Any) -> bool:
        data = short(event)
        return data is not None and (not data or context.try_write(data))

    call.write_straight(write_short)
    try:
        while events := await call.receive():
            if is_large:  # 65,536 numbers
                is_large, messages = False, await _in_thread(partial(encode, events))
            else:
                messages = encode(events)
            for message in messages:
                await context.write(message)
            credited = call.credited
            call.written(sum([isinstance(event, credited) for event in events]))
    except Disconnected:
        raise
    except Exception as error:
        call.cancel()
        await context.end(*ending_of(error))
    finally:
        call.leave()


async def _in_thread(job: Callable[[], T]) -> T:
    """What ``job`` gives, which takes long. Cancellation: the job's end is waited for."""
    return await WorkerThreads().run(job, _encoding)


def clients_timeout(remaining_s: float | None) -> float | None:
    """What is left at least until the client's own timer ends the call, of what it said is left.

    A timeout of a second or more travels in three digits, rounded up: 10.01 s arrive as 10.1 s, and
    the client would end the call long before the server's status (D18). Below a second it travels
    in milliseconds. Measured: of ten clients with 1 to 10.1 s, four saw no details without this.
    Source: grpc/src/core, timeout_encoding.cc.
    """
    if remaining_s is None or remaining_s < 1:
        return remaining_s
    return remaining_s - 10.0 ** (math.floor(math.log10(remaining_s)) - 2)
