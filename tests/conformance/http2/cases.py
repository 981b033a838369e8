"""How a case of h2spec is written: the client, the frames, what can be expected, and the register.

h2spec (https://github.com/summerwind/h2spec) checks a server by some 150 cases, each a few frames
and what has to come back. The facts are h2spec's, with its numbers; the words and the code are
ours. h2spec asks a web server for a page. Here a request is a gRPC call of one of these methods:

| method | what it does |
|---|---|
| `ECHO` | takes one message and answers it |
| `HELLO` | takes any number of messages and answers with one |
| `WAIT` | takes any number of messages and never answers, so that its stream stays half-closed |

We expect more than h2spec does. To h2spec a closed connection is a good answer to every mistake;
here the error has to be named, and a mistake on one stream must not end the connection. Where a
server should do nothing, it has to answer a ping that comes afterwards, and no timer is needed.
"""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.wrappers_pb2 import StringValue

from tests.support.raw_http2 import (
    CODES,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    End,
    RawClient,
    frame,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable

    Fields = list[tuple[bytes, bytes]]

ECHO, HELLO, WAIT = "/h2spec.Test/Echo", "/h2spec.Test/Hello", "/h2spec.Test/Wait"
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 1, 2, 3
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 4, 5, 6
WINDOW, WINDOW_MAX = 2**16 - 1, 2**31 - 1
FRAME_BYTES = 2**14  # the largest frame that every server takes
LIMIT_S = 10.0  # seconds for an answer, which only a failing case uses up
FILLER = (b"x-filler", b"x" * 4000)  # repeated, this header makes a block longer than a frame


# ---- frames


def framed(text: str) -> bytes:
    message = StringValue(value=text).SerializeToString()
    return b"\0" + len(message).to_bytes(4, "big") + message


MESSAGE = framed("test")


def headers(stream: int, block: bytes, *, is_last: bool = True, is_whole: bool = True) -> bytes:
    """Return HEADERS; ``is_last``: the request has no body, ``is_whole``: no CONTINUATION comes."""
    flags = (END_STREAM if is_last else 0) | (END_HEADERS if is_whole else 0)
    return frame(HEADERS, flags, stream, block)


def continuation(stream: int, block: bytes, *, is_whole: bool = True) -> bytes:
    """Return CONTINUATION; ``is_whole``: it ends the block of headers."""
    return frame(CONTINUATION, END_HEADERS if is_whole else 0, stream, block)


def data(stream: int, body: bytes = MESSAGE, *, is_last: bool = True) -> bytes:
    return frame(DATA, END_STREAM if is_last else 0, stream, body)


def dependency(on: int = 0, weight: int = 255, *, is_exclusive: bool = False) -> bytes:
    """Return the five bytes that say on which stream another one depends."""
    return struct.pack(">IB", is_exclusive << 31 | on, weight)


def priority(stream: int, body: bytes | None = None) -> bytes:
    return frame(PRIORITY, 0, stream, dependency() if body is None else body)


def reset(stream: int, code: int = CODES.index("CANCEL")) -> bytes:
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def goaway(code: int, text: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, struct.pack(">II", 0, code) + text)


def window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


# ---- the client


class Received(NamedTuple):
    """A frame that the server has sent."""

    kind: int
    flags: int
    stream: int
    body: bytes


class Client(RawClient):
    """A connection, over TLS if ``tls`` is given, that keeps every frame it gets.

    ``is_stepwise``: wait after each frame of `send` until the server has acted on it.
    """

    _may_speak = False  # keeps the base class from sending the preface before TLS has begun

    def __init__(
        self, port: int, tls: ssl.SSLContext | None = None, *, is_stepwise: bool = False
    ) -> None:
        super().__init__(("127.0.0.1", port))
        self.scheme = b"http"
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname="localhost")
            self.scheme = b"https"
        self.frames: list[Received] = []
        self._may_speak = True
        self._is_stepwise = is_stepwise
        self._is_in_block = False  # whether only CONTINUATION may follow
        self._pings = (struct.pack(">Q", number) for number in itertools.count(1))

    def say(self, data: bytes) -> None:
        """Send bytes; ignore that the server has closed."""
        if self._may_speak:
            super().say(data)

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        self.frames.append(Received(kind, flags, stream, body))
        super()._take(kind, flags, stream, body)

    def shake_hands(self) -> None:
        """Send the preface, and wait until both sides know each other's settings."""
        self.say(PREFACE + settings((INITIAL_WINDOW_SIZE, WINDOW)))
        self.wait_frames(SETTINGS, 2)

    def wait_frames(self, kind: int, count: int = 1) -> list[Received]:
        """Wait until so many frames of a kind have come in all; return them."""
        found: list[Received] = []

        def is_there() -> bool:
            found[:] = [one for one in self.frames if one.kind == kind]
            return len(found) >= count

        if not self.wait_for(is_there, LIMIT_S):
            raise UnmetError(f"{len(found)} frames of kind {kind} came, and not {count}")
        return found

    def send(self, *whole: bytes) -> None:
        if not self._is_stepwise:
            self.say(b"".join(whole))
        for one in whole:
            kind, flags = one[3], one[4]
            if kind in (HEADERS, CONTINUATION):
                self._is_in_block = not flags & END_HEADERS
            if self._is_stepwise:
                self.say(one)
                if not self._is_in_block:
                    self.settle()

    def settle(self) -> None:
        """Wait until the server has acted on everything that was sent: until it has answered a ping
        or ended the connection. Inside a block of headers, where a ping would be an error, wait for
        the end only."""
        payload = next(self._pings)
        if not self._is_in_block:
            self.say(frame(PING, 0, 0, payload))
        if not (self.wait_for(lambda: payload in self.pings, LIMIT_S) or self.is_closed):
            raise UnmetError("neither an answer nor an end")

    # ---- requests

    def fields(self, path: str = ECHO) -> Fields:
        return [
            (b":method", b"POST"),
            (b":scheme", self.scheme),
            (b":path", path.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        ]

    def encode(self, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
        return self.encoder.encode(fields, huffman=False)

    def call(self, path: str = HELLO, *, stream: int = 1, is_last: bool = True) -> bytes:
        """Return the HEADERS of a gRPC call; with ``is_last`` the call has no messages."""
        return headers(stream, self.encode(self.fields(path)), is_last=is_last)


# ---- what is expected


class UnmetError(Exception):
    """The server did something else than expected; the text says what."""


def outcome(client: Client, stream: int = 1) -> str:
    """Return how the server has reacted to all frames: ``goaway`` with the error, ``closed``
    without a GOAWAY, ``reset`` with the error if it reset ``stream``, or ``goes on``."""
    client.settle()
    if client.goaway:
        return f"goaway {client.goaway}" + ("" if client.is_closed else ", and goes on")
    if client.is_closed:
        return "closed"
    code = client.ends.get(stream, End()).reset
    return f"reset {code}" if code else "goes on"


def expect(found: str, *expected: str) -> None:
    """Expect one of these outcomes.

    Raises: UnmetError: another outcome.
    """
    if found not in expected:
        raise UnmetError(found)


def goes_on(client: Client) -> None:
    """Expect that nothing is reset, and that the connection stays open."""
    expect(outcome(client), "goes on")


def stream_error(client: Client, *codes: str, stream: int = 1) -> None:
    """Expect that the stream is reset with one of these errors, and that the connection stays."""
    expect(outcome(client, stream), *[f"reset {code}" for code in codes])


def connection_error(client: Client, *codes: str) -> None:
    """Expect that the connection ends with one of these errors."""
    expect(outcome(client), *[f"goaway {code}" for code in codes])


def answers(client: Client, how: str = "grpc 0") -> End:
    """Expect that the request on stream 1 is answered as ``how`` says (the text of an `End`)."""
    end = client.wait(1, LIMIT_S)
    expect(str(end), how)
    return end


def answers_bytes(client: Client, size: int, count: int = 1) -> None:
    """Expect ``count`` DATA frames in all, of which the last one has ``size`` bytes."""
    found = client.wait_frames(DATA, count)[-1]
    expect(f"{len(found.body)} bytes", f"{size} bytes")


# ---- the register


class Case(NamedTuple):
    """A case of h2spec. ``begins``: the case sends the preface itself."""

    title: str
    run: Callable[[Client], None]
    begins: bool


CASES: dict[str, Case] = {}


def case(
    numbers: str, title: str, *, begins: bool = False
) -> Callable[[Callable[[Client], None]], Callable[[Client], None]]:
    """Register a function as h2spec's case of this number. h2spec has some cases twice: their
    numbers are separated by a space."""

    def register(run: Callable[[Client], None]) -> Callable[[Client], None]:
        for number in numbers.split():
            assert number not in CASES, number
            CASES[number] = Case(title, run, begins)
        return run

    return register
