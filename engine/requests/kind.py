"""The protocols by which requests of every kind of work are served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.requests.prepared import Assignment, Prepared
    from engine.requests.stream import RequestStream, StreamOptions
    from engine.requests.tasks import RequestTasks
    from engine.requests.tokenizing import Tokenizing
    from engine.status import Capability

    Feeds = Mapping[type[Any], Callable[..., "RequestStream[Any]"]]


class ClientRequest(Protocol):
    """The fields that requests of all kinds have in common."""

    @property
    def request_id(self) -> str:
        """The client's own id for the request; empty if it gave none."""

    @property
    def model(self) -> str:
        """The model's name or alias; empty for the first model that has the capability."""

    @property
    def priority(self) -> int | None:
        """The rank among its holder's waiting requests, the lowest first (`Origin.priority_of`)."""

    @property
    def timeout_s(self) -> float | None:
        """The seconds until the client's deadline; None without a deadline."""

    @property
    def capability(self) -> Capability:
        """The capability that a model must have for the request."""

    @property
    def image_bytes(self) -> int:
        """The bytes of the request's image files."""

    def validate(self) -> None:
        """Check every range that needs no model.

        Raises:
            InvalidRequest: the error names every field that is out of range.
        """


class Preparer(Protocol):
    """Makes the core's requests of one kind. Belongs to the Trio thread."""

    async def prepare(self, assignment: Assignment[Any, Any]) -> Prepared[Any]:
        """Return a client's request, ready to run.

        Raises:
            InvalidRequest, RequestTooLarge: fields that only the model can check are wrong.
        Cancellation: at once; a thread that tokenises runs to its end, and its result is dropped.
        """


class RequestKind(Protocol):
    """The requests of one kind of work (`engine.kinds`)."""

    @property
    def request_types(self) -> tuple[type[Any], ...]:
        """The classes of the requests that clients send, each a `ClientRequest`."""

    @property
    def feeds(self) -> Feeds:
        """The classes of requests whose inputs run in other requests of this kind, each with the
        class of its stream (`engine.requests.serving.FeedServing`)."""

    def make_stream(self, request: Any, options: StreamOptions[Any]) -> RequestStream[Any]:
        """Return the stream of a new request. A request that is out of range has a stream, too,
        whose error is the refusal."""

    def make_preparer(self, tokenizing: Tokenizing, tasks: RequestTasks) -> Preparer:
        """Return the preparer of one engine."""
