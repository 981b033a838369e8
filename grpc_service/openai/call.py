"""One HTTP request and its answer, as `grpc_service.services.call_writer` writes to it.

Rule 1: the connection's end cancels ``scope``, whatever the call waits for. Rule 2: an answer that
has begun ends whole or with its connection, so that no client takes a cut answer for a whole one;
a stream of events that fails ends with an event that has the error.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import trio

from engine.errors import DeadlineExceeded, InvalidRequest
from grpc_service.access.rpc_record import CallRecord
from grpc_service.openai.errors import HttpError, answer_of
from grpc_service.openai.json_text import encode_json
from grpc_service.rpc.errors import Disconnected, TooManyHeld
from grpc_service.rpc.held_bytes import CALL_BYTES, Holding
from grpc_service.rpc.sockets import RECEIVE_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from grpc_service.openai.connection import HttpConnection

    Headers = Sequence[tuple[bytes, bytes]]

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
TIMEOUT_HEADER, ID_HEADER = b"x-request-timeout", b"x-request-id"
LOOK_S = 1.0  # between looks whether a client has left that sent more than its request
GROW_BYTES = 2**16  # larger bodies wait for room before they are read. Guess.
# Larger answers wait for room before they are sent, in parts of this size. Guess: several windows.
SENT_BYTES = 2**18
# An answer counts for this part of `Limits.held_bytes` at most, so that some can be sent at once
# whatever their size; those that wait for room and are sent may have so many times as many bytes,
# of which each address has its share. Guesses.
COUNTED_SHARE, WAITING_SHARES = 4, 8
# Points that a part of a body costs: h11's event, and a message to the call. Owed where parts have
# fewer bytes in the mean; a guess, below what networks cut. Measured: the points.
SMALL_PART, SMALL_BYTES = 2.0, 2**9
LINGER_S, LINGER_BYTES = 2.0, 2**24  # for the rest of a request that is answered early. Guesses.


class HttpCall:
    """One request. Only the task that serves it may use it, except for `try_write` and `evict`.

    ``method`` is the path, as the log shows it, and ``verb`` GET, POST and so on. ``headers`` has
    the request's headers by lower-case name; ``num_keys`` of them were keys, or names of holders.
    ``deadline`` is the client's, on Trio's clock. ``status`` is the answer's; None before it.
    ``scope`` is cancelled when the client has left. ``name`` is what the path names beyond that.
    ``request_id`` is sent with the answer. ``on_answer`` is called when the answer begins, and when
    the call has ended. ``extra_headers`` are sent with the answer. ``only_of`` is
    `CallRecord.only_of`.
    """

    def __init__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Any],
        send: Callable[[Any], Any],
        connection: HttpConnection,
    ) -> None:
        self.verb = str(scope["method"])
        self.method = str(scope["path"])
        self.name = ""  # of what the path ends with
        self.request_id = ""
        self.only_of: str | None = ""
        self.query = bytes(scope["query_string"])
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        names = [name for name, _ in scope["headers"]]
        self.num_keys = max(names.count(name) for name in (b"authorization", b"x-triolet-holder"))
        self.connection = connection
        self.peer = connection.peer
        self.scope = trio.CancelScope()
        self.status: int | None = None
        self.code: int | None = None  # the status, once the answer was sent whole, or failed
        self.is_lost = False
        self.on_answer: Callable[[], None] = lambda: None
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.trailing_metadata = ()  # is not sent
        self.is_closing = False  # no other request may follow on the connection
        self._receive = receive
        self._send_message = send
        self.num_read = 0  # bytes of the body
        self._num_parts_read = 0
        self.has_paid = False  # for not being work
        self.num_parts = 0  # of the answer that were sent
        self._has_body = False  # the request's body has come whole
        self._body: Holding | None = None  # of a body that was read
        self._is_stream = False  # of events
        self._is_sending = False  # a part of the answer, between whose bytes nothing may come
        self._has_ended = (
            False  # the end of the answer was sent, which ends the request for anycorn
        )
        self.arrived_at = trio.current_time()
        self.deadline = math.inf

    def read_timeout(self) -> None:
        """Set the deadline from `TIMEOUT_HEADER`.

        Raises:
            InvalidRequest: it is no number of seconds above 0.
        """
        given = self.headers.get(TIMEOUT_HEADER)
        if given is None:
            return
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise InvalidRequest.of("X-Request-Timeout", "is no number of seconds above 0")
        self.deadline = self.arrived_at + seconds

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None without a deadline."""
        return None if self.deadline == math.inf else self.deadline - trio.current_time()

    # ---- the request

    async def read_body(self, max_bytes: int) -> bytes:
        """Return the request's body. Its bytes are counted for the client's address until
        `free_body`.

        Raises:
            HttpError: it has more than ``max_bytes``, or did not come within
                `Limits.request_timeout_s`.
            DeadlineExceeded: nor before the client's own deadline.
            TooManyHeld: the server keeps too many bytes.
            Disconnected: the client has left.
        Cancellation: safe.
        """
        length = self.headers.get(b"content-length", b"")
        num_missing = int(length) if length.isdigit() and len(length) < 20 else 0
        if num_missing > max_bytes:
            raise _too_large(num_missing, max_bytes)
        limits, held = self.connection.shared.limits, self.connection.shared.held
        stream = self.connection.stream
        may_read, evicted = trio.Event(), trio.CancelScope()
        num_counted = CALL_BYTES  # else closing it would not end its wait for room

        def grow() -> None:
            """Count the whole body at once: many that are let in together would be too many."""
            nonlocal num_counted
            num_counted += num_missing
            may_read.set()
            stream.resume(RECEIVE_BYTES)
            held.set_bytes(holding, num_counted)

        holding = Holding(self.connection.holder, evicted.cancel, grow)
        until = min(self.deadline, trio.current_time() + limits.request_timeout_s)
        held.set_bytes(holding, num_counted)
        body = bytearray()  # parts of a byte each would take fifty times as much
        try:
            with trio.move_on_at(until), evicted:
                if num_missing > GROW_BYTES:
                    stream.pause()
                    held.ask_to_grow(holding, num_missing)
                    await self._wait_here(may_read)
                self.connection.go_on()
                while True:
                    message = await self._receive_part()
                    if message["type"] == "http.disconnect":
                        self.is_lost = True
                        raise Disconnected
                    body += message["body"]
                    if self.num_read > max_bytes:
                        raise _too_large(self.num_read, max_bytes)
                    num_counted = max(num_counted + 1, CALL_BYTES + self.num_read)
                    held.set_bytes(holding, num_counted)  # shows the progress, too
                    if not message.get("more_body", False):
                        self._has_body = True
                        return bytes(body)
        finally:
            stream.resume()
            body.clear()  # an exception's frames may wait for the collector
            holding.is_whole, holding.evict = self._has_body, self.evict
            self._body = holding
            if not self._has_body:
                self.free_body()
        if evicted.cancelled_caught:
            raise TooManyHeld("too many bytes of incomplete requests are kept")
        if self.deadline <= until:
            raise DeadlineExceeded(
                "the deadline passed in phase read, before the request had come",
                phase="read",
            )
        seconds = f"{limits.request_timeout_s:g} s"
        raise HttpError(408, "REQUEST_TIMEOUT", f"the request did not come within {seconds}")

    async def _receive_part(self) -> dict[str, Any]:
        """Return the next message of anycorn's. For parts of a body that are small in the mean, the
        connection owes time, and the body is read on when its client has had its turn.

        Cancellation: safe, as the connection ends then.
        """
        message: dict[str, Any] = await self._receive()
        if size := len(message.get("body", b"")):
            self.num_read += size
            self._num_parts_read += 1
            if self._num_parts_read > 1 + self.num_read // SMALL_BYTES:
                self.connection.account.owe(SMALL_PART)
                await self.connection.pay_owed()
        return message

    def free_body(self) -> None:
        """Take note that the request's body is being decoded, or has failed. Idempotent."""
        if self._body is not None:
            self.connection.shared.held.close(self._body)
            self._body = None

    async def _wait_here(self, event: trio.Event) -> None:
        """Wait for ``event`` while nothing is read. Raises Disconnected if the client leaves."""
        while not event.is_set():
            with trio.move_on_after(LOOK_S):
                await event.wait()
            if self.connection.stream.has_left:
                self.is_lost = True
                raise Disconnected

    async def watch(self) -> None:
        """Cancel ``scope`` when the client leaves, from the request's end on.

        Cancellation: safe.
        """
        while True:
            with trio.move_on_after(LOOK_S):
                if (await self._receive())["type"] == "http.disconnect":
                    break
            if self.connection.stream.has_left:
                break
        if self._has_ended:  # a cancellation would stop anycorn's clock of an idle connection
            return
        self.is_lost = self.code is None
        self.scope.cancel(reason="the client has left")

    # ---- the answer

    def begin_events(self) -> None:
        """Let the next `write` begin a stream of events."""
        self._is_stream = True

    async def write(self, message: bytes) -> None:
        """Write a part of a stream of events, or the whole answer, and wait until the socket has
        taken it.

        Raises:
            Disconnected: the client has left.
        Cancellation: part of it may have been sent, and the connection is cut.
        """
        if not self._is_stream:
            await self.answer(200, message)
            return
        if self.status is None:
            await self._start(200, EVENTS, [(b"x-accel-buffering", b"no")])
        async with self._room_for(len(message)) as note_left:
            await self._send(message, note_left)

    def try_write(self, data: bytes) -> bool:
        """Write a part of a stream now; return False if the task has to do it."""
        is_sent = not self._is_sending and self.status is not None
        is_sent = is_sent and self.connection.write_now(data)
        self.num_parts += is_sent
        return is_sent

    async def answer(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers = ()
    ) -> None:
        """Send a whole answer. Raises and cancellation: as `write`."""
        length = [(b"content-length", b"%d" % len(body))]
        async with self._room_for(len(body)) as note_left:
            await self._start(status, content_type, [*length, *headers])
            if self.verb != "HEAD":
                await self._send(body, note_left)
        self.code = status

    async def finish(self) -> None:
        """End the answer, if it has begun; before the request has come whole, `linger` does that.
        Raises Disconnected. Cancellation: as `write`."""
        if self.status is not None and self._has_body:
            self.code = self.code or self.status
            self._has_ended = True
            await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def linger(self) -> None:
        """End an answer that was sent before its request had come whole. The rest of the request
        is read and dropped, at most `LINGER_BYTES` in `LINGER_S`: anycorn waits until its messages
        are taken, and a connection that closes with unread bytes is reset, by which its client may
        lose the answer. Beyond these limits, the connection closes all the same.

        Raises nothing. Cancellation: safe.
        """
        if self._has_body or self.status is None:
            return
        num_left = LINGER_BYTES
        with trio.move_on_after(LINGER_S):
            while not self._has_body and num_left > 0:
                message = await self._receive_part()
                if message["type"] == "http.disconnect":
                    return
                num_left -= len(message["body"])
                self._has_body = not message.get("more_body", False)
        with contextlib.suppress(Disconnected):
            await self.finish()

    async def fail(self, error: Exception) -> None:
        """Answer with ``error``: with its status, or in a stream that has begun with an event.
        Nothing is raised; a client that does not take the answer loses its connection.

        Cancellation: the connection is cut.
        """
        status, headers, body = answer_of(error)
        self.code = status
        try:
            if self.status is None:
                self.is_closing |= not self._has_body
                await self.answer(status, encode_json(body), headers=headers)
            elif self._is_stream and self.connection.stream.is_clear:
                await self._send(b"data: " + encode_json(body) + b"\n\n", _ignore)
            else:
                self.connection.cut()
        except Disconnected:
            self.is_lost = True

    async def wait_received(self) -> None:
        """Do nothing: over HTTP, no request waits for a client that lost its connection."""

    def evict(self) -> None:
        """End the call and its connection, because its client does not read the answer."""
        self.connection.cut()
        self.scope.cancel(reason="the answer is not read")

    async def _start(self, status: int, content_type: bytes, headers: Headers) -> None:
        self.on_answer()
        self.status = status
        closing = [(b"connection", b"close")] if self.is_closing else []
        common = [
            (b"content-type", content_type),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        if self.request_id:
            common.append((ID_HEADER, _header_of(self.request_id)))
        every = [*common, *headers, *self.extra_headers, *closing]
        await self._put({"type": "http.response.start", "status": status, "headers": every})

    def _room_for(
        self, num_bytes: int
    ) -> contextlib.AbstractAsyncContextManager[Callable[[int], None]]:
        """Return a context that waits for room for a large part of the answer, and counts it for
        its client while it is sent. The context's value is to be called with the number of bytes
        that are left.

        Raises:
            TooManyHeld: too many bytes of answers wait.
            Disconnected: the client has left.
        Cancellation: safe.
        """
        is_large = num_bytes > SENT_BYTES
        return self._keeping(num_bytes) if is_large else contextlib.nullcontext(_ignore)

    @contextlib.asynccontextmanager
    async def _keeping(self, num_bytes: int) -> AsyncIterator[Callable[[int], None]]:
        limits, held = self.connection.shared.limits, self.connection.shared.held
        unsent, address = held.unsent, self.connection.address
        most, total = WAITING_SHARES * limits.held_bytes, unsent.total()
        if total and total + num_bytes > most:
            share = most // len({address, *unsent})
            if unsent[address] + num_bytes > share:
                raise TooManyHeld("too many bytes of answers wait to be sent")
        num_counted, may_send = min(num_bytes, limits.held_bytes // COUNTED_SHARE), trio.Event()

        def grow() -> None:
            note_left(num_bytes)
            holding.grow = None  # from now on less is progress, and not more
            may_send.set()

        def note_left(num_left: int) -> None:
            held.set_bytes(holding, CALL_BYTES + num_counted * num_left // num_bytes)

        holding = Holding(self.connection.holder, self.evict, grow)
        unsent[address] += num_bytes
        try:
            held.set_bytes(holding, CALL_BYTES)
            held.ask_to_grow(holding, num_counted)
            await self._wait_here(may_send)
            yield note_left
        finally:
            unsent[address] -= num_bytes
            if not unsent[address]:
                del unsent[address]
            held.close(holding)

    async def _send(self, data: bytes, note_left: Callable[[int], None]) -> None:
        """Send a part of the answer's body, and wait until the socket has taken it."""
        self._is_sending = True
        try:
            for at in range(0, len(data), SENT_BYTES):
                await self._put_part(data[at : at + SENT_BYTES])
                note_left(max(0, len(data) - at - SENT_BYTES))
        finally:
            self._is_sending = False

    async def _put_part(self, data: bytes) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": True})
        self.num_parts += 1
        stream = self.connection.stream
        if stream.is_clear and not stream.is_broken:
            return
        try:
            await stream.wait_sent()
        except trio.Cancelled:
            self.connection.cut()
            raise

    async def _put(self, message: dict[str, Any]) -> None:
        """Give anycorn a message. h11 has it then; so the connection of one that is cancelled
        before it has reached the socket cannot go on."""
        if self.connection.stream.is_broken:
            raise Disconnected
        try:
            await self._send_message(message)
        except trio.Cancelled:
            self.connection.cut()
            raise


class HttpRecord(CallRecord):
    """The record of an HTTP request; ``call`` is what its handler reads and writes."""

    __slots__ = ("call",)
    call: HttpCall | None

    @classmethod
    def of(cls, call: HttpCall) -> HttpRecord:
        """Return the record of a request that has just come."""
        record = cls(method=call.method, peer=call.peer, address=call.connection.address)
        record.call = call
        return record


def _ignore(num_left: int) -> None:
    """Do nothing: small parts are counted where they wait."""


def _header_of(request_id: str) -> bytes:
    """Return an id as a header's value, without what a header cannot have."""
    return bytes([char for char in request_id.encode("ascii", "ignore") if 0x20 < char < 0x7F])


def _too_large(size: int, max_bytes: int) -> HttpError:
    limits = "--max-message-bytes; of images --max-image-bytes"
    told = f"the request has {size} bytes or more, of at most {max_bytes} ({limits})"
    return HttpError(413, "REQUEST_TOO_LARGE", told)
