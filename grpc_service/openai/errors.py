"""Errors in OpenAI's form: an HTTP status, and a JSON object with our reason and the field.

Rule: which code an error has is decided by the table that gRPC uses, too
(`grpc_service.services.error_status`); this page only writes it in HTTP's numbers.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from engine import errors
from grpc_service.rpc.status import StatusCode
from grpc_service.services.error_status import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CANCELLED = 499  # nginx's number for a client that has left; no client sees it
STATUSES = {
    StatusCode.OK: 200,
    StatusCode.CANCELLED: CANCELLED,
    StatusCode.UNKNOWN: 500,
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.DEADLINE_EXCEEDED: 504,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.FAILED_PRECONDITION: 500,
    StatusCode.ABORTED: 500,
    StatusCode.OUT_OF_RANGE: 400,
    StatusCode.UNIMPLEMENTED: 400,
    StatusCode.INTERNAL: 500,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DATA_LOSS: 500,
    StatusCode.UNAUTHENTICATED: 401,
}
CODES = {
    **{status: code.name for code, status in reversed(STATUSES.items())},
    **dict.fromkeys((405, 406, 408, 413, 415), StatusCode.INVALID_ARGUMENT.name),
    500: StatusCode.INTERNAL.name,
    400: StatusCode.INVALID_ARGUMENT.name,
}
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
# How the engine's descriptions name fields of triolet.v1. Others are words of their sentence.
NAMED = re.compile(r"\b(?:chat|reasoning|constraint)\.[a-z_]+\b")
FIELDS_SHOWN = 20  # of the broken ones
TEXT_CHARS_MAX = 2000


class HttpError(Exception):
    """An error that HTTP alone has, such as a wrong verb."""

    def __init__(
        self, status: int, reason: str, message: str, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.headers = tuple(headers)


def renamed(
    error: errors.InvalidRequest | errors.Unsupported, rename: Callable[[str], str]
) -> errors.TrioletError:
    """Return an error of the engine with the names that ``rename`` gives the fields of triolet.v1,
    also where its text names others."""

    def retold(text: str) -> str:
        return NAMED.sub(lambda found: rename(found[0]), text)

    made: errors.TrioletError
    if isinstance(error, errors.InvalidRequest):
        if not error.violations:
            return error
        made = type(error)(
            errors.FieldViolation(rename(one.field), retold(one.description))
            for one in error.violations
        )
    elif error.field:
        name, told = rename(error.field), str(error)
        if told.startswith(error.field):
            told = name + told.removeprefix(error.field)
        made = type(error)(retold(told), field=name)
    else:
        return error
    made.log_detail = error.log_detail
    return made


def answer_of(error: BaseException) -> tuple[int, list[tuple[bytes, bytes]], dict[str, Any]]:
    """Return the status, the headers and the JSON of an answer that ``error`` ended. Log what the
    client does not get.

    OpenAI's clients retry after 408, 409, 429 and every 5xx, unless ``x-should-retry`` says no.
    """
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, HttpError):
        headers += error.headers
        return error.status, headers, _body(error.status, str(error), error.reason, None)
    known, code, retry_s = explain(error)
    status = STATUSES[code]
    if retry_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_s))))
    elif status >= 409:
        headers.append((b"x-should-retry", b"false"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return status, headers, _body(status, str(known), known.reason, _field_of(known), known)


def _body(
    status: int,
    message: str,
    reason: str,
    field: str | None,
    error: errors.TrioletError | None = None,
) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    told: dict[str, Any] = {
        "message": message[:TEXT_CHARS_MAX],
        "type": kind,
        "param": field,
        "code": reason.lower(),
    }
    if isinstance(error, errors.InvalidRequest) and len(error.violations) > 1:
        told["fields"] = [
            {"field": one.field, "description": one.description}
            for one in error.violations[:FIELDS_SHOWN]
        ]
    if isinstance(error, errors.DeadlineExceeded):
        told |= {"phase": error.phase, "tokens_done": error.tokens_done}
    return {"error": told}


def _field_of(error: errors.TrioletError) -> str | None:
    if isinstance(error, errors.InvalidRequest) and error.violations:
        return error.violations[0].field
    if isinstance(error, errors.Unsupported):
        return error.field or None
    return None
