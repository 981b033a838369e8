"""The parked requests, which no step computes (D7).

Rule: nothing is decided here; `engine.core.text.step_builder` and `engine.core.text.guests` decide
which requests are parked, go on or give their blocks back.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.core.common.types import RequestId
    from engine.core.text.sequence import LiveText, Sequence


class Parked:
    """The parked requests of one scheduler, the one that has been parked longest first.

    ``unread`` are the requests whose readers have not drained their streams, ``guests`` the
    requests whose clients are away, and ``holders`` the guests with blocks. Read-only outside.
    """

    def __init__(self, unread: dict[RequestId, LiveText]) -> None:
        self.unread = unread
        self.guests: dict[RequestId, LiveText] = {}
        self.holders: dict[RequestId, LiveText] = {}

    def __len__(self) -> int:
        return len(self.unread) + len(self.guests)

    def __contains__(self, live: LiveText) -> bool:
        return live.request.request_id in (self.guests if live.is_guest else self.unread)

    def add(self, live: LiveText) -> None:
        """Keep a request that is parked from now on."""
        name = live.request.request_id
        if not live.is_guest:
            self.unread[name] = live
            return
        self.guests[name] = live
        if live.num_blocks:
            self.holders[name] = live

    def remove(self, live: LiveText) -> None:
        """Forget a request, which need not be parked."""
        for place in (self.unread, self.guests, self.holders):
            place.pop(live.request.request_id, None)

    def note_loss(self, live: LiveText) -> None:
        """Take note that a sequence of a parked request has lost its blocks."""
        if not live.num_blocks:
            self.holders.pop(live.request.request_id, None)

    def residents(self) -> Iterator[Sequence]:
        """Yield the parked sequences that hold blocks. The time does not grow with the number of
        guests that hold none."""
        for live in chain(self.unread.values(), self.holders.values()):
            yield from [seq for seq in live.sequences if seq.blocks]

    def check(self) -> None:
        """Check that each request is in its place.

        Raises:
            AssertionError: One is not.
        """
        assert not any(live.is_guest for live in self.unread.values())
        assert all(live.is_guest for live in self.guests.values())
        holders = {name for name, live in self.guests.items() if live.num_blocks}
        assert holders <= self.holders.keys() <= self.guests.keys(), "a guest's blocks are unknown"
