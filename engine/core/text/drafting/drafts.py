"""How many drafted tokens each row verifies (D27).

The worker offers drafts with a sequence's result. The rows of the next step, planned as if there
were none, are then widened: a row of one position becomes one of ``1 + drafts``, if that is likely
to pay. Rule 1: drafts take only what is left over: blocks that are free, tokens of the step's
budget, and positions of a step with few rows and no prompt, which should take no longer. No
sequence is preempted for them, and none waits. Rule 2: an offer is for the next plan alone. Rule 3:
drafts change no token. The rest of the core reads only how many a step has: to count its work, to
plan nothing behind it, and to run it again without them.

A worker has up to two drafters: what it looked up comes with the offer, and a draft model drafts
in the step that verifies (`Row.by_model`), so that it costs nothing where nothing is verified. Each
row takes the drafter and the length that gain most (`engine.core.text.drafting.draft_lengths`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine.core.text.drafting.draft_counts import DraftCounter
from engine.core.text.drafting.draft_lengths import (
    FIRST_SHARE,
    LEAST_WEIGHT_OF_ALL,
    Drafting,
    Lengths,
    Share,
    Trials,
)
from engine.core.text.memory.blocks import blocks_for
from engine.core.text.plan import (
    DRAFTED_TOKENS_MAX,
    DRAFTING_STEP_MAX,
    ROW_COUNT,
    BlockDelta,
    Logits,
)

if TYPE_CHECKING:
    from engine.core.common.types import DraftCounts, SequenceId
    from engine.core.text.ledger import Ledger
    from engine.core.text.pace.speeds import Speeds
    from engine.core.text.plan import Row
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import Sequence


class Offer(NamedTuple):
    """What can be drafted behind a sequence: ``count`` tokens that were looked up, and as many as
    are wanted by a draft model if it ``has_model``."""

    count: int  # type: ignore[assignment]  # the domain word, over tuple.count
    has_model: bool


class Beside(NamedTuple):
    """The other rows of a step: how many may take drafts of the same drafter, and how many not."""

    others: int
    idle: int


class Draft(NamedTuple):
    """What one row verifies: so many tokens of one drafter."""

    length: int
    by_model: bool = False


class Drafts:
    """The drafts of one scheduler."""

    def __init__(self, ledger: Ledger, speeds: Speeds) -> None:
        self._ledger = ledger
        self._speeds = speeds
        self._model_share = Share(FIRST_SHARE, least=LEAST_WEIGHT_OF_ALL)  # of all sequences
        self._model_trials = Trials(slows=True)
        self._offers: dict[SequenceId, Offer] = {}  # for the next plan
        self._counter = DraftCounter()
        self._by_model = (0, 0)  # drafted and accepted since the last `note_step`

    def offer(self, seq: Sequence, count: int, *, has_model: bool = False) -> None:
        """Note that the worker has ``count`` drafted tokens for the sequence's next row, and
        whether it has a model that may draft them."""
        if count or self._speeds.budget.is_open:
            self._offers[seq.sequence_id] = Offer(count, has_model)

    def note(
        self, seq: Sequence, drafted: int, accepted: int, *, forced: int, by_model: bool
    ) -> None:
        """Count a row that was committed, of whose drafts a constraint forced the first
        ``forced``."""
        assert seq.drafting is not None
        seq.drafting.note(drafted, accepted, forced=forced, by_model=by_model)
        self._counter.note(drafted, accepted, forced=forced, by_model=by_model)
        if by_model:
            self._model_share.note(drafted, accepted)
            self._by_model = (self._by_model[0] + drafted, self._by_model[1] + accepted)

    def note_step(self, step: PlannedStep, draft_s: float) -> None:
        """Count what a draft model took of a step with drafts, whose rows were committed."""
        costs, budget = self._speeds.costs, self._speeds.budget
        passes = [row.drafts for row in step.rows if row.by_model]
        if not passes:
            budget.note_other()
            return
        (drafted, accepted), self._by_model = self._by_model, (0, 0)
        num_rows, most = len(step.rows), max(passes)
        spent = costs.in_steps(num_rows, draft_s) or most * costs.pass_ratio
        budget.note(accepted / num_rows, spent + costs.ratio(step.num_drafts) - 1.0)
        if drafted:  # otherwise the model has only read what was missing in its cache
            costs.note_passes(num_rows, most, draft_s)

    @property
    def counts(self) -> tuple[DraftCounts, ...]:
        """The drafts of each drafter since the start."""
        return self._counter.counts

    def widen(self, step: PlannedStep | None, *, is_allowed: bool) -> None:
        """Add drafts to the rows of a step that goes to the worker now, and drop all offers."""
        if not self._offers:
            return
        offers, self._offers = self._offers, {}
        if step is None or not is_allowed:
            return
        rows = step.rows
        num_rows = len(rows)
        used = num_rows + step.image_cost
        room = min(DRAFTING_STEP_MAX, self._ledger.config.max_num_batched_tokens) - used
        if room <= 0 or sum(map(ROW_COUNT, rows)) > num_rows:
            return
        looked_up = [name for name, offer in offers.items() if offer.count]
        has_model = self._speeds.budget.is_open and any(
            offer.has_model for offer in offers.values()
        )
        may_model = has_model and self._speeds.costs.is_known(num_rows)
        left = len(offers) if may_model else len(looked_up)
        beside = _beside(num_rows, len(looked_up)), _beside(num_rows, len(offers))
        for index, seq in enumerate(step.sequences):
            if not left:
                return
            offer = offers.get(seq.sequence_id)
            if offer is None or not (may_model or offer.count):
                continue
            most, left = -(-room // left), left - 1  # an equal part of what is left
            draft = self._pick(seq, rows[index], offer, most, beside, may_model=may_model)
            if draft.length:
                rows[index] = self._widened(step, seq, rows[index], draft)
                step.num_drafts += rows[index].drafts
                room -= rows[index].drafts

    def _pick(
        self,
        seq: Sequence,
        row: Row,
        offer: Offer,
        most: int,
        beside: tuple[Beside, Beside],
        *,
        may_model: bool,
    ) -> Draft:
        """Return what a row should draft: nothing if it is no decode, and never so many tokens that
        the sequence could become longer than it may. ``beside`` are the other rows, seen by the
        n-gram drafter and by a draft model."""
        if row.children or row.logits is not Logits.LAST:
            return Draft(0)
        # The planned token is counted as known, so this is how many may still follow it.
        most = min(most, seq.max_tokens - (seq.num_tokens - seq.num_prompt), DRAFTED_TOKENS_MAX)
        if most <= 0:
            return Draft(0)
        if seq.drafting is None:
            seq.drafting = Drafting(Lengths(self._model_share.value, self._model_trials))
        found, models = seq.drafting.by_ngram, seq.drafting.by_model
        looked_up, num_rows = min(most, offer.count), 1 + sum(beside[0])
        costs = self._speeds.costs
        has_model = offer.has_model and may_model
        length, rate = found.best(looked_up, costs, *beside[0]) if looked_up else (0, 0.0)
        if has_model:
            drawn, rate_of_model = models.best(most, costs, *beside[1])
            if rate_of_model > rate:
                return Draft(drawn, by_model=True)
        if length:
            return Draft(length)
        if looked_up and found.trials.is_due(num_rows):
            return Draft(1)
        if has_model and models.trials.is_due(num_rows):
            return Draft(1, by_model=True)
        return Draft(0)

    def _widened(self, step: PlannedStep, seq: Sequence, row: Row, draft: Draft) -> Row:
        """Return the row with a draft, or with as much of it as there are blocks for."""
        count = draft.length
        size, end = self._ledger.config.block_size, row.start + 1
        missing = blocks_for(end + count, size) - len(seq.blocks)
        delta = row.blocks
        if missing > 0:
            missing = min(missing, self._ledger.pool.num_free)
            taken = self._ledger.take(step.reservation, missing) if missing > 0 else None
            if taken:
                kept, before = (len(seq.blocks), ()) if delta is None else delta
                delta = BlockDelta(kept, before + taken)
                seq.blocks += taken
            count = min(count, len(seq.blocks) * size - end)
        by_model = draft.by_model and count > 0
        return row._replace(count=1 + count, blocks=delta, drafts=count, by_model=by_model)


def _beside(num_rows: int, num_offers: int) -> Beside:
    """Return what is beside a row of a step, ``num_offers`` of whose rows have offers."""
    return Beside(max(0, num_offers - 1), max(0, num_rows - max(1, num_offers)))
