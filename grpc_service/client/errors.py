"""The exceptions that calls end with: one class for each status code that a Triolet server sends.

A server's own errors carry a reason, and often the invalid fields or the time after which to try
again, as google.rpc details. A status without a reason did not come from Triolet: the client's own
timer ran out, the connection failed, or grpc refused a message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

if TYPE_CHECKING:
    from collections.abc import Mapping

DETAILS_KEY = "grpc-status-details-bin"
RETRY_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class FieldViolation(NamedTuple):
    """A field of the request that the server refused: its path in the proto, such as
    ``sampling.top_p``, and one sentence that says why."""

    field: str
    description: str


class CallError(Exception):
    """A call ended with a status other than OK.

    ``reason`` is the server's, such as ``QUEUE_FULL``; "" means that the status is not Triolet's
    own. ``retry_after_s`` is set where waiting that long may help. ``metadata`` holds further facts
    by name.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message or code.name)
        self.code = code
        self.reason = reason
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})

    @property
    def is_retryable(self) -> bool:
        """Whether the same call may succeed after ``retry_after_s``."""
        return self.code in RETRY_CODES and self.retry_after_s is not None


class Cancelled(CallError):
    """The call was cancelled, by this client or by the server."""


class InvalidArgument(CallError):
    """The request breaks the documented ranges, or never fits the model; see ``violations``."""


class DeadlineExceeded(CallError):
    """The call's time ran out, or cannot suffice."""

    @property
    def phase(self) -> str:
        """The phase in which the request was, "" if the server did not say."""
        return self.metadata.get("phase", "")

    @property
    def tokens_done(self) -> int:
        """How many tokens had been generated."""
        return int(self.metadata.get("tokens_done", 0))


class NotFound(CallError):
    """There is no such model, or no such live request."""


class AlreadyExists(CallError):
    """Another live request has the same id."""


class PermissionDenied(CallError):
    """This client may not call this RPC."""


class ResourceExhausted(CallError):
    """A queue or the memory is full, a key's quota is used up, or a message is too large."""


class FailedPrecondition(CallError):
    """The model cannot be loaded until an operator acts."""


class Aborted(CallError):
    """An operator ended the request, or the client did not read for too long."""


class Unimplemented(CallError):
    """The server does not have the field, feature or RPC."""


class Internal(CallError):
    """The server failed on this request, and logged why."""


class Unavailable(CallError):
    """The server cannot be reached, shuts down, is paused, or has no worker for the model."""


class Unauthenticated(CallError):
    """The server needs a key, and the call had none or a wrong one."""


CLASSES: dict[grpc.StatusCode, type[CallError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.INTERNAL: Internal,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


def call_error(error: grpc.RpcError) -> CallError:
    """Return the exception for an error of grpc, with the details that the status carries."""
    code, message = error.code(), error.details() or ""
    info, request, retry = _details(error)
    return CLASSES.get(code, CallError)(
        code,
        message,
        reason=info.reason,
        violations=tuple(FieldViolation(v.field, v.description) for v in request.field_violations),
        retry_after_s=(
            retry.retry_delay.ToTimedelta().total_seconds()
            if retry.HasField("retry_delay")
            else None
        ),
        metadata=info.metadata,
    )


def _details(error: grpc.RpcError) -> tuple[Any, Any, Any]:
    """Return the ErrorInfo, BadRequest and RetryInfo of a status, each empty if it is missing."""
    details = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    metadata: Any = error.trailing_metadata() or ()  # grpc's type does not say that these are pairs
    for key, value in metadata:
        if key == DETAILS_KEY:
            for packed in Status.FromString(value).details:
                for detail in details:
                    packed.Unpack(detail)  # Unpack does nothing if the types differ
    return details
