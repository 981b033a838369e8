"""As much of HTTP/2 as it takes to send pings that no gRPC library would send.

Source: RFC 9113, sections 3.4, 4.1, 6.5 (SETTINGS), 6.7 (PING), 6.8 (GOAWAY).
"""

from __future__ import annotations

import contextlib
import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
LIMIT_S = 10.0


class Connection:
    """A connection without streams that answers nothing by itself but settings."""

    def __init__(self, sock):
        self._socket = sock
        sock.settimeout(LIMIT_S)
        sock.sendall(PREFACE)
        self.send(SETTINGS)

    def send(self, kind, payload=b"", flags=0):
        header = struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + bytes(4)
        self._socket.sendall(header + payload)

    def receive(self):
        """The next frame as (kind, flags, payload); None at the connection's end."""
        header = self._read(9)
        if header is None:
            return None
        length, kind, flags = int.from_bytes(header[:3], "big"), header[3], header[4]
        payload = self._read(length)
        if kind == SETTINGS and not flags & ACK:
            self.send(SETTINGS, flags=ACK)
        return kind, flags, payload

    def ping(self, number):
        """Ping, and read up to the answer. False: the server said goodbye instead."""
        payload = struct.pack(">Q", number)
        self.send(PING, payload)
        while (frame := self.receive()) is not None:
            if frame[0] == GOAWAY:
                return False
            if frame == (PING, ACK, payload):
                return True
        return False

    def wait_closed(self):
        """Read, and answer nothing, until the server closes."""
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
    """A connection to ``HOST:PORT``."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as sock:
        yield Connection(sock)
