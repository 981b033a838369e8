"""The server as a whole: engine, bridge and front, started and ended in order.

Start: engine (models load in the background) → the address is bound, calls are served → ready when
every preloaded text model has settled, or every encoder where there are no text models. End (D17):
health NOT_SERVING → new requests refused → running ones finish within the drain timeout → the rest
cut with a status → connections ended → all threads joined, but for those that `_Ending` does not
wait for.

Exit codes: 0 all finished, 75 some were cut, 70 an internal error or a step that hangs, 1 could not
start, 128 + n a second signal.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from engine import logs
from engine.api import make_torch_runner, open_engine
from engine.errors import ConfigError, TrioletError
from engine.heap import collect_rarely, settle_heap
from engine.status import ModelState
from engine.threads import WorkerThreads
from engine.watchdog import EXIT_HUNG, Watchdog
from grpc_service.bridge import Bridge
from grpc_service.cli.startup import awaited, show_loading, show_ready
from grpc_service.cli.statistics import log_statistics
from grpc_service.connections import Flusher, RpcServer
from grpc_service.health import SERVICE_NAME as HEALTH_NAME
from grpc_service.health import HealthServicer, apply_states, health_methods
from grpc_service.keys import open_keys, reload_keys
from grpc_service.metrics import serving_metrics
from grpc_service.reception import Reception
from grpc_service.reflection import reflection_methods
from grpc_service.servicer import SERVICE_NAMES, methods
from grpc_service.sockets import check_free, listen
from grpc_service.tls import server_context
from grpc_service.tracing import open_tracing

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Sequence

    from engine.api import Engine
    from engine.config import EngineConfig
    from engine.entry import Entry
    from engine.pool import RunnerFactory
    from grpc_service.config import ServerConfig
    from grpc_service.keys import KeyRing

log = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_INTERNAL, EXIT_CUT = 0, 1, EXIT_HUNG, 75
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STOP_GRACE_S = 1.0  # guess: for statuses that are written already; all else has ended by then
LEAVE_PATIENCE_S = 3.0  # guess: for a load under way, which nobody wants any more
CUT_PATIENCE_S = 3.0  # guess: `STOP_GRACE_S`, and a step of ordinary length


@dataclass(eq=False)
class _Ending:
    """How the process comes to its end, whatever it waits for then (D17).

    The first signal drains. Once connections have ended nobody is left to answer, and a thread that
    is still busy is only joined: a step for as long as `Watchdog` says, a load for
    `LEAVE_PATIENCE_S`. A second signal ends the process within `CUT_PATIENCE_S` wherever it is.
    """

    watchdog: Watchdog
    keys: KeyRing | None = None
    engine: Engine | None = None
    num_zombies: Callable[[], int] = lambda: 0
    is_serving: bool = False
    first: trio.Event = field(default_factory=trio.Event)
    second: trio.Event = field(default_factory=trio.Event)
    served: int = EXIT_INTERNAL  # until it is known better
    cut_by: int | None = None

    @property
    def code(self) -> int:
        """The exit code as far as it is known."""
        return self.served if self.cut_by is None else 128 + self.cut_by

    async def watch(self, signals: AsyncIterator[int]) -> None:
        """Take signals until cancelled."""
        async for number in signals:
            if number == signal.SIGUSR1:
                if self.engine is not None:
                    log_statistics(self.engine.statistics(), self.num_zombies())
            elif number == signal.SIGHUP:
                reload_keys(self.keys)
            elif not self.first.is_set():
                self.first.set()
            elif self.cut_by is None:
                self.cut_by = number
                self.watchdog.leave(self.code, patience_s=CUT_PATIENCE_S, waits_for_steps=False)
                self.second.set()

    def leave(self) -> None:
        """Connections have ended: from here on the process only joins its threads. One that could
        not even listen waits, or its sentence why would be lost."""
        if self.is_serving and self.cut_by is None:
            self.watchdog.leave(self.code, patience_s=LEAVE_PATIENCE_S, waits_for_steps=True)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, for those who embed it: ``port`` is what it listens on."""

    engine: Engine
    port: int


