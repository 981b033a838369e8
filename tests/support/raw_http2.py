"""A client that sends a request as the bytes it is given, and reports how the server ended it.

It uses neither grpcio nor h2: frames are packed here, and headers by hpack, so that a test can send
what no library would.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import unquote

from hpack import Decoder, Encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITIZED = 0x4, 0x8, 0x20
GET_STATS = "/triolet.v1.Control/GetStats"
CALL = (
    *((b":method", b"POST"), (b":scheme", b"http")),
    *((b":authority", b"localhost"), (b"te", b"trailers")),
)
CODES = (
    *("NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT"),
    *("STREAM_CLOSED", "FRAME_SIZE_ERROR", "REFUSED_STREAM", "CANCEL", "COMPRESSION_ERROR"),
    *("CONNECT_ERROR", "ENHANCE_YOUR_CALM", "INADEQUATE_SECURITY", "HTTP_1_1_REQUIRED"),
)


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Return one frame."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def code_name(number: int) -> str:
    """Return the name of an HTTP/2 error code."""
    return CODES[number] if number < len(CODES) else str(number)


@dataclass
class End:
    """How a stream ended: with ``headers`` (initial ones and trailers), ``body`` and perhaps a
    reset; or with the connection's ``goaway``; or the connection was ``closed`` or said nothing."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    reset: str = ""
    goaway: str = ""
    is_over: bool = False
    is_closed: bool = False

    def __str__(self) -> str:
        if "grpc-status" in self.headers:
            return f"grpc {self.headers['grpc-status']}"
        if self.is_over and ":status" in self.headers:
            return f"http {self.headers[':status']}"
        if self.reset:
            return f"reset {self.reset}"
        if self.goaway:
            return f"goaway {self.goaway}"
        return "closed" if self.is_closed else "nothing"

    @property
    def message(self) -> str:
        """The sentence of the status."""
        return unquote(self.headers.get("grpc-message", ""))


class RawClient:
    """One connection, to a host and port or to ``HOST:PORT``. ``settings`` are sent with the
    preface."""

    def __init__(
        self, address: tuple[str, int] | str, settings: Sequence[tuple[int, int]] = ()
    ) -> None:
        if isinstance(address, str):
            host, _, port = address.rpartition(":")
            address = (host, int(port))
        self.sock = socket.create_connection(address, timeout=5)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.encoder, self.decoder = Encoder(), Decoder()
        self.ends: dict[int, End] = {}
        self.goaway = ""
        self.heard: list[tuple[int, int, int, bytes]] = []  # frames that came, without SETTINGS
        self.answers_pings = True
        self.num_calls = 0
        self.pings: list[bytes] = []
        self.settings: dict[int, int] = {}
        self.is_closed = False
        self._buffer = b""
        self._block: tuple[int, int, bytes] | None = None
        body = b"".join(struct.pack(">HI", *one) for one in settings)
        self.say(PREFACE + frame(SETTINGS, 0, 0, body))

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def say(self, data: bytes) -> None:
        """Send bytes; a server that has closed does not matter."""
        try:
            self.sock.sendall(data)
        except OSError:
            self.is_closed = True

    def headers(
        self, stream: int, fields: Iterable[tuple[bytes, bytes]], *, is_last: bool = False
    ) -> bytes:
        """Return the frame of a request's headers."""
        block = self.encoder.encode(fields, huffman=False)
        flags = END_HEADERS | (END_STREAM if is_last else 0)
        return frame(HEADERS, flags, stream, block)

    def call(self, path: str, message: bytes) -> End:
        """Begin a gRPC call with one message, on a new stream; return its future `End`."""
        self.num_calls += 1
        stream = 2 * self.num_calls - 1
        fields = [(b":path", path.encode()), *CALL, (b"content-type", b"application/grpc")]
        body = bytes(1) + len(message).to_bytes(4, "big") + message
        self.say(self.headers(stream, fields) + frame(DATA, END_STREAM, stream, body))
        return self.ends.setdefault(stream, End())

    def ask(self, path: str, message: bytes = b"", limit_s: float = 10.0) -> bytes:
        """Call a method, also on a connection whose server has sent GOAWAY, and return its answer.

        Raises:
            AssertionError: the call did not end with OK.
        """
        end = self.call(path, message)
        self.wait_for(lambda: end.is_over, limit_s)
        assert str(end) == "grpc 0", f"{end}: {end.message}"
        return end.body[5:]

    def wait(self, stream: int, limit_s: float = 2.0) -> End:
        """Read until a stream has ended, the connection is lost, or ``limit_s`` has passed."""
        until = time.monotonic() + limit_s
        end = self.ends.setdefault(stream, End())
        while not (end.is_over or self.is_closed):
            left = until - time.monotonic()
            if left <= 0 or not self._read(left):
                break
        end.goaway, end.is_closed = self.goaway, self.is_closed
        return end

    def wait_for(self, found: Callable[[], bool], limit_s: float = 2.0) -> bool:
        """Read until ``found()`` is true; return whether it became so."""
        until = time.monotonic() + limit_s
        while not found():
            left = until - time.monotonic()
            if self.is_closed or left <= 0 or not self._read(left):
                return found()
        return True

    def _read(self, limit_s: float) -> bool:
        self.sock.settimeout(limit_s)
        try:
            data = self.sock.recv(2**16)
        except TimeoutError:
            return False
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
            return True
        self._buffer += data
        while len(self._buffer) >= 9:
            size = int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < 9 + size:
                break
            kind, flags, stream = struct.unpack(">BBI", self._buffer[3:9])
            body, self._buffer = self._buffer[9 : 9 + size], self._buffer[9 + size :]
            self._take(kind, flags, stream & 0x7FFFFFFF, body)
        return True

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        end = self.ends.setdefault(stream, End()) if stream else End()
        if kind != SETTINGS:
            self.heard.append((kind, flags, stream, body))
        if kind in (HEADERS, CONTINUATION):
            first = self._block or (flags, stream, b"")
            self._block = (first[0], stream, first[2] + body)
            if flags & END_HEADERS:
                found = self.decoder.decode(self._block[2], raw=True)
                end.headers |= {name.decode(): value.decode("latin-1") for name, value in found}
                end.is_over |= bool(self._block[0] & END_STREAM)
                self._block = None
        elif kind == DATA:
            end.body += body
            end.is_over |= bool(flags & END_STREAM)
        elif kind == RST_STREAM:
            end.reset, end.is_over = code_name(int.from_bytes(body, "big")), True
        elif kind == GOAWAY:
            self.goaway = code_name(int.from_bytes(body[4:8], "big"))
        elif kind == SETTINGS and not flags & ACK:
            for begin in range(0, len(body), 6):
                number, value = struct.unpack(">HI", body[begin : begin + 6])
                self.settings[number] = value
            self.say(frame(SETTINGS, ACK, 0))
        elif kind == PING:
            if flags & ACK:
                self.pings.append(body)
            elif self.answers_pings:
                self.say(frame(PING, ACK, 0, body))


