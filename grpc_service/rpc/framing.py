"""Messages in the body of a request or an answer. Bytes go in, messages come out, nothing waits.

Source: gRPC over HTTP2 (PROTOCOL-HTTP2.md), Compression (compression.md).
"""

from __future__ import annotations

import mmap
import zlib
from collections import deque
from typing import TYPE_CHECKING

from grpc_service.rpc.errors import (
    InvalidMessage,
    MessageTooLarge,
    RpcError,
    UnsupportedEncoding,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX_BYTES = 5
MESSAGE_BYTES = 64  # what Python needs to keep a message, beside the message's own bytes
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}  # zlib's numbers for the two formats
COMPRESSIONS = frozenset(_WINDOW_BITS)
# So many decompressed bytes per compressed byte count as usual. Text has three to ten.
INFLATION_FREE = 16
DECOMPRESSED_PART_BYTES = 2**16  # decompressing them takes about a quarter of a millisecond
_COMPRESSED_PART_BYTES = 2**14  # passed to zlib at once, as it copies bytes that it does not use
# The buffer of a body is emptied into a block of the heap when it has this many bytes, and blocks
# into a segment, which is a memory mapping of its own. Buffers that grow side by side, and blocks
# that are freed, leave holes in the heap, which nothing fills (`python -m tools.lab.bench abuse`).
_BLOCK_BYTES = 2**14
_SEGMENT_BYTES = 2**20
_LEVEL = 1  # zlib's level: higher ones take several times as long to save a few per cent
_IDENTITY = b"identity"


def compressor(encoding: str) -> zlib._Compress:
    """Return zlib's object that compresses by one of `COMPRESSIONS`."""
    return zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[encoding.encode()])


class _Pieces:
    """The first ``num_bytes`` of a message. Segments hold what came first, and blocks what came
    since the last segment was made. A segment's memory returns to the system when it is dropped.
    """

    __slots__ = ("_blocks", "_num_in_blocks", "_segments", "num_bytes")

    def __init__(self) -> None:
        self._segments: list[mmap.mmap] = []
        self._blocks: list[bytes] = []
        self._num_in_blocks = 0
        self.num_bytes = 0

    def append(self, piece: bytes) -> None:
        """Add the next bytes of the message."""
        self._blocks.append(piece)
        self._num_in_blocks += len(piece)
        self.num_bytes += len(piece)
        if self._num_in_blocks >= _SEGMENT_BYTES:
            segment = mmap.mmap(-1, self._num_in_blocks)
            segment.write(b"".join(self._blocks))
            self._segments.append(segment)
            self._blocks.clear()
            self._num_in_blocks = 0

    def take(self, last: bytes = b"") -> bytes:
        """Remove all bytes, and return them with ``last`` behind them."""
        if not self.num_bytes:
            return last
        joined = b"".join([*self._segments, *self._blocks, last])
        self.clear()
        return joined

    def clear(self) -> None:
        """Remove all bytes."""
        self._segments.clear()
        self._blocks.clear()
        self._num_in_blocks = self.num_bytes = 0


