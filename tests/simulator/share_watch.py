"""The watcher of holders' shares: by its own account of every plan, no holder that could be
computed gets more than another, for its weight, by more than the bound."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, ClassVar, NamedTuple
from weakref import WeakValueDictionary

from engine.core.text import admission
from engine.core.text.lifecycle import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.core.common.shares import Shares
    from engine.core.text.ledger import Ledger
    from engine.core.text.plan import Row, StepPlan
    from engine.core.text.scheduler import Scheduler
    from engine.core.text.sequence import Sequence

# The counters of two holders differ by two steps at most (engine/core/common/shares.py), so between
# any two moments one's service exceeds the other's by four at most.
STEPS_MAX = 4
ROUNDING = 1e-6


class _Lead(NamedTuple):
    """How much more service one holder had than another, each for its weight, since both could be
    computed all the time: ``ahead`` of the replica's own steps. ``elsewhere`` is how much more of
    other replicas' steps the one had that did not count before, less what both had in all; and it
    was ``most`` and ``least`` so far, or 0."""

    ahead: float
    elsewhere: float
    most: float
    least: float


class Leads:
    """How far holders are ahead of each other in one scheduler, which has ``shares``."""

    _of: ClassVar[WeakValueDictionary[int, Leads]] = WeakValueDictionary()  # by id of shares

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._of[id(shares)] = self
        self._largest = 0.0  # what the largest step costs for the smallest weight
        self._elsewhere: dict[str, float] = {}  # service of other replicas, for the weight
        self._leads: dict[tuple[str, str], _Lead] = {}  # by two holders

    @property
    def holders(self) -> set[str]:
        """The holders whose leads are known."""
        return {name for pair in self._leads for name in pair}

    def restart(self) -> None:
        """Forget the service so far at all replicas, because rows run alone after a failed step."""
        for one in self._all():
            one._leads = {}

    def _all(self) -> list[Leads]:
        replicas = map(id, self._shares._replicas)
        return [self._of[replica] for replica in replicas if replica in self._of]

    def tell(self, service: dict[str, float], weights: dict[str, int]) -> None:
        """Have the other replicas take note of the ``service`` of each holder in a step."""
        for one in self._all() if self._shares.is_counted else ():
            for name, price in service.items() if one is not self else ():
                before = one._elsewhere.get(name, 0.0)
                one._elsewhere[name] = before + price / weights[name]

    def note(
        self,
        service: dict[str, float],
        weights: dict[str, int],
        waiting: Iterable[str],
        largest: float,
    ) -> str:
        """Take note of the ``service`` of each holder in a step, and return what is wrong, or "".
        Only the holders ``waiting`` have had work all the time since the step before, and could
        have been in this step, which could have cost ``largest``."""
        largest = max(largest, sum(service.values()))
        self._largest = max(self._largest, largest / min(weights.values(), default=1))
        before, self._leads = self._leads, {}
        for pair in combinations(sorted(waiting), 2):
            one, other = (service.get(name, 0.0) / weights[name] for name in pair)
            had = self._more_elsewhere(pair)
            lead = before.get(pair) or self._first(pair, had)
            ahead, more = lead.ahead + one - other, had - lead.elsewhere
            most, least = max(lead.most, more), min(lead.least, more)
            self._leads[pair] = _Lead(ahead, lead.elsewhere, most, least)
            limit = STEPS_MAX * self._largest + ROUNDING
            if not -limit - most <= ahead <= limit - least:
                return f"{pair}: {ahead} ahead, where a step costs {self._largest}"
        return ""

    def _more_elsewhere(self, pair: tuple[str, str]) -> float:
        one, other = (self._elsewhere.get(name, 0.0) for name in pair)
        return one - other

    def _first(self, pair: tuple[str, str], had: float) -> _Lead:
        """Return the lead of two holders that have been computed in no step yet."""
        one, other = (self._shares._known[name].elsewhere for name in pair)
        more = one - other
        return _Lead(0.0, had - more, max(0.0, more), min(0.0, more))


class ShareWatch:
    """Watch one scheduler. Service is in seconds of a step, by the usual times that the scheduler
    has measured."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._leads = Leads(scheduler.shares)
        self.restart = self._leads.restart
        self._interrupted: set[str] = set()  # holders that had nothing to do since the last plan
        # Before the next plan: the place of each active holder, and of those that just came back a
        # sequence that could start at once.
        self._places: dict[str, float] = {}
        self._first: dict[str, Sequence] = {}

    def applied(self, now: float) -> None:
        """Take note of what could be planned after an event, and of which holders have nothing to
        do: what they do not use is not saved up."""
        lives = self._scheduler._ledger.requests.values()
        active = {
            _holder(seq)
            for live in lives
            for seq in live.sequences
            if seq.state in (State.RUNNING, State.WAITING) and not seq.is_attached
        }
        self._interrupted |= {live.request.holder for live in lives} - active
        self._interrupted |= self._leads.holders - active
        self._note_places(now)

    def _note_places(self, now: float) -> None:
        ledger, self._first = self._scheduler._ledger, {}
        if not ledger.shares.is_contested:
            return
        shares = {live.share for live in ledger.requests.values() if live.share.num_active}
        back_s = ledger.shares.head_start
        self._places = {
            share.holder: share.counter - (back_s / share.weight if share.is_back else 0.0)
            for share in shares
        }
        core = self._scheduler
        is_held = core._pause or core._prepared or core._recovery.is_under_way
        for seq in () if is_held else ledger.waiting.items:
            share = seq.live.share  # of which nothing else waits that would start before
            if share.is_back and share.num_active == 1 and _could_start(ledger, seq, now):
                self._first[share.holder] = seq

    def planned(self, plan: StepPlan, now: float) -> str:
        """Return what is wrong with a plan that is sent now, or ""."""
        scheduler = self._scheduler
        lives = scheduler._ledger.requests.values()
        sequences = {seq.sequence_id: seq for live in lives for seq in live.sequences}
        rows = [(sequences[row.sequence], row) for row in plan.rows if row.sequence in sequences]
        service = self._service_of(rows)
        weights = {live.request.holder: live.share.weight for live in lives}
        self._leads.tell(service, weights)
        if scheduler._recovery.is_under_way:
            self.restart()
            return ""
        for name in self._first.keys() - service.keys():
            # one before it may lack memory, which nobody else takes then
            others = [place for other, place in self._places.items() if other != name]
            if all(self._places[name] < place for place in others):
                return f"{name} came back, and does not go first"
        possible = [seq for seq in sequences.values() if not seq.has_ended]
        size = scheduler.config.block_size
        able = [seq for seq in possible if _could_run(seq, size)]
        if not any(seq.live.is_background for seq, _ in rows):
            able = [seq for seq in able if not seq.live.is_background]
        waiting = {_holder(seq) for seq in able} | service.keys()
        waiting -= self._interrupted
        self._interrupted = set()
        wrong = self._leads.note(service, weights, waiting, self._largest_of(possible))
        self.applied(now)  # planning may have parked requests
        return wrong

    def _service_of(self, rows: list[tuple[Sequence, Row]]) -> dict[str, float]:
        """Return what each holder gets of a step: as many seconds as its rows alone would take."""
        service: dict[str, float] = {}
        for name in {_holder(seq) for seq, _ in rows}:
            own = [(row, _cost(seq, row)) for seq, row in rows if _holder(seq) == name]
            decodes = [row for row, cost in own if not cost and row.count - row.drafts == 1]
            chunks = [row.count + cost for row, cost in own if row not in decodes]
            service[name] = self._price(len(decodes), sum(row.drafts for row in decodes))
            service[name] += self._scheduler._times.price_of_prompts(sum(chunks)) if chunks else 0
        return service

    def _price(self, num_decodes: int, num_drafts: int) -> float:
        times = self._scheduler._times
        return times.price_of_decodes(num_decodes, num_drafts) if num_decodes else 0.0

    def _largest_of(self, possible: list[Sequence]) -> float:
        """Return what the largest step would cost now."""
        times, config = self._scheduler._times, self._scheduler.config
        tokens = sum(seq.num_tokens for seq in possible)
        tokens += sum(image.cost for seq in possible for image in seq.live.request.images)
        tokens = min(config.max_num_batched_tokens, tokens)
        largest_s = times.price_of_decodes(config.max_num_seqs, config.max_num_batched_tokens)
        return largest_s + (times.price_of_prompts(tokens) if tokens else 0.0)


