"""A small HTTP/2 client that can send what no gRPC library would send.

Source: RFC 9113, sections 3.4, 4.1, 6.1 (DATA) to 6.10 (CONTINUATION); RFC 7541, section 6.2.2
(literal header fields without indexing).
"""

import contextlib
import itertools
import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
CONTINUATION = 9
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW = 4
LIMIT_S = 10.0


def frame(kind, payload=b"", flags=0, stream=0):
    """Return a frame's bytes."""
    length = struct.pack(">I", len(payload))[1:]
    return length + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def setting(identifier, value):
    """Return the payload of SETTINGS with one setting."""
    return struct.pack(">HI", identifier, value)


def field(name, value):
    """Return a header field, encoded literally."""
    parts = (name.encode(), value.encode())
    assert all(len(part) < 127 for part in parts)
    return b"\x00" + b"".join(bytes((len(part),)) + part for part in parts)


def headers(path):
    """Return the header block of a gRPC call."""
    return b"".join(
        itertools.starmap(
            field,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", "localhost"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
            ],
        )
    )


class Connection:
    """A connection that answers only SETTINGS by itself, and only with ``answers_settings``."""

    def __init__(self, sock):
        self._socket = sock
        self._streams = itertools.count(1, 2)
        self.answers_settings = True
        sock.settimeout(LIMIT_S)
        sock.sendall(PREFACE)
        self.send(SETTINGS)

    def send(self, kind, payload=b"", flags=0, stream=0):
        """Send one frame."""
        self._socket.sendall(frame(kind, payload, flags, stream))

    def open(self, path, request=None):
        """Begin a call, with its one request or without, and return the stream's number."""
        stream = next(self._streams)
        self.send(HEADERS, headers(path), END_HEADERS, stream)
        if request is not None:
            message = b"\x00" + struct.pack(">I", len(request)) + request
            self.send(DATA, message, END_STREAM, stream)
        return stream

    def drain(self):
        """Read and drop what has arrived."""
        self._socket.settimeout(0.005)
        try:
            while self._socket.recv(65536):
                pass
        except TimeoutError:
            pass
        finally:
            self._socket.settimeout(LIMIT_S)

    def receive(self):
        """Return the next frame as (kind, flags, payload); None at the connection's end."""
        header = self._read(9)
        if header is None:
            return None
        length, kind, flags = int.from_bytes(header[:3], "big"), header[3], header[4]
        payload = self._read(length)
        if kind == SETTINGS and not flags & ACK and self.answers_settings:
            self.send(SETTINGS, flags=ACK)
        return kind, flags, payload

    def ping(self, number):
        """Send PING and read up to its answer. Return False if the server sends GOAWAY instead."""
        payload = struct.pack(">Q", number)
        self.send(PING, payload)
        while (got := self.receive()) is not None:
            if got[0] == GOAWAY:
                return False
            if got == (PING, ACK, payload):
                return True
        return False

    def wait_closed(self):
        """Read until the server closes, and answer nothing."""
        with contextlib.suppress(ConnectionError):
            while self.receive() is not None:
                pass

    def _read(self, count):
        data = b""
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                return None
            data += piece
        return data


@contextlib.contextmanager
def connect(address):
    """Return a connection to ``HOST:PORT``."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as sock:
        yield Connection(sock)
