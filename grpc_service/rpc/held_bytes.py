"""Bounds the bytes that the server keeps for its clients.

Counted are incomplete requests, unread answers, calls that wait for their request or for their
client's window, and output that a client's connection does not accept. One object counts them for
all connections. Beyond `Limits.held_bytes`

1. calls of connections without progress for `Limits.held_stall_s` are ended: first those of the
   address with the most bytes, and of these those of the connection with the most, so that
   other connections behind the same proxy keep theirs. A call whose request waits for the server
   is not ended. Calls are also ended while a request waits for room;
2. incomplete requests get no larger window, and wait for room in order. Two kinds never wait: the
   first request, so that one can always be completed; and requests of addresses that hold less than
   their share even with the whole request, so that slow senders do not delay others.

A request asks for room for all of its missing bytes, so that many large requests do not fill the
room while none of them can be completed. Large answers over HTTP ask for room in the same way
before they are sent (`grpc_service.openai.call`).

Beyond twice `Limits.held_bytes`, calls are ended even if they progress. Nothing here waits.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpc_service.rpc.limits import Limits


# Seconds between searches for stalled calls, and how many calls a search ends: to end a call takes
# about 0.2 ms, and there may be thousands. Guesses.
LOOK_S = 0.05
ENDS_MAX = 32
LOOKS_MAX = 32  # waiting requests that are examined when there may be room. Guess.
PROGRESS_BYTES = 2**12  # fewer bytes in `Limits.held_stall_s` are no progress. Guess.
CALL_BYTES = 2**14  # a call's memory without its messages, about. Measured with 1,000 calls.


class Holder:
    """One connection, for which ``num_bytes`` are kept. ``progressed_at`` is when it had last
    delivered `PROGRESS_BYTES` of requests, or taken as many bytes of answers, or the end of an
    answer; in the clock's seconds."""

    __slots__ = ("_num_moved", "address", "num_bytes", "progressed_at")

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_bytes = 0
        self.progressed_at = -math.inf
        self._num_moved = 0  # bytes delivered or taken since `progressed_at`

    def note_progress(self, num_bytes: int, now: float, *, is_whole: bool) -> None:
        """Note that bytes have moved; ``is_whole``: they ended an answer."""
        self._num_moved += num_bytes
        if is_whole or self._num_moved >= PROGRESS_BYTES:
            self._num_moved, self.progressed_at = 0, now


class Holding:
    """The ``num_bytes`` that are kept for a call's request, for its answer, or for a connection's
    unsent output.

    ``evict`` ends the call, or the connection. ``grow`` enlarges the request's window, or lets an
    answer be sent; None for output, and for an answer that is being sent. ``changed_at`` is when
    ``num_bytes`` last changed, in the clock's seconds. ``num_missing`` are the bytes that an
    incomplete request lacks; a request that ``is_whole`` waits for the server. Nothing is counted
    once it ``is_closed``.
    """

    __slots__ = (
        *("changed_at", "evict", "grow", "holder", "is_closed", "is_whole", "num_bytes"),
        "num_missing",
    )

    def __init__(
        self, holder: Holder, evict: Callable[[], None], grow: Callable[[], None] | None = None
    ) -> None:
        self.holder = holder
        self.evict = evict
        self.grow = grow
        self.num_bytes = 0
        self.num_missing = 0
        self.is_whole = False
        self.changed_at = 0.0
        self.is_closed = False


