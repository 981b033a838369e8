"""Guests: requests whose clients have lost their connections and may come back (D25).

Rule 1: a guest is computed only in steps that have nothing else to compute, and then on a share of
the seats. As soon as another request runs or waits, the guests are parked. Rule 2: parked guests
hold a share of the blocks, the last ones that were parked; the others give theirs back, and are
computed again when their clients are back. Rule 3: what a step costs does not grow with the number
of parked guests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.text.lifecycle import State

if TYPE_CHECKING:
    from engine.config import SchedulerConfig
    from engine.core.common.types import RequestId
    from engine.core.text.ledger import Ledger
    from engine.core.text.sequence import LiveRequest

# Both are guesses: enough for the few that come back after a second, and nothing that others miss.
SEATS_SHARE = 8  # 1/8 of max_num_seqs, at least one guest
BLOCKS_SHARE = 16  # 1/16 of the blocks


class Guests:
    """The guests of one scheduler. ``going`` are those that are not parked."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.num_seats = max(1, config.max_num_seqs // SEATS_SHARE)
        self.num_blocks = config.num_blocks // BLOCKS_SHARE
        self.going: dict[RequestId, LiveRequest] = {}
        self._parked: dict[RequestId, LiveRequest] = {}
        self._residents: dict[RequestId, LiveRequest] = {}  # parked with blocks, the last one last

    @property
    def residents(self) -> tuple[LiveRequest, ...]:
        """The parked guests that may hold blocks."""
        return tuple(self._residents.values())

    def is_parked(self, live: LiveRequest) -> bool:
        """Return whether a request is a parked guest."""
        return live.request.request_id in self._parked

    def first_ready(self) -> LiveRequest | None:
        """Return the parked guest that has waited longest and whose stream has room."""
        return next((live for live in self._parked.values() if live.credit.free > 0), None)

    def add(self, live: LiveRequest) -> None:
        """Take note of a guest that is not parked."""
        self.going[live.request.request_id] = live

    def park(self, live: LiveRequest) -> list[LiveRequest]:
        """Take note of a parked guest; return those that have to give their blocks back."""
        name = live.request.request_id
        self.going.pop(name, None)
        self._parked[name] = self._residents[name] = live
        return self._over()

    def unpark(self, live: LiveRequest) -> None:
        """Take note that a guest is not parked any more."""
        name = live.request.request_id
        del self._parked[name]
        self._residents.pop(name, None)
        self.going[name] = live

    def remove(self, live: LiveRequest) -> None:
        """Forget a request, whether it is a guest or not."""
        if live.is_guest:
            for places in (self.going, self._parked, self._residents):
                places.pop(live.request.request_id, None)

    def _over(self) -> list[LiveRequest]:
        """Forget the oldest residents, until the others hold at most their share, and return
        them."""
        over, held = [], sum(map(_held, self._residents.values()))
        while held > self.num_blocks:
            oldest = self._residents.pop(next(iter(self._residents)))
            held -= _held(oldest)
            over.append(oldest)
        return over

    def check(self) -> None:
        """Check that parked guests hold at most their share.

        Raises:
            AssertionError: They hold more.
        """
        held = sum(map(_held, self._parked.values()))
        assert held <= self.num_blocks, f"guests hold {held} blocks of {self.num_blocks}"
        assert not self.going.keys() & self._parked.keys()
        assert self._residents.keys() <= self._parked.keys()


def must_give_way(ledger: Ledger) -> bool:
    """Return whether guests are computed that must not be."""
    going = ledger.guests.going
    if not going:
        return False
    return _others_are_there(ledger) or (
        len(going) > 1 and sum(map(_seats, going.values())) > ledger.guests.num_seats
    )


def settle(ledger: Ledger, now: float) -> None:
    """Park the guests that must not be computed, and let others go on if nobody else is there. No
    plan is in flight."""
    guests = ledger.guests
    if must_give_way(ledger):
        is_alone = not _others_are_there(ledger)
        taken = 0
        for live in list(guests.going.values()):
            seats = _seats(live)
            if is_alone and (not taken or taken + seats <= guests.num_seats):
                taken += seats
            else:
                ledger.park(live, now)
    if _others_are_there(ledger):
        return
    taken = sum(map(_seats, guests.going.values()))
    while (live := guests.first_ready()) is not None:
        taken += _seats(live)
        if taken > guests.num_seats and guests.going:
            return
        ledger.unpark(live, now)


def _others_are_there(ledger: Ledger) -> bool:
    """Return whether a request that is no guest runs or waits."""
    going = [seq for live in ledger.guests.going.values() for seq in live.sequences]
    own = sum(
        [seq.state in (State.RUNNING, State.WAITING) and not seq.is_attached for seq in going]
    )
    return len(ledger.running) + len(ledger.waiting) > own


def _seats(live: LiveRequest) -> int:
    return live.request.num_choices


def _held(live: LiveRequest) -> int:
    return sum([len(seq.blocks) for seq in live.sequences])
