"""Unread calls: their requests have succeeded, and their clients do not read the answers.

Rule 1: a request that succeeded is answered in full, however late its client reads (D1, R71); a
call that failed ends soon (`grpc_service.services.call_writer`). An unread call holds nothing of
the engine's, but it is counted, and while there are too many, new calls are refused. Calls that run
at that time may still become unread ones; the bound on live requests bounds their number.
Rule 2: everything here takes constant time on average, because every new call asks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from urllib.parse import unquote

from engine.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

UNREAD_AGE_S = 1.0  # guess: a client that reads has read by then, on any usable network
UNREAD_CALLS_MAX = 1024
UNREAD_CALLS_PER_ADDRESS_MAX = 64
RETRY_AFTER_S = 5.0  # guess: by then a client has noticed that one of its calls stalls


def address_of(peer: str) -> str:
    """Return the client's address without the connection's port: ``ipv4:10.0.0.7`` for
    ``ipv4:10.0.0.7:5123``, as grpc writes ``peer``. Returns "" for a Unix socket."""
    kind, _, rest = unquote(peer).partition(":")
    return "" if kind == "unix" or not rest else f"{kind}:{rest.rpartition(':')[0]}"


class UnreadCalls:
    """Counts calls between `ended` and `gone`; a call that stays longer than `UNREAD_AGE_S` is
    unread. ``clock`` returns seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: dict[Hashable, tuple[float, str]] = {}  # in the order of their ends
        self._unread_calls: dict[Hashable, str] = {}
        self._by_address: Counter[str] = Counter()

    def ended(self, call: Hashable, address: str) -> None:
        """Note that a call's request has succeeded; the call's handler still runs."""
        self._ended[call] = (self._clock(), address)

    def gone(self, call: Hashable) -> None:
        """Forget a call, as its handler has returned. `ended` need not have been called for it."""
        self._ended.pop(call, None)
        address = self._unread_calls.pop(call, "")
        if address:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def count(self) -> int:
        """Return the number of unread calls now."""
        limit = self._clock() - UNREAD_AGE_S
        while self._ended:
            call = next(iter(self._ended))
            ended_at, address = self._ended[call]
            if ended_at > limit:
                break
            del self._ended[call]
            self._unread_calls[call] = address
            if address:
                self._by_address[address] += 1
        return len(self._unread_calls)

    def check_room(self, address: str) -> None:
        """Check that a new call from ``address`` may be served.

        Raises:
            Overloaded: too many calls are unread, of that address or in total.
        """
        if self.count() >= UNREAD_CALLS_MAX:
            raise Overloaded(
                f"{UNREAD_CALLS_MAX} calls have ended and their clients do not read the end",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._by_address[address] >= UNREAD_CALLS_PER_ADDRESS_MAX:
            raise Overloaded(
                f"{UNREAD_CALLS_PER_ADDRESS_MAX} calls from this address have ended and their "
                "clients do not read the end",
                retry_after_s=RETRY_AFTER_S,
            )
