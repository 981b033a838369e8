"""The gRPC server on Trio: connections, and a task with a cancel scope for each call.

grpcio's own server needs asyncio's loop, in a thread of its own: a token would cross two threads
and a poller on its way out, and nobody could end a call whose client has stopped reading (D1).
Here a call is a task in the nursery of its connection: a reset or a lost connection cancels it,
and what the engine makes in a step is written from where it is made, one system call for all
streams of a connection (`Flusher`). `python -m tools.bench front` measures both.

Rule 1: a call ends once, by `Context.end`, or by its client. Rule 2: nothing of one connection
waits for another, and nothing of one stream for another's window. Rule 3: a client that takes no
bytes is not read from either, once `CLOGGED_BYTES` wait for it.

Life of a connection: accepted → (TLS) → read from until it ends, or does not answer pings →
its calls are cancelled → closed. A server that stops ends it gracefully first.
"""

from __future__ import annotations

import logging
import math
from time import thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import trio
from google.protobuf.message_factory import GetMessageClass

from engine.errors import InvalidRequest
from grpc_service.framing import (
    CONTENT_TYPE,
    RESPONSE_HEADERS,
    MessageReader,
    metadata_of,
    timeout_of,
    trailers_of,
)
from grpc_service.http2 import Connection, ErrorCodes, ProtocolError
from grpc_service.sockets import SEND_BYTES, PlainTransport, TlsTransport, accept

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from google.protobuf.descriptor import ServiceDescriptor
    from google.protobuf.message import Message

    from grpc_service.config import ServerConfig
    from grpc_service.http2 import Headers, Stream
    from grpc_service.sockets import Transport

    Behaviour = Callable[[Any, "Context"], Awaitable[Message | None]]

log = logging.getLogger(__name__)

STREAMS_PER_CONNECTION_MAX = 1000  # guess: more than a sequence each of the largest batches
CALLS_PER_CONNECTION_MAX = 2 * STREAMS_PER_CONNECTION_MAX  # with those that a reset has yet to end
CLOGGED_BYTES = 2**16  # guess: unsent ones, from which on messages wait in their streams
END_PATIENCE_S = 1.0  # guess: for the rest of a message that a status is to follow
PART_S = 0.002  # guess: that looking at what one client sent holds up all else for
PART_BYTES_MIN, PART_BYTES_MAX = 2**8, 2**14  # of which such a part is made
SHARE_S = 0.004  # guess: the same for all clients together, in one turn of Trio's loop
PARTS_PER_TURN_MAX = 16  # guess: clients that are let on at once when a turn begins
STARTS_PER_TURN = 6  # calls that begin between two looks at anything else: some 3 ms


class Method(NamedTuple):
    """A method of a service. ``behaviour`` gives the answer, or has written all there is and gives
    None. ``takes_stream``: it reads the requests itself, and is given None."""

    name: str  # triolet.v1.Inference/Generate
    request: type[Message]
    behaviour: Behaviour
    takes_stream: bool = False


def methods_of(service: ServiceDescriptor, servicer: object) -> list[Method]:
    """Those of a service, each served by the method of ``servicer`` that has its name."""
    return [
        Method(
            f"{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            getattr(servicer, method.name),
            method.client_streaming,
        )
        for method in service.methods
    ]


class Disconnected(Exception):
    """The client has gone: there is nobody to tell anything."""


class Flusher:
    """Says when what was written goes out: at once, or, while `hold` lasts, at its end, together
    with whatever else was written for the same connection."""

    def __init__(self) -> None:
        self._touched: dict[_Client, None] = {}
        self._is_holding = False

    def touch(self, client: _Client) -> None:
        """Something was written for ``client``."""
        if self._is_holding:
            self._touched[client] = None
        else:
            client.flush()

    def hold(self) -> None:
        self._is_holding = True

    def release(self) -> None:
        """End `hold`. Never raises."""
        self._is_holding = False
        touched, self._touched = self._touched, {}
        for client in touched:
            client.flush()


