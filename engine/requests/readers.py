"""The readers of streams: the protocol, and the readers in the engine's own process."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import trio

if TYPE_CHECKING:
    from engine.errors import TrioletError

EventT = TypeVar("EventT")
EventT_contra = TypeVar("EventT_contra", contravariant=True)


class Reader(Protocol[EventT_contra]):
    """Takes the events of one stream, on the engine's thread, in the step's delivery.

    Both methods are synchronous, wait for nothing and raise nothing.
    """

    def push(self, event: EventT_contra) -> None:
        """Take the next event. A credited event keeps its slot until the reader frees that."""

    def end(self, error: TrioletError | None) -> None:
        """Take note that no event follows. ``error`` is None for a request that succeeded."""


class Leaving(NamedTuple):
    """How a reader leaves its stream: it has not taken ``num_unread`` tokens or other results, and
    its call has sent ``num_bytes``. ``is_lost``: its client has lost its connection, and did not
    end the call."""

    num_unread: int = 0
    num_bytes: int = 0
    is_lost: bool = False


IN_PEACE = Leaving()


class Latest:
    """One place for events in a ``reader``'s queue: a newer one replaces one that was not taken.

    The reader's side calls `take` for the event when it finds this in its queue. That may happen on
    another thread.
    """

    def __init__(self, reader: Reader[Any]) -> None:
        self.reader = reader
        self._event: Any = None
        self._is_queued = False

    def put(self, event: Any) -> None:
        """Hand the newest event to the reader. Waits for nothing."""
        self._event = event
        if not self._is_queued:
            self._is_queued = True
            self.reader.push(self)

    def take(self) -> Any:
        """Return the newest event; None if it has been taken from this place before."""
        # In this order, an event that is put meanwhile is taken now or queued again.
        self._is_queued = False
        event, self._event = self._event, None
        return event


def taken(events: list[Any]) -> list[Any]:
    """Return the events that a reader found in its queue, with those of `Latest` in its place."""
    found = [event.take() if isinstance(event, Latest) else event for event in events]
    return [event for event in found if event is not None]


class ChannelReader(Generic[EventT]):
    """Keeps a stream's events in a memory channel, for a task of the engine's own Trio loop."""

    def __init__(self, capacity: int) -> None:
        self._send, self._receive = trio.open_memory_channel[EventT](capacity)

    def push(self, event: EventT) -> None:
        """Keep an event. The channel has room for every event that a stream may have."""
        self._send.send_nowait(event)

    def end(self, error: TrioletError | None) -> None:
        """Let `receive` raise `trio.EndOfChannel` after the events that are kept."""
        self._send.close()

    async def receive(self) -> EventT:
        """Return the next event.

        Raises:
            trio.EndOfChannel: the stream has ended. trio.ClosedResourceError: `close` was called.
        Cancellation: no event is lost.
        """
        return await self._receive.receive()

    def close(self) -> list[EventT]:
        """Drop the events that have not been received, and return them. Idempotent."""
        unread: list[EventT] = []
        with suppress(trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
            while True:
                unread.append(self._receive.receive_nowait())
        self._receive.close()
        return unread


class NoReader:
    """Drops the events of a stream whose reader has left or was notified of the end."""

    def push(self, event: object) -> None:
        """Drop an event."""

    def end(self, error: TrioletError | None) -> None:
        """Do nothing."""


NO_READER = NoReader()
