"""A transport in memory, and a client of the RPC library at its other end.

Bytes travel through the same HTTP/2 as over a socket, and no socket is opened. After an act of a
client, `Client.settle` returns when server and client can only wait. With Trio's `MockClock`
deadlines and pings take no time. `serving` of `tests.support.rpc_calls` has the server.
"""

import math
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote

import trio
import trio.testing
from h2.config import H2Configuration
from h2.connection import H2Connection
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

from grpc_service.rpc.framing import MessageReader
from grpc_service.rpc.status import StatusCode

RECEIVE_BYTES = 2**14
PEER = "ipv4:127.0.0.1:5"


class Wire:
    """The server's transport in memory (`grpc_service.rpc.sockets.PlainTransport`).

    ``incoming`` holds the client's bytes, ``outgoing`` the server's. ``room`` is the number of
    bytes that the server can send before it has to wait. `open` waits for ``ready``.
    """

    opening_s = 0.0

    def __init__(self, peer=PEER):
        self.peer = peer  # the client's address
        self.certified = ""  # the name in the client's certificate
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.room = math.inf
        self.is_closed = False  # the server has closed it, and sends nothing more
        self.has_left = False  # the client has gone
        self.ready = trio.Event()
        self.ready.set()
        self._is_read = False
        self._changed = trio.lowlevel.ParkingLot()
        self._written = trio.lowlevel.ParkingLot()

    def change(self):
        """Wake the server after the client has changed something."""
        self._changed.unpark_all()

    async def wait_written(self):
        """Wait until the server has sent or closed something."""
        if not (self.outgoing or self.is_closed):
            await self._written.park()

    async def open(self):
        await self.ready.wait()

    async def receive(self):
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

    def send_now(self, data):
        if self.has_left:
            raise BrokenPipeError("the client has left")
        size = int(min(len(data), self.room))
        self.room -= size
        self.outgoing += data[:size]
        self._written.unpark_all()
        return size

    async def send(self, data):
        await trio.lowlevel.checkpoint()
        rest = memoryview(data)
        while rest := rest[self.send_now(rest) :]:
            await self._changed.park()

    def end(self):
        self.is_closed = True
        self._written.unpark_all()

    async def close(self):
        self.end()


class WireListener:
    """Hands wires to the server (`grpc_service.rpc.sockets.SocketListener`)."""

    def __init__(self):
        self._arrivals, self._queue = trio.open_memory_channel[Wire](math.inf)

    def arrive(self, wire):
        """Let a client arrive over ``wire``."""
        self._arrivals.send_nowait(wire)

    async def accept(self):
        wire = await self._queue.receive()
        return [(wire, wire.peer)]

    def close(self):
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


class UnrulyH2(H2Connection):
    """h2's client, but one that goes on after GOAWAY, and opens more streams than allowed."""

    open_outbound_streams = 0  # never more than the server's limit, with which h2 compares it

    def _receive_goaway_frame(self, frame):
        event = ConnectionTerminated()
        event.error_code = ErrorCodes(frame.error_code)
        event.last_stream_id = frame.last_stream_id
        return [], [event]


class Client:
    """A client at the other end of ``wire``; calls are named by their stream's number.

    ``window`` is the size of a stream's window. ``is_deaf``: it answers neither pings nor settings.
    ``messages`` and ``headers`` hold what came for each call. ``ends`` holds how each ended call
    ended: its grpc-status, the HTTP status of a request that is not gRPC, or the code of a reset.
    """

    def __init__(self, wire, *, window=65_535, is_deaf=False):
        self.wire = wire
        self.is_deaf = is_deaf
        self.h2 = UnrulyH2(
            H2Configuration(
                header_encoding="latin-1",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.h2.local_settings[SettingCodes.INITIAL_WINDOW_SIZE] = window
        self.h2.local_settings.acknowledge()
        self.h2.initiate_connection()
        self.messages = {}
        self.readers = {}
        self.headers = {}
        self.ends = {}
        self.num_pings = 0  # pings that the server has answered
        self.has_goaway = False  # the server has sent GOAWAY
        self.goaway_code = None  # the error code of the server's GOAWAY
        self.last_served = math.inf  # the server serves no call with a higher number
        self._flush()

    async def request(self, method, *messages, headers=None):
        """Make a call with these messages, wait for its end, and return what came."""
        call = self.call(*messages, path=f"/{method}", headers=headers)
        while True:
            await self.settle()
            if call in self.ends:
                return self._answer(call)
            if self.wire.is_closed:
                raise ConnectionError("the server has closed the connection")
            await self.wire.wait_written()

    def _answer(self, call):
        end, headers = self.ends[call], self.headers.get(call, {})
        code = StatusCode(int(end)) if "grpc-status" in headers else StatusCode.CANCELLED
        message = unquote(headers.get("grpc-message", ""))
        return Answer(self.messages[call], code, message, headers)

    def call(self, *messages, path="/a.B/C", headers=None, is_last=True):
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

    def send(self, call, data, *, is_last=False):
        """Send bytes of a request's body; `framed` makes them of a message."""
        self.h2.send_data(call, data, end_stream=is_last)
        self._flush()

    def end(self, call):
        """Send no more messages."""
        self.h2.end_stream(call)
        self._flush()

    def reset(self, call):
        """End a call from the client's side."""
        self.h2.reset_stream(call, ErrorCodes.CANCEL)
        self.ends[call] = "reset by the client"
        self._flush()

    def ping(self, count=1):
        """Send pings."""
        for _ in range(count):
            self.h2.ping(b"12345678")
        self._flush()

    def open_window(self, size, call=None):
        """Allow ``size`` bytes more for a call or, without one, for the connection."""
        self.h2.increment_flow_control_window(size, call)
        self._flush()

    def say(self, data):
        """Send bytes that h2 would not."""
        self.wire.incoming += data
        self.wire.change()

    def leave(self):
        """Close the connection."""
        self.wire.has_left = True
        self.wire.change()

    def hear(self):
        """Take what the server has sent; return whether there was anything."""
        data = bytes(self.wire.outgoing)
        self.wire.outgoing.clear()
        for event in self.h2.receive_data(data) if data else ():
            self._take(event)
        if not self.is_deaf:
            self._flush()
        return bool(data)

    async def settle(self):
        """Wait until server and client have nothing left to do but wait."""
        while True:
            await trio.testing.wait_all_tasks_blocked()
            if not self.hear():
                return

    def _flush(self):
        self.say(self.h2.data_to_send())

    def _take(self, event):
        match event:
            case ResponseReceived():
                self.headers[event.stream_id] = dict(event.headers)
            case TrailersReceived():
                self.headers[event.stream_id] |= dict(event.headers)
            case DataReceived():
                reader = self.readers[event.stream_id]
                reader.feed(event.data)
                while reader.messages:
                    self.messages[event.stream_id].append(reader.take()[0])
            case StreamEnded():
                found = self.headers[event.stream_id]
                self.ends[event.stream_id] = found.get("grpc-status", found[":status"])
            case StreamReset():
                self.ends.setdefault(event.stream_id, ErrorCodes(event.error_code))
            case PingAckReceived():
                self.num_pings += 1
            case ConnectionTerminated():
                self.has_goaway = True
                self.goaway_code = event.error_code
                self.last_served = event.last_stream_id or 0


def framed(message):
    """Return a message with gRPC's prefix of five bytes."""
    return b"\0" + len(message).to_bytes(4, "big") + message