def _holder(seq: Sequence) -> str:
    return seq.live.request.holder


def _cost(seq: Sequence, row: Row) -> int:
    """Return what encoding the images of a row costs, in tokens."""
    end = row.start + row.count
    return sum(x.cost for x in seq.live.request.images if row.start <= x.start < end)


def _could_run(seq: Sequence, block_size: int) -> bool:
    """Return whether a sequence that is in no plan could have been in this one, without memory that
    it lacks."""
    return (
        seq.state is State.RUNNING
        and not seq.in_step
        and seq.credit.free > len(seq.live.attached)
        and not seq.live.is_guest
        and not seq.live.attached
        and len(seq.blocks) * block_size > seq.num_computed
    )


def _could_start(ledger: Ledger, seq: Sequence, now: float) -> bool:
    """Return whether a waiting sequence can start at once, whatever else is planned."""
    return (
        not any(other.is_known_to_worker for other in seq.live.sequences)
        and not seq.is_background
        and not seq.live.is_guest
        and not seq.is_late(now)
        and not seq.request.images
        and all(
            seq.request.prompt[0] != other.request.prompt[0]  # no block of it is being computed
            for other in ledger.requests.values()
            if other is not seq.live
        )
        and admission.has_seats(ledger, seq)
        and admission.has_slots(ledger, seq, 1)
        and admission.shortfall(ledger, seq, admission.match(ledger, seq)) <= 0
    )
