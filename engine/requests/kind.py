"""The protocols by which the supervisor serves requests of every kind of work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager, ExitStack

    from engine.core.common.events import CoreRequest
    from engine.replica.replica import Replica
    from engine.requests.stream import RequestStream, StreamOptions
    from engine.requests.tasks import RequestTasks
    from engine.requests.tokenizing import Tokenizing
    from engine.status import Capability


class ClientRequest(Protocol):
    """The fields that requests of all kinds have in common."""

    @property
    def request_id(self) -> str:
        """The client's own id for the request; empty if it gave none."""
        ...

    @property
    def model(self) -> str:
        """The model's name or alias; empty for the first model that has the capability."""
        ...

    @property
    def timeout_s(self) -> float | None:
        """The seconds until the client's deadline; None without a deadline."""
        ...

    def validate(self) -> None:
        """Check every range that needs no model.

        Raises:
            InvalidRequest: it names every field that is out of range.
        """
        ...


class Preparer(Protocol):
    """Makes the core's requests of one kind. Belongs to the Trio thread."""

    async def prepare(
        self, stream: Any, replica: Replica[Any, Any], held: ExitStack
    ) -> CoreRequest:
        """Return the core's request for the stream's request. What was taken for it is entered in
        ``held``, which gives it back when the request has ended.

        Raises:
            InvalidRequest, RequestTooLarge: fields that only the model can check are wrong.
        Cancellation: at once; a thread that tokenises runs to its end, and its result is dropped.
        """
        ...

    def holding(
        self, request: Any, replica: Replica[Any, Any]
    ) -> AbstractAsyncContextManager[None] | None:
        """Return a context manager that holds what the replica's worker must have ready for the
        request; it is entered before the request is submitted, and left at its end. None if the
        request needs nothing."""
        ...


class RequestKind(Protocol):
    """One kind's requests (`engine.kinds`)."""

    @property
    def request_types(self) -> tuple[type[Any], ...]:
        """The classes of the requests that clients send, each a `ClientRequest`."""
        ...

    def capability_for(self, request: Any) -> Capability:
        """Return what a model must be able to do for a request."""
        ...

    def image_bytes(self, request: Any) -> int:
        """Return the bytes of the files of a request's images."""
        ...

    def make_stream(self, request: Any, options: StreamOptions[Any]) -> RequestStream[Any]:
        """Return the stream of a new request. A request that is out of range has a stream, too,
        whose error is the refusal."""
        ...

    def make_preparer(self, tokenizing: Tokenizing, tasks: RequestTasks) -> Preparer:
        """Return the preparer of one engine."""
        ...
