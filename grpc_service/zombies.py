"""Calls that have ended for the engine and not for their client, who does not read.

Rule 1: a reader that has all that its window allows, and does not read, is owed what its request
made before it succeeded (D1, R71); a call that failed ends at once. Such a call holds nothing of
the engine's; it is counted, and while there are too many no new call is taken. Those that were open
before may still become zombies: the bound on live requests bounds them.
Rule 2: everything here takes constant time, on average; it is asked at every new call.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from urllib.parse import unquote

from engine.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

ZOMBIE_AGE_S = 1.0  # guess: by then a reader that reads has read, on any network worth the name
ZOMBIES_MAX = 1024
ZOMBIES_PER_ADDRESS_MAX = 64
RETRY_AFTER_S = 5.0  # guess: one stall noticed by its own client


def address_of(peer: str) -> str:
    """The address in ``peer`` as grpc writes it, without the connection's port: ``ipv4:10.0.0.7``
    for ``ipv4:10.0.0.7:5123``. "" for a Unix socket, whose clients have none."""
    kind, _, rest = unquote(peer).partition(":")
    return "" if kind == "unix" or not rest else f"{kind}:{rest.rpartition(':')[0]}"


class Zombies:
    """Counts ended calls from `ended` to `gone`; those between for longer than `ZOMBIE_AGE_S` are
    zombies. ``clock`` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: dict[Hashable, tuple[float, str]] = {}  # in the order of their ends
        self._zombies: dict[Hashable, str] = {}
        self._by_address: Counter[str] = Counter()

    def ended(self, call: Hashable, address: str) -> None:
        """The engine's part of a call is over, its handler is still there."""
        self._ended[call] = (self._clock(), address)

    def gone(self, call: Hashable) -> None:
        """A call's handler has returned; whether it ever counted does not matter."""
        self._ended.pop(call, None)
        address = self._zombies.pop(call, "")
        if address:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def count(self) -> int:
        """How many zombies there are."""
        limit = self._clock() - ZOMBIE_AGE_S
        while self._ended:
            call = next(iter(self._ended))
            ended_at, address = self._ended[call]
            if ended_at > limit:
                break
            del self._ended[call]
            self._zombies[call] = address
            if address:
                self._by_address[address] += 1
        return len(self._zombies)

    @property
    def last_count(self) -> int:
        """As `count` found it last; for any thread."""
        return len(self._zombies)

    def check_room(self, address: str) -> None:
        """Whether a new call from ``address`` may come.

        Raises:
            Overloaded: too many ended calls wait for their clients to read; nothing was changed.
        """
        if self.count() >= ZOMBIES_MAX:
            raise Overloaded(
                f"{ZOMBIES_MAX} calls have ended and their clients do not read the end",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._by_address[address] >= ZOMBIES_PER_ADDRESS_MAX:
            raise Overloaded(
                f"{ZOMBIES_PER_ADDRESS_MAX} calls from this address have ended and their clients "
                "do not read the end",
                retry_after_s=RETRY_AFTER_S,
            )
