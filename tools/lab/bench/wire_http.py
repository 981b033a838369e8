"""A bare ASGI handler and readers over HTTP, each a process of its own (`tools.lab.bench.wire`).

The handler runs on the server that OpenAI's API has, anycorn on Trio, and writes the same bytes to
every stream at every tick, without an engine, JSON or limits.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from typing import Any

import anycorn
import trio

from tools.lab.bench.wire import answer_lines, end_by_signal, new_event_loop, say

TEXT = "/v1/completions"
END = b"]"  # once in each event of a text completion


def post(path: str, body: bytes) -> bytes:
    """Return the bytes of a request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Bare:
    """The handler, as an ASGI application that writes ``chunk``."""

    def __init__(self, chunk: bytes) -> None:
        self._chunk = chunk
        self._tick = trio.Event()

    def tick(self) -> None:
        """Have every stream write the chunk."""
        tick, self._tick = self._tick, trio.Event()
        tick.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the request, and write the chunk at every tick, until the client leaves."""
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])  # so the server knows that there is no more
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write, send)
            while (await receive())["type"] != "http.disconnect":
                pass
            nursery.cancel_scope.cancel(reason="the client has left")

    async def _write(self, send: Any) -> None:
        while True:
            await self._tick.wait()
            await send({"type": "http.response.body", "body": self._chunk, "more_body": True})


async def serve_bare(step_s: float, chunk: str) -> None:
    """Serve the handler until the process is killed."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = anycorn.Config()
    config.bind = [f"fd://{listening.fileno()}"]
    config.accesslog = config.errorlog = None
    app = Bare(chunk.encode())
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: anycorn.serve(app, config, mode="asgi", task_status=task_status)
        )
        answer_lines(lambda: None, end_by_signal)
        port = listening.getsockname()[1]
        say({"port": port, "openai_port": port})
        while True:
            await trio.sleep(step_s)
            app.tick()


class StreamClient:
    """A client of one stream at a time, with one connection, and with another when the server ends
    that, as it does after a thousand requests."""

    def __init__(self, address: str) -> None:
        self._address = address.split(":")
        self._connect()

    def _connect(self) -> None:
        host, port = self._address
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes, mark: bytes = b"") -> float:
        """Send a request, read the stream to its end, and return when ``mark`` was first seen, by
        `time.perf_counter`."""
        self._socket.sendall(request)
        seen, first = b"", 0.0
        while not seen.endswith(b"0\r\n\r\n"):
            data = self._socket.recv(2**16)
            if not data:
                raise RuntimeError(f"the server closed after {seen!r}")
            seen += data
            if not first and mark in seen:
                first = time.perf_counter()
        if b"connection: close" in seen.partition(b"\r\n\r\n")[0].lower():
            self.close()
            self._connect()
        return first

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Reader(asyncio.Protocol):
    """A stream's client. Adds the events and bytes that it reads to ``counts``, and sets its
    ``is_running`` after two events."""

    def __init__(self, request: bytes, counts: list[int]) -> None:
        self._request = request
        self._counts = counts
        self._num_seen = 0
        self.is_running = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count."""
        num_events = data.count(END)
        self._counts[0] += num_events
        self._counts[1] += len(data)
        if self._num_seen < 2:
            self._num_seen += num_events
            if self._num_seen >= 2:
                self.is_running.set_result(None)


async def read_streams(address: str, streams: int, body: str) -> None:
    """Open every stream, each on a connection of its own, and count events and bytes.

    The process is ready when each stream has had two events.
    Cancellation: leaves the connections open.
    """
    counts = [0, 0]
    host, port = address.split(":")
    loop = asyncio.get_running_loop()
    request = post(TEXT, body.encode())
    opened = [
        await loop.create_connection(lambda: Reader(request, counts), host, int(port))
        for _ in range(streams)
    ]
    await asyncio.gather(*(reader.is_running for _, reader in opened))
    done = asyncio.Event()
    answer_lines(lambda: counts, lambda: loop.call_soon_threadsafe(done.set))
    say({})
    await done.wait()
    for transport, _ in opened:
        transport.close()


def run(kind: str, settings: dict[str, Any]) -> None:
    """Run a process of this file's kinds."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if kind == "bare":
        trio.run(serve_bare, settings["step_s"], settings["chunk"])
    else:
        new_event_loop().run_until_complete(read_streams(**settings))
