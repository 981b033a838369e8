"""Counts what each drafter has drafted, and how much of it was right (D27).

Rule: a token counts for the drafter that drafted it, so that the sums over the drafters are the
numbers of tokens. A draft counts for one drafter: if a constraint forced only the draft's
beginning, for the drafter that continued it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from engine.core.common.types import DraftCounts
from engine.core.text.plan import DRAFTED_TOKENS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

CONSTRAINT, NGRAM, MODEL = DRAFTERS = ("constraint", "lookup", "model")


class DraftCounter(Counter[tuple[str, str | int]]):
    """The drafts of one sequence, or of all sequences: for each drafter its "drafts", its "drafted"
    tokens, and its right tokens by their positions."""

    def note(self, drafted: int, accepted: int, *, forced: int = 0, by_model: bool = False) -> None:
        """Count a draft whose first ``accepted`` tokens were right. The first ``forced`` tokens of
        the draft are those that a constraint forced."""
        drafter = MODEL if by_model else NGRAM
        self[drafter if drafted > forced else CONSTRAINT, "drafts"] += 1
        self[CONSTRAINT, "drafted"] += forced
        self[drafter, "drafted"] += drafted - forced
        for position in range(accepted):
            self[CONSTRAINT if position < forced else drafter, position] += 1


def counts_of(counters: Iterable[DraftCounter]) -> tuple[DraftCounts, ...]:
    """Return the counts of each drafter in all counters together."""
    total: Counter[tuple[str, str | int]] = sum(counters, Counter())
    return tuple([_counts_of(name, total) for name in DRAFTERS])


def _counts_of(name: str, total: Counter[tuple[str, str | int]]) -> DraftCounts:
    right = tuple([total[name, position] for position in range(DRAFTED_TOKENS_MAX)])
    return DraftCounts(name, total[name, "drafts"], total[name, "drafted"], sum(right), right)
