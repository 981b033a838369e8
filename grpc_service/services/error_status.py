"""The one table from errors to the status that a client gets.

Rule 1: the table has one row per class of `engine.errors`; a test compares both with a list. The
RPC library's errors about messages are translated into the engine's. Any other `RpcError` has its
own status. Rule 2: any other exception becomes an `EngineBug`: its traceback is logged and not
sent. Rule 3: a status always fits in a client's limit on metadata, whatever a message quotes.

Details are sent as a google.rpc.Status with an ErrorInfo of domain ``triolet``, a BadRequest if
fields are wrong, and a RetryInfo if waiting helps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2, status_pb2

from engine import errors
from grpc_service.rpc.errors import (
    InvalidMessage,
    MessageTooLarge,
    MissingMessage,
    RpcError,
    TooManyHeld,
    UnsupportedEncoding,
)
from grpc_service.rpc.status import Status, StatusCode
from grpc_service.services.text_encoder import encode_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from google.protobuf.message import Message

DOMAIN = "triolet"
DETAILS_KEY = "grpc-status-details-bin"  # source: grpc_status.rpc_status
PUSHBACK_KEY = "grpc-retry-pushback-ms"  # source: gRFC A6, Pushback
# grpc peers may refuse more than 8 KiB of metadata. The text is sent twice: in grpc-message, where
# a byte may become three, and in the details, which base64 makes a third longer. The violations are
# sent once: 800 * 3 + (800 + 2500 + 400) * 4/3 < 8 KiB.
TEXT_BYTES_MAX = 800
VIOLATIONS_BYTES_MAX = 2500
VALUE_BYTES_MAX = 200  # one metadata value, or one violation's field or description

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """The code of an error class. ``retry_s`` is how long a client should wait if the error itself
    does not say so; None gives no advice."""

    code: StatusCode
    retry_s: float | None = None


# The codes on which clients usually retry: only these statuses have `PUSHBACK_KEY`.
PUSHED_BACK = {StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED}

# The waiting times are guesses, except for a dead worker, whose first restart comes after 1 s.
TABLE: dict[type[errors.TrioletError], Row] = {
    errors.InvalidRequest: Row(StatusCode.INVALID_ARGUMENT),
    errors.RequestTooLarge: Row(StatusCode.INVALID_ARGUMENT),
    errors.ModelNotFound: Row(StatusCode.NOT_FOUND),
    errors.RequestNotFound: Row(StatusCode.NOT_FOUND),
    errors.DuplicateRequest: Row(StatusCode.ALREADY_EXISTS),
    errors.Overloaded: Row(StatusCode.RESOURCE_EXHAUSTED, retry_s=1),
    errors.MemoryExhausted: Row(StatusCode.RESOURCE_EXHAUSTED),
    errors.RequestCancelled: Row(StatusCode.CANCELLED),
    errors.DeadlineExceeded: Row(StatusCode.DEADLINE_EXCEEDED),
    errors.DeadlineInfeasible: Row(StatusCode.DEADLINE_EXCEEDED),
    errors.RequestAborted: Row(StatusCode.ABORTED),
    errors.ReaderStalled: Row(StatusCode.ABORTED),
    errors.ShuttingDown: Row(StatusCode.UNAVAILABLE, retry_s=5),
    errors.Paused: Row(StatusCode.UNAVAILABLE, retry_s=5),
    errors.NoWorkers: Row(StatusCode.UNAVAILABLE, retry_s=1),
    errors.WorkerLost: Row(StatusCode.UNAVAILABLE, retry_s=1),
    errors.SpawnTimeout: Row(StatusCode.UNAVAILABLE, retry_s=5),
    errors.SpawnFailed: Row(StatusCode.FAILED_PRECONDITION),
    errors.StepFailed: Row(StatusCode.INTERNAL),
    errors.EngineBug: Row(StatusCode.INTERNAL),
    errors.Unsupported: Row(StatusCode.UNIMPLEMENTED),
    errors.Unauthenticated: Row(StatusCode.UNAUTHENTICATED),
    errors.NotAllowed: Row(StatusCode.PERMISSION_DENIED),
}

# The RPC library's errors that get the details of one of the engine's. They keep their codes, as
# every gRPC server sends them, but for InvalidMessage: operators are called for an INTERNAL, which
# is a bug of the server's.
TRANSLATED: dict[type[RpcError], Callable[[str], errors.TrioletError]] = {
    InvalidMessage: lambda text: errors.InvalidRequest([], message=text),
    MissingMessage: lambda text: errors.InvalidRequest([], message=text),
    MessageTooLarge: lambda text: errors.RequestTooLarge(
        [], message=f"{text} (--max-message-bytes; of images --max-image-bytes)"
    ),
    TooManyHeld: lambda text: errors.MemoryExhausted(f"{text} (--max-held-bytes)"),
    UnsupportedEncoding: errors.Unsupported,
}


def status_of(error: BaseException) -> Status:
    """Return the status of a call that ``error`` ended; log details that the client does not
    get."""
    if isinstance(error, RpcError) and type(error) not in TRANSLATED:
        return error.status
    known, code, retry_s = explain(error)
    row = TABLE[type(known)]
    status = status_pb2.Status(code=code, message=_cut(str(known), TEXT_BYTES_MAX))
    status.details.extend(_packed(_details(known, row)))
    metadata: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
    if retry_s is not None and code in PUSHED_BACK:
        metadata.append((PUSHBACK_KEY, str(round(1000 * retry_s))))
    return Status(code, status.message, tuple(metadata))


def explain(error: BaseException) -> tuple[errors.TrioletError, StatusCode, float | None]:
    """Return what a client of any protocol is told of ``error``: the engine's error, its code, and
    how many seconds to wait before another try (None: no advice). Log what the client does not
    get."""
    known = _known(error)
    row = TABLE[type(known)]
    code = row.code
    if isinstance(error, RpcError) and not isinstance(error, InvalidMessage):
        code = error.status.code
    return known, code, _retry_s(known, row)


def _retry_s(error: errors.TrioletError, row: Row) -> float | None:
    return row.retry_s if error.retry_after_s is None else error.retry_after_s


def _known(error: BaseException) -> errors.TrioletError:
    """Return the error itself if the table has its class, the engine's error for one of the RPC
    library's, and otherwise an EngineBug, which is logged."""
    if isinstance(error, RpcError) and (translate := TRANSLATED.get(type(error))) is not None:
        return translate(str(error))
    if isinstance(error, errors.TrioletError) and type(error) in TABLE:
        if isinstance(error, (errors.EngineBug, errors.StepFailed)):
            log.error("%s: %s", error.reason, error.log_detail or error, exc_info=error)
        elif error.log_detail:
            log.info("%s: %s", error.reason, error.log_detail)
        return error
    log.error("an RPC was ended by an unexpected %s", type(error).__name__, exc_info=error)
    return errors.EngineBug(repr(error))


