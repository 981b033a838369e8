"""How a gRPC call ends: a code, a message and metadata.

Source: gRPC status codes (grpc/doc/statuscodes.md).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

Metadata = tuple[tuple[str, str | bytes], ...]


class StatusCode(IntEnum):
    """The codes of gRPC, with the numbers that travel in ``grpc-status``."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Status(NamedTuple):
    """The end of a call. ``metadata`` travels in the trailers: text, or bytes under a name that
    ends in ``-bin``."""

    code: StatusCode
    message: str = ""
    metadata: Metadata = ()
