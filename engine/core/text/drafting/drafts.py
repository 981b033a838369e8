"""How many drafted tokens each row verifies (D27).

The worker offers drafts with a sequence's result. The rows of the next step, planned as if there
were none, are then widened: a row of one position becomes one of ``1 + drafts``, if that is likely
to pay. Rule 1: drafts take only what is left over: free blocks, and tokens that the step's budget
still has. Only steps with few rows and no prompt have drafts, because there a few more positions
should hardly take longer. No sequence gives way or waits for them. Rule 2: an offer is for the next
plan alone. Rule 3: drafts change no token. The other parts of the core read only how many drafts a
step has: to count its work, to prepare no plan while it runs, and to run it again without drafts if
it failed.

A worker has up to two drafters: an n-gram drafter, whose tokens come with the offer, and a draft
model, which drafts in the step that verifies (`Row.by_model`). Each row takes the drafter and the
length that gain most (`engine.core.text.drafting.draft_lengths`).
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from engine.core.text.drafting.draft_counts import DraftCounter, counts_of
from engine.core.text.drafting.draft_lengths import (
    LEAST_WEIGHT_OF_ALL,
    DraftBudget,
    Drafting,
    Lengths,
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
    from engine.core.text.plan import Row
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import Sequence
    from engine.core.text.step_times import StepTimes


class Offer(NamedTuple):
    """The drafts that a sequence may get: ``count`` tokens of the n-gram drafter or, with
    ``has_model``, any number of tokens of the draft model."""

    count: int  # type: ignore[assignment]  # the domain word, over tuple.count
    has_model: bool


class Drafts:
    """The drafts of one scheduler. ``offers`` are for the next plan; read-only outside."""

    def __init__(self, ledger: Ledger, times: StepTimes) -> None:
        self._ledger = ledger
        self._times = times
        self._budget = DraftBudget()
        self._model_trials = Trials(slows=True)
        # the draft model's share of accepted tokens, over all sequences
        self._all = Lengths(model_trials=self._model_trials, least=LEAST_WEIGHT_OF_ALL)
        self.offers: dict[SequenceId, Offer] = {}
        self._counter = DraftCounter()
        self._by_model = (0, 0)  # the draft model's drafted and accepted tokens since `note_step`

    def offer(self, seq: Sequence, count: int, *, has_model: bool = False) -> None:
        """Note that the worker has ``count`` drafted tokens for the sequence's next row, and
        whether it has a model that may draft them."""
        if count or self._budget.is_open:
            self.offers[seq.sequence_id] = Offer(count, has_model)

    def note(
        self, seq: Sequence, drafted: int, accepted: int, *, forced: int, by_model: bool
    ) -> None:
        """Count a committed row, of whose drafted tokens a constraint forced the first
        ``forced``."""
        assert seq.drafting is not None
        counter, by_ngram, of_model = seq.drafting
        for counts in (counter, self._counter):
            counts.note(drafted, accepted, forced=forced, by_model=by_model)
        (of_model if by_model else by_ngram).note(drafted, accepted)
        if by_model:
            self._all.note(drafted, accepted)
            self._by_model = (self._by_model[0] + drafted, self._by_model[1] + accepted)

    def note_step(self, step: PlannedStep, draft_s: float) -> None:
        """Count the time that a draft model took in a step whose rows were committed."""
        passes = [row.drafts for row in step.rows if row.by_model] if step.num_drafts else ()
        if not passes:
            self._budget.note_other()
            return
        (drafted, accepted), self._by_model = self._by_model, (0, 0)
        times, num_rows, most = self._times, len(step.rows), max(passes)
        spent = times.in_steps(num_rows, draft_s) or most * times.pass_ratio
        self._budget.note(accepted / num_rows, spent + times.ratio(step.num_drafts) - 1.0)
        if drafted:  # otherwise the model has only computed tokens that its cache lacked
            times.note_passes(num_rows, most, draft_s)

    @property
    def counts(self) -> tuple[DraftCounts, ...]:
        """The drafts of each drafter since the start."""
        return counts_of([self._counter])

    def widen(self, step: PlannedStep | None, *, is_allowed: bool) -> None:
        """Add drafts to the rows of a step that goes to the worker now, and drop all offers. If
        there are none, a call has no effect."""
        offers, self.offers = self.offers, {}
        if step is None or not is_allowed:
            return
        rows, num_rows = step.rows, len(step.rows)
        used = num_rows + step.image_cost
        room = min(DRAFTING_STEP_MAX, self._ledger.config.max_num_batched_tokens) - used
        if room <= 0 or sum(map(ROW_COUNT, rows)) > num_rows:
            return
        num_drafted = sum(offer.count > 0 for offer in offers.values())
        has_model = self._budget.is_open and any(offer.has_model for offer in offers.values())
        may_model = has_model and self._times.may_draft(num_rows)
        left = len(offers) if may_model else num_drafted
        for index, seq in enumerate(step.sequences):
            if not left:
                return
            offer = offers.get(seq.sequence_id)
            if offer is None or not (may_model or offer.count):
                continue
            most, left = -(-room // left), left - 1  # each row's equal part of the free positions
            by_model = most if offer.has_model and may_model else 0
            counts = (offer.count, num_drafted), (by_model, len(offers))
            length, is_models = self._pick(seq, rows[index], most, counts, num_rows)
            if length:
                rows[index] = self._widened(step, seq, rows[index], length, by_model=is_models)
                step.num_drafts += rows[index].drafts
                room -= rows[index].drafts

    def _pick(
        self,
        seq: Sequence,
        row: Row,
        most: int,
        counts: tuple[tuple[int, int], tuple[int, int]],
        num_rows: int,
    ) -> tuple[int, bool]:
        """Return how many tokens a row should draft, and whether by a draft model: none if the row
        is no decode, and never so many that the sequence could become longer than it may.
        ``counts`` has a pair for the n-gram drafter and one for a draft model: how many tokens it
        may draft for this row, and in how many of the step's rows it may draft."""
        if row.children or row.logits is not Logits.LAST:
            return 0, False
        # The planned token is counted as known, so this is how many tokens may still follow it.
        most = min(most, seq.max_tokens - (seq.num_tokens - seq.num_prompt), DRAFTED_TOKENS_MAX)
        if most <= 0:
            return 0, False
        if seq.drafting is None:
            by_model = Lengths(self._all.share, self._model_trials)
            seq.drafting = Drafting(DraftCounter(), Lengths(), by_model)
        drafters = zip(seq.drafting[1:], counts, strict=True)
        usable = [(lengths, min(most, count), rows) for lengths, (count, rows) in drafters if count]
        results = [
            (*item.best(count, self._times, rows, num_rows), item) for item, count, rows in usable
        ]
        length, _, lengths = max(results, key=itemgetter(1))
        if length:
            return length, lengths.is_model
        due = (item for item, _, _ in usable if item.trials.is_due(num_rows))
        return next(((1, item.is_model) for item in due), (0, False))

    def _widened(
        self, step: PlannedStep, seq: Sequence, row: Row, count: int, *, by_model: bool
    ) -> Row:
        """Return the row with ``count`` drafts, or with as many as there are blocks for."""
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
        by_model = by_model and count > 0
        return row._replace(count=1 + count, blocks=delta, drafts=count, by_model=by_model)
