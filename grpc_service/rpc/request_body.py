"""The body of one request: its messages, what they take of the server's memory, and what they cost.

A large compressed message is decompressed in parts by its connection, which reads nothing more
meanwhile (`Connection.to_decompress`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpc_service.rpc import accounts
from grpc_service.rpc.errors import TooManyHeld
from grpc_service.rpc.framing import MessageReader
from grpc_service.rpc.held_bytes import CALL_BYTES, Holding

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpc_service.rpc.connection import Connection
    from grpc_service.rpc.streams import Stream


class RequestBody:
    """The body of the request on ``stream``. ``touch`` is called when the connection has something
    to write, and ``on_change`` when the call's task has something to do: a message is whole, or the
    body has an error."""

    def __init__(
        self,
        stream: Stream,
        connection: Connection,
        encoding: bytes,
        touch: Callable[[], None],
        on_change: Callable[[], None],
        method: str = "",
    ) -> None:
        self._stream = stream
        self._touch = touch
        self._account = connection.account
        self._to_decompress = connection.to_decompress
        self._on_change = on_change
        self._held = connection.held
        self._holding = Holding(connection.holder, self._evict, self._grow)
        self.num_received = 0  # bytes
        self.has_request = False  # a message has come, or the body's end
        self._is_waiting = False  # the call's task waits for a message
        self._is_closed = False
        self._account.owe(accounts.WAITING_CALL)
        limits = connection.limits
        most = limits.max_message_bytes + limits.extra_bytes_by_method.get(method, 0)
        self.reader = MessageReader(most, encoding)

    @property
    def is_faulty(self) -> bool:
        """Whether the request is malformed, or too large."""
        return self.reader.error is not None and not self._is_closed

    @property
    def has_message(self) -> bool:
        """Whether a whole message waits to be taken."""
        return bool(self.reader.messages)

    @property
    def next_bytes(self) -> int:
        """The size of the message that waits to be taken; 0 if none does."""
        return len(self.reader.messages[0][0]) if self.reader.messages else 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._is_closed:
            self._account.charge(accounts.NO_OP_FRAME)
            return
        self.num_received += len(data)
        was_decompressing = self.reader.is_decompressing
        self.reader.feed(data)
        self._note_change()
        if self.reader.is_decompressing and not was_decompressing:
            self._to_decompress.append(self)

    def decompress_part(self) -> bool:
        """Decompress the next part of a large message; return whether there is more to do."""
        if self._is_closed or self._stream.is_over:
            return False
        self.reader.decompress_part()
        self._note_change()
        return self.reader.is_decompressing

    def take(self) -> tuple[bytes, bool]:
        """Remove and return the first message, and whether it came compressed."""
        taken, self._is_waiting = self.reader.take(), False
        self._count()
        if not (self._stream.has_ended or self.reader.messages):
            self._open_window()
            self._touch()
        return taken

    def note_waiting(self) -> None:
        """Count the call itself, beside its bytes, while it waits for its next message."""
        if not self._is_waiting:
            self._is_waiting = True
            self._count()

    def note_request(self) -> None:
        """Note that the request has come; give back what the call owed until then."""
        if not self.has_request:
            self.has_request, self._is_waiting = True, False
            self._account.owe(-accounts.WAITING_CALL)
            self._count()

    def close(self) -> None:
        """Drop all bytes, past and future, as the call has ended or takes no more messages.
        Idempotent."""
        self._is_closed = True
        # A new error replaces a raised one, which refers to the call, and that to this body.
        self.reader.fail(TooManyHeld("the call takes no more messages"))
        self._on_change = lambda: None
        self._held.close(self._holding)

    def _note_change(self) -> None:
        reader = self.reader
        if reader.inflated_bytes:
            self._account.charge(accounts.INFLATED_BYTE * reader.inflated_bytes)
            reader.inflated_bytes = 0
        if reader.messages or reader.error is not None:
            self.note_request()
        self._count()
        if not reader.messages:
            self._open_window()
        if reader.messages or reader.error is not None:
            self._on_change()

    def _open_window(self) -> None:
        """Let the client send more. While a message waits to be taken, the window stays as it is:
        a client may send many messages, and the server would keep all that it does not read."""
        if self.reader.is_amid_message:
            self._held.ask_to_grow(self._holding, self.reader.num_missing)
        else:
            self._stream.release()

    def _count(self) -> None:
        self._holding.is_whole = self.has_message or self.reader.is_decompressing
        num_bytes = self.reader.num_bytes
        if self._is_waiting:
            num_bytes += CALL_BYTES
        self._held.set_bytes(self._holding, num_bytes)

    def _grow(self) -> None:
        self._stream.release()
        self._touch()

    def _evict(self) -> None:
        self._account.charge(accounts.EVICTED_CALL)
        which = "wait for it" if self._holding.is_whole else "are not complete"
        self.reader.fail(TooManyHeld(f"the server keeps too many requests that {which}"))
        self._on_change()
