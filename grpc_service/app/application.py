"""The server as a whole: starts and ends the engine and the gRPC server in order.

Start: the engine starts, and models load in the background → the address is bound and calls are
served → the server is ready when every preloaded text model has loaded or failed; without text
models, when every encoder has. End (D17): health is NOT_SERVING → the sockets close, and clients
are asked to go on elsewhere → once handlers have all calls that were sent before, new requests are
refused → running ones may finish within the drain timeout → the others are cut with a status →
connections end → all threads are joined, except those that `_Ending` does not wait for.

Exit codes: 0 all requests finished, 75 some were cut, 70 an internal error or a step that hangs, 1
the server could not start, 128 + n a second signal.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from engine import logs
from engine.api.engine import make_torch_runner, open_engine
from engine.errors import ConfigError, TrioletError
from engine.gc_tuning import collect_hardly, freeze_after_load
from engine.replica.threads import WorkerThreads
from engine.replica.watchdog import EXIT_HUNG, Watchdog
from engine.status import ModelState
from grpc_service.access.interceptor import Interceptor
from grpc_service.access.keys import open_keys, reload_keys
from grpc_service.access.unread_calls import UnreadCalls
from grpc_service.app.gateway_ports import GatewayPorts, check_gateways
from grpc_service.app.gen_ai import GenAiMetrics
from grpc_service.app.health import SERVICE_NAME as HEALTH_NAME
from grpc_service.app.health import HealthServicer, apply_states, health_methods
from grpc_service.app.listening import check_free, listen, num_connections
from grpc_service.app.metrics import serving_metrics
from grpc_service.app.openai_port import OpenAIPort, check_openai
from grpc_service.app.startup import awaited, reasons_held_back, show_loading, show_ready
from grpc_service.app.statistics import log_statistics
from grpc_service.app.tls import certificate_warnings, server_context
from grpc_service.app.tracing import open_tracing
from grpc_service.app.usage_log import keeping_usage_log
from grpc_service.rpc.connection import Flusher
from grpc_service.rpc.limits import Limits
from grpc_service.rpc.server import RpcServer
from grpc_service.services.backend import Backend
from grpc_service.services.error_status import status_of
from grpc_service.services.methods import LASTING_METHODS, SERVICE_NAMES, TAKING_IMAGES, methods
from grpc_service.services.reflection import reflection_methods

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping

    from engine.api.engine import Engine
    from engine.config import EngineConfig
    from engine.pool.entry import Entry
    from engine.pool.loader import RunnerFactory
    from grpc_service.access.interceptor import Fields, Metadata
    from grpc_service.access.keys import KeyRing
    from grpc_service.app.server_config import ServerConfig
    from grpc_service.app.startup import HeldBack
    from grpc_service.app.usage_log import UsageLog
    from grpc_service.rpc.methods import Method

log = logging.getLogger(__name__)

LASTING_NAMES = (
    *(f"{HEALTH_NAME}/", "grpc.reflection.", *LASTING_METHODS),
    *(f"vllm.grpc.engine.VllmEngine/{name}" for name in ("HealthCheck", "Abort")),
)
LASTING = tuple(f"/{name}".encode() for name in LASTING_NAMES)
EXIT_OK, EXIT_FAILED, EXIT_INTERNAL, EXIT_CUT = 0, 1, EXIT_HUNG, 75
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STOP_GRACE_S = 1.0  # guess: time for statuses that are being written; all else has ended by then
LEAVE_PATIENCE_S = 3.0  # guess: for a load that still runs when no request waits for it any more
LOADING_PATIENCE_S = 0.5  # guess: the same in a server that was never ready, which had no clients
CUT_PATIENCE_S = 3.0  # guess: `STOP_GRACE_S` and a step of ordinary length


@dataclass(eq=False)
class _Ending:
    """Ends the process in bounded time, whatever it waits for (D17).

    The first signal drains. When all connections have ended, there is no client left to answer, so
    a thread that is still busy is joined for a limited time: a step up to its limit (`Watchdog`),
    a load for `LEAVE_PATIENCE_S`, or for `LOADING_PATIENCE_S` if the server was never ready. A
    second signal ends the process within `CUT_PATIENCE_S`.
    """

    watchdog: Watchdog
    keys: KeyRing | None = None
    backend: Backend | None = None  # None while the engine is being opened
    server: RpcServer | None = None  # None before it listens
    gateways: GatewayPorts | None = None  # None before it listens
    openai: OpenAIPort | None = None  # None before it listens
    usage_log: UsageLog | None = None
    is_serving: bool = False
    was_ready: bool = False
    first: trio.Event = field(default_factory=trio.Event)
    second: trio.Event = field(default_factory=trio.Event)
    served: int = EXIT_INTERNAL  # the exit code of serving, set when it has ended in order
    cut_by: int | None = None

    @property
    def code(self) -> int:
        """The exit code if the process ended now."""
        return self.served if self.cut_by is None else 128 + self.cut_by

    async def watch(self, signals: AsyncIterator[int]) -> None:
        """Handle signals until cancelled.

        Cancellation: safe; later signals are not handled.
        """
        async for number in signals:
            if number == signal.SIGUSR1:
                if self.backend is not None:
                    log_statistics(self.backend.statistics())
            elif number == signal.SIGHUP:
                reload_keys(self.keys)
            elif not self.first.is_set():
                self.first.set()
            elif self.cut_by is None:
                self.cut_by = number
                self.watchdog.leave(self.code, patience_s=CUT_PATIENCE_S, waits_for_steps=False)
                self.second.set()

    def leave(self) -> None:
        """Limit how long the end may still join threads, now that all connections have ended. A
        server that could not even listen has no limit, because its error message would be lost."""
        if self.is_serving and self.cut_by is None:
            patience_s = LEAVE_PATIENCE_S if self.was_ready else LOADING_PATIENCE_S
            self.watchdog.leave(self.code, patience_s=patience_s, waits_for_steps=True)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, for programs that embed it. ``port`` is the port that it listens on;
    ``openai_port`` is that of OpenAI's API, if there is one; ``vllm_engine_ports`` has those for
    gateways, by the model's name."""

    engine: Engine
    port: int
    openai_port: int | None = None
    vllm_engine_ports: Mapping[str, int] = field(default_factory=dict)


