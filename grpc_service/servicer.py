"""The three services of triolet.v1 on grpc.aio: decode, ask the front, encode.

Rule 1: a handler knows the codec, `grpc_service.front`'s protocols and its context, nothing else.
Rule 2: every end but success is one `context.abort`, in `_answering`, after the engine's part is
given back. A CancelledError leaves a handler only when grpc put it in, or when the client has gone:
grpc.aio sends no status for it, and any other client would hang.
Rule 3: a write that fails means that the client has gone; nothing is sent after it.
Handlers are coroutines, as grpc.aio does not close async generators when a call is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from engine.errors import EngineBug, InvalidRequest
from grpc_service import codec, encode_codec, operations, snapshots
from grpc_service._generated.triolet.v1 import control_pb2, inference_pb2, models_pb2
from grpc_service.status import ending_of
from grpc_service.watching import watch_stats

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

    from grpc_service.front import Call, Front
    from grpc_service.straight import Write

    Context = grpc.aio.ServicerContext[Any, Any]
    Behaviour = Callable[[Any, Context], Awaitable[Any]]

INFERENCE: ServiceDescriptor = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
MODELS: ServiceDescriptor = models_pb2.DESCRIPTOR.services_by_name["Models"]
CONTROL: ServiceDescriptor = control_pb2.DESCRIPTOR.services_by_name["Control"]
SERVICE_NAMES = (INFERENCE.full_name, MODELS.full_name, CONTROL.full_name)

log = logging.getLogger(__name__)


class Disconnected(Exception):
    """The client has gone: there is nobody to tell anything."""


class Inference:
    """Generation, encoders and tokens."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """One outstanding write; credit goes back when the client's transport took it (D1). The
        call is left when its status is given: one that cannot be is a zombie."""
        timeout_s = clients_timeout(context.time_remaining())
        call = self._front.generate(codec.decode_generate(request, timeout_s), context.peer())
        encode = partial(codec.encode_events, token_ids=request.output.token_ids)
        short = codec.ShortDelta(token_ids=request.output.token_ids)
        is_large = request.output.HasField("prompt_logprobs")
        await _carry(call, encode, context, short=short.encode, is_large=is_large)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> None:
        """As `Generate`; a vector is a message."""
        timeout_s = clients_timeout(context.time_remaining())
        asked = encode_codec.decode_embed(request, timeout_s)
        call = self._front.encode(asked, context.peer())
        await _carry(call, encode_codec.EmbedEncoder(), context)

    async def Rerank(self, request: inference_pb2.RerankRequest, context: Context) -> None:
        """As `Generate`; a score is a message."""
        timeout_s = clients_timeout(context.time_remaining())
        asked = encode_codec.decode_rerank(request, timeout_s)
        call = self._front.encode(asked, context.peer())
        await _carry(call, encode_codec.encode_scores, context)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        given = codec.decode_tokenize(request)
        spans, max_model_len = await self._front.call(
            lambda engine: engine.tokenize(request.model, **given)
        )
        # off the loop: 100,000 tokens take a third of a second to encode
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, codec.encode_tokens, spans, max_model_len)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        ids = tuple(request.ids)
        text = await self._front.call(
            lambda engine: engine.detokenize(request.model, ids, skip_special_tokens=skip)
        )
        return codec.encode_text(text)


class Models:
    """What is loaded, and loading it."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def ListModels(
        self, request: models_pb2.ListModelsRequest, context: Context
    ) -> models_pb2.ListModelsResponse:
        statuses = await self._front.ask(lambda engine: engine.list_models())
        return models_pb2.ListModelsResponse(models=map(snapshots.encode_model, statuses))

    async def GetModel(
        self, request: models_pb2.GetModelRequest, context: Context
    ) -> models_pb2.GetModelResponse:
        name = codec.decode_get_model(request)
        status = await self._front.ask(lambda engine: engine.get_model(name))
        return models_pb2.GetModelResponse(model=snapshots.encode_model(status))

    async def LoadModel(self, request: models_pb2.LoadModelRequest, context: Context) -> None:
        """Leaving it ends only the watching: a load is the server's (R115)."""
        name, replicas = operations.decode_load(request)
        watch = await self._front.ask(lambda engine: engine.watch_load(name, replicas))
        while (status := await self._front.call(lambda engine: watch.next())) is not None:
            try:
                await context.write(operations.encode_load(status))
            except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
                raise Disconnected from error

    async def UnloadModel(
        self, request: models_pb2.UnloadModelRequest, context: Context
    ) -> models_pb2.UnloadModelResponse:
        name, drain_s = operations.decode_unload(request)
        await self._front.call(lambda engine: engine.unload_model(name, drain_s))
        return models_pb2.UnloadModelResponse()


