"""The asyncio thread: grpc.aio's server, from bind to stop.

Rule 1: everything of grpc lives on this thread's loop (grpc.aio objects are not thread-safe).
Rule 2: the thread's end, whatever its cause, is told to the Trio side exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from engine.errors import ConfigError
from grpc_service.health import SERVICE_NAME as HEALTH_NAME
from grpc_service.health import HealthServicer, add_health, apply_states
from grpc_service.metrics import serving_metrics
from grpc_service.reception import Reception
from grpc_service.reflection import SERVICE_NAMES as REFLECTION_NAMES
from grpc_service.reflection import add_reflection
from grpc_service.servicer import SERVICE_NAMES, add_servicers
from grpc_service.tls import server_credentials
from grpc_service.tracing import open_tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.status import ModelStatus
    from grpc_service.bridge import Bridge
    from grpc_service.config import ServerConfig
    from grpc_service.keys import KeyRing

log = logging.getLogger(__name__)

STREAMS_PER_CONNECTION_MAX = 1000  # guess: more than a sequence each of the largest batches
PENDING_CALLS_MAX = 20_000  # guess: that many such connections' worth, about 200 MB


def server_options(config: ServerConfig) -> list[tuple[str, Any]]:
    """Channel arguments: sizes, and keepalive that finds half-dead clients and allows a client
    to ping every 10 s (grpc's default would punish it after two)."""
    return [
        # twice what is taken, so that one too large is told so in full (`Reception`)
        ("grpc.max_receive_message_length", min(2 * config.max_message_bytes, 2**31 - 1)),
        ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a lottery
        ("grpc.keepalive_time_ms", _ms(config.keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", _ms(config.keepalive_timeout_s)),
        # what grpcio 1.85 goes by (tests/service/test_peers.py), a minute unless it is set
        ("grpc.http2.ping_timeout_ms", _ms(config.keepalive_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        # One connection's calls, those that it has reset and that nobody has looked at yet among
        # them: with grpc's own limits (none, and 1,000 over all connections), a client that opened
        # and reset 5,000 at once had other clients' calls end with CANCELLED (`test_fuzz.py`)
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
        ("grpc.server.max_pending_requests", PENDING_CALLS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", 2 * PENDING_CALLS_MAX),
    ]


def _ms(seconds: float) -> int:
    return min(round(seconds * 1000), 2**31 - 1)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def check_free(config: ServerConfig) -> None:
    """Find out early, and in one sentence, that the address cannot be had: grpc writes lines of
    its own on standard error, and would take the path of a Unix socket from a running server.

    Raises:
        ConfigError: the address is in use, or not this machine's; or no socket can be made there.
    """
    try:
        if config.uds:
            _check_path(Path(config.uds))
        else:
            _check_port(config.host.strip("[]"), config.port)
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        flag = "--uds" if config.uds else "--port" if is_port else "--host"
        raise _cannot_listen(config, error.strerror or str(error), flag) from None


def _check_port(host: str, port: int) -> None:
    """Raise OSError if none of the host's addresses is ours, or another program has the port on
    one. grpc, too, goes without one that this machine has not, as localhost's of IPv6 may be."""
    failures = []
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            failures.append(error)
    if len(failures) == len(found):
        raise failures[0]


def _check_path(path: Path) -> None:
    """Raise OSError if a running server has this socket, or none can be made."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as client:
            if client.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, "a running server has it")
    elif path.exists():
        raise OSError(errno.EEXIST, "it is there and no socket")
    elif not path.parent.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    elif not os.access(path.parent, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def _cannot_listen(config: ServerConfig, reason: str, flag: str) -> ConfigError:
    return ConfigError(f"cannot listen on {config.address}: {reason}; choose another with {flag}")


class AsyncioSide:
    """Runs the gRPC server on a thread of its own.

    ``on_bound(port)`` and ``on_end(error)`` are called on that thread; ``on_end`` once, and last
    unless there is an error.
    """

    def __init__(
        self,
        config: ServerConfig,
        bridge: Bridge,
        on_bound: Callable[[int], None],
        on_end: Callable[[BaseException | None], None],
        new_event_loop: Callable[[], asyncio.AbstractEventLoop] = new_event_loop,
        keys: KeyRing | None = None,
    ) -> None:
        self._config = config
        self._credentials = server_credentials(config)
        self._tracing = open_tracing(os.environ)
        self.reception = Reception(keys, config.max_message_bytes, self._tracing)
        self._bridge = bridge
        self._on_bound = on_bound
        self._on_end = on_end
        self._loop = new_event_loop()
        self._stop = asyncio.Event()
        self._stop_grace_s = 0.0
        self._health: HealthServicer | None = None
        self._states: tuple[tuple[ModelStatus, ...], bool] = ((), False)
        self._thread = threading.Thread(target=self._run, name="triolet-grpc", daemon=True)

    def start(self) -> None:
        """Bind and serve; `on_bound` tells the port, or `on_end` the reason why not."""
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """From any thread: refuse new calls, give running ones ``grace_s`` seconds, end."""

        def stop() -> None:
            self._stop_grace_s = grace_s
            self._stop.set()

        self._soon(stop)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; False: it is still running."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def show_states(self, models: Sequence[ModelStatus], *, is_draining: bool) -> None:
        """From any thread: what health says from now on."""
        states = (tuple(models), is_draining)

        def show() -> None:
            self._states = states
            if self._health is not None:
                apply_states(self._health, *states)

        self._soon(show)

    def _soon(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.debug("the asyncio loop has ended")

    # ---- on the thread

    def _run(self) -> None:
        try:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            # told first: a server that was never stopped may hang when it is let go, as grpc then
            # joins a thread of its own that waits for the server's end
            self._on_end(error)
            with contextlib.suppress(Exception):  # a broken loop need not be able to close
                self._close_loop()
        else:
            try:
                self._close_loop()
            finally:
                self._on_end(None)

    def _close_loop(self) -> None:
        loop = self._loop
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    async def _serve(self) -> None:
        self._bridge.attach(asyncio.get_running_loop())
        # first in and last out: a drain is watched to its end
        async with serving_metrics(self._config, self._bridge, self.reception):
            await self._serve_calls()
        if self._tracing is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._tracing.flush)

    async def _serve_calls(self) -> None:
        server = grpc.aio.server(
            options=server_options(self._config), interceptors=[self.reception]
        )
        self._health = HealthServicer()
        apply_states(self._health, *self._states)
        add_servicers(server, self._bridge)
        add_health(server, self._health)
        add_reflection(server, [*SERVICE_NAMES, HEALTH_NAME, *REFLECTION_NAMES])
        port = self._bind(server)
        await server.start()
        self._on_bound(port)
        await self._stop.wait()
        await server.stop(self._stop_grace_s)

    def _bind(self, server: grpc.aio.Server) -> int:
        try:
            if self._credentials is not None:
                return server.add_secure_port(self._config.address, self._credentials)
            return server.add_insecure_port(self._config.address)
        except RuntimeError:
            reason = "the address is in use or not ours"  # since `check_free` looked
            flag = "--uds" if self._config.uds else "--port"
            raise _cannot_listen(self._config, reason, flag) from None