async def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    make_runner: RunnerFactory = make_torch_runner,
    shows_progress: bool = False,
    exit_process: Callable[[int], object] = os._exit,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> int:
    """Serve until a signal or a failure, and return the exit code. `Control.Drain` does not end
    the server.

    ``task_status`` is started when the port is bound; models may still be loading then.
    ``exit_process`` is called with the exit code, on a thread of its own, if this function cannot
    return because a worker thread stays busy.

    Raises:
        ConfigError: the address cannot be bound, or every model failed to load. The error is in an
            ExceptionGroup if it occurs after the engine was started.

    Cancellation: running requests are cut at once, and the threads are joined.
    """
    check_gateways(engine_config, server_config)
    check_openai(server_config)
    check_free(server_config)
    server_context(server_config)  # so that a broken file is reported before models load
    for sentence in certificate_warnings(server_config, time.time()):
        log.warning(sentence)
    keys = open_keys(server_config)
    ending = _Ending(Watchdog(engine_config.step_timeout_s, exit_process=exit_process), keys)
    with trio.open_signal_receiver(*SIGNALS) as signals:
        async with keeping_usage_log(server_config) as usage_log, trio.open_nursery() as nursery:
            ending.usage_log = usage_log
            nursery.start_soon(ending.watch, signals)  # signals count also while the engine ends
            await _serve(
                engine_config,
                server_config,
                ending,
                make_runner=make_runner,
                shows_progress=shows_progress,
                task_status=task_status,
            )
            nursery.cancel_scope.cancel(reason="served")
    return ending.code


