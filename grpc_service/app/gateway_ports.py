"""The ports on which gateways use models: one RPC server for each model that has such a port.

Rule: a server without such ports imports nothing of `grpc_service.vllm_engine`, whose protos are in
an extra.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import trio

from engine.errors import ConfigError, install_command
from grpc_service.app.health import SERVICE_NAME as HEALTH_NAME
from grpc_service.app.health import HealthServicer, health_methods
from grpc_service.app.listening import listen_for_gateway
from grpc_service.services.reflection import reflection_methods

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.config import EngineConfig
    from grpc_service.app.server_config import ServerConfig
    from grpc_service.rpc.methods import Method
    from grpc_service.rpc.server import RpcServer
    from grpc_service.services.backend import Backend
    from grpc_service.vllm_engine.service import VllmEngine

log = logging.getLogger(__name__)

PROTOS = "smg_grpc_proto"


class _Port(NamedTuple):
    service: VllmEngine
    health: HealthServicer
    server: RpcServer


def check_gateways(engine_config: EngineConfig, config: ServerConfig) -> None:
    """Check that each port for gateways has a model, and that the protos are installed.

    Raises:
        ConfigError: a port has no model, or the protos are not installed.
    """
    if config.vllm_engine_ports and find_spec(PROTOS) is None:
        raise ConfigError(
            "--vllm-engine-port needs the protos of smg; install them with "
            f"`{install_command('smg')}`"
        )
    ports_by_model(engine_config, config)


def ports_by_model(engine_config: EngineConfig, config: ServerConfig) -> dict[str, int]:
    """Return the ports for gateways, by the names of their models.

    Raises:
        ConfigError: a port names no model or an unknown one, or a model has two ports.
    """
    names = {
        alias: model.name
        for model in engine_config.models
        for alias in (model.name, *model.aliases)
    }
    served, ports = [model.name for model in engine_config.models], dict[str, int]()
    for name, port in config.vllm_engine_ports:
        if not name and len(served) > 1:
            raise ConfigError(
                f"--vllm-engine-port {port} names no model, and there are {len(served)}; write "
                f"MODEL={port} with one of {', '.join(served)}"
            )
        model = names.get(name) if name else served[0]
        if model is None:
            raise ConfigError(
                f"--vllm-engine-port {name}={port} names no model of this server; it serves "
                f"{', '.join(served)}"
            )
        if model in ports:
            raise ConfigError(f"--vllm-engine-port gives {model} two ports; a model has one")
        ports[model] = port
    return ports


@dataclass(eq=False)
class GatewayPorts:
    """Serves models to gateways. ``make_server`` returns an RPC server of the given methods.

    ``ports`` has the ports that are served, by the model's name.
    """

    _config: ServerConfig
    _backend: Backend
    _make_server: Callable[[Iterable[Method]], RpcServer]
    _open: dict[str, _Port] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def start(self, nursery: trio.Nursery) -> None:
        """Listen, and serve in tasks of ``nursery`` until `stop`.

        Raises:
            ConfigError: another program took an address after it was checked.
        """
        wanted = ports_by_model(self._backend.engine.config, self._config)
        for model, port in wanted.items():
            listeners = listen_for_gateway(self._config, port)
            self.ports[model] = listeners[0].port
            self._open[model] = gateway = self._port_of(model)
            nursery.start_soon(gateway.server.run, listeners)
            where = f"{self._config.vllm_engine_host}:{listeners[0].port}"
            log.info("%s is served to gateways on grpc://%s", model, where)
        self.refresh()

    def refresh(self) -> None:
        """Set the ports' health by the engine's models; in a drain, ask clients to leave."""
        for gateway in self._open.values():
            gateway.service.refresh()
            is_healthy = gateway.service.is_healthy
            gateway.health.set_states({"": is_healthy, gateway.service.full_name: is_healthy})
            if self._backend.engine.is_draining:
                gateway.server.leave()

    async def settle(self) -> None:
        """Wait until handlers have all calls that were sent, as `RpcServer.settle` does.

        Cancellation: safe.
        """
        async with trio.open_nursery() as nursery:
            for gateway in self._open.values():
                nursery.start_soon(gateway.server.settle)

    async def stop(self, grace_s: float) -> None:
        """Stop all ports, as `RpcServer.stop` does.

        Cancellation: the ports that were not stopped go on.
        """
        async with trio.open_nursery() as nursery:
            for gateway in self._open.values():
                gateway.service.close()
                nursery.start_soon(gateway.server.stop, grace_s)

    def _port_of(self, model: str) -> _Port:
        from grpc_service.vllm_engine.service import VllmEngine, methods

        service, health = VllmEngine(self._backend, model), HealthServicer()
        reflection = reflection_methods([service.full_name, HEALTH_NAME])
        served = [*methods(service), *health_methods(health), *reflection]
        return _Port(service, health, self._make_server(served))
