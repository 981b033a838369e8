"""A server and its clients in memory, for tests of handlers and of the library itself.

    async with open_server(Dispatcher(methods).serve) as server:
        client = await server.connect()
        answer = await client.request("helloworld.Greeter/SayHello", b"...")
        assert answer.code is StatusCode.OK

Bytes travel through the same HTTP/2 as over a socket, and no socket is opened. A test that needs
more than whole answers calls `Client.call`, `Client.send`, `Client.reset` and so on, and then
`Client.settle`, which returns when server and client have nothing left to do but wait. With Trio's
`MockClock` deadlines and pings take no time.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import trio
import trio.testing
from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    PingAckReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes

from grpc_service.rpc.connection import Flusher
from grpc_service.rpc.framing import MessageReader
from grpc_service.rpc.h2_overrides import UnrulyClientH2
from grpc_service.rpc.server import RpcServer
from grpc_service.rpc.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from grpc_service.rpc.call_tasks import ServeCall
    from grpc_service.rpc.limits import Limits
    from grpc_service.rpc.sockets import Transport

RECEIVE_BYTES = 2**14
PEER = "ipv4:127.0.0.1:5"


class Wire:
    """The server's transport in memory (`grpc_service.rpc.sockets.Transport`).

    ``incoming`` holds the client's bytes, ``outgoing`` the server's. ``room`` is the number of
    bytes that the server can send before it has to wait. `open` waits for ``ready``.
    """

    opening_s = 0.0

    def __init__(self, peer: str = PEER) -> None:
        self.peer = peer  # the client's address
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.room: float = math.inf
        self.is_closed = False  # by the server, which sends nothing more
        self.has_left = False  # the client
        self.ready = trio.Event()
        self.ready.set()
        self._is_read = False
        self._changed = trio.lowlevel.ParkingLot()
        self._written = trio.lowlevel.ParkingLot()

    def change(self) -> None:
        """Wake the server after the client has changed something."""
        self._changed.unpark_all()

    async def wait_written(self) -> None:
        """Wait until the server has sent or closed something.

        Cancellation: safe.
        """
        if not (self.outgoing or self.is_closed):
            await self._written.park()

    async def open(self) -> None:
        """Wait for ``ready``.

        Cancellation: safe.
        """
        await self.ready.wait()

    async def receive(self) -> bytes:
        """Wait for the client's bytes.

        Cancellation: safe.
        """
        await trio.lowlevel.checkpoint()
        if self._is_read:
            raise trio.BusyResourceError("another task reads")
        self._is_read = True
        try:
            while not (self.incoming or self.has_left):
                await self._changed.park()
        finally:
            self._is_read = False
        data = bytes(self.incoming[:RECEIVE_BYTES])
        del self.incoming[: len(data)]
        return data

    def send_now(self, data: bytes | memoryview) -> int:
        """Take as many bytes as there is ``room`` for."""
        if self.has_left:
            raise BrokenPipeError("the client has left")
        size = int(min(len(data), self.room))
        self.room -= size
        self.outgoing += data[:size]
        self._written.unpark_all()
        return size

    def end(self) -> None:
        """Note that the server sends nothing more."""
        self.is_closed = True
        self._written.unpark_all()

    async def send(self, data: bytes | memoryview) -> None:
        """Take all bytes, waiting for ``room``.

        Cancellation: part of them may have been taken.
        """
        await trio.lowlevel.checkpoint()
        rest = memoryview(data)
        while rest := rest[self.send_now(rest) :]:
            await self._changed.park()

    async def close(self) -> None:
        """Note that the server has closed the connection. Never waits."""
        self.is_closed = True
        self._written.unpark_all()


class WireListener:
    """Hands wires to the server (`grpc_service.rpc.sockets.Listener`)."""

    def __init__(self) -> None:
        self._arrivals, self._queue = trio.open_memory_channel[Wire](math.inf)

    def arrive(self, wire: Wire) -> None:
        """Let a client arrive over ``wire``."""
        self._arrivals.send_nowait(wire)

    async def accept(self) -> Sequence[tuple[Transport, str]]:
        """Wait for the next wire.

        Cancellation: safe.
        """
        wire = await self._queue.receive()
        return [(wire, wire.peer)]

    def close(self) -> None:
        """Accept no more, and reset those that wait to be accepted, as the kernel does."""
        with suppress(trio.WouldBlock, trio.ClosedResourceError):
            while True:
                self._queue.receive_nowait().end()
        self._queue.close()


class Answer(NamedTuple):
    """What came of one call. ``headers`` are the response's headers and trailers in one."""

    messages: list[bytes]
    code: StatusCode
    message: str
    headers: dict[str, str]