async def _serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    ending: _Ending,
    *,
    make_runner: RunnerFactory,
    shows_progress: bool,
    task_status: trio.TaskStatus[Server],
) -> None:
    health = HealthServicer()

    def on_change() -> None:
        if ending.backend is not None:
            engine = ending.backend.engine
            apply_states(health, engine.list_models(), draining=engine.is_draining)
            if ending.gateways is not None:
                ending.gateways.refresh()
            if engine.is_draining and ending.server is not None:
                ending.server.leave()

    async def take_leave() -> None:
        """Wait until no call is on its way any more, as `on_change` has asked clients to leave."""
        if ending.server is not None and ending.gateways is not None and ending.openai is not None:
            async with trio.open_nursery() as nursery:
                for part in (ending.server, ending.gateways, ending.openai):
                    nursery.start_soon(part.settle)

    flusher = Flusher()
    with reasons_held_back(engine_config) as reasons:
        async with open_engine(
            engine_config,
            make_runner=make_runner,
            on_change=on_change,
            take_leave=take_leave,
            watchdog=ending.watchdog,
            batch=flusher,
        ) as engine:
            if ending.usage_log is not None:
                engine.usage.listeners.append(ending.usage_log.add)
            ending.backend = backend = Backend(engine, UnreadCalls(time.monotonic))
            on_change()
            async with _serving_calls(server_config, backend, flusher, ending, health) as port:

                async def wait_ready() -> None:
                    await _wait_loaded(engine, reasons)
                    ending.was_ready = True
                    freeze_after_load()
                    if shows_progress and not engine.is_draining:
                        show_ready(engine, server_config, port)
                    if await _wait_settled(engine.registry.entries.values()):
                        freeze_after_load()  # freeze again, because encoders load last (D14)

                ending.is_serving = True
                assert ending.gateways is not None
                assert ending.openai is not None
                task_status.started(Server(engine, port, ending.openai.port, ending.gateways.ports))
                async with trio.open_nursery() as watched:
                    if shows_progress:
                        watched.start_soon(show_loading, engine)
                    watched.start_soon(wait_ready)
                    ending.served = await _serve_until_signal(engine, ending)
                    watched.cancel_scope.cancel(reason="served")


@asynccontextmanager
async def _serving_calls(
    config: ServerConfig,
    backend: Backend,
    flusher: Flusher,
    ending: _Ending,
    health: HealthServicer,
) -> AsyncIterator[int]:
    """Serve gRPC until the block is left, and then for up to `STOP_GRACE_S`. Yield the port.

    Raises:
        ConfigError: another program took the address after it was checked.

    Cancellation: calls are cut at once.
    """
    tracing = open_tracing(os.environ)
    names = [*SERVICE_NAMES, HEALTH_NAME]
    own = methods(backend, config.max_message_bytes, adapter_root=config.adapter_root)
    served = [*own, *health_methods(health), *reflection_methods(names)]
    named = GenAiMetrics()

    def record(fields: Fields, metadata: Metadata, request_id: str) -> None:
        """Count an ended call under OpenTelemetry's names, and make its spans."""
        named.record(fields)
        if tracing is not None:
            tracing.record(fields, metadata, request_id)

    interceptor = Interceptor(served, ending.keys, status_of, record)
    limits = _limits_of(config)
    server = ending.server = RpcServer(interceptor.serve, limits, flusher)

    def serve_gateways(methods: Iterable[Method]) -> RpcServer:
        """Return the server of a port for gateways, which send no keys."""
        own = Interceptor(methods, None, status_of, record, interceptor.calls, interceptor.decoding)
        return RpcServer(own.serve, limits, flusher)

    gateways = ending.gateways = GatewayPorts(config, backend, serve_gateways)
    openai = ending.openai = OpenAIPort(config, backend, interceptor, ending.keys, named)
    # Metrics start first and end last, so that they show a drain to its end.
    async with serving_metrics(config, backend, interceptor, named), trio.open_nursery() as nursery:
        listeners = listen(config, server_context(config))
        nursery.start_soon(server.run, listeners)
        gateways.start(nursery)
        openai.start(nursery, server.shared)
        try:
            yield listeners[0].port
        finally:
            with trio.CancelScope(shield=True):  # at most `STOP_GRACE_S`
                async with trio.open_nursery() as stopping:
                    stopping.start_soon(server.stop, STOP_GRACE_S)
                    stopping.start_soon(gateways.stop, STOP_GRACE_S)
                    stopping.start_soon(openai.stop, STOP_GRACE_S)
            ending.leave()
    if tracing is not None:
        await WorkerThreads().run(tracing.flush, trio.CapacityLimiter(1))