class Context:
    """One call, as its handler sees it; for the one task that serves it, but for `try_write`.

    ``code`` is the status it ended with; None: it has not, or its client has ended it. ``deadline``
    is the client's, on Trio's clock.
    """

    def __init__(self, client: _Client, stream: Stream, arrived_at: float, limit: int) -> None:
        found = dict(stream.headers)
        self._client = client
        self._stream = stream
        self._has_begun = False
        self._news: trio.Event | None = None
        self._reader = MessageReader(limit, found.get(b"grpc-encoding", b"identity"))
        timeout_s = timeout_of(found.get(b"grpc-timeout", b""))
        self.deadline = math.inf if timeout_s is None else arrived_at + timeout_s
        self.method = found.get(b":path", b"").decode("latin-1").removeprefix("/")
        self.metadata = metadata_of(stream.headers)
        self.refusal = _refusal(found)  # headers, where it is no gRPC call
        self.peer = client.peer
        self.code: grpc.StatusCode | None = None
        self.scope = trio.CancelScope()

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: it has none."""
        return None if self.deadline == math.inf else self.deadline - trio.current_time()

    @property
    def is_late(self) -> bool:
        """The client's deadline passed before there was a status."""
        return self.code is None and not self.is_over and trio.current_time() >= self.deadline

    @property
    def is_over(self) -> bool:
        """Nothing can be sent any more."""
        return self._stream.is_over

    # ---- the request

    async def read(self) -> bytes | None:
        """The next message; None: the client has said everything.

        Raises:
            RequestTooLarge, InvalidRequest, Unsupported: what came is no message, or too large a
                one; no other will come.
        """
        reader = self._reader
        if self._has_begun:  # thousands may have come at once, and answers need no waiting
            await trio.lowlevel.checkpoint()
        while not reader.messages:
            if reader.error is not None:
                raise reader.error
            if self._stream.has_ended:
                if reader.is_amid_message:
                    raise InvalidRequest([], message="the request's message breaks off")
                return None
            await self._wait()
        return reader.take()

    # ---- the answer

    async def write(self, message: Message | bytes) -> None:
        """Send a message; back when the client's window had room for all of it.

        Raises:
            Disconnected: the client has ended the call.
        Cancellation: it may have been sent in part, and then only a reset can follow.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._send(message)
        self._client.touch()
        await self._wait_sent()
        if self._stream.is_over:
            raise Disconnected

    def try_write(self, data: bytes) -> bool:
        """Send a message's bytes if that needs no waiting: False, and nothing was sent. For
        whoever knows that the call's task does not write."""
        if not self._has_begun:
            return False
        is_sent = not self._stream.is_over and self._stream.try_send_message(data)
        if is_sent:
            self._client.touch()
        return is_sent

    async def answer(self, message: Message) -> None:
        """`write` and `end`, in one."""
        self._send(message)
        if self._stream.is_blocked:
            self._client.touch()
            await self._wait_sent()
        await self.end(grpc.StatusCode.OK)

    async def end(
        self,
        code: grpc.StatusCode,
        message: str = "",
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        """End the call with a status, unless it has ended. A message that waits whole for the
        client's window is dropped; of one that was sent in part, the rest gets `END_PATIENCE_S`,
        after which the client only hears that the call was reset."""
        stream = self._stream
        if stream.is_over:
            return
        self.code = code
        if not stream.drop_message():
            with trio.move_on_after(END_PATIENCE_S):
                await self._wait_sent()
            if stream.is_blocked:
                stream.reset(ErrorCodes.CANCEL)
        if not stream.is_over:
            trailers = trailers_of(code, message, metadata)
            stream.send_headers(
                trailers if self._has_begun else RESPONSE_HEADERS + trailers, is_last=True
            )
        self._client.touch()

    def _send(self, message: Message | bytes) -> None:
        if self._stream.is_over:
            raise Disconnected
        if not self._has_begun:
            self._has_begun = True
            self._stream.send_headers(RESPONSE_HEADERS)
        data = message if isinstance(message, bytes) else message.SerializeToString()
        self._stream.send_message(data)

    async def _wait_sent(self) -> None:
        """Until no part of a message waits for the client's window."""
        while self._stream.is_blocked:
            await self._wait()

    # ---- news from the client (`grpc_service.http2.Listener`)

    def on_data(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        if reader.messages or reader.error is not None:  # of a large one's parts nobody need wake
            self._tell()

    def on_end(self) -> None:
        self._tell()

    def on_reset(self) -> None:
        self.scope.cancel(reason="the client ended the call")

    def on_drained(self) -> None:
        self._tell()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()

    async def _wait(self) -> None:
        self._news = trio.Event()
        await self._news.wait()
        self._news = None


class _Client:
    """One connection."""

    def __init__(self, server: RpcServer, transport: Transport, peer: str) -> None:
        self._server = server
        self._transport = transport
        self._unsent = b""
        self._may_write = trio.Event()  # there is something unsent
        self._has_written = trio.Event()  # there is not
        self._heard_at = trio.current_time()
        self._part_bytes = PART_BYTES_MAX  # that are looked at in one go
        self._calls: trio.Nursery
        self._num_calls = 0
        self._has_room = trio.Event()  # a call has ended
        self._scope = trio.CancelScope()
        self.peer = peer
        self.http2 = Connection(self._on_stream, streams_max=STREAMS_PER_CONNECTION_MAX)

    async def run(self) -> None:
        """Serve until the connection ends; then its calls are cancelled, and it is closed."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._calls = nursery
                    self.flush()
                    nursery.start_soon(self._write_rests)
                    nursery.start_soon(self._ask_if_alive)
                    await self._read()
                    nursery.cancel_scope.cancel(reason="the connection has ended")
        finally:
            self.http2.cut()
            with trio.CancelScope(shield=True):
                await self._transport.close()

    def cut(self, reason: str) -> None:
        """End the connection, and its calls."""
        self._scope.cancel(reason=reason)

    def end_gracefully(self) -> None:
        """Take no more calls."""
        self.http2.end_gracefully()
        self.flush()

    async def _read(self) -> None:
        """Take what comes until nothing more will."""
        http2, transport = self.http2, self._transport
        try:
            while data := await transport.receive():
                self._heard_at = trio.current_time()
                await self._take(data)
        except ProtocolError as error:
            log.debug("%s: %s", self.peer, error)
            self.flush()
            http2.cut()  # h2 says nothing any more
        except OSError as error:
            log.debug("%s: %s", self.peer, error)

    async def _take(self, data: bytes) -> None:
        """Have what came looked at in parts of about `PART_S`: 16 KiB may be a page of a prompt, or
        1,800 empty frames that take 60 ms."""
        while data:
            await self._server.share.enter()
            began_at = thread_time()
            self.http2.receive(data[: self._part_bytes])
            took = thread_time() - began_at
            self.touch()
            data = data[self._part_bytes :]
            if took > PART_S:
                self._part_bytes = max(self._part_bytes // 2, PART_BYTES_MIN)
            elif took < PART_S / 4:
                self._part_bytes = min(self._part_bytes * 2, PART_BYTES_MAX)
            if took > PART_S / 4:
                self._server.share.spend(took)
            await self._wait_for_room()
            if data:
                await trio.lowlevel.checkpoint()

    async def _wait_for_room(self) -> None:
        while len(self._unsent) >= CLOGGED_BYTES:
            await self._has_written.wait()
        while self._num_calls > CALLS_PER_CONNECTION_MAX:  # a client that resets all it begins
            self._has_room = trio.Event()
            await self._has_room.wait()

    def touch(self) -> None:
        """There is output."""
        self._server.flusher.touch(self)

    def flush(self) -> None:
        """Send what there is, as far as the transport takes it now; the rest follows by itself."""
        data = self.http2.take_output()
        if not data:
            return
        if self._unsent:
            self._unsent += data
        else:
            try:
                num_sent = self._transport.send_now(data)
            except OSError as error:
                self.cut(str(error))
                return
            if num_sent == len(data):
                return
            self._unsent = data[num_sent:]
            self._has_written = trio.Event()
            self._may_write.set()
        if len(self._unsent) >= CLOGGED_BYTES:
            self.http2.is_clogged = True

    async def _write_rests(self) -> None:
        """Send what `flush` could not."""
        while True:
            await self._may_write.wait()
            self._may_write = trio.Event()
            try:
                while data := self._unsent:
                    for begin in range(0, len(data), SEND_BYTES):
                        await self._transport.send(memoryview(data)[begin : begin + SEND_BYTES])
                        self._heard_at = trio.current_time()  # who takes bytes is there
                    self._unsent = self._unsent[len(data) :]
            except OSError as error:
                self.cut(str(error))
                return
            self._has_written.set()
            self._server.tell_progress()
            if self.http2.is_clogged:
                self.http2.unclog()
                self.flush()

    async def _ask_if_alive(self) -> None:
        """Ping a client that has not been heard of, and cut it if it does not answer."""
        config = self._server.config
        while True:
            heard_at = self._heard_at
            await trio.sleep_until(heard_at + config.keepalive_time_s)
            if self._heard_at != heard_at:
                continue
            self.http2.ping()
            self.flush()
            await trio.sleep(config.keepalive_timeout_s)
            if self._heard_at == heard_at:
                log.info("%s: no answer to a ping; the connection is cut", self.peer)
                self.cut("no answer to a ping")

    # ---- calls

    def _on_stream(self, stream: Stream) -> Context:
        server = self._server
        context = Context(self, stream, trio.current_time(), server.config.max_message_bytes)
        self._num_calls += 1
        self._calls.start_soon(self._serve, context, stream)
        return context

    async def _serve(self, context: Context, stream: Stream) -> None:
        try:
            with context.scope:
                await self._server.turnstile.enter()  # one that is reset leaves the line
                if context.refusal:
                    if not stream.is_over:
                        stream.send_headers(context.refusal, is_last=True)
                        self.touch()
                    return
                context.scope.deadline = context.deadline
                await self._server.serve_call(context)
            if context.scope.cancelled_caught:  # by its deadline, or nobody hears this
                await context.end(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")
        finally:
            self._num_calls -= 1
            self._has_room.set()
            self._server.tell_progress()

    @property
    def is_quiet(self) -> bool:
        """No call runs, and nothing waits to be sent."""
        return not (self.http2.num_streams or self._unsent)


def _refusal(headers: Mapping[bytes, bytes]) -> Headers:
    """The answer to what is no gRPC call. Source: PROTOCOL-HTTP2.md, Responses."""
    if headers.get(b":method") != b"POST":
        return [(b":status", b"405"), (b"allow", b"POST")]
    content_type = headers.get(b"content-type", b"")
    rest = content_type.removeprefix(CONTENT_TYPE)
    if rest == content_type or rest[:1] not in (b"", b"+", b";"):  # such as application/grpc-web
        return [(b":status", b"415"), (b"accept-post", CONTENT_TYPE)]
    return []


class _Turnstile:
    """Lets `STARTS_PER_TURN` tasks through, and then Trio's loop go round: of a burst of calls the
    engine's step waits for that many at most."""

    def __init__(self) -> None:
        self._num_passed = 0
        self._line = trio.lowlevel.ParkingLot()
        self._token = trio.lowlevel.current_trio_token()

    async def enter(self) -> None:
        """Wait until it is this task's turn."""
        if not self._num_passed:
            self._token.run_sync_soon(self._turn)
        self._num_passed += 1
        if self._num_passed > STARTS_PER_TURN:
            await self._line.park()

    def _turn(self) -> None:
        self._num_passed = len(self._line.unpark(count=STARTS_PER_TURN))
        if self._num_passed:
            self._token.run_sync_soon(self._turn)


class _Share:
    """What clients' frames may take of each turn of Trio's loop: about `SHARE_S`. A step's end, and
    whatever else is due, waits for that long at most, however many clients send."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._line = trio.lowlevel.ParkingLot()
        self._token = trio.lowlevel.current_trio_token()

    async def enter(self) -> None:
        """Wait until there is something left of a turn's share."""
        while self._spent_s >= SHARE_S:
            await self._line.park()

    def spend(self, seconds: float) -> None:
        """So long was spent in this turn."""
        if not self._spent_s:
            self._token.run_sync_soon(self._turn)
        self._spent_s += seconds

    def _turn(self) -> None:
        self._spent_s = 0.0
        self._line.unpark(count=PARTS_PER_TURN_MAX)
        if self._line:  # those in front may have been cancelled, and spend nothing
            self._token.run_sync_soon(self._turn)


class RpcServer:
    """Serves methods to whoever connects. ``serve_call`` is the way of every call from its begin to
    its end (`grpc_service.reception`): it raises nothing but cancellation."""

    def __init__(
        self,
        config: ServerConfig,
        flusher: Flusher,
        serve_call: Callable[[Context], Awaitable[None]],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.config = config
        self.flusher = flusher
        self.serve_call = serve_call
        self.turnstile = _Turnstile()
        self.share = _Share()
        self._tls = tls
        self._clients: dict[_Client, None] = {}
        self._listening = trio.CancelScope()
        self._serving = trio.CancelScope()
        self._progress = trio.Event()  # for `stop`: a call has ended, or something was sent

    async def run(self, listeners: Sequence[socket.socket]) -> None:
        """Serve what connects to ``listeners``, and close them at the end.

        Cancellation: every call is cancelled, and its client hears that its connection ends.
        """
        with self._serving:
            async with trio.open_nursery() as nursery:
                try:
                    with self._listening:
                        async with trio.open_nursery() as accepting:
                            for listener in listeners:
                                accepting.start_soon(self._accept, listener, nursery)
                finally:
                    for listener in listeners:
                        listener.close()

    async def stop(self, grace_s: float) -> None:
        """Take no more connections and calls; end what still runs after ``grace_s`` seconds."""
        self._listening.cancel(reason="the server stops")
        for client in list(self._clients):
            client.end_gracefully()
        with trio.move_on_after(grace_s):
            while not all(client.is_quiet for client in self._clients):
                self._progress = trio.Event()
                await self._progress.wait()
        self._serving.cancel(reason="the server stops")

    def tell_progress(self) -> None:
        """One of the things that `stop` waits for has happened."""
        self._progress.set()

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            sock, peer = await accept(listener)
            nursery.start_soon(self._serve, sock, peer)

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            transport = await self._transport_of(sock)
        except OSError as error:
            log.debug("%s: %s", peer, error)
            return
        client = _Client(self, transport, peer)
        self._clients[client] = None
        if self._listening.cancel_called:  # it was accepted just before
            client.end_gracefully()
        try:
            await client.run()
        except Exception:
            log.exception("a connection met a bug")
        finally:
            del self._clients[client]
            self.tell_progress()

    async def _transport_of(self, sock: socket.socket) -> Transport:
        if self._tls is None:
            return PlainTransport(sock)
        transport = TlsTransport(sock, self._tls)
        try:
            await transport.handshake()
        except BaseException:
            await transport.close()
            raise
        return transport
