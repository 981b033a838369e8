"""grpc.health.v1: which names the server answers for, and what it says of them.

Rule 1: `model_states` decides, and is pure; the servicer only tells. Rule 2: a watcher that does
not read delays nobody: setting a state never waits (grpcio's own aio servicer holds a lock over a
watcher's write, and one stalled watcher stops every later change).
A watcher that fell behind gets the newest state only, as the protocol allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import trio
from grpc_health.v1 import health_pb2

from engine.errors import Overloaded
from engine.status import Capability, ModelState
from grpc_service.connections import methods_of
from grpc_service.servicer import CONTROL, INFERENCE, MODELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.status import ModelStatus
    from grpc_service.connections import Context, Method

SERVICE_NAME = "grpc.health.v1.Health"
WATCHERS_MAX = 1024  # guess: as many as zombies in total; beyond: RESOURCE_EXHAUSTED

Response = health_pb2.HealthCheckResponse


class HealthServicer:
    """Check, List and Watch over a map of names."""

    def __init__(self) -> None:
        self._states: dict[str, bool] = {"": False}
        self._changed = trio.Event()
        self._num_watchers = 0

    @property
    def num_watchers(self) -> int:
        """Calls of Watch that are open."""
        return self._num_watchers

    def set_states(self, states: Mapping[str, bool]) -> None:
        """Make ``states`` (name to is-serving) all there is, and wake the watchers."""
        if states == self._states:
            return
        self._states = dict(states)
        self._changed.set()
        self._changed = trio.Event()

    async def Check(self, request: Any, context: Context) -> Any:
        if request.service not in self._states:
            await context.end(grpc.StatusCode.NOT_FOUND, "no such service or model")
            return None
        return self._response(request.service)

    async def List(self, request: Any, context: Context) -> Any:
        return health_pb2.HealthListResponse(
            statuses={name: self._response(name) for name in self._states}
        )

    async def Watch(self, request: Any, context: Context) -> None:
        """The state now, and again after each change, until the client goes. A name that is not
        known is SERVICE_UNKNOWN, and may become known."""
        if self._num_watchers >= WATCHERS_MAX:
            raise Overloaded("too many health watchers are open")
        self._num_watchers += 1
        try:
            last = None
            while True:
                changed = self._changed  # taken before the look, so that no change is missed
                response = self._response(request.service)
                if response != last:
                    await context.write(response)
                    last = response
                await changed.wait()
        finally:
            self._num_watchers -= 1

    def _response(self, name: str) -> Any:
        state = self._states.get(name)
        if state is None:
            return Response(status=Response.SERVICE_UNKNOWN)
        return Response(status=Response.SERVING if state else Response.NOT_SERVING)


def health_methods(servicer: HealthServicer) -> list[Method]:
    """Those of grpc.health.v1."""
    return methods_of(health_pb2.DESCRIPTOR.services_by_name["Health"], servicer)


def apply_states(servicer: HealthServicer, models: Sequence[ModelStatus], draining: bool) -> None:
    """Tell watchers and checkers how ``models`` stand."""
    servicer.set_states(model_states(models, draining=draining))


def model_states(models: Sequence[ModelStatus], *, draining: bool) -> dict[str, bool]:
    """Every health name and whether it is SERVING.

    The server as a whole waits for its preloaded text models. One that FAILED shows under its
    own name only, unless no text model is left that has not.
    """
    text = [model for model in models if model.capability is Capability.TEXT_TO_TEXT]
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
    """A lazy model can be asked at any time: the request loads it. One whose step hangs queues
    what comes, but is not the one to ask."""
    return model.can_be_asked and not model.is_hung
