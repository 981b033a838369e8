"""Every way in which a request can fail, one exception class for each.

Rule 1: what a program needs to know stands on the class (``reason``, ``is_retryable``); no program
parses messages. Rule 2: a client may read ``str(error)``. The text names fields and numbers of the
request, never prompt text, paths, stack traces or Python types. What only the operator may see goes
into ``log_detail`` and the exception's cause.

`grpc_service.services.error_status` maps each class to a gRPC code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def install_command(extra: str) -> str:
    """Return the command that installs an extra. No index has the package, and pip asks none for a
    package that is installed, be it from a wheel or from a source checkout."""
    return f"pip install 'triolet[{extra}]'"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field with an invalid value: its path in the proto, such as ``sampling.top_p``, and one
    sentence that says why."""

    field: str
    description: str


class TrioletError(Exception):
    """Base of all errors that a client can receive.

    ``reason`` names the kind of error for programs. ``is_retryable``: the same request may succeed
    later. ``retry_after_s`` is how many seconds the client should wait before that, or None if the
    server does not know. ``log_detail`` goes into the log only. ``prefix`` begins every message.
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
        """Pickle the message as it is: `__init__` would put the prefix in front a second time."""
        return _restored, (type(self), self.args, self.__dict__.copy())


def _restored(
    kind: type[TrioletError], args: tuple[object, ...], state: dict[str, object]
) -> object:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class InvalidRequest(TrioletError):
    """Fields of the request have invalid values. ``violations`` lists all of them."""

    reason = "INVALID_REQUEST"

    def __init__(self, violations: Iterable[FieldViolation], *, message: str = "") -> None:
        self.violations = tuple(violations)
        listed = "; ".join(f"{v.field}: {v.description}" for v in self.violations)
        super().__init__(message or listed)

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequest:
        """Return the error of a request with one invalid field."""
        return cls([FieldViolation(field, description)])

    def renamed(self, rename: Callable[[str], str]) -> InvalidRequest:
        """Return the same error, of the same kind, with each field called as ``rename`` says."""
        renamed = type(self)(
            FieldViolation(rename(v.field), v.description) for v in self.violations
        )
        renamed.log_detail = self.log_detail
        return renamed


class RequestTooLarge(InvalidRequest):
    """The request is valid, but larger than this model or this server can ever serve."""

    reason = "REQUEST_TOO_LARGE"


class ModelNotFound(TrioletError):
    """No model with this name is configured; or, for an empty name, none with the capability."""

    reason = "MODEL_NOT_FOUND"


class RequestNotFound(TrioletError):
    """No request with this id is running or waiting."""

    reason = "REQUEST_NOT_FOUND"


class DuplicateRequest(TrioletError):
    """Another request with this id is running or waiting. That request goes on."""

    reason = "DUPLICATE_REQUEST"


class Overloaded(TrioletError):
    """The queue holds as many requests or tokens as it may. The request was not queued."""

    reason = "QUEUE_FULL"
    is_retryable = True


class MemoryExhausted(TrioletError):
    """The model that the request needs does not fit in the memory limit beside those loaded, or the
    server keeps as many bytes for clients that do not send or read on as it may."""

    reason = "MEMORY_EXHAUSTED"
    is_retryable = True
    prefix = "Memory exhausted: "


class RequestCancelled(TrioletError):
    """The client cancelled the request."""

    reason = "CANCELLED"


class DeadlineExceeded(TrioletError):
    """The request's deadline passed. ``phase`` says what the request was doing, ``tokens_done`` how
    many tokens of its results were complete."""

    reason = "DEADLINE_EXCEEDED"

    def __init__(self, message: str, *, phase: str = "", tokens_done: int = 0) -> None:
        super().__init__(message)
        self.phase = phase
        self.tokens_done = tokens_done


class DeadlineInfeasible(DeadlineExceeded):
    """The prompt cannot be computed before the deadline, at the best rate that was measured."""

    reason = "DEADLINE_INFEASIBLE"


class RequestAborted(TrioletError):
    """An operator ended the request (``Control.Abort``, or Pause with ABORT)."""

    reason = "ABORTED"


class ReaderStalled(TrioletError):
    """The stream was full and the client read nothing for as long as the stall timeout."""

    reason = "READER_STALLED"


class ShuttingDown(TrioletError):
    """The server is draining or has closed, and takes no new requests."""

    reason = "SHUTTING_DOWN"
    is_retryable = True
    prefix = "Shutting down: "


class Paused(TrioletError):
    """The engine is paused in a mode in which it takes no new requests."""

    reason = "PAUSED"
    is_retryable = True


class NoWorkers(TrioletError):
    """The model has no worker for the request, because the operator is unloading the model."""

    reason = "NO_WORKERS"
    is_retryable = True
    prefix = "No workers available: "


class WorkerLost(TrioletError):
    """The worker died while it ran the request. The output before that was delivered."""

    reason = "WORKER_LOST"
    is_retryable = True


class SpawnTimeout(TrioletError):
    """The model did not load within the spawn timeout. Its load goes on."""

    reason = "SPAWN_TIMEOUT"
    is_retryable = True
    prefix = "Spawn timeout: "


class SpawnFailed(TrioletError):
    """The model cannot be loaded. The operator must act."""

    reason = "SPAWN_FAILED"
    prefix = "Worker spawn failed: "


class StepFailed(TrioletError):
    """The model failed on this request. Other requests go on."""

    reason = "STEP_FAILED"


class EngineBug(TrioletError):
    """A bug of the engine. Its description stands in ``log_detail`` alone."""

    reason = "ENGINE_BUG"

    def __init__(self, log_detail: str) -> None:
        text = "the engine had an internal error, which was logged"
        super().__init__(text, log_detail=log_detail)

    def __repr__(self) -> str:
        return f"EngineBug({self.log_detail!r})"


class Unsupported(TrioletError):
    """This server does not support a field, an RPC or a feature of a model. ``field`` is a field's
    path, or empty."""

    reason = "UNSUPPORTED"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Unauthenticated(TrioletError):
    """The call has no API key or an invalid one."""

    reason = "UNAUTHENTICATED"


class NotAllowed(TrioletError):
    """The client may not call this RPC."""

    reason = "PERMISSION_DENIED"


class ConfigError(TrioletError):
    """The configuration is invalid, so the server does not start. One sentence says what to change.
    No client receives this error."""

    reason = "CONFIG"