def _details(error: errors.TrioletError, row: Row) -> Iterator[Message]:
    yield error_details_pb2.ErrorInfo(
        reason=error.reason, domain=DOMAIN, metadata=dict(_metadata(error))
    )
    if isinstance(error, errors.InvalidRequest):
        yield _bad_request(error.violations)
    if (retry_s := _retry_s(error, row)) is not None:
        yield error_details_pb2.RetryInfo(retry_delay=encode_duration(retry_s))


def _metadata(error: errors.TrioletError) -> Iterator[tuple[str, str]]:
    if isinstance(error, errors.DeadlineExceeded):
        yield "phase", _cut(error.phase, VALUE_BYTES_MAX)
        yield "tokens_done", str(error.tokens_done)
    if isinstance(error, errors.Unsupported) and error.field:
        yield "field", _cut(error.field, VALUE_BYTES_MAX)


def _bad_request(violations: Sequence[errors.FieldViolation]) -> error_details_pb2.BadRequest:
    """Return the violations that fit into the status. A last entry says how many do not; for those
    no message is made, as 20,000 would take the loop 0.1 s."""
    request = error_details_pb2.BadRequest()
    for number, violation in enumerate(violations):
        entry = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(violation.field, VALUE_BYTES_MAX),
            description=_cut(violation.description, VALUE_BYTES_MAX),
        )
        if request.ByteSize() + entry.ByteSize() > VIOLATIONS_BYTES_MAX:
            request.field_violations.add(description=f"and {len(violations) - number} more")
            break
        request.field_violations.append(entry)
    return request


def _packed(messages: Iterable[Message]) -> Iterator[Any]:
    for message in messages:
        packed = Any()
        packed.Pack(message)
        yield packed


def _cut(text: str, bytes_max: int) -> str:
    """Return ``text``, cut to ``bytes_max`` bytes with an ellipsis if it is longer."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= bytes_max:
        return encoded.decode()
    return encoded[: bytes_max - 3].decode("utf-8", "ignore") + "…"
