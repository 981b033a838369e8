"""Drafts by finding an earlier occurrence of a sequence's last tokens.

The tokens that followed the earlier occurrence are the draft. So a text that repeats its prompt or
itself is drafted without a model: edits of code, summaries, answers in a form.

Rule 1: the memory of a sequence is bounded by two tables of `SLOTS_MAX` places, whatever its
length; newer places overwrite older ones. Rule 2: the tokens at a place that a hash finds are
compared, so that a collision gives no draft instead of a wrong one. Rule 3: a token's cost does not
depend on the length of the text. Rule 4: with each `MISSES` look-ups in a row after which the
sequence grew by a single token, the n-gram drafter skips one token more before it looks up again:
up to `REST_MAX` if it found nothing, and up to `IDLE_REST_MAX` if its draft was rejected, or not
verified because that would not pay. With a search at each token, eight plain stories at once spent
1.6 % of their time on look-ups.

Source: prompt look-up decoding (A. Saxena, 2023), and llama.cpp's n-gram drafts.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LONG, SHORT = 5, 3  # the lengths of the n-grams, in tokens; not tuned
SHORT_DRAFT_MAX = 3  # tokens after a short n-gram, which predicts less well; not tuned
SLOTS_MIN, SLOTS_MAX = 1 << 8, 1 << 14  # sizes of a table; 16,384 places are 64 KiB
MISSES, REST_MAX = 4, 15  # not tuned; a text's repetition is found at most 16 tokens later
IDLE_REST_MAX = 3  # tokens without a look-up behind a draft that did not help (rule 4); not tuned
BULK = 64  # more new tokens than these are indexed by numpy at once; not tuned
# Factors of the hashes: odd numbers below 2**31, whose products with token ids fit int64. Source:
# the fractional parts of the golden ratio and of the square roots of 2, 3 and 5.
FACTORS = F0, F1, F2, F3, F4 = (0x4F1BBCDD, 0x3504F333, 0x5DB3D743, 0x1E3779B9, 0x52A7FA9D)


class NgramDrafter:
    """Tables of the last place of each three and each five tokens of a sequence. Each call gets the
    whole sequence, which only grows."""

    __slots__ = ("_long", "_num_missed", "_num_seen", "_rests_until", "_short", "_size")

    def __init__(self) -> None:
        self._num_seen = 0
        self._long = self._short = array("i")
        self._size = 0  # the sequence's length at the last call
        self._num_missed = 0  # look-ups since the sequence last grew by several tokens
        self._rests_until = 0  # the least length of the sequence at the next search

    def draft(self, tokens: Sequence[int], behind: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that may follow ``tokens`` and then ``behind``, which are
        drafted tokens. The list is empty if the last tokens have not occurred before, or if the
        n-gram drafter rests (Rule 4)."""
        size, before = len(tokens), self._size
        self._size = size
        if size > before + 1:
            self._num_missed = 0
        elif size < self._rests_until and not behind:
            return []
        self._index(tokens)
        draft = self._lookup(tokens, behind, most)
        self._num_missed += 1
        rest_max = IDLE_REST_MAX if draft else REST_MAX
        self._rests_until = size + 1 + min(self._num_missed // MISSES, rest_max)
        return draft

    def _lookup(self, tokens: Sequence[int], behind: Sequence[int], most: int) -> list[int]:
        last = [*tokens[-LONG:], *behind][-LONG:] if behind else list(tokens[-LONG:])
        if len(last) < SHORT:
            return []
        long, short = _slots(last, len(self._long) - 1)
        place = self._long[long] if len(last) == LONG else 0
        if place and list(tokens[place - LONG : place]) == last:
            return _continued(tokens, place, behind, most)
        place = self._short[short]
        if place and list(tokens[place - SHORT : place]) == last[-SHORT:]:
            return _continued(tokens, place, behind, min(most, SHORT_DRAFT_MAX))
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        """Add the places of all n-grams that a token follows to the tables."""
        end = len(tokens)
        if end > len(self._long) // 2 and len(self._long) < SLOTS_MAX:
            size = min(SLOTS_MAX, max(SLOTS_MIN, 1 << (2 * end).bit_length()))
            self._long, self._short = array("i", bytes(4 * size)), array("i", bytes(4 * size))
            self._num_seen = 0
        begin, self._num_seen = self._num_seen, end
        first = max(begin, SHORT)
        if end - first > BULK:
            _index_many(self._long, tokens, max(first, LONG, end - SLOTS_MAX), end, LONG)
            _index_many(self._short, tokens, max(first, end - SLOTS_MAX), end, SHORT)
            return
        mask = len(self._long) - 1
        for place in range(first, end):
            long, short = _slots(tokens[max(0, place - LONG) : place], mask)
            self._short[short] = place
            if place >= LONG:
                self._long[long] = place


def _continued(tokens: Sequence[int], place: int, behind: Sequence[int], most: int) -> list[int]:
    """Return the tokens from ``place`` on. Behind the last token the draft continues with
    ``behind`` and then with itself, as a text that repeats itself does."""
    draft = list(tokens[place : place + most])
    if len(draft) < most:
        draft += behind
        for index in range(most):
            draft.append(draft[index])
    return draft[:most]


def _slots(last: Sequence[int], mask: int) -> tuple[int, int]:
    """Return the slots of the last `LONG` tokens, of no use if there are fewer, and of the last
    `SHORT` tokens. Both are written out, because each sequence computes them in each step."""
    c, d, e = last[-3:]
    a, b = last[:2]
    short = c * F2 + d * F3 + e * F4
    long = a * F0 + b * F1 + short
    return (long ^ (long >> 17)) & mask, (short ^ (short >> 17)) & mask


def _index_many(table: array[int], tokens: Sequence[int], first: int, end: int, size: int) -> None:
    """Index the places from ``first`` to ``end - 1`` at once; of equal slots the last one stays."""
    ids: NDArray[np.int64] = np.array(tokens[first - size : end], np.int64)
    count = end - first
    mixed = np.zeros(count, np.int64)
    for index in range(size):
        mixed += ids[index : index + count] * FACTORS[index - size]
    slots = (mixed ^ (mixed >> 17)) & (len(table) - 1)
    np.frombuffer(table, np.int32)[slots] = np.arange(first, end, dtype=np.int32)
