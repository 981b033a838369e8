"""The application for Ray Serve: replicas that each have an engine and answer Inference.

`build` is the import path for a Serve config file, whose ``args`` are the settings of each
replica's engine. The file's settings of the deployment override those of this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from engine.api.aio import open_engine
from engine.errors import ConfigError
from grpc_service._generated.triolet.v1 import (
    classes_pb2,
    common_pb2,
    images_pb2,
    inference_pb2,
    vectors_pb2,
)
from grpc_service.cli.flags import engine_config_of
from grpc_service.ray.answers import Answers, trouble_of
from grpc_service.ray.autoscaling import SEQUENCES
from grpc_service.ray.ingress import CODES, REMAINING_KEY
from grpc_service.ray.prefixes import PREFIXES, Prefixes, keys_of
from grpc_service.services.error_status import status_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from google.protobuf.message import Message

    from engine.config import EngineConfig

NAME = "Inference"  # the deployment's name in a Serve config file


def _streaming(answer: Callable[..., AsyncIterator[Message]], kind: type[Message]) -> Any:
    """Return the method of Inference that yields what a method of `Answers` yields. Cancellation of
    the method: ends the request."""

    async def method(self: Replica, request: Any, grpc_context: Any) -> AsyncIterator[Message]:
        try:
            async for message in answer(self._answers, request, _remaining_s(grpc_context)):
                yield message
        except Exception as error:
            _fail(grpc_context, error)
            yield kind()

    return method


def _unary(answer: Callable[..., Awaitable[Message]], kind: type[Message]) -> Any:
    """Return the method of Inference that returns what a method of `Answers` returns."""

    async def method(self: Replica, request: Any, grpc_context: Any) -> Message:
        try:
            return await answer(self._answers, request)
        except Exception as error:
            _fail(grpc_context, error)
            return kind()

    return method


class Replica:
    """One replica: an engine, and the methods of Inference by their names.

    The status of a failure is set on the context that Serve passes. A last, empty message takes the
    status to the proxy (`grpc_service.ray.ingress`).
    """

    async def __init__(  # type: ignore[misc, unused-ignore]  # Serve awaits it
        self, config: EngineConfig, options: Mapping[str, Any]
    ) -> None:
        """Open the engine and load its models. Serve sends requests afterwards. ``options`` are
        those of `open_engine`."""
        self._engine = await open_engine(config, **options)
        for model in config.models:
            if not model.lazy:
                await self._engine.wait_ready(model.name)
        self._answers = Answers(self._engine)
        self._prefixes = Prefixes((await self._engine.statistics()).totals.total_blocks)

    # ---- the methods of Inference

    async def Generate(
        self, request: inference_pb2.GenerateRequest, grpc_context: Any
    ) -> AsyncIterator[Message]:
        """Yield what the model generates. Cancellation: ends the request."""
        self._prefixes.add(keys_of(request))
        async for message in self._generate(request, grpc_context):
            yield message

    _generate = _streaming(Answers.generate, inference_pb2.GenerateResponse)
    Attach = _streaming(Answers.attach, inference_pb2.GenerateResponse)
    Embed = _streaming(Answers.embed, vectors_pb2.EmbedResponse)
    Rerank = _streaming(Answers.rerank, vectors_pb2.RerankResponse)
    Classify = _streaming(Answers.classify, classes_pb2.ClassifyResponse)
    GenerateImage = _streaming(Answers.generate_image, images_pb2.GenerateImageResponse)
    Tokenize = _unary(Answers.tokenize, common_pb2.TokenizeResponse)
    Detokenize = _unary(Answers.detokenize, common_pb2.DetokenizeResponse)

    # ---- what Serve calls

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises.

        Raises:
            RuntimeError: a model cannot serve, and will not by itself.
        """
        if trouble := trouble_of(await self._engine.list_models()):
            raise RuntimeError(trouble)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the keys of the prompts that this replica has computed, for the router."""
        return {PREFIXES: self._prefixes.report()}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how many sequences run, wait or are parked, for the autoscaling policy."""
        counts = (await self._engine.statistics()).totals
        return {SEQUENCES: counts.running + counts.waiting + counts.parked}

    async def __del__(self) -> None:
        """Let the last requests end, and close the engine. Serve calls and awaits this."""
        await self._engine.drain()
        await self._engine.close()


def _fail(context: Any, error: Exception) -> None:
    status = status_of(error)
    context.set_code(CODES[int(status.code)])
    context.set_details(status.message)
    context.set_trailing_metadata(list(status.metadata))


def _remaining_s(context: Any) -> float | None:
    """Return how long the client of a call will wait; None without a deadline."""
    values = [value for key, value in context.invocation_metadata() if key == REMAINING_KEY]
    return float(values[0]) if values else None


def application(config: EngineConfig, kind: type[Replica] = Replica, **options: Any) -> Any:
    """Return the application whose replicas are of class ``kind``, with this config. ``options``
    are those of `open_engine`."""
    deployment = serve.deployment(
        kind,
        name=NAME,
        max_ongoing_requests=2 * config.max_num_seqs,  # half of the requests wait, to fill steps
        graceful_shutdown_timeout_s=config.drain_timeout_s + config.step_timeout_s,
        health_check_period_s=5,
        request_router_config=RequestRouterConfig(
            request_router_class="grpc_service.ray.router.PrefixRouter",
            request_routing_stats_period_s=2,
        ),
    )
    return deployment.bind(config, options)


def build(args: dict[str, Any]) -> Any:
    """Return the application of a Serve config file.

    Raises:
        ConfigError: a setting is wrong; the message names it.
    """
    try:
        return application(engine_config_of(args))
    except ConfigError as error:
        raise ConfigError(f"args: {error}") from None