async def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    make_runner: RunnerFactory = make_torch_runner,
    shows_progress: bool = False,
    exit_process: Callable[[int], object] = os._exit,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> int:
    """Serve until a signal or a failure; the exit code. `Control.Drain` does not end it.

    ``task_status`` is told once the port is bound; models may still be loading. ``exit_process`` is
    called, on a thread of its own, with the exit code if this cannot return, as a worker thread is
    busy and will be.

    Raises:
        ConfigError: the address cannot be bound, or every model failed to load; in an
            ExceptionGroup if that shows only after the engine was started.
    Cancellation: running requests are cut at once; the threads are joined.
    """
    check_free(server_config)
    server_context(server_config)  # what is wrong with its files is said before models load
    keys = open_keys(server_config)
    ending = _Ending(Watchdog(engine_config.step_timeout_s, exit_process=exit_process), keys)
    # without keys to read again, a terminal that hangs up ends the server as it ends others
    numbers = SIGNALS if keys is None else (*SIGNALS, signal.SIGHUP)
    with trio.open_signal_receiver(*numbers) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ending.watch, signals)  # also while the engine ends
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
        if (engine := ending.engine) is not None:  # else there is nothing to tell of yet
            apply_states(health, engine.list_models(), draining=engine.is_draining)

    async with open_engine(
        engine_config, make_runner=make_runner, on_change=on_change, watchdog=ending.watchdog
    ) as engine:
        ending.engine = engine
        on_change()
        async with _serving_calls(server_config, engine, ending, health) as port:

            async def wait_ready() -> None:
                await _wait_loaded(engine)
                settle_heap()
                if shows_progress and not engine.is_draining:
                    show_ready(engine, server_config, port)
                if await _wait_settled(engine.progress()):
                    settle_heap()  # what encoders brought, which come behind (D14)

            ending.is_serving = True
            task_status.started(Server(engine, port))
            async with trio.open_nursery() as watched:
                if shows_progress:
                    watched.start_soon(show_loading, engine)
                watched.start_soon(wait_ready)
                ending.served = await _serve_until_signal(engine, ending)
                watched.cancel_scope.cancel(reason="served")


@asynccontextmanager
async def _serving_calls(
    config: ServerConfig, engine: Engine, ending: _Ending, health: HealthServicer
) -> AsyncIterator[int]:
    """Serve gRPC until the block is left, and then for as long as `STOP_GRACE_S`; the port.

    Raises:
        ConfigError: the address was taken since it was looked at.
    """
    flusher = Flusher()
    bridge = Bridge(engine, flusher)
    ending.num_zombies = lambda: bridge.zombies.last_count
    tracing = open_tracing(os.environ)
    names = [*SERVICE_NAMES, HEALTH_NAME]
    served = [*methods(bridge), *health_methods(health), *reflection_methods(names)]
    reception = Reception(served, ending.keys, tracing)
    server = RpcServer(config, flusher, reception.serve, server_context(config))
    # first in and last out: a drain is watched to its end
    async with serving_metrics(config, bridge, reception), trio.open_nursery() as nursery:
        listeners = listen(config)
        nursery.start_soon(server.run, listeners)
        try:
            yield _port_of(listeners)
        finally:
            with trio.CancelScope(shield=True):  # bounded by the grace
                await server.stop(STOP_GRACE_S)
            ending.leave()
    if tracing is not None:
        await WorkerThreads().run(tracing.flush, trio.CapacityLimiter(1))


def _port_of(listeners: Sequence[socket.socket]) -> int:
    """0 for a Unix socket."""
    address = listeners[0].getsockname()
    return int(address[1]) if isinstance(address, tuple) else 0


async def _wait_loaded(engine: Engine) -> None:
    """Wait until every preloaded model that the start waits for is READY or FAILED, and, if all of
    these are FAILED, the others; raise if every model there is FAILED."""
    entries = engine.progress()
    first = awaited(entries)
    await _wait_settled(first)
    if all(entry.state is ModelState.FAILED for entry in first):
        await _wait_settled(entries)
    models = engine.list_models()
    if all(model.state is ModelState.FAILED for model in models):
        raise ConfigError(models[0].error + _where(engine))


def _where(engine: Engine) -> str:
    """Which directory the first model was looked for in, which the operator alone is told."""
    model = next(iter(engine.progress())).config.model
    is_path = model.startswith((".", "/", "~"))
    return f" [{Path(os.path.expanduser(model)).absolute()}]" if is_path else ""


async def _wait_settled(entries: Sequence[Entry]) -> bool:
    """Wait until the preloaded ones of these models have settled; whether any had not."""
    late = [one for one in entries if not (one.config.lazy or one.settled.is_set())]
    for entry in late:
        await entry.settled.wait()
    return bool(late)


async def _serve_until_signal(engine: Engine, ending: _Ending) -> int:
    """Wait for a signal to end; drain; a second signal cuts."""
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
    """`triolet serve`: run until told to end; the process's exit code."""
    collect_rarely()
    logs.configure(os.environ.get("TRIOLET_LOG", "INFO"), server_config.log_format)
    if not __debug__:
        print("triolet: refuses to run with python -O: its checks are part of it", file=sys.stderr)
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
