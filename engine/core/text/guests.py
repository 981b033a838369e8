"""Guests: requests whose clients have lost their connections and may come back (D25).

Rule 1: guests are computed only when no other request has been computed for a while, and then on a
share of the seats. They are parked as soon as another request runs or waits. Rule 2: the guests
that were parked last keep their blocks, up to a share of all blocks; the others give their blocks
back, and are computed again. Rule 3: many parked guests do not slow down the planning of other
requests' steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.core.text.lifecycle import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.core.common.types import RequestId
    from engine.core.text.ledger import Ledger
    from engine.core.text.sequence import LiveText, Sequence

# Both shares are estimates: few clients come back later than after a second, and their guests find
# seats and blocks at little cost to other requests.
SEATS_SHARE = 8  # 1/8 of max_num_seqs, at least one guest
BLOCKS_SHARE = 16  # 1/16 of the blocks
# Seconds without a step of another request before parked guests go on: a client that sends one
# request after another does not wait for guests' steps in between.
QUIET_S = 0.25


class Guests:
    """Decides for one scheduler which guests are computed, and which hold blocks."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._num_seats = max(1, ledger.config.max_num_seqs // SEATS_SHARE)
        self._num_blocks = ledger.config.num_blocks // BLOCKS_SHARE
        # Guests that `settle` let run or wait, and requests that became guests after its last call.
        self._admitted: dict[RequestId, LiveText] = {}
        self._quiet_from = -math.inf

    # ---- changes

    def leave(self, request_id: RequestId) -> None:
        """Make a request a guest, because its client has lost its connection."""
        live = self._ledger.requests.get(request_id)
        if live is None or live.is_over or live.is_guest:
            return
        parked = self._ledger.parked
        parked.remove(live)
        live.is_guest = True
        if live.parked_since is not None:
            parked.add(live)
        self._admitted[request_id] = live

    def come_back(self, request_id: RequestId, now: float) -> None:
        """Let a guest, whose client is back, run and wait like any other request."""
        live = self._ledger.requests.get(request_id)
        if live is None or live.is_over or not live.is_guest:
            return
        if live.parked_since is not None:
            self._ledger.unpark(live, now)
        live.is_guest = False
        self._admitted.pop(request_id, None)

    def note_step(self, sequences: Iterable[Sequence], now: float) -> None:
        """Take note of a step that ended: guests wait for a while if it computed other requests."""
        if any(not seq.live.is_guest for seq in sequences):
            self._quiet_from = now + QUIET_S

    # ---- views

    def waiting(self) -> list[Sequence]:
        """Return the sequences of guests that wait in the queue, until a plan parks them."""
        return [
            seq
            for live in self._admitted.values()
            for seq in live.sequences
            if seq.state is State.WAITING and not seq.is_attached
        ]

    def reason(self, live: LiveText, now: float) -> str:
        """Return what a parked guest waits for."""
        if not _has_room(live):
            return "its client: its stream has no room for what comes next"
        if self._others_are_there() or now < self._quiet_from:
            return f"the others: its replica has to compute nobody else for {QUIET_S} s"
        return "other guests" if self._admitted or self._first_ready() is not live else "a step"

    # ---- decisions

    def must_settle(self) -> bool:
        """Return whether `settle` must park guests, or check the blocks of guests parked
        meanwhile."""
        admitted = self._admitted.values()
        if not admitted:
            return False
        return (
            any(live.is_over or live.parked_since is not None for live in admitted)
            or self._others_are_there()
            or (len(admitted) > 1 and _seats(admitted) > self._num_seats)
        )

    def settle(self, now: float) -> None:
        """While no step is in flight: park guests that should not be computed, take blocks from
        those that hold too many, and let parked ones go on if no other request runs or waits."""
        if self.must_settle():
            self._park(now)
            self._evict(now)
        if self._ledger.parked.guests and now >= self._quiet_from and not self._others_are_there():
            self._resume(now)

    def next_wakeup(self, now: float) -> float | None:
        """Return when `settle` has something to do if nothing happens before, or None."""
        if self.must_settle():
            return now
        if self._admitted or not self._ledger.parked.guests or self._others_are_there():
            return None
        return None if self._first_ready() is None else max(now, self._quiet_from)

    def _park(self, now: float) -> None:
        others_are_there = self._others_are_there()
        admitted, self._admitted = self._admitted, {}
        for name, live in admitted.items():
            if live.is_over or live.parked_since is not None:
                continue
            is_first = not self._admitted
            if not others_are_there and (
                is_first or _seats([*self._admitted.values(), live]) <= self._num_seats
            ):
                self._admitted[name] = live
            else:
                self._ledger.park(live, now)

    def _evict(self, now: float) -> None:
        """Take the blocks of the guests parked first, until all guests hold at most their share."""
        left = self._num_blocks
        for live in reversed(tuple(self._ledger.parked.holders.values())):
            if live.num_blocks <= left:
                left -= live.num_blocks
                continue
            for seq in live.sequences:
                if seq.blocks:
                    self._ledger.preempt(seq, now)

    def _resume(self, now: float) -> None:
        while (live := self._first_ready()) is not None:
            if self._admitted and _seats([*self._admitted.values(), live]) > self._num_seats:
                return
            self._ledger.unpark(live, now)
            self._admitted[live.request.request_id] = live

    def _first_ready(self) -> LiveText | None:
        """Return the guest that has been parked longest, of those whose streams have room for a
        message of each choice."""
        return next(filter(_has_room, self._ledger.parked.guests.values()), None)

    def _others_are_there(self) -> bool:
        """Return whether a request that is no guest runs or waits."""
        admitted = [seq for live in self._admitted.values() for seq in live.sequences]
        places = (State.RUNNING, State.WAITING)
        own = sum([seq.state in places and not seq.is_attached for seq in admitted])
        return len(self._ledger.running) + len(self._ledger.waiting) > own


def _has_room(live: LiveText) -> bool:
    return live.credit.free >= len(live.sequences)


def _seats(lives: Iterable[LiveText]) -> int:
    return sum([live.request.num_choices for live in lives])
