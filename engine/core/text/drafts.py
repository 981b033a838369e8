"""How many drafted tokens each row verifies (D27).

The worker offers drafts with a sequence's result. The rows of the next step, planned as if there
were none, are then widened: a row of one position becomes one of ``1 + drafts``, if that is likely
to pay. Rule 1: drafts take only what is left over: blocks that are free, tokens of the step's
budget, and positions of a step with few rows. No sequence is preempted for them, and none waits.
Rule 2: an offer is for the next plan alone. Rule 3: drafts change no token. The rest of the
core reads only how many a step has: to count its work, to plan nothing behind it, and to run it
again without them.

The length of a draft follows its sequence's own acceptance and what drafts cost here. With a share
p of accepted tokens, k drafts give 1 + p + … + p^k tokens on average; a step with k drafts takes
`StepCosts.ratio` times as long as one without. The length is the k with the best quotient, and 0 if
none is above `GAIN_LEAST`. A sequence that does not draft tries again with one token now and then,
because a text may begin to repeat itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.core import DraftCounts
from engine.core.text.blocks import blocks_for
from engine.core.text.plan import DRAFTED_TOKENS_MAX, DRAFTING_STEP_MAX, BlockDelta, Logits

if TYPE_CHECKING:
    from engine.core.common.types import SequenceId
    from engine.core.text.ledger import Ledger
    from engine.core.text.plan import Row
    from engine.core.text.planned_step import PlannedStep
    from engine.core.text.sequence import Sequence

TOKEN_COST = 0.05  # of one more position, in steps, until it is measured
GAIN_LEAST = 1.03  # guess: below this, drafts may cost more than they gain
MOVE = 1.03  # guess: how much one step changes an estimate of costs
FIRST_SHARE = 0.5  # guess: what is expected of a sequence's first draft
GAIN = 0.2  # guess: how much one verified token changes the share
TRY_EVERY = 16  # offers; guess: a sequence whose drafts do not pay tries one of so many


class StepCosts:
    """How much longer steps take that draft, by the steps before.

    An estimate moves by the same factor whatever a step took, up or down. So it follows the median,
    and a step that waited for something else does not count for more than another.
    """

    def __init__(self) -> None:
        self._plain_s = [0.0] * DRAFTING_STEP_MAX  # by the step's rows; 0: unknown
        # [k] is the ratio of steps with 2**k … 2**(k + 1) - 1 drafts.
        sizes = range(DRAFTING_STEP_MAX.bit_length() - 1)
        self._ratios: list[float] = [1.0 + TOKEN_COST * ((2 << k) - 1) for k in sizes]

    def ratio(self, num_drafts: int) -> float:
        """Return how long a step takes with so many drafts, compared with none."""
        return self._ratios[min(num_drafts.bit_length(), len(self._ratios)) - 1]

    def note(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Count a step of ``num_rows`` decodes and no prompt, which took more than 0 seconds."""
        if num_rows >= DRAFTING_STEP_MAX:
            return
        plain_s = self._plain_s[num_rows]
        if not num_drafts:
            self._plain_s[num_rows] = _nearer(plain_s, seconds) if plain_s else seconds
        elif plain_s:
            k = min(num_drafts.bit_length(), len(self._ratios)) - 1
            self._ratios[k] = max(1.0, _nearer(self._ratios[k], seconds / plain_s))


def _nearer(estimate: float, value: float) -> float:
    """Return the estimate after one more value."""
    return min(value, estimate * MOVE) if value > estimate else max(value, estimate / MOVE)


class Drafting:
    """How the drafts of one sequence have fared: ``accepted`` of ``drafted`` tokens, and the
    ``share`` of the recent ones."""

    __slots__ = ("accepted", "drafted", "num_declined", "share")

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self.share = FIRST_SHARE
        self.num_declined = 0

    def length(self, most: int, costs: StepCosts, others: int = 0, idle: int = 0) -> int:
        """Return how many tokens to draft, at most ``most``, which is at least 1. ``others`` more
        sequences draft beside this one, and ``idle`` ones do not."""
        best, best_rate = 0, GAIN_LEAST
        chance, expected = 1.0, 1.0
        drafting = 1 + others
        for count in range(1, most + 1):
            chance *= self.share
            expected += chance
            rate = (drafting * expected + idle) / (drafting + idle) / costs.ratio(drafting * count)
            if rate > best_rate:
                best, best_rate = count, rate
        if best:
            return best
        self.num_declined += 1
        return 1 if self.num_declined % TRY_EVERY == 0 else 0

    def note(self, drafted: int, accepted: int) -> None:
        """Count a draft whose first ``accepted`` tokens were taken. Of the others, only the first
        was compared with what the model says behind these, unless the sequence ended before."""
        self.drafted += drafted
        self.accepted += accepted
        for _ in range(accepted):
            self.share += GAIN * (1.0 - self.share)
        if accepted < drafted:
            self.share -= GAIN * self.share


class Drafts:
    """The drafts of one scheduler."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.costs = StepCosts()
        self._offers: dict[SequenceId, int] = {}  # for the next plan
        self._num_rows = self._num_drafted = 0
        self._by_position = [0] * DRAFTED_TOKENS_MAX

    def offer(self, seq: Sequence, count: int) -> None:
        """Note that the worker has ``count`` drafted tokens for the sequence's next row."""
        self._offers[seq.sequence_id] = count

    def note(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Count a row that was committed."""
        assert seq.drafting is not None
        seq.drafting.note(drafted, accepted)
        self._num_rows += 1
        self._num_drafted += drafted
        for position in range(accepted):
            self._by_position[position] += 1

    @property
    def counts(self) -> DraftCounts:
        """The drafts since the start."""
        by_position = tuple(self._by_position)
        return DraftCounts(self._num_rows, self._num_drafted, sum(by_position), by_position)

    def widen(self, step: PlannedStep | None, *, is_allowed: bool) -> None:
        """Add drafts to the rows of a step that goes to the worker now, and drop all offers."""
        if not self._offers:
            return
        offers, self._offers = self._offers, {}
        if step is None or not is_allowed:
            return
        rows, config = step.rows, self._ledger.config
        room = DRAFTING_STEP_MAX - len(rows)
        if room > 0:
            room = min(room, config.max_num_batched_tokens - sum([row.count for row in rows]))
        left = num_offers = len(offers)
        for index, seq in enumerate(step.sequences):
            if room <= 0:
                return
            most = offers.get(seq.sequence_id, 0)
            if not most:
                continue
            most, left = min(most, -(-room // left)), left - 1  # an equal part of what is left
            beside = (num_offers - 1, max(0, len(rows) - num_offers))
            count = self._length(seq, rows[index], most, beside)
            if count:
                rows[index] = self._widened(step, seq, rows[index], count)
                step.num_drafts += rows[index].drafts
                room -= rows[index].drafts

    def _length(self, seq: Sequence, row: Row, most: int, beside: tuple[int, int]) -> int:
        """Return how many tokens a row should draft: 0 for one that is no decode, and never so many
        that the sequence could become longer than it may."""
        if row.count > 1 or row.children or row.logits is not Logits.LAST:
            return 0
        # The planned token is counted as known, so this is how many may still follow it.
        most = min(most, seq.max_tokens - (seq.num_tokens - seq.num_prompt), DRAFTED_TOKENS_MAX)
        if most <= 0:
            return 0
        if seq.drafting is None:
            seq.drafting = Drafting()
        return seq.drafting.length(most, self.costs, *beside)

    def _widened(self, step: PlannedStep, seq: Sequence, row: Row, count: int) -> Row:
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
        return row._replace(count=1 + count, blocks=delta, drafts=count)