def _limits_of(config: ServerConfig) -> Limits:
    return Limits(
        max_message_bytes=config.max_message_bytes,
        extra_bytes_by_method=dict.fromkeys(TAKING_IMAGES, config.max_image_bytes),
        keepalive_time_s=config.keepalive_time_s,
        keepalive_timeout_s=config.keepalive_timeout_s,
        connections_max=num_connections(
            config.max_connections,
            1 + len(config.vllm_engine_ports) + (config.openai_port is not None),
        ),
        connections_per_address_max=config.max_connections_per_address,
        connection_age_s=config.max_connection_age_s or math.inf,
        connection_idle_s=config.max_connection_idle_s,
        budget=config.connection_budget,
        budget_per_s=config.connection_budget / 2,
        held_bytes=config.max_held_bytes,
        lasting_methods=LASTING,
    )


async def _wait_loaded(engine: Engine, reasons: HeldBack) -> None:
    """Wait until every preloaded model that the start waits for is READY or FAILED; if all of these
    FAILED, wait for the encoders, too. Then log the ``reasons`` why models FAILED.

    Raises:
        ConfigError: every model FAILED.

    Cancellation: safe; the loads go on.
    """
    entries = engine.registry.entries.values()
    first = awaited(entries)
    await _wait_settled(first)
    if all(entry.state is ModelState.FAILED for entry in first):
        await _wait_settled(entries)
    failure = _failure(engine)
    reasons.release(failure)
    if failure:
        raise ConfigError(failure)


def _failure(engine: Engine) -> str:
    """Return why no model was loaded; empty if one was or will be."""
    models = [model for model in engine.list_models() if not model.base]  # not their adapters
    if any(model.state is not ModelState.FAILED for model in models):
        return ""
    if len(models) > 1:
        return f"none of the {len(models)} models was loaded; the log says why"
    return f"{models[0].name}: {models[0].error}{_where(engine)}"


def _where(engine: Engine) -> str:
    """Return where the only model was looked for, if it is a path. Clients never see this."""
    model = next(iter(engine.registry.entries.values())).config.model
    is_path = model.startswith((".", "/", "~"))
    return f" [{Path(os.path.expanduser(model)).absolute()}]" if is_path else ""


async def _wait_settled(entries: Collection[Entry]) -> bool:
    """Wait until every preloaded model of ``entries`` is READY or FAILED. Return whether a model
    was not settled when the wait began.

    Cancellation: safe; the loads go on.
    """
    late = [entry for entry in entries if not (entry.config.lazy or entry.settled.is_set())]
    for entry in late:
        await entry.settled.wait()
    return bool(late)


async def _serve_until_signal(engine: Engine, ending: _Ending) -> int:
    """Wait for a signal, drain the engine, and return the exit code. A second signal cuts.

    Cancellation: safe; running requests end with the engine.
    """
    await ending.first.wait()
    count = engine.num_live
    log.info("draining: %d %s running", count, "request is" if count == 1 else "requests are")
    cut = 0
    async with trio.open_nursery() as nursery:

        async def cut_at_second() -> None:
            await ending.second.wait()
            nursery.cancel_scope.cancel(reason="second signal")

        nursery.start_soon(cut_at_second)
        cut = await engine.drain()
        nursery.cancel_scope.cancel(reason="drained")
    return EXIT_CUT if cut else EXIT_OK


def serve_forever(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    make_runner: RunnerFactory = make_torch_runner,
) -> int:
    """Run a server until a signal ends it, as ``triolet serve`` does; return the exit code."""
    collect_hardly()
    logs.configure(os.environ.get("TRIOLET_LOG", "INFO"), server_config.log_format)
    if not __debug__:
        print(
            "triolet: does not run with python -O, because it relies on its assertions",
            file=sys.stderr,
        )
        return EXIT_FAILED
    try:
        return trio.run(
            partial(serve, make_runner=make_runner, shows_progress=True),
            engine_config,
            server_config,
        )
    except BaseException as raised:
        error = _first(raised)
        if isinstance(error, TrioletError):
            print(f"triolet: {error}", file=sys.stderr)
            return EXIT_FAILED
        log.exception("the server failed")
        return EXIT_INTERNAL


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
