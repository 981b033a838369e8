"""The HTTP port: its sockets, its connections, and its end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import trio
from anycorn import Config
from anycorn.app_wrappers import ASGIWrapper
from anycorn.worker_context import WorkerContext

from grpc_service.openai.connection import HttpConnection
from grpc_service.rpc.reception import Reception

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grpc_service.openai.door import Door
    from grpc_service.rpc.connection import Shared
    from grpc_service.rpc.entrance import Pass
    from grpc_service.rpc.sockets import PlainTransport, SocketListener

log = logging.getLogger(__name__)

IDLE_S = 60.0  # after which a connection without a request is closed. Guess: longer than clients'


class HttpServer:
    """Serves HTTP/1.1 to the clients that connect. It shares with gRPC's server what a client may
    cost (``shared``), and has its own count of connections."""

    def __init__(self, door: Door, shared: Shared) -> None:
        self._door = door
        self._shared = shared
        self._reception = Reception(shared)
        self._connections: dict[HttpConnection, None] = {}
        self._config = _config_of(shared)
        self._context = WorkerContext(None)
        self._serving = trio.CancelScope()
        self._changed = trio.Event()  # a request has reached the engine, or has ended

    @property
    def num_calls(self) -> int:
        """The number of requests that are served."""
        return sum([connection.num_calls for connection in self._connections])

    async def run(self, listeners: Sequence[SocketListener]) -> None:
        """Serve the clients of ``listeners`` until `stop`; close the listeners at the end.

        Cancellation: every request is cancelled, and every connection closed.
        """
        with self._serving:
            async with trio.open_nursery() as nursery:
                await self._reception.run(listeners, nursery, self._serve)

    async def settle(self) -> None:
        """Wait until the engine has every request that is on its way; at most for
        `Limits.settle_patience_s`. Cancellation: safe."""
        with trio.move_on_after(self._shared.limits.settle_patience_s):
            await self._wait(lambda: not any(one.arrivals for one in self._connections))

    async def stop(self, grace_s: float) -> None:
        """Accept no more, wait up to ``grace_s`` seconds until all requests have ended, then end
        the others, and let `run` return.

        Cancellation: the server goes on without accepting.
        """
        self._reception.close()
        await self._context.terminated.set()  # connections without a request end at once
        with trio.move_on_after(grace_s):
            await self._wait(lambda: not self.num_calls)
        for connection in self._connections:
            if not connection.stream.is_clear:
                connection.cut()
        self._serving.cancel(reason="the server stops")

    async def _wait(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if self._changed.is_set():  # another task may wait for the old event
                self._changed = trio.Event()
            await self._changed.wait()

    def _on_change(self) -> None:
        self._changed.set()

    async def _serve(self, transport: PlainTransport, peer: str, given: Pass) -> None:
        connection = HttpConnection(self._shared, transport, peer, self._on_change)
        self._connections[connection] = None

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self._door(scope, receive, send, connection)

        try:
            await connection.run(ASGIWrapper(app), self._config, self._context)
        except* Exception:
            log.exception("a connection met a bug")
        finally:
            del self._connections[connection]


def _config_of(shared: Shared) -> Config:
    config = Config()
    config.accesslog = None  # the door has its own
    config.errorlog = log
    config.include_server_header = False
    config.keep_alive_timeout = IDLE_S
    config.h11_max_incomplete_size = shared.limits.header_list_bytes
    config.max_app_queue_size = 2  # parts of a body that nobody has read yet
    return config
