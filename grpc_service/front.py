"""What the servicers ask of the engine's side: the protocols that `grpc_service.bridge` fills.

Rule 1: nothing of HTTP and nothing of grpc is named here. A test's fake fills the same protocols.
Rule 2: `Call` is used by one task; every method may be called after the request's end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.core.events import PauseMode
    from engine.core.plan import TokenSpan
    from engine.core.types import Explanation
    from engine.encode_requests import EncodeRequests
    from engine.load_watch import LoadStatus
    from engine.requests import Chat, GenerateRequest
    from engine.status import AbortOutcome, EngineStatistics, ModelStatus


class LoadWatch(Protocol):
    """A load that is watched (`engine.load_watch`)."""

    async def next(self) -> LoadStatus | None: ...


class Engine(Protocol):
    """The engine's methods that a servicer may use (`engine.api.Engine`).

    Each raises a `TrioletError` where it cannot: ModelNotFound, InvalidRequest and so on.
    """

    async def tokenize(
        self,
        model: str,
        *,
        text: str | None,
        chat: Chat | None,
        add_special_tokens: bool | None,
    ) -> tuple[tuple[TokenSpan, ...], int]:
        """The tokens of a text or a chat, and the model's max_model_len. ``add_special_tokens``
        None: True for a text, False for a chat."""
        ...

    async def detokenize(
        self, model: str, ids: Sequence[int], *, skip_special_tokens: bool
    ) -> str: ...

    def list_models(self) -> Sequence[ModelStatus]: ...

    def get_model(self, name: str) -> ModelStatus: ...

    def watch_load(self, name: str, replicas: int | None = None) -> LoadWatch: ...

    async def unload_model(self, name: str, drain_s: float | None = None) -> None: ...

    def pause(self, mode: PauseMode, model: str = "") -> None: ...

    def resume(self, model: str = "") -> None: ...

    def reset_prefix_cache(self, model: str = "") -> None: ...

    def abort(self, request_id: str) -> AbortOutcome: ...

    def explain(self, request_id: str) -> Explanation: ...

    async def drain_in_background(self, timeout_s: float | None = None) -> None: ...


class Call(Protocol):
    """One request of any kind, as its handler sees it; it has exactly one end."""

    @property
    def request_id(self) -> str: ...

    async def receive(self) -> Sequence[Any]:
        """Everything that is ready, at least one event; () after the last event of a request
        that succeeded.

        Raises:
            TrioletError: the request ended otherwise; every event before that was handed out.
        Cancellation: safe; no event is lost, though nobody may be left to ask for it.
        """
        ...

    @property
    def credited(self) -> tuple[type, ...]:
        """The kinds of its events that hold credit (`engine.generation.Lifetime`)."""
        ...

    def write_straight(self, write: Callable[[Any], bool]) -> None:
        """Let ``write`` have events that come alone while the task waits in `receive`, which then
        does not give them; it never waits, and gives False for one that `receive` is to give. What
        it raises, `receive` raises. Called once, before the first `receive`."""
        ...

    def written(self, num_events: int) -> None:
        """Give credit back: so many credited events were written to the client (D1)."""
        ...

    def cancel(self) -> None:
        """End the request, if it has not ended. Idempotent, never raises."""
        ...

    def leave(self) -> None:
        """`cancel`, and nobody will ask this call for anything again: its client has gone, or has
        been given all there is. Idempotent, never raises."""
        ...


class Front(Protocol):
    """The engine, as the servicers see it."""

    @property
    def engine(self) -> Engine: ...

    def generate(self, request: GenerateRequest, peer: str = "") -> Call:
        """Hand the request to the engine; never waits. A refusal comes from the call's first
        `receive`. ``peer`` is the client as grpc names it. Every call must be left (`Call.leave`).

        Raises:
            Overloaded: too many of the client's calls have ended, and it does not read the end.
        """
        ...

    def encode(self, request: EncodeRequests, peer: str = "") -> Call:
        """As `generate`, for an encoder."""
        ...

    def statistics(self) -> EngineStatistics:
        """The counters as they stand, the front's own among them."""
        ...
