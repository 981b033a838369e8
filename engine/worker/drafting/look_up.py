"""Drafts by looking up where the last tokens of a sequence stood before.

What followed them then is the draft. So a text that repeats its prompt or itself is drafted without
a model: edits of code, summaries, answers in a form.

Rule 1: the memory of a sequence is bounded by two tables of `SLOTS_MAX` places, whatever its
length; newer places overwrite older ones. Rule 2: a place that the hash finds is compared with the
tokens themselves, so that a collision gives no draft instead of a foreign one. Rule 3: a token's
cost does not depend on the length of the text.

Source: prompt look-up decoding (A. Saxena, 2023), and llama.cpp's n-gram drafts.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LONG, SHORT = 5, 3  # tokens that must stand there as they stand at the end; guess
SHORT_DRAFT_MAX = 3  # guess: three equal tokens say less about what follows than five
SLOTS_MIN, SLOTS_MAX = 1 << 8, 1 << 14  # of a table; 16,384 places are 64 KiB
BULK = 64  # guess: so many new tokens are indexed by numpy at once
# Odd numbers below 2**31; a product with a token id fits int64. Source: the fractional parts of the
# golden ratio and of the square roots of 2, 3 and 5.
FACTORS = (0x4F1BBCDD, 0x3504F333, 0x5DB3D743, 0x1E3779B9, 0x52A7FA9D)


class LookUp:
    """Where each three and each five of a sequence's tokens stood last. It is given the whole
    sequence at each call, which only grows."""

    __slots__ = ("_long", "_num_seen", "_short")

    def __init__(self) -> None:
        self._num_seen = 0
        self._long = self._short = array("i")

    def draft(self, tokens: Sequence[int], behind: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that may follow ``tokens`` and then ``behind``, which are
        guesses themselves. The list is empty if the last tokens have not stood before."""
        self._index(tokens)
        end = [*tokens[-LONG:], *behind]
        for table, size, limit in (
            (self._long, LONG, most),
            (self._short, SHORT, min(most, SHORT_DRAFT_MAX)),
        ):
            if len(end) < size:
                continue
            last = end[-size:]
            place = table[_slot(last, len(table))]
            if place and list(tokens[place - size : place]) == last:
                return _continued(tokens, place, behind, limit)
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        """Note the places up to the last token, behind which nothing has stood yet."""
        end = len(tokens)
        if end > len(self._long) // 2 and len(self._long) < SLOTS_MAX:
            size = min(SLOTS_MAX, max(SLOTS_MIN, 1 << (2 * end).bit_length()))
            self._long, self._short = array("i", bytes(4 * size)), array("i", bytes(4 * size))
            self._num_seen = 0
        begin, self._num_seen = self._num_seen, end
        for table, size in ((self._long, LONG), (self._short, SHORT)):
            first = max(begin, size)
            if end - first > BULK:
                _index_many(table, tokens, max(first, end - SLOTS_MAX), end, size)
                continue
            for place in range(first, end):
                table[_slot(tokens[place - size : place], len(table))] = place


def _continued(tokens: Sequence[int], place: int, behind: Sequence[int], most: int) -> list[int]:
    """Return what stood from ``place`` on. At the end of the tokens it goes on with the guesses
    and the draft itself, as a text that repeats itself does."""
    found = list(tokens[place : place + most])
    if len(found) < most:
        found += behind
        for index in range(most):
            found.append(found[index])
    return found[:most]


def _slot(last: Sequence[int], num_slots: int) -> int:
    mixed = 0
    for token, factor in zip(last, FACTORS, strict=False):
        mixed += token * factor
    return (mixed ^ (mixed >> 17)) & (num_slots - 1)


def _index_many(table: array[int], tokens: Sequence[int], first: int, end: int, size: int) -> None:
    """Index the places from ``first`` to ``end - 1`` at once; of equal slots the last one stays."""
    ids: NDArray[np.int64] = np.array(tokens[first - size : end], np.int64)
    count = end - first
    mixed = np.zeros(count, np.int64)
    for index in range(size):
        mixed += ids[index : index + count] * FACTORS[index]
    slots = (mixed ^ (mixed >> 17)) & (len(table) - 1)
    np.frombuffer(table, np.int32)[slots] = np.arange(first, end, dtype=np.int32)