class HeldBytes:
    """Counts the bytes of all holdings. ``clock`` returns seconds."""

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        on_short: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_short = on_short
        self._max = limits.held_bytes
        self._stall_s = limits.held_stall_s
        self._clock = clock
        self._holdings: dict[Holding, None] = {}  # holdings with bytes, the last changed last
        self._growing: dict[Holding, None] = {}  # requests that asked for room, in that order
        self._waiting: dict[Holding, None] = {}  # requests of `_growing` that got no room
        self._by_address: Counter[str] = Counter()
        self._looked_at = -math.inf  # when stalled calls were last looked for
        self.num_bytes = 0
        # Bytes of large answers over HTTP by address, of which `num_bytes` has a part.
        self.unsent: Counter[str] = Counter()

    def set_bytes(self, holding: Holding, num_bytes: int) -> None:
        """Note how many bytes a holding has now. Calls may end, this one's too."""
        change = num_bytes - holding.num_bytes
        if not change or holding.is_closed:
            return
        now = self._clock()
        if (change > 0) == (holding.grow is not None):  # progress: requests grow, answers shrink
            holding.holder.note_progress(abs(change), now, is_whole=not num_bytes)
        self._count(holding, num_bytes)
        if num_bytes:
            holding.changed_at = now
            self._holdings[holding] = None
        if self.is_short:
            self.make_room()

    def close(self, holding: Holding) -> None:
        """Count nothing for a holding any more. Its callbacks are dropped, which refer to the call
        that refers to the holding: Python collects such cycles late."""
        self.set_bytes(holding, 0)
        holding.is_closed = True
        holding.evict = holding.grow = lambda: None

    def ask_to_grow(self, holding: Holding, num_missing: int = 0) -> None:
        """Call `Holding.grow` when the request may have the ``num_missing`` bytes that it lacks, or
        the answer as many: now or later."""
        holding.num_missing = num_missing
        self._growing[holding] = self._waiting[holding] = None
        if self._may_grow(holding):
            self._grow(holding)
        else:
            self.make_room()

    def _count(self, holding: Holding, num_bytes: int) -> None:
        change = num_bytes - holding.num_bytes
        self.num_bytes += change
        holding.holder.num_bytes += change
        address = holding.holder.address
        self._by_address[address] += change
        if not self._by_address[address]:
            del self._by_address[address]
        holding.num_bytes = num_bytes
        self._holdings.pop(holding, None)
        if not num_bytes:
            self._growing.pop(holding, None)
            self._waiting.pop(holding, None)

    @property
    def is_short(self) -> bool:
        """Whether more is kept than `Limits.held_bytes`, or a request waits for room."""
        return self.num_bytes > self._max or bool(self._waiting)

    def make_room(self) -> None:
        """End calls as far as that is needed now, and let requests grow."""
        if self.is_short:
            self._on_short()
            self._end_some()
        if self._waiting:
            self._let_grow()

    def _end_some(self) -> None:
        now = self._clock()
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            num_missing = next(iter(self._waiting)).num_missing if self._waiting else 0
            stalled = self._stalled(now - self._stall_s)
            self._evict(stalled, self._max - num_missing, ENDS_MAX)
        if self.num_bytes > 2 * self._max:
            self._evict(list(self._holdings), 2 * self._max)

    def _stalled(self, limit: float) -> list[Holding]:
        """Return the holdings without progress since ``limit``, the longest unchanged one first."""
        unchanged = itertools.takewhile(lambda holding: holding.changed_at <= limit, self._holdings)
        return [
            part
            for part in unchanged
            if part.holder.progressed_at <= limit and not (part.is_whole or part in self._waiting)
        ]

    def _evict(self, holdings: list[Holding], max_bytes: int, max_ends: float = math.inf) -> None:
        """End calls until no more than ``max_bytes`` are kept, or ``max_ends`` calls have ended:
        first those of the address with most bytes, among these of the connection with most, the
        largest first."""
        by_holder: dict[Holder, deque[Holding]] = {}
        for holding in sorted(holdings, key=lambda holding: -holding.num_bytes):
            by_holder.setdefault(holding.holder, deque()).append(holding)
        num_ended = 0
        while by_holder and self.num_bytes > max_bytes and num_ended < max_ends:
            holder = max(by_holder, key=self._bytes_of)
            holding = by_holder[holder].popleft()
            if not by_holder[holder]:
                del by_holder[holder]
            if holding.num_bytes:  # `evict` may have ended others
                self._count(holding, 0)
                holding.evict()
                num_ended += 1

    def _bytes_of(self, holder: Holder) -> tuple[int, int]:
        return self._by_address[holder.address], holder.num_bytes

    def _let_grow(self) -> None:
        """Of the first `LOOKS_MAX` requests that wait, let those grow that may."""
        first = next(iter(self._growing))  # may stand behind the first `LOOKS_MAX` of `_waiting`
        for holding in [first, *itertools.islice(self._waiting, LOOKS_MAX)]:
            if holding in self._waiting and self._may_grow(holding):
                self._grow(holding)

    def _may_grow(self, holding: Holding) -> bool:
        if self.num_bytes + holding.num_missing <= self._max:
            return True
        share = self._max // len(self._by_address)
        own = self._by_address[holding.holder.address] + holding.num_missing
        return own <= share or holding is next(iter(self._growing))

    def _grow(self, holding: Holding) -> None:
        del self._waiting[holding]
        assert holding.grow is not None
        holding.grow()
