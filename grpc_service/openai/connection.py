"""One HTTP connection: a transport of `grpc_service.rpc.sockets`, and anycorn's HTTP/1.1 over it.

anycorn waits for a client that does not read in a shielded scope, so that neither a deadline nor
the server's end reaches it. Rule 1: so no write of anycorn's waits here. What the socket does not
take stays in `DoorStream`, whose own task sends it, and a call waits for that by `wait_sent`, where
it can be cancelled. Rule 2: unsent bytes are counted for their client's address, like gRPC's
(`grpc_service.rpc.held_bytes`). Rule 3: HTTP/1.1 alone is spoken: an upgrade to HTTP/2 or to
WebSockets, which would lead around these rules and around what a request costs, is ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import h11
import trio
from anycorn.events import Closed, RawData, Updated
from anycorn.tcp_server import TCPServer
from anyio.abc import SocketAttribute

from grpc_service.openai.errors import HttpError, answer_of
from grpc_service.openai.json_text import encode_json
from grpc_service.rpc.accounts import POINT_S, SERVING, Account
from grpc_service.rpc.errors import Disconnected
from grpc_service.rpc.held_bytes import Holder, Holding
from grpc_service.rpc.sockets import address_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from anycorn.events import Event

    from grpc_service.openai.call import HttpCall
    from grpc_service.rpc.connection import Shared
    from grpc_service.rpc.sockets import PlainTransport

# The most bytes of an answer in the socket's buffer. Without this limit the buffer takes megabytes,
# and a request whose client does not read is parked late. Guess: as gRPC's window of a stream.
UNSENT_BYTES = 2**16
PART_BYTES = 2**14  # received at once, until a request may be read: anycorn keeps up to four parts
PART_S, BYTE_S = 1e-4, 4e-9  # processor time of a received part, and of each byte, about
NO_HTTP = "this is no request of HTTP/1.1"
MALFORMED = {431: "the headers are too large", 501: "this Transfer-Encoding is not known"}
CLOSE_PATIENCE_S = 1.0  # for the last bytes of an answer that ends its connection. Guess.


class DoorStream:
    """A transport as anycorn's connection uses one, with Rule 1. Once it ``is_broken``, no byte can
    be sent any more. ``on_end`` is called then, and when it is closed."""

    def __init__(self, transport: PlainTransport, holding: Holding, shared: Shared) -> None:
        self._transport = transport
        self._shared = shared
        self._holding = holding
        self._unsent = bytearray()
        self._has_unsent = trio.Event()
        self._is_empty = trio.Event()
        self._is_empty.set()
        self._may_read = trio.Event()
        self._may_read.set()
        self._part_bytes = PART_BYTES
        self.on_end: Callable[[], None] = lambda: None
        self.is_broken = False
        self._is_cut = False
        self._is_closed = False

    @property
    def opening_s(self) -> float:
        """The processor time that the transport's opening took, about, in seconds."""
        return self._transport.opening_s

    @property
    def has_left(self) -> bool:
        """Whether the client has closed the connection, as far as the system tells."""
        return self._is_closed or self.is_broken or self._transport.has_left

    def extra(self, attribute: object) -> socket.socket:
        """Return the socket; TLS, which is the transport's own matter, is hidden from anycorn."""
        if attribute is SocketAttribute.raw_socket:
            return self._transport.raw
        raise anyio.TypedAttributeLookupError

    async def receive(self, max_bytes: int = 0) -> bytes:
        """Wait for bytes. Cancellation: safe; no byte is lost."""
        await self._may_read.wait()
        if self._is_closed:
            raise anyio.ClosedResourceError
        await self._shared.share.enter(self._holding.holder.address)
        try:
            data = await self._transport.receive(self._part_bytes)
            self._shared.share.spend(PART_S + BYTE_S * len(data))
        except (OSError, trio.ClosedResourceError):
            raise anyio.BrokenResourceError from None
        if not data:
            raise anyio.EndOfStream
        return data

    def pause(self) -> None:
        """Receive nothing until `resume`, beyond a part that is on its way."""
        if self._may_read.is_set():
            self._may_read = trio.Event()

    def resume(self, part_bytes: int = PART_BYTES) -> None:
        """Receive again, parts of up to ``part_bytes``. Idempotent."""
        self._part_bytes = part_bytes
        self._may_read.set()

    async def send(self, data: bytes) -> None:
        """Send what the socket takes now, and keep the rest. Never waits."""
        self.send_now(data)
        if self.is_broken:
            raise anyio.BrokenResourceError

    def send_now(self, data: bytes) -> None:
        """Do the work of `send`, and raise nothing."""
        if self.is_broken or self._is_closed:
            return
        num_sent = 0
        if not self._unsent:
            try:
                num_sent = self._transport.send_now(data)
            except OSError:
                self._break()
                return
            if num_sent == len(data):
                return
        self._unsent += memoryview(data)[num_sent:]
        self._is_empty = trio.Event() if self._is_empty.is_set() else self._is_empty
        self._has_unsent.set()
        self._shared.held.set_bytes(self._holding, len(self._unsent))

    @property
    def is_clear(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._unsent

    async def wait_sent(self) -> None:
        """Wait until the socket has taken everything.

        Raises:
            Disconnected: the connection is broken.
        Cancellation: safe, but part of a message may have been sent.
        """
        await self._is_empty.wait()
        if self.is_broken:
            raise Disconnected

    async def run(self) -> None:
        """Send what `send` keeps, until cancelled."""
        while True:
            await self._has_unsent.wait()
            try:
                await self._transport.wait_writable()
                num_sent = self._transport.send_now(self._unsent)
            except (OSError, trio.ClosedResourceError):
                self._break()
                await trio.sleep_forever()
            del self._unsent[:num_sent]
            self._shared.held.set_bytes(self._holding, len(self._unsent))
            if not self._unsent:
                self._has_unsent = trio.Event()
                self._is_empty.set()

    def _break(self) -> None:
        self.is_broken = True
        self._unsent = bytearray()
        self._shared.held.set_bytes(self._holding, 0)
        self._is_empty.set()
        self.on_end()

    def cut(self) -> None:
        """Drop what was not sent, and end the connection, so that its client sees that the answer
        is incomplete. Idempotent."""
        self._break()
        self._is_cut = True
        if not self._is_closed:
            self._transport.reset()

    async def send_eof(self) -> None:
        """Do nothing: `aclose` announces the end."""

    async def aclose(self) -> None:
        """Close the connection; what was not sent gets `CLOSE_PATIENCE_S`. Idempotent."""
        if self._is_closed:
            return
        try:
            with trio.move_on_after(CLOSE_PATIENCE_S):
                await self._is_empty.wait()
        finally:
            self._is_closed = True
            self._break()
            if not self._is_cut:
                self._transport.end()
                self._transport.drop_received()
            with trio.CancelScope(shield=True):  # never waits
                await self._transport.close()


class HttpConnection:
    """One client's connection, over an open ``transport``. Its calls count the bytes that they keep
    for its ``holder``, and what they cost in its ``account``. ``arrivals`` has the calls whose
    requests the engine has not got yet; ``on_change`` is called when one has reached it, or has
    ended."""

    def __init__(
        self,
        shared: Shared,
        transport: PlainTransport,
        peer: str,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.shared = shared
        self._on_change = on_change
        self.peer = peer
        self.address = address_of(peer)
        self.certified = transport.certified
        self.holder = Holder(self.address)
        self.account = Account(shared.limits, trio.current_time)
        self._output = Holding(self.holder, self.cut)
        transport.limit_unsent(UNSENT_BYTES)
        self.stream = DoorStream(transport, self._output, shared)
        self.arrivals: set[HttpCall] = set()
        self.num_calls = 0  # that run now
        self._server: _Http1

    @property
    def is_being_read(self) -> bool:
        """Whether the client has read answers or sent requests within `Limits.held_stall_s`."""
        idle_s = trio.current_time() - self.holder.progressed_at
        return idle_s < self.shared.limits.held_stall_s

    def note_taken(self, call: HttpCall) -> None:
        """Take note that a call's request has been taken, or refused."""
        self.arrivals.discard(call)
        self._on_change()

    def cut(self) -> None:
        """End the connection at once."""
        self.stream.cut()

    def go_on(self) -> None:
        """Tell a client to send its request's body, if it waits for that."""
        framing: Any = self._server.protocol.protocol.connection
        if framing.client_is_waiting_for_100_continue:
            told = h11.InformationalResponse(status_code=100, headers=[])
            self.stream.send_now(framing.send(told))

    async def pay_owed(self) -> None:
        """Wait for the client's turn in the loop's time for what its requests cost in vain, if that
        is much (`grpc_service.rpc.accounts`). Cancellation: safe."""
        if owed_s := self.account.take_owed_s():
            await self.shared.overhead.enter(self.address, owed_s)

    def write_now(self, data: bytes) -> bool:
        """Send a part of an answer's body at once, framed by h11, without waking a task; return
        False if that cannot be. The call of the connection has sent its headers."""
        server = self._server
        if self.stream.is_broken or not self.stream.is_clear or server.send_lock.locked():
            return False
        framing: Any = server.protocol.protocol.connection
        framed = framing.send(h11.Data(data=data))
        if framed:
            self.stream.send_now(framed)
        return not self.stream.is_broken

    async def run(self, app: Any, config: Any, context: Any) -> None:
        """Serve the connection until the client closes it, or it was idle for a while.

        Cancellation: its calls are cancelled, and it is closed.
        """
        stream: Any = self.stream
        self._server = _Http1(app, config, context, {}, stream)
        try:
            async with trio.open_nursery() as nursery:
                # anycorn's reader waits for ever if a client has sent two requests and left
                self.stream.on_end = nursery.cancel_scope.cancel
                nursery.start_soon(self.stream.run)
                await self._server.run()
                nursery.cancel_scope.cancel(reason="the connection has ended")
        finally:
            self.account.owe(SERVING + self.stream.opening_s / POINT_S)
            self.shared.addresses.add_debt_s(self.address, self.account.take_debt_s())
            self.shared.held.close(self._output)
            try:
                await self.stream.aclose()
            finally:
                self.stream.on_end = lambda: None
                self._server.forget()


class _Http1(TCPServer):
    """anycorn's connection, which ignores every wish for another protocol (Rule 3), and ends as
    soon as its client has left: anycorn's own task would wait for another request until it is idle
    too long."""

    _has_left = False

    async def _read_data(self) -> None:
        await super()._read_data()
        self._has_left = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        is_idle = isinstance(event, Updated) and event.idle
        await super().protocol_send(Closed() if is_idle and self._has_left else event)

    def forget(self) -> None:
        """Drop what the ended connection has received: its parts refer to each other, and would
        wait for the collector, which comes seldom."""
        wrapper = vars(self).get("protocol")
        parts: list[Any] = [self] if wrapper is None else [wrapper.protocol, wrapper, self]
        for part in parts:
            vars(part).clear()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "protocol":
            _restrain(value.protocol)
        super().__setattr__(name, value)


def _restrain(protocol: Any) -> None:
    """Keep anycorn's HTTP/1.1 from other protocols: each request is one of HTTP/1.1."""
    create_stream = protocol._create_stream

    async def create(request: h11.Request) -> None:
        if any(name == b"upgrade" for name, _ in request.headers):
            headers = [pair for pair in request.headers if pair[0] != b"upgrade"]
            request = h11.Request(
                method=request.method,
                target=request.target,
                headers=headers,
                http_version=request.http_version,
            )
        await create_stream(request)

    async def refuse(status: int) -> None:
        _, _, told = answer_of(HttpError(status, "INVALID_REQUEST", MALFORMED.get(status, NO_HTTP)))
        body = encode_json(told)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers.append((b"connection", b"close"))
        answer = h11.Response(status_code=status, headers=headers)
        events = (answer, h11.Data(data=body), h11.EndOfMessage())
        # all at once, else the request's own answer could come between
        framed = b"".join([protocol.connection.send(event) for event in events])
        await protocol.send(RawData(data=framed))

    protocol._check_protocol = _stay
    protocol._create_stream = create
    protocol._send_error_response = refuse  # anycorn's has no body
    most = protocol.config.h11_max_incomplete_size
    protocol.connection = _Framing(h11.SERVER, max_incomplete_event_size=most)


class _Framing(h11.Connection):
    """h11's connection, without three reasons for which anycorn would act too early. A client's
    wish to be told to go on is hidden from it, which `HttpConnection.go_on` fulfils behind the
    checks. What follows a connection's last request is dropped: h11 calls it an error, for which
    anycorn closes the connection before the answer is sent. And a body that turns out to be
    malformed when its request is being answered already is taken for one that has ended."""

    _is_malformed = False

    @property
    def they_are_waiting_for_100_continue(self) -> bool:
        return False

    def receive_data(self, data: bytes) -> None:
        if self.their_state is not h11.MUST_CLOSE and not self._is_malformed:
            super().receive_data(data)

    def next_event(self) -> Any:
        if self.their_state is h11.MUST_CLOSE or self._is_malformed:
            return h11.NEED_DATA
        try:
            return super().next_event()
        except h11.RemoteProtocolError:
            if self.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
                raise
            self._is_malformed = True
            return h11.EndOfMessage()


async def _stay(event: object) -> None:
    """Upgrade nothing."""
