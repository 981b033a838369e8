"""The server as a whole: engine, bridge and front, started and ended in order.

Start: engine (models load in the background) → asyncio thread binds → ready when every preloaded
model has settled. End (D17): health NOT_SERVING → new requests refused → running ones finish
within the drain timeout → the rest cut with a status → grpc stopped → both threads joined.

Exit codes: 0 all finished, 75 some were cut, 70 an internal error, 1 could not start, 128 + n a
second signal.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from engine import logs
from engine.api import make_torch_runner, open_engine
from engine.errors import ConfigError, TrioletError
from engine.memory import settle_heap
from engine.status import ModelState
from grpc_service.asyncio_side import AsyncioSide, check_free, new_event_loop
from grpc_service.bridge import Bridge
from grpc_service.cli.startup import show_loading, show_ready

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable

    from engine.api import Engine
    from engine.config import EngineConfig
    from engine.pool import RunnerFactory
    from grpc_service.config import ServerConfig

log = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_INTERNAL, EXIT_CUT = 0, 1, 70, 75
STOP_GRACE_S = 1.0  # guess: for statuses that are written already; all else has ended by then
JOIN_TIMEOUT_S = 10.0  # guess: grpc's stop takes its grace plus a poll; beyond it is stuck


@dataclass(eq=False)
class _Front:
    """What the Trio side knows of the asyncio thread."""

    bound: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    port: int = 0
    error: BaseException | None = None


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
    new_event_loop: Callable[[], AbstractEventLoop] = new_event_loop,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> int:
    """Serve until a signal or a failure; the exit code. `Control.Drain` does not end it.

    ``task_status`` is told once the port is bound; models may still be loading.
    ``new_event_loop`` makes the asyncio thread's loop.

    Raises:
        ConfigError: the address cannot be bound, or every model failed to load; in an
            ExceptionGroup if that shows only after the engine was started.
    Cancellation: running requests are cut at once; both threads are joined.
    """
    check_free(server_config)
    front = _Front()
    show: list[Callable[[], None]] = []

    def on_change() -> None:
        for callback in show:
            callback()

    async with open_engine(engine_config, make_runner=make_runner, on_change=on_change) as engine:
        bridge = Bridge(engine)
        asyncio_side = _asyncio_side(server_config, bridge, front, new_event_loop)
        show.append(
            lambda: asyncio_side.show_states(engine.list_models(), is_draining=engine.is_draining)
        )
        show[0]()

        async def wait_ready() -> None:
            await _wait_loaded(engine)
            settle_heap()
            if shows_progress and not engine.is_draining:
                show_ready(engine, server_config, front.port)

        async with trio.open_nursery() as nursery:
            await nursery.start(bridge.run)
            asyncio_side.start()
            try:
                await _wait_bound(front)
                task_status.started(Server(engine, front.port))
                async with trio.open_nursery() as watched:
                    watched.start_soon(_watch_front, front)
                    if shows_progress:
                        watched.start_soon(show_loading, engine)
                    watched.start_soon(wait_ready)
                    code = await _serve_until_signal(engine)
                    watched.cancel_scope.cancel(reason="served")
            finally:
                asyncio_side.stop(STOP_GRACE_S)
                with trio.CancelScope(shield=True):  # bounded by JOIN_TIMEOUT_S
                    await _join(asyncio_side, front)
            nursery.cancel_scope.cancel(reason="served")
        return code


def _asyncio_side(
    config: ServerConfig,
    bridge: Bridge,
    front: _Front,
    new_event_loop: Callable[[], AbstractEventLoop],
) -> AsyncioSide:
    token = trio.lowlevel.current_trio_token()

    def tell(callback: Callable[[], None]) -> None:
        try:
            token.run_sync_soon(callback)
        except trio.RunFinishedError:
            log.debug("the engine ended before the front")

    def on_bound(port: int) -> None:
        def bound() -> None:
            front.port = port
            front.bound.set()

        tell(bound)

    def on_end(error: BaseException | None) -> None:
        def ended() -> None:
            front.error = error
            front.ended.set()
            front.bound.set()

        tell(ended)

    return AsyncioSide(config, bridge, on_bound, on_end, new_event_loop)


async def _wait_bound(front: _Front) -> None:
    await front.bound.wait()
    if front.ended.is_set():
        error, front.error = front.error, None  # told here, and not again by `_join`
        raise error or ConfigError("the gRPC thread ended at once")


async def _watch_front(front: _Front) -> None:
    """The asyncio thread's death ends the server."""
    await front.ended.wait()
    error, front.error = front.error, None
    raise RuntimeError("the gRPC thread died") from error


async def _join(asyncio_side: AsyncioSide, front: _Front) -> None:
    with trio.move_on_after(JOIN_TIMEOUT_S + STOP_GRACE_S) as scope:
        await front.ended.wait()
    if scope.cancelled_caught:
        log.error("the gRPC thread did not end; leaving it behind")
        return
    asyncio_side.join(1.0)
    if front.error is not None:
        log.error("the gRPC thread failed", exc_info=front.error)


async def _wait_loaded(engine: Engine) -> None:
    """Wait until every preloaded model is READY or FAILED; raise if every model there is FAILED."""
    for entry in engine.progress():
        if not entry.config.lazy:
            await entry.settled.wait()
    models = engine.list_models()
    if all(model.state is ModelState.FAILED for model in models):
        raise ConfigError(models[0].error)


async def _serve_until_signal(engine: Engine) -> int:
    """Wait for a signal to end; drain; a second signal cuts."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) as signals:
        async for number in signals:
            if number != signal.SIGUSR1:
                log.info("draining: %d requests are running", engine.num_live)
                break
            log.info("statistics: %s", engine.statistics())
        second: list[int] = []
        cut = 0
        async with trio.open_nursery() as nursery:

            async def watch_second() -> None:
                async for number in signals:
                    if number != signal.SIGUSR1:
                        second.append(number)
                        nursery.cancel_scope.cancel(reason="second signal")
                        return

            nursery.start_soon(watch_second)
            cut = await engine.drain()
            nursery.cancel_scope.cancel(reason="drained")
        if second:
            return 128 + second[0]
        return EXIT_CUT if cut else EXIT_OK


def serve_forever(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    make_runner: RunnerFactory = make_torch_runner,
) -> int:
    """`triolet serve`: run until told to end; the process's exit code."""
    logs.configure(os.environ.get("TRIOLET_LOG", "INFO"))
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
