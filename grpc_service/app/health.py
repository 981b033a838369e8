"""grpc.health.v1: the names that have a health, and whether each of them is SERVING.

Rule 1: `model_states` decides, and is pure; the servicer only answers. Rule 2: a watcher that does
not read delays no other, because setting a state never waits. (grpcio's own aio servicer holds a
lock during a watcher's write, so that one stalled watcher stops every later change.) A watcher that
fell behind gets the newest state only, as the protocol allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio
from grpc_health.v1 import health_pb2

from engine.errors import Overloaded
from engine.status import ModelState
from grpc_service.rpc.errors import RpcError
from grpc_service.rpc.methods import methods_of
from grpc_service.rpc.places import Places
from grpc_service.rpc.status import StatusCode
from grpc_service.services.methods import CONTROL, INFERENCE, MODELS
from grpc_service.services.value_counts import judges_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.status import ModelStatus
    from grpc_service.access.rpc_record import Rpc
    from grpc_service.rpc.methods import Method

SERVICE_NAME = "grpc.health.v1.Health"
# Guess: as `UNREAD_CALLS_MAX`. Beyond it, the address with most watchers loses its oldest.
WATCHERS_MAX = 1024

Response = health_pb2.HealthCheckResponse


class HealthServicer:
    """Answers Check, List and Watch from a map of names."""

    def __init__(self) -> None:
        self._states: dict[str, bool] = {"": False}
        self._changed = trio.Event()
        self._watchers = Places(WATCHERS_MAX)

    def set_states(self, states: Mapping[str, bool]) -> None:
        """Replace the map of names by ``states`` (whether each is SERVING), and wake the
        watchers."""
        if states == self._states:
            return
        self._states = dict(states)
        self._changed.set()
        self._changed = trio.Event()

    async def Check(self, request: Any, rpc: Rpc) -> Any:
        """Return the state of one name. Never waits.

        Raises:
            RpcError: NOT_FOUND, if the name is not known.
        Cancellation: none; there is no checkpoint.
        """
        if request.service not in self._states:
            raise RpcError(StatusCode.NOT_FOUND, "no such service or model")
        return self._response(request.service)

    async def List(self, request: Any, rpc: Rpc) -> Any:
        """Return the states of all names. Never waits, so it cannot be cancelled."""
        return health_pb2.HealthListResponse(
            statuses={name: self._response(name) for name in self._states}
        )

    async def Watch(self, request: Any, rpc: Rpc) -> None:
        """Write the state now and after each change, until the client ends the call. An unknown
        name is SERVICE_UNKNOWN, and may become known.

        Raises:
            Overloaded: there are more than `WATCHERS_MAX` watchers, most of them of this address.

        Cancellation: safe; it is how every watch ends.
        """
        with self._watchers.hold(rpc.call.connection.address):
            await self._watch(request.service, rpc)
        raise Overloaded("too many health watchers are open")

    async def _watch(self, name: str, rpc: Rpc) -> None:
        last = None
        while True:
            changed = self._changed  # taken before the state is read, so that no change is missed
            response = self._response(name)
            if response != last:
                await rpc.call.write(response)
                last = response
            await changed.wait()

    def _response(self, name: str) -> Any:
        state = self._states.get(name)
        if state is None:
            return Response(status=Response.SERVICE_UNKNOWN)
        return Response(status=Response.SERVING if state else Response.NOT_SERVING)


def health_methods(servicer: HealthServicer) -> list[Method]:
    """Return the methods of grpc.health.v1."""
    service = health_pb2.DESCRIPTOR.services_by_name["Health"]
    return methods_of(service, servicer, judges_of(service, {}))


def apply_states(servicer: HealthServicer, models: Sequence[ModelStatus], draining: bool) -> None:
    """Set the health of all names from the states of ``models``."""
    servicer.set_states(model_states(models, draining=draining))


def model_states(models: Sequence[ModelStatus], *, draining: bool) -> dict[str, bool]:
    """Return every health name and whether it is SERVING.

    The server as a whole is SERVING when its preloaded text models are. A text model that FAILED
    affects only its own name, unless all text models have failed; an adapter never affects more.
    """
    text = [model for model in models if model.capability.generates_text and not model.base]
    alive = [model for model in text if model.state is not ModelState.FAILED]
    is_up = all(_is_serving(model) for model in alive) and (bool(alive) or not text)
    states = {
        "": is_up,
        INFERENCE.full_name: is_up,
        MODELS.full_name: True,
        CONTROL.full_name: True,
    }
    states |= {f"model/{model.name}": _is_serving(model) for model in models}
    return {name: state and not draining for name, state in states.items()}


def _is_serving(model: ModelStatus) -> bool:
    """Return whether clients should send requests to the model. A lazy model is loaded by a
    request, so it counts as serving. A model whose step hangs does not."""
    return model.is_available and not model.is_hung
