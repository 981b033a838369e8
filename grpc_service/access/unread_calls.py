"""Unread calls: their requests have succeeded, and their clients do not read the answers.

Rule 1: a request that succeeded is answered in full, however late its client reads, while its
connection has no more than `UNREAD_CALLS_PER_CONNECTION_MAX` unread calls (D1); a call that
failed ends soon (`grpc_service.services.call_writer`). An unread call keeps no memory of the
engine. Rule 2: a connection with more unread calls loses its oldest, unless its client reads
slowly; with more than `UNREAD_CALLS_MAX` in all, so does the connection that has most. No other
client is affected. Rule 3: everything here takes constant time on average, while `UNREAD_CALLS_MAX`
is not reached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

UNREAD_AGE_S = 1.0  # guess: on any usable network, a client that reads has read its answer by then
UNREAD_CALLS_MAX = 1024
UNREAD_CALLS_PER_CONNECTION_MAX = 64


class EndedCall(Protocol):
    """A call whose request has succeeded."""

    @property
    def is_being_read(self) -> bool:
        """Whether the client still reads from the call's connection, if only slowly."""

    def evict(self) -> None:
        """Reset the call."""


class UnreadCalls:
    """Counts calls between `ended` and `gone`; a call that stays longer than `UNREAD_AGE_S` is
    unread. ``clock`` returns seconds and never goes back. ``most`` bounds the unread calls of a
    connection, ``most_in_all`` those of all connections."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        most: int = UNREAD_CALLS_PER_CONNECTION_MAX,
        most_in_all: int = UNREAD_CALLS_MAX,
    ) -> None:
        self._clock = clock
        self._most, self._most_in_all = most, most_in_all
        self._ended: dict[EndedCall, tuple[float, Hashable]] = {}  # calls, the first ended first
        self._connections: dict[EndedCall, Hashable] = {}  # each unread call's connection
        self._unread: dict[Hashable, dict[EndedCall, None]] = {}  # by connection, the oldest first

    def ended(self, call: EndedCall, connection: Hashable) -> None:
        """Note that a call's request has succeeded; the call's handler still runs."""
        self._ended[call] = (self._clock(), connection)
        self._reset_excess()

    def gone(self, call: EndedCall) -> None:
        """Forget a call, as its handler has returned. `ended` need not have been called for it."""
        self._ended.pop(call, None)
        if call in self._connections:
            connection = self._connections.pop(call)
            calls = self._unread[connection]
            del calls[call]
            if not calls:
                del self._unread[connection]

    def count(self) -> int:
        """Return the number of unread calls now. Calls beyond the bounds are reset first."""
        self._reset_excess()
        return len(self._connections)

    def _reset_excess(self) -> None:
        """Note the calls that became unread, and reset the oldest ones beyond the bounds."""
        limit = self._clock() - UNREAD_AGE_S
        while self._ended:
            call = next(iter(self._ended))
            ended_at, connection = self._ended[call]
            if ended_at > limit:
                break
            del self._ended[call]
            self._connections[call] = connection
            calls = self._unread.setdefault(connection, {})
            calls[call] = None
            while len(calls) > self._most and not call.is_being_read:
                self._evict_oldest(connection)
        while len(self._connections) > self._most_in_all:
            self._evict_oldest(max(self._unread, key=lambda owner: len(self._unread[owner])))

    def _evict_oldest(self, connection: Hashable) -> None:
        call = next(iter(self._unread[connection]))
        self.gone(call)
        call.evict()