class Client:
    """A client at the other end of ``wire``; calls are named by their stream's number.

    ``window`` is the size of a stream's window. ``is_deaf``: it answers neither pings nor settings.
    ``messages`` and ``headers`` hold what came for each call. ``ends`` holds how each ended call
    ended: its grpc-status, or the HTTP status of a request that is no call, or the code of a reset.
    """

    def __init__(self, wire: Wire, *, window: int = 65_535, is_deaf: bool = False) -> None:
        self.wire = wire
        self.is_deaf = is_deaf
        self.h2 = UnrulyClientH2(H2Configuration(client_side=True, header_encoding="latin-1"))
        self.h2.local_settings[SettingCodes.INITIAL_WINDOW_SIZE] = window
        self.h2.local_settings.acknowledge()
        self.h2.initiate_connection()
        self.messages: dict[int, list[bytes]] = {}
        self.readers: dict[int, MessageReader] = {}
        self.headers: dict[int, dict[str, str]] = {}
        self.ends: dict[int, str | ErrorCodes] = {}
        self.num_pings = 0  # answered by the server
        self.is_asked_to_go = False  # by the server
        self.goaway_code: int | None = None  # the code with which the server did
        self.last_served: float = math.inf  # the server serves no call with a higher number
        self._flush()

    async def request(
        self, method: str, *messages: bytes, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Make a call with these messages, wait for its end, and return what came.

        Raises:
            ConnectionError: the server has closed the connection.
        Cancellation: the call goes on.
        """
        call = self.call(*messages, path=f"/{method}", headers=headers)
        while True:
            await self.settle()
            if call in self.ends:
                return self._answer(call)
            if self.wire.is_closed:
                raise ConnectionError("the server has closed the connection")
            await self.wire.wait_written()

    def _answer(self, call: int) -> Answer:
        end, headers = self.ends[call], self.headers.get(call, {})
        code = StatusCode(int(end)) if "grpc-status" in headers else StatusCode.CANCELLED
        message = unquote(headers.get("grpc-message", ""))
        return Answer(self.messages[call], code, message, headers)

    def call(
        self,
        *messages: bytes,
        path: str = "/a.B/C",
        headers: Mapping[str, str] | None = None,
        is_last: bool = True,
    ) -> int:
        """Begin a call and return its number. ``headers`` replace those of the same name. Without
        ``is_last`` more messages may follow (`send`)."""
        call = self.h2.get_next_available_stream_id()
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
            **(headers or {}),
        }
        self.readers[call] = MessageReader(2**30)
        self.messages[call] = []
        self.h2.send_headers(call, fields.items())
        self.send(call, b"".join(map(framed, messages)), is_last=is_last)
        return call

    def raw_call(self, headers: Mapping[str, str]) -> int:
        """Begin a call whose headers h2 would not send, and return its number."""
        is_checked = self.h2.config.validate_outbound_headers
        self.h2.config.validate_outbound_headers = False
        self.h2.config.normalize_outbound_headers = False
        try:
            return self.call(headers=headers)
        finally:
            self.h2.config.validate_outbound_headers = is_checked
            self.h2.config.normalize_outbound_headers = is_checked

    def send(self, call: int, data: bytes, *, is_last: bool = False) -> None:
        """Send bytes of a request's body; `framed` makes them of a message."""
        self.h2.send_data(call, data, end_stream=is_last)
        self._flush()

    def end(self, call: int) -> None:
        """Send no more messages."""
        self.h2.end_stream(call)
        self._flush()

    def reset(self, call: int) -> None:
        """End a call from the client's side."""
        self.h2.reset_stream(call, ErrorCodes.CANCEL)
        self.ends[call] = "reset by the client"
        self._flush()

    def ping(self, count: int = 1) -> None:
        """Send pings."""
        for _ in range(count):
            self.h2.ping(b"12345678")
        self._flush()

    def open_window(self, size: int, call: int | None = None) -> None:
        """Allow ``size`` bytes more for a call or, without one, for the connection."""
        self.h2.increment_flow_control_window(size, call)
        self._flush()

    def say(self, data: bytes) -> None:
        """Send bytes that h2 would not."""
        self.wire.incoming += data
        self.wire.change()

    def leave(self) -> None:
        """Close the connection."""
        self.wire.has_left = True
        self.wire.change()

    def hear(self) -> bool:
        """Take what the server has sent; return whether there was anything."""
        data = bytes(self.wire.outgoing)
        self.wire.outgoing.clear()
        for event in self.h2.receive_data(data) if data else ():
            self._take(event)
        if not self.is_deaf:
            self._flush()
        return bool(data)

    async def settle(self) -> None:
        """Wait until server and client have nothing left to do but wait.

        Cancellation: safe.
        """
        while True:
            await trio.testing.wait_all_tasks_blocked()
            if not self.hear():
                return

    def _flush(self) -> None:
        self.say(self.h2.data_to_send())

    def _take(self, event: Any) -> None:
        if isinstance(event, ResponseReceived):
            self.headers[event.stream_id] = _text_of(event.headers)
        elif isinstance(event, TrailersReceived):
            self.headers[event.stream_id] |= _text_of(event.headers)
        elif isinstance(event, DataReceived):
            reader = self.readers[event.stream_id]
            reader.feed(event.data)
            while reader.messages:
                self.messages[event.stream_id].append(reader.take()[0])
        elif isinstance(event, StreamEnded):
            found = self.headers[event.stream_id]
            self.ends[event.stream_id] = found.get("grpc-status", found[":status"])
        elif isinstance(event, StreamReset):
            self.ends.setdefault(event.stream_id, ErrorCodes(event.error_code))
        elif isinstance(event, PingAckReceived):
            self.num_pings += 1
        elif isinstance(event, ConnectionTerminated):
            self.is_asked_to_go = True
            self.goaway_code = event.error_code
            self.last_served = event.last_stream_id or 0


class MemoryServer:
    """A server whose clients connect in memory."""

    def __init__(self, serve_call: ServeCall, limits: Limits | None = None) -> None:
        self.flusher = Flusher()
        self.server = RpcServer(serve_call, limits, self.flusher)
        self.listener = WireListener()
        self.has_ended = False

    async def run(self) -> None:
        """Serve until stopped.

        Cancellation: ends every call.
        """
        await self.server.run([self.listener])
        self.has_ended = True

    async def connect(
        self, *, window: int = 65_535, is_deaf: bool = False, peer: str = PEER
    ) -> Client:
        """Connect a client (`Client`) from the address ``peer``.

        Cancellation: the server may know the client already.
        """
        client = Client(Wire(peer), window=window, is_deaf=is_deaf)
        self.listener.arrive(client.wire)
        await client.settle()
        return client


@asynccontextmanager
async def open_server(
    serve_call: ServeCall, limits: Limits | None = None
) -> AsyncIterator[MemoryServer]:
    """Serve calls in memory while the block runs; what still runs at its end is cancelled."""
    server = MemoryServer(serve_call, limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        yield server
        nursery.cancel_scope.cancel(reason="the test has ended")


def framed(message: bytes) -> bytes:
    """Return a message as it stands in a body."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def _text_of(headers: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    return {str(name): str(value) for name, value in headers}
