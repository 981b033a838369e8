"""The port for OpenAI's API: an HTTP server beside gRPC's, in the same loop.

Rule: a server without this port imports nothing of `grpc_service.openai`, which needs an extra.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

from engine.errors import ConfigError, install_command
from grpc_service.addresses import is_loopback
from grpc_service.app.health import model_states
from grpc_service.app.listening import listen_for_openai
from grpc_service.app.metrics import text_of
from grpc_service.app.tls import server_context
from grpc_service.rpc.sockets import HTTP1

if TYPE_CHECKING:
    import trio

    from grpc_service.access.interceptor import Interceptor
    from grpc_service.access.keys import KeyRing
    from grpc_service.app.gen_ai import GenAiMetrics
    from grpc_service.app.server_config import ServerConfig
    from grpc_service.openai.server import HttpServer
    from grpc_service.rpc.connection import Shared
    from grpc_service.services.backend import Backend

log = logging.getLogger(__name__)

PACKAGE = "anycorn"


def check_openai(config: ServerConfig) -> None:
    """Check that the port's packages are installed.

    Raises:
        ConfigError: a package is missing, and a port is configured.
    """
    if config.openai_port is not None and find_spec(PACKAGE) is None:
        raise ConfigError(
            f"--openai-port needs an HTTP server; install it with `{install_command('openai')}`"
        )


@dataclass(eq=False)
class OpenAIPort:
    """Serves OpenAI's API, if a port is configured. ``port`` is the one that is served; None
    without."""

    _config: ServerConfig
    _backend: Backend
    _interceptor: Interceptor
    _keys: KeyRing | None
    _named: GenAiMetrics
    port: int | None = None
    _server: HttpServer | None = None

    def start(self, nursery: trio.Nursery, shared: Shared) -> None:
        """Listen, and serve in a task of ``nursery`` until `stop`. What a client may cost is
        counted with ``shared``, gRPC's own.

        Raises:
            ConfigError: another program took the address after it was checked.
        """
        config = self._config
        if config.openai_port is None:
            return
        from grpc_service.openai.door import Access, Answers, Door
        from grpc_service.openai.server import HttpServer

        tls = server_context(config, HTTP1)
        listeners = listen_for_openai(config, config.openai_port, tls)
        self.port = listeners[0].port
        is_local = is_loopback(config.openai_host) and tls is None
        door = Door(
            self._backend,
            shared,
            Access(
                self._keys,
                frozenset(config.openai_origins),
                is_local,
                has_holders=self._keys is not None or bool(config.client_ca),
            ),
            Answers(self._is_healthy, metadata.version("triolet"), self._metrics),
            decoding=self._interceptor.decoding,
            calls=self._interceptor.calls,
            record=self._interceptor.record,
            max_bytes=config.max_message_bytes,
            max_image_bytes=config.max_image_bytes,
        )
        self._server = HttpServer(door, shared)
        nursery.start_soon(self._server.run, listeners)
        scheme = "http" if tls is None else "https"
        log.info("OpenAI's API is served on %s://%s:%d/v1", scheme, config.openai_host, self.port)

    async def settle(self) -> None:
        """Wait until the engine has every request that is on its way. Cancellation: safe."""
        if self._server is not None:
            await self._server.settle()

    async def stop(self, grace_s: float) -> None:
        """Stop serving, as `HttpServer.stop` does."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def _is_healthy(self) -> bool:
        engine = self._backend.engine
        return model_states(engine.list_models(), draining=engine.is_draining)[""]

    async def _metrics(self) -> bytes:
        return await text_of(self._backend, self._interceptor, self._named)
