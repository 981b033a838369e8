"""Seats and turns, for the kinds of work whose requests take turns, one step each.

Rule 1: requests take turns in the order of their ranks (priority, arrival), one step each. A
request that cannot go on misses its turn. So between two steps of a request that could go on all
the time, no other request gets two steps. Rule 2: a request keeps its seat until its end, because
the worker keeps its state. Requests that are parked, or late and about to be cancelled, do not
count against ``max_seats``, so that clients which do not read hold up no others; but at most
`HELD_SHARE` times ``max_seats`` requests have seats. Rule 3: with several holders, the step is the
least holder's (`engine.core.common.shares`), and rule 1 holds among its requests. A holder with
fewer seats than its part, which is one at least, gets more beside those that others have.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from engine.core.common.core import PlanT
from engine.core.common.events import RequestT, ResultT
from engine.core.common.one_choice import OneChoice, OneChoiceCore
from engine.core.common.types import SequenceId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.core.common.credit import Credit
    from engine.core.common.one_choice import Parts
    from engine.core.common.shares import Share, Shares
    from engine.core.common.waiting_queue import WaitingQueue
    from engine.settings import QueueLimits

HELD_SHARE = 4  # a guess (rule 2): a drawing's state is small beside the model's workspace


class InTurn(OneChoice[RequestT]):
    """A live request that takes turns. It waits until it gets a ``sequence``, by which the worker
    knows it. From then on it has a seat, until its end. ``share`` is its holder's."""

    __slots__ = ("sequence", "share")

    def __init__(self, request: RequestT, credit: Credit, now: float, number: int) -> None:
        super().__init__(request, credit, now, number)
        self.sequence: SequenceId | None = None
        self.share: Share  # set by `TurnsCore`, when the request is admitted

    @property
    @abstractmethod
    def part(self) -> Any:
        """The part of the request that the step in flight computes, or else its next step."""

    @property
    def has_begun(self) -> bool:
        """Whether the request has been in a step."""
        return self.num_done + self.in_step > 0


TurnT = TypeVar("TurnT", bound=InTurn[Any])


