"""Cuts what a client sends into frames.

h2 makes objects of every frame, some 30 µs of work whatever the frame says. With the frames cut
here, `grpc_service.rpc.http2` acts by itself on those that need no more state than a window, and
passes the others to h2 as they came.

Source: RFC 9113, sections 3.4, 4.1 and 6.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFACE_BYTES = 24
HEAD_BYTES = 9
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)
UNCUT = -1  # the kind of bytes that h2 has to look at, whatever they are
END_STREAM = ACK = 0x1
END_HEADERS, PADDED = 0x4, 0x8
_STREAM_BITS = 2**31 - 1
_HEAD = Struct(">HBBBI")  # the length's upper 16 and lower 8 bits, kind, flags and stream


class Frame(NamedTuple):
    """One frame, or a part of one that is too large. ``data`` are its bytes so far, head
    included; ``size`` is the length of its body in bytes, as the head has it."""

    kind: int
    flags: int
    stream_id: int
    data: bytes
    size: int

    @property
    def number(self) -> int:
        """The body as a number of 31 bits: a window's increment, or the stream that a priority
        depends on."""
        return int.from_bytes(self.data[HEAD_BYTES : HEAD_BYTES + 4], "big") & _STREAM_BITS


class FrameSplitter:
    """Cuts one connection's bytes. Frames longer than ``size_max`` are not waited for.

    The connection's preface, the head of a frame that is too long, and whatever comes while a block
    of headers is incomplete have the kind `UNCUT`: only h2 knows whether they are errors.
    ``num_block_bytes`` is the size of the last block of headers as far as it has come.
    ``num_whole`` counts complete frames, and a block of headers of several frames once.
    ``is_amid``: the preface, a frame or a block of headers is incomplete.
    """

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._rest = b""
        self._preface_missing = PREFACE_BYTES
        self._is_in_block = False  # only CONTINUATION may follow
        self.num_block_bytes = 0
        self.num_whole = 0
        self.is_amid = True

    def split(self, data: bytes) -> Iterator[Frame]:
        """Yield every frame that ``data`` completes."""
        buffer = self._rest + data if self._rest else data
        begin, end = 0, len(buffer)
        if self._preface_missing:
            begin = min(end, self._preface_missing)
            self._preface_missing -= begin
            yield Frame(UNCUT, 0, 0, buffer[:begin], begin)
        while end - begin >= HEAD_BYTES:
            high, low, kind, flags, stream = _HEAD.unpack_from(buffer, begin)
            size = high << 8 | low
            if size > self._size_max:
                yield Frame(UNCUT, 0, 0, buffer[begin:], size)
                begin = end
                break
            after = begin + HEAD_BYTES + size
            if after > end:
                break
            if self._is_in_block:
                self.num_block_bytes += size
                self._is_in_block = kind == CONTINUATION and not flags & END_HEADERS
                yield Frame(UNCUT, 0, 0, buffer[begin:after], size)
            else:
                self.num_block_bytes = size
                self._is_in_block = kind == HEADERS and not flags & END_HEADERS
                yield Frame(kind, flags, stream & _STREAM_BITS, buffer[begin:after], size)
            begin = after
            self.num_whole += not self._is_in_block
        self._rest = buffer[begin:]
        self.is_amid = bool(self._rest or self._is_in_block or self._preface_missing)
