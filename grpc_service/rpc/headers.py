"""The headers of gRPC: checks and parses the headers of requests, and makes the trailers of a
status.

The functions are pure: bytes go in, values come out, and nothing waits.
Source: RFC 9113, sections 8.2 and 8.3; gRPC over HTTP2 (PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING
from urllib.parse import quote

from grpc_service.rpc.errors import InvalidHeaders

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from grpc_service.rpc.status import Metadata, StatusCode

Headers = list[tuple[bytes, bytes]]

CONTENT_TYPE = b"application/grpc"
ENCODINGS = b"identity,deflate,gzip"  # no spaces: grpc-js does not expect them
RESPONSE_HEADERS: Headers = [
    (b":status", b"200"),
    (b"content-type", CONTENT_TYPE),
    (b"grpc-accept-encoding", ENCODINGS),
]
ENTRY_BYTES = 32  # bytes added to the size of each header in a list. Source: RFC 9113, 10.5.1.
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT = re.compile(rb"\s*(\d+)\s*([HMSmun])\s*")
_NAME = re.compile(rb"[!-9;-@\[-~]+")  # printable, without upper-case letters and colons
_NOT_IN_A_VALUE = re.compile(rb"[\0\r\n]")
_LENGTH_DIGITS = 19  # digits of a content-length, at most; Python refuses to read thousands
_OF_A_REQUEST = {b":method", b":scheme", b":path", b":authority"}
_NEEDED = (b":method", b":scheme", b":path")
# Headers of HTTP/1 that speak of the connection. Source: RFC 9113, section 8.2.2.
_OF_A_CONNECTION = {
    *(b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"),
}
# The characters that travel unescaped in grpc-message.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


# ---- requests


def fault_of(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return why a request's headers are malformed, and "" for those that are not.

    Spaces around a value are no fault, because gRPC's metadata may have them. A host header that
    differs from :authority is none either: a proxy may have changed it, this server uses neither,
    and grpcio serves such calls. Source: RFC 9113, section 8.1.1: the stream of a malformed request
    is reset, and its connection goes on.
    """
    pseudo: dict[bytes, bytes] = {}
    is_past_pseudo = False
    has_host, length = False, None
    for name, value in headers:
        if _NOT_IN_A_VALUE.search(value):
            return f"the value of {name!r} holds a NUL or a line break"
        if name[:1] == b":":
            if name not in _OF_A_REQUEST:
                return f"{name!r} is no header of a request"
            if name in pseudo or is_past_pseudo:
                return f"{name!r} comes twice, or after other headers"
            pseudo[name] = value
            continue
        is_past_pseudo = True
        if fault := _fault_of_name(name):
            return fault
        if name == b"te" and value.lower() != b"trailers":
            return "te is not trailers"
        if name == b"host":
            if has_host:
                return "host comes twice"
            has_host = True
        if name == b"content-length":
            is_number = value.isdigit() and len(value) <= _LENGTH_DIGITS
            if not is_number or (length is not None and length != int(value)):
                return "content-length is no number, or several"
            length = int(value)
    for name in _NEEDED if pseudo.get(b":method") != b"CONNECT" else ():
        if not pseudo.get(name):
            return f"{name.decode()} is missing or empty"
    return "" if has_host or b":authority" in pseudo else ":authority is missing"


def fault_of_trailers(trailers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return why the headers after a request's body are malformed, and "" if they are not. gRPC
    gives them no meaning. Source: RFC 9113, section 8.1."""
    for name, value in trailers:
        if _NOT_IN_A_VALUE.search(value):
            return f"the value of {name!r} holds a NUL or a line break"
        if fault := _fault_of_name(name):
            return fault
    return ""


def _fault_of_name(name: bytes) -> str:
    if not _NAME.fullmatch(name):
        return f"{name!r} is no name of a header"
    if name in _OF_A_CONNECTION:
        return f"{name!r} has no place in HTTP/2"
    return ""


def size_of(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the size of a header list in bytes, as the limit that we announce counts it."""
    return sum([len(name) + len(value) + ENTRY_BYTES for name, value in headers])


def length_of(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Return the length of the body that well-formed headers announce; None without one."""
    return next((int(value) for name, value in headers if name == b"content-length"), None)


def refusal_of(headers: Mapping[bytes, bytes]) -> Headers:
    """Return the HTTP answer to a request that is no gRPC call; empty for a gRPC call.

    Source: PROTOCOL-HTTP2.md, Responses.
    """
    if headers.get(b":method") != b"POST":
        return [(b":status", b"405"), (b"allow", b"POST")]
    content_type = headers.get(b"content-type", b"")
    rest = content_type.removeprefix(CONTENT_TYPE)
    if rest == content_type or rest[:1] not in (b"", b"+", b";"):  # such as application/grpc-web
        return [(b":status", b"415"), (b"accept-post", CONTENT_TYPE)]
    return []


def timeout_of(value: bytes) -> float:
    """Return the seconds of a ``grpc-timeout`` such as ``100m``.

    More than eight digits and spaces are taken, as grpcio takes them.

    Raises:
        InvalidHeaders: the value is malformed.
    """
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise InvalidHeaders(f"grpc-timeout {value.decode('latin-1')!r} is malformed")
    return float(match[1]) * _SECONDS[match[2]]


def metadata_of(headers: Iterable[tuple[bytes, bytes]]) -> Metadata:
    """Return the headers without HTTP/2's own: text, and bytes under names that end in ``-bin``.

    Raises:
        InvalidHeaders: a value that should be base64 is not.
    """
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name.startswith(b":"):
            continue
        text = name.decode("latin-1")
        if name.endswith(b"-bin"):
            metadata += [(text, _unbase64(text, part)) for part in value.split(b",")]
        else:
            metadata.append((text, value.strip(b" \t").decode("latin-1")))
    return tuple(metadata)


def _unbase64(name: str, value: bytes) -> bytes:
    """Decode base64 with or without padding."""
    digits = value.strip().rstrip(b"=")
    try:
        return base64.b64decode(digits + b"=" * (-len(digits) % 4), validate=True)
    except binascii.Error:
        raise InvalidHeaders(f"{name} is not base64") from None


# ---- answers


def trailers_of(
    code: StatusCode, message: str = "", metadata: Sequence[tuple[str, str | bytes]] = ()
) -> Headers:
    """Return the headers that end a call with this status."""
    trailers = [(b"grpc-status", b"%d" % code)]
    if message:
        # UTF-8 has no lone surrogate: it becomes a question mark.
        escaped = quote(message, safe=_PLAIN, errors="replace")
        trailers.append((b"grpc-message", escaped.encode()))
    return trailers + encode_metadata(metadata)


def encode_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Headers:
    """Return metadata as headers; bytes travel in base64, under names that end in ``-bin``."""
    headers: Headers = []
    for name, value in metadata:
        data = value.encode() if isinstance(value, str) else value
        if name.endswith("-bin"):
            data = base64.b64encode(data).rstrip(b"=")
        headers.append((name.encode(), data))
    return headers
