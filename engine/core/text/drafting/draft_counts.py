"""Counts what each drafter has drafted, and how much of it was right (D27).

Rule: a token counts for the drafter that guessed it, so that the sums over the drafters are the
numbers of tokens. A draft counts once. If a constraint forced only its beginning, it counts for the
drafter that continued it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from engine.core.common.types import DraftCounts
from engine.core.text.plan import DRAFTED_TOKENS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CONSTRAINT, NGRAM, MODEL = DRAFTERS = ("constraint", "lookup", "model")


class DraftCounter:
    """The drafts of one sequence, or of all."""

    __slots__ = ("_drafted", "_right", "_rows")

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self._drafted: Counter[str] = Counter()
        self._right = {name: [0] * DRAFTED_TOKENS_MAX for name in DRAFTERS}

    def note(self, drafted: int, accepted: int, *, forced: int = 0, by_model: bool = False) -> None:
        """Count a draft whose first ``accepted`` tokens were right. A constraint forced the first
        ``forced`` ones."""
        drafter = MODEL if by_model else NGRAM
        self._rows[drafter if drafted > forced else CONSTRAINT] += 1
        self._drafted[CONSTRAINT] += forced
        self._drafted[drafter] += drafted - forced
        for position in range(accepted):
            self._right[CONSTRAINT if position < forced else drafter][position] += 1

    @property
    def counts(self) -> tuple[DraftCounts, ...]:
        """The counts of each drafter."""
        return tuple(map(self._counts_of, DRAFTERS))

    def _counts_of(self, name: str) -> DraftCounts:
        right = tuple(self._right[name])
        return DraftCounts(name, self._rows[name], self._drafted[name], sum(right), right)


def summed(counters: Iterable[DraftCounter]) -> tuple[DraftCounts, ...]:
    """Return the counts of each drafter in all counters together."""
    return tuple(_summed(zip(*[one.counts for one in counters], strict=True)))


def _summed(by_drafter: Iterable[tuple[DraftCounts, ...]]) -> Iterator[DraftCounts]:
    for counts in by_drafter:
        right = tuple(map(sum, zip(*[one.by_position for one in counts], strict=True)))
        drafts, drafted = sum(one.drafts for one in counts), sum(one.drafted for one in counts)
        yield DraftCounts(counts[0].drafter, drafts, drafted, sum(right), right)
