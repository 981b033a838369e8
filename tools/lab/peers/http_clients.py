"""Clients of a server of OpenAI's API, in a process of their own: `python -m
tools.lab.peers.http_clients KIND ADDRESS VOCAB`; ``KIND`` is not looked at, as all kinds get the
same requests.

Loads and measurements are those of `tools.lab.peers.clients`, with a connection for each client,
which it keeps. The requests are streamed completions of token ids. A server may put several tokens
into an event and withholds incomplete characters, so that the gaps are those between events, and
the tokens are those of the usage that comes last.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from tools.lab.peers.clients import Load, run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AsyncExitStack

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BEGIN, DONE = b"data: ", b"[DONE]"


class Completions:
    """The requests."""

    def request(self, name: str, ids: list[int], max_tokens: int) -> bytes:
        """Return the bytes of a request."""
        body = {
            **{"prompt": ids, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True},
            **{"stream": True, "stream_options": {"include_usage": True}},
        }
        data = json.dumps(body).encode()
        return f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Kept:
    """A client's connection, which is opened anew where the server has closed it: llama-server
    announces that it keeps connections, and closes them after a stream."""

    def __init__(self, address: str) -> None:
        self._address = address.split(":")
        self._opened: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[asyncio.StreamReader, bytes]:
        """Send a request, and return the reader of its answer's body, and the head."""
        while True:
            is_new = self._opened is None
            if self._opened is None:
                host, port = self._address
                self._opened = await asyncio.open_connection(host, int(port))
            reader, writer = self._opened
            try:
                writer.write(request)
                return reader, (await reader.readuntil(b"\r\n\r\n")).lower()
            except (asyncio.IncompleteReadError, ConnectionError):
                self.close()
                if is_new:
                    raise

    def close(self) -> None:
        """Close the connection."""
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None


class HttpLoad(Load):
    """Sends requests to a server over HTTP."""

    async def _connect(self, stack: AsyncExitStack, asked: dict[str, Any]) -> list[Any]:
        calls = [Kept(self._address) for _ in range(asked["clients"])]
        for call in calls:
            stack.callback(call.close)
        return calls

    async def _counts(self, call: Any, request: bytes) -> AsyncIterator[tuple[int, bool]]:
        """Yield 1 for each event with text, and for the usage the tokens beyond these events."""
        reader, head = await call.ask(request)
        if b" 200 " not in head or b"transfer-encoding: chunked" not in head:
            raise RuntimeError(f"the server answered {head!r}")
        num_events = 0
        waiting = b""
        async for part in _chunks(reader):
            *lines, waiting = (waiting + part).split(b"\n")
            for line in lines:
                if not line.startswith(BEGIN) or DONE in line:
                    continue
                event = json.loads(line.removeprefix(BEGIN))
                if event["choices"] and event["choices"][0]["text"]:
                    num_events += 1
                    yield 1, True
                elif usage := event.get("usage"):
                    yield usage["completion_tokens"] - num_events, False


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the parts of a chunked body up to its end."""
    while size := int((await reader.readline()).partition(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)


if __name__ == "__main__":
    run(HttpLoad(Completions(), sys.argv[2], int(sys.argv[3])))
