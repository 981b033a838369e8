"""VllmEngine for one model: what a gateway calls.

Rule: a handler gets the request decoded, calls the engine, and encodes the answer, as those of
triolet.v1 do. Every end other than success is an exception, which
`grpc_service.access.interceptor` turns into a status.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import trio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from engine.api.engine import files_of
from engine.errors import NotAllowed, NoWorkers, Unsupported
from engine.status import ModelState
from grpc_service.access.policy import is_local
from grpc_service.rpc.methods import methods_of
from grpc_service.services.call_writer import CallWriter, encode_in_thread
from grpc_service.services.inference import clients_timeout
from grpc_service.services.operations_codec import decode_abort
from grpc_service.services.value_counts import judges_of
from grpc_service.vllm_engine.answer_encoder import GenerateEncoder, encode_embeddings
from grpc_service.vllm_engine.count_limits import LIMITS
from grpc_service.vllm_engine.kv_feed import KvFeed
from grpc_service.vllm_engine.loads import Loads
from grpc_service.vllm_engine.model_info import encode_info, tokenizer_chunks
from grpc_service.vllm_engine.request_codec import DEADLINE_S, decode_embed, decode_generate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from google.protobuf.descriptor import ServiceDescriptor

    from engine.requests.encode.values import EmbedRequest
    from engine.requests.text.values import GenerateRequest
    from grpc_service.access.rpc_record import Rpc
    from grpc_service.rpc.call import Call
    from grpc_service.rpc.methods import Method
    from grpc_service.services.backend import Backend

SERVICE: ServiceDescriptor = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]


class GenerateCall(NamedTuple):
    """A request, and whether its tokens are sent as they are generated."""

    request: GenerateRequest
    is_stream: bool

    @property
    def request_id(self) -> str:
        """The client's own id for the request."""
        return self.request.request_id


