"""Every way a request can go wrong, as one exception class each.

Rule 1: a kind sits on its class (``reason``, ``is_retryable``); nobody parses messages.
Rule 2: ``str(error)`` is the text a client may read: it names the request's own fields and
numbers, never prompt text, paths, stack traces or Python types. What only the operator should
see goes into ``log_detail`` and the exception's cause.

The mapping to gRPC codes is the front's (`grpc_service.status`), one row per class here.
Source: R121 for the prefixes; they are kept on the classes that carry those names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field that was wrong: its proto path (``sampling.top_p``) and one sentence why."""

    field: str
    description: str


class TrioletError(Exception):
    """Base of all errors a client can be told.

    ``retry_after_s`` is a hint in seconds where waiting can help, else None.
    """

    reason: ClassVar[str] = ""
    is_retryable: ClassVar[bool] = False
    prefix: ClassVar[str] = ""

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, log_detail: str = ""
    ) -> None:
        super().__init__(f"{self.prefix}{message}")
        self.retry_after_s = retry_after_s
        self.log_detail = log_detail

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled, it comes back as it is: making it once more would put its prefix on twice."""
        return _remade, (type(self), self.args, self.__dict__.copy())


def _remade(cls: type[TrioletError], args: tuple[object, ...], state: dict[str, object]) -> object:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class InvalidRequest(TrioletError):
    """The request breaks the documented ranges; every broken field is listed."""

    reason = "INVALID_REQUEST"

    def __init__(self, violations: Iterable[FieldViolation], *, message: str = "") -> None:
        self.violations = tuple(violations)
        listed = "; ".join(f"{v.field}: {v.description}" for v in self.violations)
        super().__init__(message or listed)

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequest:
        """The usual case: one field, one sentence."""
        return cls([FieldViolation(field, description)])


class RequestTooLarge(InvalidRequest):
    """The request is well formed but can never fit this model or this server."""

    reason = "REQUEST_TOO_LARGE"


class ModelNotFound(TrioletError):
    """No model of that name (or, with no name, none with the capability) is configured."""

    reason = "MODEL_NOT_FOUND"


class RequestNotFound(TrioletError):
    """No live request has this id."""

    reason = "REQUEST_NOT_FOUND"


class DuplicateRequest(TrioletError):
    """A live request already has this id; the live one is untouched."""

    reason = "DUPLICATE_REQUEST"


class Overloaded(TrioletError):
    """The queue's bound on requests or tokens is reached; nothing was queued."""

    reason = "QUEUE_FULL"
    is_retryable = True


class MemoryExhausted(TrioletError):
    """The byte budget cannot hold what the request needs loaded."""

    reason = "MEMORY_EXHAUSTED"
    is_retryable = True
    prefix = "Memory exhausted: "


class RequestCancelled(TrioletError):
    """The client ended its own request."""

    reason = "CANCELLED"


class DeadlineExceeded(TrioletError):
    """The request's time ran out; ``phase`` says where, ``tokens_done`` how far it got."""

    reason = "DEADLINE_EXCEEDED"

    def __init__(self, message: str, *, phase: str = "", tokens_done: int = 0) -> None:
        super().__init__(message)
        self.phase = phase
        self.tokens_done = tokens_done


class DeadlineInfeasible(DeadlineExceeded):
    """The prompt cannot be computed in the time left, at the best rate measured."""

    reason = "DEADLINE_INFEASIBLE"


class RequestAborted(TrioletError):
    """An operator ended the request (``Control.Abort``, or Pause with ABORT)."""

    reason = "ABORTED"


class ReaderStalled(TrioletError):
    """The client read nothing for the stall timeout while its stream was full."""

    reason = "READER_STALLED"


class ShuttingDown(TrioletError):
    """The server is draining or has closed; it takes no new requests."""

    reason = "SHUTTING_DOWN"
    is_retryable = True
    prefix = "Shutting down: "


class Paused(TrioletError):
    """The engine is paused and does not queue."""

    reason = "PAUSED"
    is_retryable = True


class NoWorkers(TrioletError):
    """The model has no worker that could serve the request."""

    reason = "NO_WORKERS"
    is_retryable = True
    prefix = "No workers available: "


class WorkerLost(TrioletError):
    """The worker died with the request on it; its output so far was delivered."""

    reason = "WORKER_LOST"
    is_retryable = True


class SpawnTimeout(TrioletError):
    """The model did not become ready within the waiters' limit; its load goes on."""

    reason = "SPAWN_TIMEOUT"
    is_retryable = True
    prefix = "Spawn timeout: "


class SpawnFailed(TrioletError):
    """The model cannot be loaded; the operator must act."""

    reason = "SPAWN_FAILED"
    prefix = "Worker spawn failed: "


class StepFailed(TrioletError):
    """The model failed on this request; others are untouched."""

    reason = "STEP_FAILED"


class EngineBug(TrioletError):
    """A programmer's error of ours; the text shown carries no internals."""

    reason = "ENGINE_BUG"

    def __init__(self, log_detail: str) -> None:
        super().__init__("the engine made an internal error; it was logged", log_detail=log_detail)

    def __repr__(self) -> str:
        return f"EngineBug({self.log_detail!r})"


class Unsupported(TrioletError):
    """A field, RPC or model feature that this server does not have; ``field`` names it."""

    reason = "UNSUPPORTED"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Unauthenticated(TrioletError):
    """A key is needed and none, or a wrong one, was given."""

    reason = "UNAUTHENTICATED"


class NotAllowed(TrioletError):
    """The peer may not call this RPC."""

    reason = "PERMISSION_DENIED"


class ConfigError(TrioletError):
    """The server cannot start as told; one sentence says what to change. Never on the wire."""

    reason = "CONFIG"
