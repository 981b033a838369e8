"""What gRPC adds to HTTP/2: headers' meanings, messages in a body, a status in the trailers.

Pure: bytes go in and values come out. Nothing here is ours, and nothing waits.
Source: gRPC over HTTP2 (PROTOCOL-HTTP2.md), Compression (compression.md).
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import quote

from engine.errors import InvalidRequest, RequestTooLarge, TrioletError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from grpc import StatusCode

    from grpc_service.http2 import Headers

    Metadata = tuple[tuple[str, str | bytes], ...]

PREFIX_BYTES = 5
MESSAGE_BYTES = 64  # that a message takes beside its own: Python's, rounded up
CONTENT_TYPE = b"application/grpc"
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}  # as zlib names the formats
ENCODINGS = b"identity, deflate, gzip"
RESPONSE_HEADERS: Headers = [
    (b":status", b"200"),
    (b"content-type", CONTENT_TYPE),
    (b"grpc-accept-encoding", ENCODINGS),
]
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")  # travels as it is in grpc-message


def timeout_of(value: bytes) -> float | None:
    """The seconds of a ``grpc-timeout``, such as ``100m``; None: it is not one, and as if it had
    not been sent."""
    digits, unit = value[:-1], value[-1:].decode("latin-1")
    if not (digits.isdigit() and len(digits) <= 8 and unit in _SECONDS):
        return None
    return int(digits) * _SECONDS[unit]


def metadata_of(headers: Iterable[tuple[bytes, bytes]]) -> Metadata:
    """What a client sent beside the request: text, and bytes under names that end in ``-bin``."""
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
    """With padding or without it; b"" for what is no base64."""
    digits = value.strip().rstrip(b"=")
    try:
        return base64.b64decode(digits + b"=" * (-len(digits) % 4))
    except binascii.Error:
        return b""


def trailers_of(
    code: StatusCode, message: str = "", metadata: Sequence[tuple[str, str | bytes]] = ()
) -> Headers:
    """The headers that end a call."""
    number: int = code.value[0]
    trailers = [(b"grpc-status", b"%d" % number)]
    if message:
        # half a surrogate pair, which no UTF-8 has, is a question mark
        told = quote(message, safe=_PLAIN, errors="replace")
        trailers.append((b"grpc-message", told.encode()))
    for name, value in metadata:
        data = value.encode() if isinstance(value, str) else value
        if name.endswith("-bin"):
            data = base64.b64encode(data).rstrip(b"=")
        trailers.append((name.encode(), data))
    return trailers


class MessageReader:
    """Takes a body apart into messages of at most ``limit`` bytes each, which it unpacks.

    ``messages`` has those that have come and were not taken (`take`); there is no more of them than
    ``limit`` bytes, or one. ``error`` is what was wrong with the body, from where on it is not
    looked at any more; nothing of what is too large is kept.
    """

    __slots__ = ("_buffer", "_encoding", "_limit", "_waiting_bytes", "error", "messages")

    def __init__(self, limit: int, encoding: bytes = b"identity") -> None:
        self._limit = limit
        self._encoding = encoding
        self._buffer = bytearray()
        self._waiting_bytes = 0
        self.messages: deque[bytes] = deque()
        self.error: TrioletError | None = None

    @property
    def is_amid_message(self) -> bool:
        """Part of a message has come."""
        return bool(self._buffer) and self.error is None

    def feed(self, data: bytes) -> None:
        """More of the body."""
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
                is_packed = bool(buffer[0])
                del buffer[: PREFIX_BYTES + size]
                self._keep(self._unpack(message) if is_packed else message)
        except TrioletError as error:
            self.error = error
            buffer.clear()

    def take(self) -> bytes:
        """The first of ``messages``."""
        message = self.messages.popleft()
        self._waiting_bytes -= MESSAGE_BYTES + len(message)
        return message

    def _keep(self, message: bytes) -> None:
        self._waiting_bytes += MESSAGE_BYTES + len(message)
        if self.messages and self._waiting_bytes > self._limit:
            raise RequestTooLarge(
                [],
                message=f"more than {self._limit} bytes of requests came before they were taken "
                "(--max-message-bytes)",
            )
        self.messages.append(message)

    def _check_size(self, size: int) -> None:
        if size > self._limit:
            raise RequestTooLarge(
                [],
                message=f"the request has {size} bytes, of at most {self._limit} "
                "(--max-message-bytes)",
            )

    def _unpack(self, data: bytes) -> bytes:
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            name = self._encoding.decode("latin-1")
            raise Unsupported(f"grpc-encoding {name!r} is not supported; {ENCODINGS.decode()} are")
        unpacker = zlib.decompressobj(bits)
        try:
            message = unpacker.decompress(data, self._limit + 1)
        except zlib.error:
            raise InvalidRequest([], message="the request is not compressed as it says") from None
        if len(message) > self._limit:
            raise RequestTooLarge(
                [],
                message=f"the request has more than {self._limit} bytes when it is unpacked, the "
                "most it may have (--max-message-bytes)",
            )
        if not unpacker.eof:
            raise InvalidRequest([], message="the compressed request breaks off")
        return message
