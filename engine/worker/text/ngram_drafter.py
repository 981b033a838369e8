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

LONG, SHORT = 5, 3  # Not tuned: the lengths of the n-grams, in tokens.
SHORT_DRAFT_MAX = 3  # Not tuned: a short n-gram predicts less well, so its draft is shorter.
SLOTS_MIN, SLOTS_MAX = 1 << 8, 1 << 14  # A table's numbers of places; 16,384 take 64 KiB.
MISSES, REST_MAX = 4, 15  # Not tuned: a repetition is found at most 16 tokens late (Rule 4).
IDLE_REST_MAX = 3  # Not tuned: the most tokens skipped after drafts that do not help (Rule 4).
BULK = 64  # Not tuned: if there are more new tokens, numpy indexes them at once.
# Factors of the hashes: odd numbers below 2**31, whose products with token ids fit int64. Source:
# the fractional parts of the golden ratio and of the square roots of 2, 3 and 5.
FACTORS = F0, F1, F2, F3, F4 = (0x4F1BBCDD, 0x3504F333, 0x5DB3D743, 0x1E3779B9, 0x52A7FA9D)


class NgramDrafter:
    """Drafts for one sequence, by tables of where each three and each five of its tokens occurred
    last. Each call gets the whole sequence, which only grows."""

    __slots__ = ("_long", "_num_missed", "_num_seen", "_rests_until", "_short", "_size")

    def __init__(self) -> None:
        self._num_seen = 0
        self._long = self._short = array("i")
        self._size = 0  # The sequence's length at the last call.
        self._num_missed = 0  # The look-ups since the sequence last grew by several tokens.
        self._rests_until = 0  # No look-up is made while the sequence is shorter.

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
    """Return ``most`` tokens from ``place`` on. After the sequence's last token come those of
    ``behind``, and then the draft again, as in a text that repeats itself."""
    draft = list(tokens[place : place + most])
    if len(draft) < most:
        draft += behind
        for index in range(most):
            draft.append(draft[index])
    return draft[:most]


def _slots(last: Sequence[int], mask: int) -> tuple[int, int]:
    """Return the places in a table of the last `LONG` tokens (of no use if there are fewer) and of
    the last `SHORT` tokens. The sums are written out because every step computes them."""
    c, d, e = last[-3:]
    a, b = last[:2]
    short = c * F2 + d * F3 + e * F4
    long = a * F0 + b * F1 + short
    return (long ^ (long >> 17)) & mask, (short ^ (short >> 17)) & mask


def _index_many(table: array[int], tokens: Sequence[int], first: int, end: int, size: int) -> None:
    """Index the places ``first`` to ``end - 1`` at once. Of several for a slot, the last stays."""
    ids: NDArray[np.int64] = np.array(tokens[first - size : end], np.int64)
    count = end - first
    mixed = np.zeros(count, np.int64)
    for index in range(size):
        mixed += ids[index : index + count] * FACTORS[index - size]
    slots = (mixed ^ (mixed >> 17)) & (len(table) - 1)
    np.frombuffer(table, np.int32)[slots] = np.arange(first, end, dtype=np.int32)