class MessageReader:
    """Splits a body into messages of at most ``limit`` bytes each, and decompresses them.

    ``messages`` holds the messages that `take` has not returned yet; together they have at most
    ``limit`` bytes, unless there is only one. ``error`` is the first error of the body; whatever
    follows it is ignored. Nothing of a message that is too large is kept.

    While a message of several parts ``is_decompressing``, the bytes after it wait; the owner calls
    `decompress_part`. ``inflated_bytes`` counts what decompression made beyond `INFLATION_FREE`
    times the compressed bytes; its reader resets it.
    """

    __slots__ = (
        *("_buffer", "_encoding", "_free_bytes", "_is_compressed", "_limit", "_missing"),
        *("_num_compressed", "_parts", "_pieces", "_waiting_bytes"),
        *("error", "inflated_bytes", "messages"),
    )

    def __init__(self, limit: int, encoding: bytes = _IDENTITY) -> None:
        self._limit = limit
        self._encoding = encoding
        self._parts: Iterator[bytes] | None = None  # parts of the message being decompressed
        self._num_compressed = 0  # compressed bytes of the message that is being decompressed
        self._free_bytes = 0  # decompressed bytes that are left before more count as inflated
        self.inflated_bytes = 0
        self._buffer = bytearray()  # the last bytes received
        self._missing: int | None = None  # bytes of the current message still to come
        # The bytes so far of the message whose prefix has come, or of the one being decompressed.
        self._pieces = _Pieces()
        self._is_compressed = False
        self._waiting_bytes = 0
        self.messages: deque[tuple[bytes, bool]] = deque()  # each with whether it came compressed
        self.error: RpcError | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept: of whole messages, and of one that is incomplete."""
        num_compressed = self._num_compressed if self.is_decompressing else 0
        num_amid = len(self._buffer) + self._pieces.num_bytes + num_compressed
        if self._missing is not None:
            num_amid += PREFIX_BYTES
        return num_amid + self._waiting_bytes

    @property
    def is_decompressing(self) -> bool:
        """Whether a message is being decompressed."""
        return self._parts is not None

    def fail(self, error: RpcError) -> None:
        """Drop all messages and bytes, keep ``error``, and ignore what follows."""
        self._stop(error)
        self.messages.clear()
        self._waiting_bytes = 0

    @property
    def is_amid_message(self) -> bool:
        """Whether the body so far ends inside a message."""
        is_begun = self._missing is not None or bool(self._buffer)
        return is_begun and self.error is None and not self.is_decompressing

    @property
    def num_missing(self) -> int:
        """Bytes that an incomplete message lacks; 0 before its prefix has come."""
        return max(0, (self._missing or 0) - len(self._buffer))

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        if self.error is not None:
            return
        self._buffer += data
        if not self.is_decompressing:
            self._split()

    def decompress_part(self) -> None:
        """Decompress the next part of a message, if there is one; after the last part go on with
        what follows the message."""
        if self._parts is None:
            return
        try:
            self._take_part(self._parts)
        except RpcError as error:
            self._stop(error)
        else:
            if not self.is_decompressing:
                self._split()

    def _split(self) -> None:
        room = DECOMPRESSED_PART_BYTES
        try:
            while not self.is_decompressing and (message := self._next_message()) is not None:
                if self._is_compressed:
                    self._num_compressed = len(message)
                    self._free_bytes = INFLATION_FREE * len(message)
                    self._parts = decompress(message, self._encoding, self._limit)
                    while self._parts is not None and room > 0:
                        room -= self._take_part(self._parts)
                else:
                    self._keep(message, is_compressed=False)
        except RpcError as error:
            self._stop(error)

    def _next_message(self) -> bytes | None:
        """Remove the next message as it came, without its prefix; None if it is not complete."""
        buffer = self._buffer
        if self._missing is None:
            if len(buffer) < PREFIX_BYTES:
                return None
            size = int.from_bytes(buffer[1:PREFIX_BYTES], "big")
            if size > self._limit:
                raise MessageTooLarge(f"the request has {size} bytes, of at most {self._limit}")
            if buffer[0] > 1:
                raise InvalidMessage(f"a message begins with {buffer[0]}, neither 0 nor 1")
            self._is_compressed, self._missing = bool(buffer[0]), size
            del buffer[:PREFIX_BYTES]
        if len(buffer) < self._missing:
            if len(buffer) >= _BLOCK_BYTES:
                self._missing -= len(buffer)
                self._pieces.append(bytes(buffer))
                buffer.clear()
            return None
        last = bytes(buffer[: self._missing])
        del buffer[: self._missing]
        self._missing = None
        return self._pieces.take(last)

    def _stop(self, error: RpcError) -> None:
        """Ignore what follows an error."""
        self.error = error
        self._parts = self._missing = None
        self._pieces.clear()
        self._buffer.clear()

    def _take_part(self, parts: Iterator[bytes]) -> int:
        """Append the next decompressed part to the message, and return its size in bytes. After
        the last part, keep the whole message and return 0."""
        part = next(parts, None)
        if part is None:
            self._parts = None
            self._keep(self._pieces.take(), is_compressed=True)
            return 0
        self._pieces.append(part)
        self.inflated_bytes += max(0, len(part) - max(0, self._free_bytes))
        self._free_bytes -= len(part)
        return len(part)

    def take(self) -> tuple[bytes, bool]:
        """Remove and return the first of ``messages``, and whether it came compressed."""
        message, is_compressed = self.messages.popleft()
        self._waiting_bytes -= MESSAGE_BYTES + len(message)
        return message, is_compressed

    def _keep(self, message: bytes, *, is_compressed: bool) -> None:
        self._waiting_bytes += MESSAGE_BYTES + len(message)
        if self.messages and self._waiting_bytes > self._limit:
            raise MessageTooLarge(
                f"more than {self._limit} bytes of requests came before they were taken"
            )
        self.messages.append((message, is_compressed))


def decompress(data: bytes, encoding: bytes, limit: int) -> Iterator[bytes]:
    """Yield the parts of a compressed message, of at most `DECOMPRESSED_PART_BYTES` each.

    Raises:
        RpcError: the encoding is unknown, or the data is not compressed by it, or the message has
            more than ``limit`` bytes.
    """
    bits = _WINDOW_BITS.get(encoding)
    if encoding == _IDENTITY:
        raise InvalidMessage("a message is marked as compressed, and grpc-encoding is not set")
    if bits is None:
        name = encoding.decode("latin-1")
        raise UnsupportedEncoding(
            f"grpc-encoding {name!r} is not supported; identity, deflate and gzip are"
        )
    decompressor, size, num_used = zlib.decompressobj(bits), 0, 0
    while num_used < len(data) and not decompressor.eof:
        piece = data[num_used : num_used + _COMPRESSED_PART_BYTES]
        num_used += len(piece)
        while piece and not decompressor.eof:
            try:
                part = decompressor.decompress(piece, DECOMPRESSED_PART_BYTES)
            except zlib.error:
                raise InvalidMessage("the request is not compressed as it says") from None
            size += len(part)
            if size > limit:
                raise MessageTooLarge(
                    f"the request has more than {limit} bytes when it is decompressed, the most it "
                    "may have"
                )
            yield part
            piece = decompressor.unconsumed_tail
    if not decompressor.eof:
        raise InvalidMessage("the compressed request breaks off")
    if decompressor.unused_data or num_used < len(data):
        raise InvalidMessage("the compressed request goes on after its end")