class Windows:
    """How many bytes a client may still send: on the connection, and on each stream."""

    def __init__(self) -> None:
        self._connection = self._initial = 65_535
        self._streams: dict[int, int] = {}
        self._buffer = b""

    def has_room(self, frames: bytes) -> bool:
        """Return whether the DATA in these whole frames may be sent."""
        wanted = _data_sizes(frames)
        return sum(wanted.values()) <= self._connection and all(
            size <= self._streams.get(stream, self._initial) for stream, size in wanted.items()
        )

    def spend(self, frames: bytes) -> None:
        """Count whole frames that are being sent."""
        for stream, size in _data_sizes(frames).items():
            self._connection -= size
            self._streams[stream] = self._streams.get(stream, self._initial) - size

    def feed(self, data: bytes) -> None:
        """Take what the server has sent."""
        self._buffer += data
        while len(self._buffer) >= 9:
            size = int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < 9 + size:
                return
            kind, flags, stream = struct.unpack(">BBI", self._buffer[3:9])
            body, self._buffer = self._buffer[9 : 9 + size], self._buffer[9 + size :]
            if kind == WINDOW_UPDATE:
                self._open(stream, int.from_bytes(body, "big"))
            elif kind == SETTINGS and not flags & ACK:
                self._set(body)

    def _open(self, stream: int, increment: int) -> None:
        if stream:
            self._streams[stream] = self._streams.get(stream, self._initial) + increment
        else:
            self._connection += increment

    def _set(self, body: bytes) -> None:
        for begin in range(0, len(body), 6):
            number, value = struct.unpack(">HI", body[begin : begin + 6])
            if number == 4:
                for stream in self._streams:
                    self._streams[stream] += value - self._initial
                self._initial = value


@lru_cache(maxsize=16)
def _data_sizes(frames: bytes) -> Mapping[int, int]:
    """Return the bytes of DATA in whole frames, by stream."""
    sizes = dict[int, int]()
    for kind, stream, size in _heads(frames):
        if kind == DATA:
            sizes[stream] = sizes.get(stream, 0) + size
    return sizes


def _heads(frames: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each frame's kind, stream and size."""
    begin = 0
    while begin + 9 <= len(frames):
        size = int.from_bytes(frames[begin : begin + 3], "big")
        kind, _, stream = struct.unpack(">BBI", frames[begin + 3 : begin + 9])
        yield kind, stream, size
        begin += 9 + size
