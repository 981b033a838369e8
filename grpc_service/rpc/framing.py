"""What gRPC adds to HTTP/2: the meaning of headers, messages in a body, a status in the trailers.

The functions are pure: bytes go in, values come out, and nothing waits.
Source: gRPC over HTTP2 (PROTOCOL-HTTP2.md), Compression (compression.md).
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import quote

from grpc_service.rpc.errors import (
    InvalidMessage,
    MessageTooLarge,
    RpcError,
    UnsupportedEncoding,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from grpc_service.rpc.status import Metadata, StatusCode

Headers = list[tuple[bytes, bytes]]

PREFIX_BYTES = 5
MESSAGE_BYTES = 64  # what Python needs to keep a message, beside the message's own bytes
CONTENT_TYPE = b"application/grpc"
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}  # zlib's numbers for the two formats
ENCODINGS = b"identity, deflate, gzip"
RESPONSE_HEADERS: Headers = [
    (b":status", b"200"),
    (b"content-type", CONTENT_TYPE),
    (b"grpc-accept-encoding", ENCODINGS),
]
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# The characters that travel unescaped in grpc-message.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


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


def timeout_of(value: bytes) -> float | None:
    """Return the seconds of a ``grpc-timeout`` such as ``100m``. Returns None for a malformed
    value; the call then has no deadline."""
    digits, unit = value[:-1], value[-1:].decode("latin-1")
    if not (digits.isdigit() and len(digits) <= 8 and unit in _SECONDS):
        return None
    return int(digits) * _SECONDS[unit]


def metadata_of(headers: Iterable[tuple[bytes, bytes]]) -> Metadata:
    """Return the headers without HTTP/2's own: text, and bytes under names that end in ``-bin``."""
    found: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name.startswith(b":"):
            continue
        if name.endswith(b"-bin"):
            found += [(name.decode("latin-1"), _unbase64(part)) for part in value.split(b",")]
        else:
            found.append((name.decode("latin-1"), value.decode("latin-1")))
    return tuple(found)


def _unbase64(value: bytes) -> bytes:
    """Decode base64 with or without padding; malformed base64 becomes b""."""
    digits = value.strip().rstrip(b"=")
    try:
        return base64.b64decode(digits + b"=" * (-len(digits) % 4))
    except binascii.Error:
        return b""


def trailers_of(
    code: StatusCode, message: str = "", metadata: Sequence[tuple[str, str | bytes]] = ()
) -> Headers:
    """Return the headers that end a call with this status."""
    trailers = [(b"grpc-status", b"%d" % code)]
    if message:
        # UTF-8 has no lone surrogate: it becomes a question mark.
        escaped = quote(message, safe=_PLAIN, errors="replace")
        trailers.append((b"grpc-message", escaped.encode()))
    for name, value in metadata:
        data = value.encode() if isinstance(value, str) else value
        if name.endswith("-bin"):
            data = base64.b64encode(data).rstrip(b"=")
        trailers.append((name.encode(), data))
    return trailers


class MessageReader:
    """Splits a body into messages of at most ``limit`` bytes each, and decompresses them.

    ``messages`` holds the messages that `take` has not returned yet; together they have at most
    ``limit`` bytes, unless there is only one. ``error`` is the first error of the body; whatever
    follows it is ignored. Nothing of a message that is too large is kept.
    """

    __slots__ = ("_buffer", "_encoding", "_limit", "_waiting_bytes", "error", "messages")

    def __init__(self, limit: int, encoding: bytes = b"identity") -> None:
        self._limit = limit
        self._encoding = encoding
        self._buffer = bytearray()
        self._waiting_bytes = 0
        self.messages: deque[bytes] = deque()
        self.error: RpcError | None = None

    @property
    def is_amid_message(self) -> bool:
        """Whether the body so far ends inside a message."""
        return bool(self._buffer) and self.error is None

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        if self.error is not None:
            return
        buffer = self._buffer
        buffer += data
        try:
            while len(buffer) >= PREFIX_BYTES:
                size = int.from_bytes(buffer[1:PREFIX_BYTES], "big")
                self._check_size(size)
                if len(buffer) < PREFIX_BYTES + size:
                    return
                message = bytes(buffer[PREFIX_BYTES : PREFIX_BYTES + size])
                is_compressed = bool(buffer[0])
                del buffer[: PREFIX_BYTES + size]
                self._keep(self._decompress(message) if is_compressed else message)
        except RpcError as error:
            self.error = error
            buffer.clear()

    def take(self) -> bytes:
        """Remove and return the first of ``messages``."""
        message = self.messages.popleft()
        self._waiting_bytes -= MESSAGE_BYTES + len(message)
        return message

    def _keep(self, message: bytes) -> None:
        self._waiting_bytes += MESSAGE_BYTES + len(message)
        if self.messages and self._waiting_bytes > self._limit:
            raise MessageTooLarge(
                f"more than {self._limit} bytes of requests came before they were taken"
            )
        self.messages.append(message)

    def _check_size(self, size: int) -> None:
        if size > self._limit:
            raise MessageTooLarge(f"the request has {size} bytes, of at most {self._limit}")

    def _decompress(self, data: bytes) -> bytes:
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            name = self._encoding.decode("latin-1")
            raise UnsupportedEncoding(
                f"grpc-encoding {name!r} is not supported; {ENCODINGS.decode()} are"
            )
        decompressor = zlib.decompressobj(bits)
        try:
            message = decompressor.decompress(data, self._limit + 1)
        except zlib.error:
            raise InvalidMessage("the request is not compressed as it says") from None
        if len(message) > self._limit:
            raise MessageTooLarge(
                f"the request has more than {self._limit} bytes when it is unpacked, the most it "
                "may have"
            )
        if not decompressor.eof:
            raise InvalidMessage("the compressed request breaks off")
        return message
