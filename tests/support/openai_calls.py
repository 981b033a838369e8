"""A client of OpenAI's API by raw sockets: it can stop, and leave, at any byte.

Rule: every wait is bounded by `LIMIT_S`.
"""

import contextlib
import json
import socket
import struct

LIMIT_S = 60.0
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RERANK, DRAW = "/v1/rerank", "/v1/images/generations"
CLASSIFY = "/v1/classify"
JSON = {"Content-Type": "application/json"}


def own_address():
    """Return an address of this machine that is not loopback; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # connecting a UDP socket sends nothing
        except OSError:
            return None
        return probe.getsockname()[0]


class Answer:
    """A whole HTTP answer: its ``status``, ``headers`` by lower-case name, and ``body`` of bytes.
    ``is_cut``: the connection ended before the answer did."""

    def __init__(self, status, headers, body, is_cut):
        self.status = status
        self.headers = headers
        self.body = body
        self.is_cut = is_cut

    @property
    def json(self):
        """Return the body as JSON."""
        return json.loads(self.body)

    @property
    def error(self):
        """Return the error that the body has."""
        return self.json["error"]

    @property
    def events(self):
        """Return the data of a stream's events; each but the last one as JSON."""
        return events_of(self.body)


def events_of(body):
    """Return the data of the events in the bytes of a stream."""
    lines = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


def request(path, body=None, *, verb="POST", headers=(), host="localhost"):
    """Return the bytes of a request; a ``body`` that is not bytes is written as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": host, **(JSON if body is not None else {})}
    if verb == "POST":
        lines["Content-Length"] = str(len(data))
    lines |= dict(headers)
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"{verb} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data


class Connection:
    """A connection to a server's port. Nothing is read unless it is asked for."""

    def __init__(self, port, *, host="127.0.0.1", window=None, source=None):
        self.socket = socket.socket()
        self.socket.settimeout(LIMIT_S)
        if window is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        if source is not None:
            self.socket.bind((source, 0))
        self.socket.connect((host, port))
        self._rest = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def send(self, data):
        """Send bytes; a server that has closed the connection is no error."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def read_until(self, mark):
        """Return the bytes up to ``mark``, which they include, or all if the connection ends."""
        while mark not in self._rest:
            more = self._receive()
            if not more:
                break
            self._rest += more
        end = self._rest.find(mark) + len(mark) if mark in self._rest else len(self._rest)
        taken, self._rest = self._rest[:end], self._rest[end:]
        return taken

    def _receive(self):
        try:
            return self.socket.recv(2**16)
        except ConnectionResetError:
            return b""

    def _read(self, size):
        while len(self._rest) < size and (more := self._receive()):
            self._rest += more
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def read_head(self):
        """Return an answer's status and headers; (0, {}) if the connection ends before."""
        head = self.read_until(b"\r\n\r\n").decode("latin-1")
        if not head:
            return 0, {}
        first, *lines = head.strip().split("\r\n")
        pairs = [line.split(": ", 1) for line in lines]
        return int(first.split()[1]), {name.lower(): value for name, value in pairs}

    def read_chunk(self):
        """Return the next part of a body of chunks: b"" after the last one, None if it is cut."""
        size = self.read_until(b"\r\n")
        if not size.endswith(b"\r\n"):
            return None
        number = int(size, 16)
        data = self._read(number + 2)
        return data[:-2] if len(data) == number + 2 else None

    def read(self):
        """Return a whole `Answer`."""
        return self.read_body(*self.read_head())

    def read_body(self, status, headers):
        """Return the `Answer` whose head was read."""
        if not status:
            return Answer(0, {}, b"", True)
        if "content-length" in headers:
            size = int(headers["content-length"])
            body = self._read(size)
            return Answer(status, headers, body, len(body) < size)
        parts = []
        while part := self.read_chunk():
            parts.append(part)
        return Answer(status, headers, b"".join(parts), part is None)

    def ask(self, path, body=None, **options):
        """Send a request, and return its `Answer`."""
        self.send(request(path, body, **options))
        return self.read()

    def reset(self):
        """End the connection by a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self):
        """End the connection as a program does that has done with it."""
        self.socket.close()


def ask(port, path, body=None, **options):
    """Return the `Answer` to one request on a connection of its own."""
    with Connection(port) as connection:
        return connection.ask(path, body, **options)


def ids_of(answer, choice=0):
    """Return the token ids of a choice, of a whole answer or of a stream's events."""
    bodies = (
        answer.events[:-1] if answer.headers["content-type"].startswith("text") else [answer.json]
    )
    entries = [one for body in bodies for one in body["choices"] if one["index"] == choice]
    return [token for one in entries for token in one.get("token_ids", ())]
