"""The server as a whole: engine, bridge and front, started and ended in order.

Start: engine (models load in the background) → asyncio thread binds → ready when every preloaded
text model has settled, or every encoder where there are no text models. End (D17): health
NOT_SERVING → new requests refused → running ones finish within the drain timeout → the rest cut
with a status → grpc stopped → all threads joined, but for those that `_Ending` does not wait for.

Exit codes: 0 all finished, 75 some were cut, 70 an internal error or a step that hangs, 1 could not
start, 128 + n a second signal.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
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
from engine.watchdog import EXIT_HUNG, Watchdog
from grpc_service.asyncio_side import AsyncioSide, check_free, new_event_loop
from grpc_service.bridge import Bridge
from grpc_service.cli.startup import awaited, show_loading, show_ready
from grpc_service.cli.statistics import log_statistics
from grpc_service.keys import open_keys, reload_keys
from grpc_service.tls import server_credentials

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
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
JOIN_TIMEOUT_S = 10.0  # guess: grpc's stop takes its grace plus a poll; beyond it is stuck
LEAVE_PATIENCE_S = 3.0  # guess: for a load under way, which nobody wants any more
CUT_PATIENCE_S = 3.0  # guess: grpc's grace, and a step of ordinary length


@dataclass(eq=False)
class _Front:
    """What the Trio side knows of the asyncio thread."""

    bound: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    port: int = 0
    error: BaseException | None = None


@dataclass(eq=False)
class _Ending:
    """How the process comes to its end, whatever it waits for then (D17).

    The first signal drains. Once grpc has stopped nobody is left to answer, and a thread that is
    still busy is only joined: a step for as long as `Watchdog` says, a load for
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
        """grpc has stopped: from here on the process only joins its threads. One that could not
        even listen waits, or its sentence why would be lost."""
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
    new_event_loop: Callable[[], AbstractEventLoop] = new_event_loop,
    exit_process: Callable[[int], object] = os._exit,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> int:
    """Serve until a signal or a failure; the exit code. `Control.Drain` does not end it.

    ``task_status`` is told once the port is bound; models may still be loading.
    ``new_event_loop`` makes the asyncio thread's loop. ``exit_process`` is called, on a thread of
    its own, with the exit code if this cannot return, as a worker thread is busy and will be.

    Raises:
        ConfigError: the address cannot be bound, or every model failed to load; in an
            ExceptionGroup if that shows only after the engine was started.
    Cancellation: running requests are cut at once; the threads are joined.
    """
    check_free(server_config)
    server_credentials(server_config)  # what is wrong with its files is said before models load
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
                new_event_loop=new_event_loop,
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
    new_event_loop: Callable[[], AbstractEventLoop],
    task_status: trio.TaskStatus[Server],
) -> None:
    front = _Front()
    show: list[Callable[[], None]] = []

    def on_change() -> None:
        for callback in show:
            callback()

    async with open_engine(
        engine_config, make_runner=make_runner, on_change=on_change, watchdog=ending.watchdog
    ) as engine:
        ending.engine = engine
        bridge = Bridge(engine)
        ending.num_zombies = lambda: bridge.zombies.last_count
        asyncio_side = _asyncio_side(server_config, bridge, front, new_event_loop, ending.keys)
        show.append(
            lambda: asyncio_side.show_states(engine.list_models(), is_draining=engine.is_draining)
        )
        show[0]()

        async def wait_ready() -> None:
            await _wait_loaded(engine)
            settle_heap()
            if shows_progress and not engine.is_draining:
                show_ready(engine, server_config, front.port)
            if await _wait_settled(engine.progress()):
                settle_heap()  # what encoders brought, which come behind (D14)

        async with trio.open_nursery() as nursery:
            await nursery.start(bridge.run)
            asyncio_side.start()
            try:
                await _wait_bound(front)
                ending.is_serving = True
                task_status.started(Server(engine, front.port))
                async with trio.open_nursery() as watched:
                    watched.start_soon(_watch_front, front)
                    if shows_progress:
                        watched.start_soon(show_loading, engine)
                    watched.start_soon(wait_ready)
                    ending.served = await _serve_until_signal(engine, ending)
                    watched.cancel_scope.cancel(reason="served")
            finally:
                asyncio_side.stop(STOP_GRACE_S)
                with trio.CancelScope(shield=True):  # bounded by JOIN_TIMEOUT_S
                    await _join(asyncio_side, front)
                ending.leave()
            nursery.cancel_scope.cancel(reason="served")


def _asyncio_side(
    config: ServerConfig,
    bridge: Bridge,
    front: _Front,
    new_event_loop: Callable[[], AbstractEventLoop],
    keys: KeyRing | None,
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

    return AsyncioSide(config, bridge, on_bound, on_end, new_event_loop, keys)


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
    new_event_loop: Callable[[], AbstractEventLoop] = new_event_loop,
) -> int:
    """`triolet serve`: run until told to end; the process's exit code."""
    collect_rarely()
    logs.configure(os.environ.get("TRIOLET_LOG", "INFO"), server_config.log_format)
    if not __debug__:
        print("triolet: refuses to run with python -O: its checks are part of it", file=sys.stderr)
        return EXIT_FAILED
    try:
        return trio.run(
            partial(
                serve, make_runner=make_runner, shows_progress=True, new_event_loop=new_event_loop
            ),
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