class Seats:
    """Lets at most ``max_seats`` requests take turns; their holders have ``shares``. ``park`` parks
    a request that has no slot. ``passed`` are the holders that were to have the last step and could
    not."""

    def __init__(self, max_seats: int, shares: Shares, park: Callable[[Any, float], None]) -> None:
        self.passed: list[Share] = []
        self._max_seats = max_seats
        self._shares = shares
        self._park = park
        self._seated: list[Any] = []  # sorted by rank
        self._sequence_ids = count(1)

    def __len__(self) -> int:
        return len(self._seated)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._seated)

    def fill(self, queue: WaitingQueue[Any], now: float) -> bool:
        """Seat the first requests of the queue while there is room. Return whether any was
        seated."""
        num_before = len(self._seated)
        while (live := self._next_to_seat(queue, now)) is not None:
            queue.remove(live)
            live.sequence, live.started_at = SequenceId(next(self._sequence_ids)), now
            self._seated.append(live)
            self._seated.sort(key=lambda live: live.rank)
        return len(self._seated) > num_before

    def _next_to_seat(self, queue: WaitingQueue[Any], now: float) -> Any | None:
        """Return the first request of the queue or, with several holders, of the one that has the
        fewest seats for its weight; None if there is no seat for it."""
        if len(self._seated) >= HELD_SHARE * self._max_seats:
            return None
        runnable = [x for x in self._seated if x.parked_since is None and not x.is_late(now)]
        has_room = len(runnable) < self._max_seats
        if not (has_room or self._shares.is_contested):
            return None
        ready = (live for live in queue.in_order(now) if not live.is_late(now))
        if not self._shares.is_contested:
            return next(ready, None)
        firsts: dict[Share, Any] = {}
        for live in ready:
            firsts.setdefault(live.share, live)
        seats = Counter([live.share for live in runnable])
        first = min(firsts, key=lambda share: seats[share] / share.weight, default=None)
        if first is None:
            return None
        weights = sum([share.weight for share in {*seats, *firsts}])
        part = max(1, self._max_seats * first.weight // weights)
        return firsts[first] if has_room or seats[first] < part else None

    def next_in_turn(self, now: float, *, only_begun: bool = False) -> Any | None:
        """Return the request whose turn it is, with the slot of its step's message reserved. Park
        requests whose streams have no slot. With ``only_begun``, skip requests not begun."""
        self.passed = []
        if not self._shares.is_contested:
            return self._first_able(self._seated, now, only_begun=only_begun)
        for share in self._shares.in_order():
            own = [live for live in self._seated if live.share is share]
            if (live := self._first_able(own, now, only_begun=only_begun)) is not None:
                return live
            self.passed.append(share)
        return None

    def _first_able(self, seated: list[Any], now: float, *, only_begun: bool) -> Any | None:
        """Return the request of a holder whose turn it is among its ``seated`` ones, with its slot
        reserved."""
        last = seated[0].share.turn if seated else ()
        after = [live for live in seated if live.rank > last]
        before = [live for live in seated if live.rank <= last]
        for live in (*after, *before):
            is_held = only_begun and not live.num_done
            if is_held or live.parked_since is not None or live.is_late(now):
                continue
            if not live.needs_slot(live.part) or live.credit.try_reserve():
                live.share.turn = live.rank
                return live
            self._park(live, now)
        return None

    def remove(self, live: InTurn[Any]) -> None:
        """Take away the seat of a request that has ended."""
        self._seated.remove(live)

    def check(self) -> None:
        """Check that the seats are sorted, and not too many.

        Raises:
            AssertionError: The seats are unsorted or too many.
        """
        ranks = [live.rank for live in self._seated]
        assert ranks == sorted(set(ranks)), "the seats are not in the order of ranks"
        assert len(ranks) <= HELD_SHARE * self._max_seats, "too many requests have seats"
        for live in self._seated:
            assert live.sequence is not None, f"{live} has a seat and no sequence"


class TurnsCore(OneChoiceCore[RequestT, PlanT, ResultT, TurnT]):
    """A `Core` for requests that take turns, at most ``max_seats`` of them at a time. ``plural`` is
    the word for them in explanations."""

    plural: str

    def __init__(self, config: QueueLimits, max_seats: int) -> None:
        super().__init__(config)
        self.max_seats = max_seats
        self._seats = Seats(max_seats, self.shares, self._park)

    def _price_of(self, live: TurnT) -> float:
        """Return what the next step of a request costs its holder: steps of a kind that does not
        say so cost alike."""
        return 1.0

    def _enqueue(self, live: TurnT, now: float) -> None:
        live.share = self.shares.enter(live.request.holder, live.request.weight)
        self.shares.activate(live.share)
        super()._enqueue(live, now)

    def _leave(self, live: TurnT) -> None:
        if live.sequence is None:
            self._waiting.remove(live)
        else:
            self._seats.remove(live)
        if live.parked_since is None:
            self.shares.deactivate(live.share)
        self.shares.leave(live.share)

    def _park(self, live: TurnT, now: float) -> None:
        self.shares.deactivate(live.share)
        super()._park(live, now)

    def _reader_drained(self, live: TurnT, now: float) -> None:
        super()._reader_drained(live, now)
        self.shares.activate(live.share)

    def _stalled(self, now: float) -> list[TurnT]:
        return sorted(super()._stalled(now), key=lambda live: live.rank)

    def _choose(self, now: float) -> Parts[TurnT]:
        """Return the request that takes the next step. If all requests with seats turn out to be
        parked, waiting requests get seats."""
        is_paused = self._pause is not None
        if not is_paused:
            self._seats.fill(self._waiting, now)
        live = self._seats.next_in_turn(now, only_begun=is_paused)
        while live is None and not is_paused and self._seats.fill(self._waiting, now):
            live = self._seats.next_in_turn(now)
        if live is None:
            return []
        if self.shares.is_counted:
            prices = {live.share: self._price_of(live)}
            self.shares.pass_over(self._seats.passed, prices)
            self.shares.charge(prices)
        return [(live, live.part)]

    def _tokens_begun(self) -> int:
        return sum(live.queued_tokens for live in self._seats)

    def _why_left_out(self, live: TurnT) -> str:
        others = len(self._seats) - len(self._parked) - 1
        if not others or live.in_step:
            return ""
        return f"its turn: {self.plural} take one step each, and {others} more go on"

    def _why_waiting(self, ahead: int) -> str:
        num_begun = len(self._seats)
        return f"a seat: {num_begun} {self.plural} take turns" if num_begun else "a step"

    def check(self) -> None:
        """Check that each request either waits or has a seat.

        Raises:
            AssertionError: The message names the first request that does neither.
        """
        super().check()
        waiting = self._waiting.items
        assert len(waiting) + len(self._seats) == len(self._requests), "a request is lost"
        self._seats.check()
        for live in waiting:
            assert live.sequence is None, f"{live} waits and has begun"
            assert live.parked_since is None, f"{live} is parked for nothing"
        lives = self._requests.values()
        active = Counter([x.request.holder for x in lives if x.parked_since is None])
        self.shares.check(active, Counter([x.request.holder for x in lives]))