class VllmEngine:
    """Serves one model to gateways (vllm_engine.proto of smg-grpc-proto)."""

    def __init__(self, backend: Backend, model: str) -> None:
        self._backend = backend
        self._engine = backend.engine
        self._entry = backend.engine.registry.find(model)
        self._name = self._entry.config.name
        self._loads = Loads(self._entry, backend.engine.config)
        self._feed = KvFeed()
        self._started_at = trio.current_time()
        self._last_receive = 0.0

    # ---- the engine's changes

    full_name = SERVICE.full_name

    def refresh(self) -> None:
        """Follow the replicas that serve the model now; called after every change of a model."""
        if self._has_prefixes:
            self._feed.follow(self._entry.replicas)

    def close(self) -> None:
        """End the calls that would never end by themselves."""
        self._feed.close()

    @property
    def is_healthy(self) -> bool:
        """Whether a gateway should send requests."""
        status = self._entry.status()
        return status.is_available and not status.is_hung and not self._engine.is_draining

    @property
    def _has_prefixes(self) -> bool:
        is_text = self._entry.likely_capability.generates_text
        return is_text and self._engine.config.prefix_cache

    # ---- requests

    def translators(self) -> dict[str, Callable[[Call], Callable[[Any], Any]]]:
        """Return `Method.translate` of Generate and Embed."""
        return {"Generate": self._generate_decoder, "Embed": self._embed_decoder}

    def _generate_decoder(self, call: Call) -> Callable[[Any], GenerateCall]:
        max_model_len, timeout_s = self._entry.status().max_model_len, self._timeout_s(call)

        def decode(message: Any) -> GenerateCall:
            request = decode_generate(message, self._name, max_model_len, timeout_s)
            return GenerateCall(request, message.stream)

        return decode

    def _embed_decoder(self, call: Call) -> Callable[[Any], EmbedRequest]:
        timeout_s = self._timeout_s(call)
        return lambda message: decode_embed(message, self._name, timeout_s)

    async def Generate(self, call: GenerateCall, rpc: Rpc) -> None:
        """Stream the tokens that the model generates, or send them all at the end. Raises
        `Disconnected` if the client has ended the call.

        Cancellation: ends the request.
        """
        output = call.request.output
        encoder = GenerateEncoder(is_stream=call.is_stream, alternatives=output.logprobs)
        writer = CallWriter(
            rpc,
            self._backend.unread_calls,
            encoder.encode,
            encoder.encode_short,
            is_large=output.prompt_logprobs is not None,
        )
        self._last_receive = time.time()
        serving = writer.serve(self._engine, call.request)
        del call  # so that the request lives only as long as its stream needs it
        await serving

    async def Embed(self, request: EmbedRequest, rpc: Rpc) -> None:
        """Send the vector of one input. Raises `Disconnected` if the client has ended the call.

        Cancellation: ends the request.
        """
        writer = CallWriter(rpc, self._backend.unread_calls, encode_embeddings)
        self._last_receive = time.time()
        await writer.serve(self._engine, request)

    def _timeout_s(self, call: Call) -> float:
        """Return how long a request may take: until the caller's deadline or, without one,
        `EngineConfig.default_deadline_s` or `DEADLINE_S`."""
        given = clients_timeout(call.time_remaining())
        own = self._engine.config.default_deadline_s or DEADLINE_S
        return own if given is None else given

    async def Abort(self, request: Any, rpc: Rpc) -> Any:
        """End requests of gateways by their ids; other holders' requests are left alone. An id that
        is unknown is remembered, since its Generate may come later.

        Raises:
            InvalidRequest: there is no id, there are too many, or one is of a length that no
                request's id has.
        """
        for request_id in decode_abort(request):
            self._engine.abort(request_id, rpc.origin.holder)
        return vllm_engine_pb2.AbortResponse()

    # ---- health and figures

    async def HealthCheck(self, request: Any, rpc: Rpc) -> Any:
        """Return whether the model takes requests.

        Raises:
            NoWorkers: the model is being loaded. After this error a gateway tries again later; an
                answer would make it read the model's description at once.
        """
        status = self._entry.status()
        is_coming = status.state in (ModelState.UNLOADED, ModelState.LOADING)
        if is_coming and not (status.is_available or status.is_restarting):
            raise NoWorkers(f"{self._name} is being loaded")
        message = "" if self.is_healthy else f"{self._name} takes no requests"
        return vllm_engine_pb2.HealthCheckResponse(healthy=self.is_healthy, message=message)

    async def GetModelInfo(self, request: Any, rpc: Rpc) -> Any:
        """Return the model's description, and load the model if a request would.

        Cancellation: the load goes on.
        """
        await self._engine.wait_ready(self._name)
        [replica, *_] = self._entry.replicas
        directory = await self._directory()
        return await encode_in_thread(partial(encode_info, self._name, replica.info, directory))

    async def GetServerInfo(self, request: Any, rpc: Rpc) -> Any:
        """Return the server's activity and settings. Never waits."""
        status, config = self._entry.status(), self._engine.config
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=status.leases,
            is_paused=self._entry.pause is not None,
            last_receive_timestamp=self._last_receive,
            uptime_seconds=trio.current_time() - self._started_at,
            server_type="triolet",
            data_parallel_size=1,
            block_size=config.block_size,
            model_dtype=status.dtype,
            max_num_seqs=config.max_num_seqs,
            constrained_decoding_start="after_reasoning",
        )

    async def GetLoads(self, request: Any, rpc: Rpc) -> Any:
        """Return the model's load. Never waits."""
        return self._loads.encode(self._backend.statistics())

    # ---- the tokenizer and the prefix cache

    async def GetTokenizer(self, request: Any, rpc: Rpc) -> None:
        """Stream the files of the tokenizer.

        Raises:
            Unsupported: the model has none.
        Cancellation: safe.
        """
        directory = await self._directory()
        for chunk in await encode_in_thread(lambda: list(tokenizer_chunks(directory))):
            await rpc.call.write(chunk)

    async def SubscribeKvEvents(self, request: Any, rpc: Rpc) -> None:
        """Stream which prefixes are cached, until the client ends the call. Raises as
        `KvFeed.serve`.

        Raises:
            Unsupported: the model has no prefix cache. A gateway then never subscribes again.
        Cancellation: safe; it is how every subscription ends.
        """
        if not self._has_prefixes:
            raise Unsupported(f"{self._name} has no prefix cache")
        await self._feed.serve(rpc.call, request.start_sequence_number)

    async def FlushCache(self, request: Any, rpc: Rpc) -> Any:
        """Forget every cached prefix. Running requests go on.

        Raises:
            NotAllowed: the client is on another machine.
        """
        if not is_local(rpc.call.peer):
            raise NotAllowed("FlushCache is served to clients on the server's machine")
        self._engine.reset_prefix_cache(self._name)
        return common_pb2.FlushCacheResponse(success=True)

    async def StartProfile(self, request: Any, rpc: Rpc) -> Any:
        """Refuse: there is no profiler.

        Raises:
            Unsupported: always.
        """
        raise Unsupported("this server has no profiler")

    StopProfile = StartProfile

    async def _directory(self) -> Path | None:
        """Return the directory of the model's files; None if there is none."""
        return await encode_in_thread(partial(files_of, self._entry.config))


def methods(service: VllmEngine) -> list[Method]:
    """Return the methods of one model's service."""
    return methods_of(SERVICE, service, judges_of(SERVICE, LIMITS), service.translators())