class Control:
    """What is going on."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def GetStats(
        self, request: control_pb2.GetStatsRequest, context: Context
    ) -> control_pb2.GetStatsResponse:
        return snapshots.encode_statistics(await self._front.statistics())

    async def WatchStats(self, request: control_pb2.WatchStatsRequest, context: Context) -> None:
        await watch_stats(self._front, context)

    async def Pause(
        self, request: control_pb2.PauseRequest, context: Context
    ) -> control_pb2.PauseResponse:
        mode = operations.decode_pause_mode(request)
        await self._front.ask(lambda engine: engine.pause(mode, request.model))
        return control_pb2.PauseResponse()

    async def Resume(
        self, request: control_pb2.ResumeRequest, context: Context
    ) -> control_pb2.ResumeResponse:
        await self._front.ask(lambda engine: engine.resume(request.model))
        return control_pb2.ResumeResponse()

    async def ResetPrefixCache(
        self, request: control_pb2.ResetPrefixCacheRequest, context: Context
    ) -> control_pb2.ResetPrefixCacheResponse:
        await self._front.ask(lambda engine: engine.reset_prefix_cache(request.model))
        return control_pb2.ResetPrefixCacheResponse()

    async def Abort(
        self, request: control_pb2.AbortRequest, context: Context
    ) -> control_pb2.AbortResponse:
        names = operations.decode_abort(request)
        outcomes = await self._front.ask(lambda engine: [engine.abort(name) for name in names])
        return operations.encode_aborts(names, outcomes)

    async def Explain(
        self, request: control_pb2.ExplainRequest, context: Context
    ) -> control_pb2.ExplainResponse:
        name = operations.decode_explain(request)
        explained = await self._front.ask(lambda engine: engine.explain(name))
        return operations.encode_explanation(explained)

    async def Drain(
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainResponse:
        """Answers when no request is left; the server stays up, refusing new ones."""
        timeout_s = operations.decode_drain(request)
        await self._front.call(lambda engine: engine.drain_in_background(timeout_s))
        return control_pb2.DrainResponse()


def add_servicers(server: grpc.aio.Server, front: Front) -> None:
    """Serve triolet.v1, to whoever calls: `grpc_service.reception` says who may. Call it before
    the server starts."""
    _add(server, INFERENCE, Inference(front))
    _add(server, MODELS, Models(front))
    _add(server, CONTROL, Control(front))


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
    write = context.write  # waits while the client's window is closed

    def write_short(event: Any) -> Write | None:
        data = short(event)
        return write(data) if data else None

    call.write_straight(write_short)
    try:
        while events := await call.receive():
            if len(events) == 1 and (data := short(events[0])) is not None:
                if data:
                    await write(data)
                call.written(1)
                continue
            if is_large:  # 65,536 numbers
                is_large, loop = False, asyncio.get_running_loop()
                messages = await loop.run_in_executor(None, encode, events)
            else:
                messages = encode(events)
            for message in messages:
                await write(message)
            credited = call.credited
            call.written(sum([isinstance(event, credited) for event in events]))
    except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        raise Disconnected from error
    except Exception as error:
        call.cancel()
        await _abort(context, error)
    finally:
        call.leave()


# ---- what every RPC has in common ------------------------------------------------------------


def _add(server: grpc.aio.Server, service: ServiceDescriptor, servicer: object) -> None:
    handlers = {
        method.name: _handler(method, _answering(getattr(servicer, method.name)))
        for method in service.methods
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service.full_name, handlers),)
    )


def _handler(method: MethodDescriptor, behaviour: Behaviour) -> grpc.RpcMethodHandler[Any, Any]:
    make: Callable[..., grpc.RpcMethodHandler[Any, Any]] = (
        grpc.unary_stream_rpc_method_handler
        if method.server_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(
        behaviour,
        request_deserializer=_deserializer(GetMessageClass(method.input_type)),
        response_serializer=_serialize,
    )


def _serialize(message: Message | bytes) -> bytes:
    """What a handler gives: a message, or its bytes where making them is its own business."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def _deserializer(cls: type[Message]) -> Callable[[bytes], Message | InvalidRequest]:
    """grpc.aio answers a deserializer that raises with UNKNOWN and a traceback in the log, so
    this one gives back what is to be raised."""

    def deserialize(data: bytes) -> Message | InvalidRequest:
        try:
            return cls.FromString(data)
        except DecodeError:
            name = cls.DESCRIPTOR.full_name
            return InvalidRequest([], message=f"the bytes sent are not a valid {name}")

    return deserialize


def _answering(behaviour: Behaviour) -> Behaviour:
    """``behaviour`` with every way it can end made a way grpc.aio can."""

    async def answer(request: Message | InvalidRequest, context: Context) -> Any:
        failure: BaseException
        try:
            if isinstance(request, InvalidRequest):
                raise request
            return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise  # the behaviour has ended the call itself
        except Disconnected:
            # A return would have grpc.aio send a status, and log a traceback where the write that
            # failed was the first: the initial metadata cannot be sent twice. This sends nothing.
            raise asyncio.CancelledError from None
        except asyncio.CancelledError as error:
            if _is_ended_by_grpc():
                raise
            failure = EngineBug("a cancellation inside the server reached the RPC's handler")
            failure.__cause__ = error
        except Exception as error:
            failure = error
        try:
            return await _abort(context, failure)
        finally:
            del failure  # its traceback knows this frame

    return answer


def _is_ended_by_grpc() -> bool:
    """Was this task asked to end, or did a CancelledError only pass through it?"""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _abort(context: Context, failure: BaseException) -> None:
    """Offer the client the status of ``failure``; with its window closed this waits until it
    reads or goes, which costs the engine nothing."""
    try:
        await context.abort(*ending_of(failure))
    except grpc.aio.AbortError:
        raise  # grpc.aio's own way out of a handler
    except (grpc.aio.BaseError, asyncio.InvalidStateError):
        log.debug("the client went before it could be told %s", type(failure).__name__)


def clients_timeout(remaining_s: float | None) -> float | None:
    """What is left at least until the client's own timer ends the call, of what grpc says is left.

    A timeout of a second or more travels in three digits, rounded up: 10.01 s arrive as 10.1 s, and
    the client would end the call long before the server's status (D18). Below a second it travels
    in milliseconds. Measured: of ten clients with 1 to 10.1 s, four saw no details without this.
    Source: grpc/src/core, timeout_encoding.cc.
    """
    if remaining_s is None or remaining_s < 1:
        return remaining_s
    return remaining_s - 10.0 ** (math.floor(math.log10(remaining_s)) - 2)
