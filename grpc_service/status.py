"""The one table from the engine's errors to what a client is told.

Rule 1: one row per class of `engine.errors`, a test holds both to a list of its own.
Rule 2: whatever else is raised is an `EngineBug`: logged with its traceback, told without it.
Rule 3: a status always fits in a client's limit on metadata, whatever a message quotes.
Details travel as google.rpc.Status with an ErrorInfo of domain ``triolet``, with BadRequest for
broken fields and RetryInfo where waiting helps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc import StatusCode
from grpc_status import rpc_status

from engine import errors
from grpc_service.codec import encode_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from google.protobuf.message import Message

DOMAIN = "triolet"
# grpc peers may refuse more than 8 KiB of metadata. The text travels twice (in grpc-message, where
# a byte may become three, and in the details, which base64 makes a third longer), the violations
# once: 800 * 3 + (800 + 2500 + 400) * 4/3 < 8 KiB.
TEXT_BYTES_MAX = 800
VIOLATIONS_BYTES_MAX = 2500
VALUE_BYTES_MAX = 200  # one metadata value, or one violation's field or description

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """The code of an error class. ``retry_s``: how long to advise waiting where the error itself
    does not say; None, no advice."""

    code: StatusCode
    retry_s: float | None = None


# Waiting times are guesses, but for a dead worker's: its first restart comes after 1 s.
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


class Ending(NamedTuple):
    """What `context.abort` takes, in its order."""

    code: StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def ending_of(error: BaseException) -> Ending:
    """How a call that met ``error`` ends. Logs what the client is not told."""
    known = _known(error)
    row = TABLE[type(known)]
    status = Status(code=row.code.value[0], message=_cut(str(known), TEXT_BYTES_MAX))
    status.details.extend(_packed(_details(known, row)))
    parts = rpc_status.to_status(status)
    return Ending(row.code, status.message, parts.trailing_metadata)


def _known(error: BaseException) -> errors.TrioletError:
    """The error itself where the table has its class, else an EngineBug for the log."""
    if isinstance(error, errors.TrioletError) and type(error) in TABLE:
        if isinstance(error, (errors.EngineBug, errors.StepFailed)):
            log.error("%s: %s", error.reason, error.log_detail or error, exc_info=error)
        elif error.log_detail:
            log.info("%s: %s", error.reason, error.log_detail)
        return error
    log.error("an RPC met an unexpected %s", type(error).__name__, exc_info=error)
    return errors.EngineBug(repr(error))


def _details(error: errors.TrioletError, row: Row) -> Iterator[Message]:
    yield error_details_pb2.ErrorInfo(
        reason=error.reason, domain=DOMAIN, metadata=dict(_metadata(error))
    )
    if isinstance(error, errors.InvalidRequest):
        yield _bad_request(error.violations)
    retry_s = row.retry_s if error.retry_after_s is None else error.retry_after_s
    if retry_s is not None:
        yield error_details_pb2.RetryInfo(retry_delay=encode_duration(retry_s))


def _metadata(error: errors.TrioletError) -> Iterator[tuple[str, str]]:
    if isinstance(error, errors.DeadlineExceeded):
        yield "phase", _cut(error.phase, VALUE_BYTES_MAX)
        yield "tokens_done", str(error.tokens_done)
    if isinstance(error, errors.Unsupported) and error.field:
        yield "field", _cut(error.field, VALUE_BYTES_MAX)


def _bad_request(violations: Iterable[errors.FieldViolation]) -> error_details_pb2.BadRequest:
    """The violations as far as they fit; how many do not is said in a last one."""
    request = error_details_pb2.BadRequest()
    left_out = 0
    for violation in violations:
        entry = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(violation.field, VALUE_BYTES_MAX),
            description=_cut(violation.description, VALUE_BYTES_MAX),
        )
        if left_out or request.ByteSize() + entry.ByteSize() > VIOLATIONS_BYTES_MAX:
            left_out += 1
        else:
            request.field_violations.append(entry)
    if left_out:
        request.field_violations.add(description=f"and {left_out} more")
    return request


def _packed(messages: Iterable[Message]) -> Iterator[Any]:
    for message in messages:
        packed = Any()
        packed.Pack(message)
        yield packed


def _cut(text: str, bytes_max: int) -> str:
    """The beginning of ``text`` that fits, marked where something is missing."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= bytes_max:
        return encoded.decode()
    return encoded[: bytes_max - 3].decode("utf-8", "ignore") + "…"
