"""Who is behind: how much service each holder has had, and which holders' work a step computes.

A holder's counter grows by the price of what was computed for it, divided by its weight: in seconds
of a step or, for an encoder, in tokens with their padding. The *least* holder, whose counter is the
lowest, is in every step. Another one gets what an encoder's step has left. Of a text model's step
it is left out while the least would stay behind it even after a step of its own: so holders with
like needs share their steps, and one with many requests skips steps beside one with few.

Rule 1: the counter of a holder whose work begins, or goes on, is lifted to that of the least, so
that nobody saves up a share (virtual token counters, Sheng et al., arXiv 2401.00588). A holder that
has left keeps its counter while it is ahead: it cannot lose its lead by leaving. But the first step
after its return comes at once if it is ahead by less than the `head_start`, so that a first token
waits for one step of others at most. Rule 2: the counters of any two holders that could be in every
step differ by at most the prices of two steps, those of the largest, each divided by its holder's
weight. Rule 3: nothing here knows what a price is made of (`engine.core.text.prices`).

Rule 4: what other replicas of the model compute for a holder counts here, too, so that one that has
a replica for itself leaves the others to those without. It counts while the holder has requests
here, and at most `ELSEWHERE_PART` of what the least holder has meanwhile, so that these go on: of
what the holder would have had here, it keeps the rest. At most `ELSEWHERE_STEPS` of the largest
steps are counted later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


ELSEWHERE_PART = 7 / 8  # estimate: a stream that has an eighth of its speed is not given up
ELSEWHERE_STEPS = 16  # estimate: fewer would be lost in the pauses between a replica's steps


class Share:
    """A holder's share. ``counter`` is in prices for each unit of ``weight``, and ``elsewhere``
    what it will count of other replicas' steps. ``num_live`` are its requests, and ``num_active``
    its sequences that run or wait. ``is_back``: it has been idle, and was in no step since then.
    Read-only outside `Shares`, but for ``turn``, the rank of the last sequence of a step that had
    no room for all of its decodes, or of the request that took a turn."""

    __slots__ = (
        "counter",
        "elsewhere",
        "holder",
        "is_back",
        "num_active",
        "num_live",
        "turn",
        "weight",
    )

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.weight = 1
        self.counter = self.elsewhere = 0.0
        self.num_live = self.num_active = 0
        self.is_back = False
        self.turn: tuple[float, ...] = ()

    def __repr__(self) -> str:
        return f"<Share {self.holder!r} {self.counter:g}, {self.num_active} active>"


class Shares:
    """The shares of one scheduler. ``is_contested``: there are several holders. ``is_counted``:
    there are several at all replicas of the model; otherwise nothing is counted. ``head_start`` is
    in prices (rule 1)."""

    def __init__(self) -> None:
        self.is_contested = self.is_counted = False
        self.head_start = 0.0
        self._known: dict[str, Share] = {}
        self._floor = 0.0  # the counter of the holder that was active last
        self._replicas = [self]  # of the model
        self._counted_to = 0.0  # the least counter when others' steps were counted last
        self._largest = 0.0  # price of a holder's part of a step, for its weight

    # ---- replicas

    def join(self, replicas: list[Shares]) -> None:
        """Count what the ``replicas`` of a model compute, and have them count what this one does,
        until `part`. Each of them is given the same list, which this method adds to."""
        replicas.append(self)
        self._replicas, self._counted_to = replicas, self._least()
        self._count_holders()

    def part(self) -> None:
        """Leave the other replicas, because this one has ended. Idempotent."""
        replicas, self._replicas = self._replicas, [self]
        replicas.remove(self)
        for one in (self, *replicas[:1]):
            one._count_holders()

    def _count_holders(self) -> None:
        self.is_contested = self.is_counted = len(self._known) > 1
        if len(self._replicas) > 1:
            holders = {holder for one in self._replicas for holder in one._known}
            for one in self._replicas:
                one.is_counted = len(holders) > 1

    # ---- holders come and go

    def enter(self, holder: str, weight: int) -> Share:
        """Return the share of a request that is admitted, until `leave`. The newest request's
        weight counts for all of its holder's."""
        share = self._known.get(holder)
        if share is None:
            share = self._known[holder] = Share(holder)
            self._count_holders()
        share.weight = weight
        share.num_live += 1
        return share

    def leave(self, share: Share) -> None:
        """Take note that a request has ended."""
        share.num_live -= 1
        if not share.num_live:
            self._forget_idle()

    def activate(self, share: Share) -> None:
        """Take note that a sequence waits or runs from now on."""
        share.num_active += 1
        if share.num_active == 1:
            others = [x.counter for x in self._known.values() if x.num_active and x is not share]
            share.counter = max(share.counter, min(others, default=self._floor))
            share.is_back = bool(others)

    def deactivate(self, share: Share) -> None:
        """Take note that a sequence neither waits nor runs any more."""
        share.num_active -= 1
        if not share.num_active:
            self._floor = share.counter

    def _forget_idle(self) -> None:
        """Forget the holders without requests that are not ahead of the least active one."""
        least = min([x.counter for x in self._known.values() if x.num_active], default=None)
        known = self._known.values()
        left = [x for x in known if x.num_live or (least is not None and x.counter > least)]
        self._known = {x.holder: x for x in left}
        self._count_holders()

    # ---- service

    def in_order(self) -> list[Share]:
        """Return the active holders, the least first, but for the `head_start` of those that are
        back."""
        active = [share for share in self._known.values() if share.num_active]
        return sorted(active, key=self._place_of)

    def _place_of(self, share: Share) -> tuple[float, bool]:
        ahead = self.head_start / share.weight if share.is_back else 0.0
        return share.counter - ahead, not share.is_back

    def charge(self, prices: Mapping[Share, float]) -> None:
        """Count what a step computes for each holder: the ``prices`` of its parts."""
        for share, price in prices.items():
            share.counter += price / share.weight
            share.is_back = False
        if len(self._replicas) > 1:
            self._count_elsewhere()
            self._tell(prices, 1.0)
        if any(not share.num_live for share in self._known.values()):
            self._forget_idle()

    def refund(self, prices: Mapping[Share, float]) -> None:
        """Take back what was charged for a step that failed and whose parts run again."""
        for share, price in prices.items():
            share.counter -= price / share.weight
        if len(self._replicas) > 1:
            self._tell(prices, -1.0)

    def _least(self) -> float:
        """Return the counter of the least active holder."""
        return min([x.counter for x in self._known.values() if x.num_active], default=self._floor)

    def _tell(self, prices: Mapping[Share, float], sign: float) -> None:
        """Tell the other replicas what a step computes for each holder or, with ``sign`` -1, that
        it will be computed again."""
        served = [(share.holder, sign * price / share.weight) for share, price in prices.items()]
        for one in self._replicas:
            one._largest = max([one._largest, *[price for _, price in served]])
            most = ELSEWHERE_STEPS * one._largest
            for holder, price in served if one is not self else ():
                if (share := one._known.get(holder)) is not None:
                    share.elsewhere = min(max(0.0, share.elsewhere + price), most)

    def _count_elsewhere(self) -> None:
        """Count other replicas' steps, but what all active holders have of them, as far as the
        least holder's counter has grown."""
        least = self._least()
        gain, self._counted_to = max(0.0, least - self._counted_to), least
        active = [share for share in self._known.values() if share.num_active]
        common = min([share.elsewhere for share in active], default=0.0)
        for share in active:
            counted = min(share.elsewhere - common, ELSEWHERE_PART * gain)
            share.counter += counted
            share.elsewhere -= common + counted

    def pass_over(self, shares: Iterable[Share], computed: Iterable[Share]) -> None:
        """Lift holders to the least one of a step, ``computed``, that they could not be in: for
        want of memory, or because nothing of theirs is left to compute. What they do not use is not
        saved up. Call this before the step is charged."""
        least = min(share.counter for share in computed)
        for share in shares:
            share.counter = max(share.counter, least)

    def pass_over_kind(self, computed: Iterable[Share]) -> None:
        """Lift the active holders that are behind all of a step, ``computed``, as they have no work
        of its kind, until the first of them has the counter of the step's least. They stay as far
        from each other as they are, because they share the steps of another kind. Call this before
        the step is charged."""
        least = min(share.counter for share in computed)
        behind = [share for share in self.in_order() if share.counter < least]
        lift = least - max([share.counter for share in behind], default=least)
        for share in behind:
            share.counter += lift

    def check(self, active: Mapping[str, int], live: Mapping[str, int]) -> None:
        """Check the counts of each holder's ``active`` sequences and ``live`` requests.

        Raises:
            AssertionError: It names a holder whose counts are wrong.
        """
        for share in self._known.values():
            assert share.num_active == active.get(share.holder, 0), share
            assert share.num_live == live.get(share.holder, 0), share
        assert live.keys() <= self._known.keys()
        assert self.is_contested == (len(self._known) > 1)
        assert self.is_counted >= self.is_contested
        assert self in self._replicas
