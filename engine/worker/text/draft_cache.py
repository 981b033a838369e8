"""The bookkeeping of a draft model's KV cache: which sequence's tokens its blocks hold.

Rule 1: the blocks here are separate from those of the model that answers. So a preempted or parked
sequence keeps the keys and values of its draft model, and a prefix hit or a fork begins with a copy
of the blocks whose tokens are the same (`open`). Rule 2: the tokens of the keys and values are
stored, too: rejected ones are dropped when the sequence drafts again (`Resident.roll_back`). A
wrong entry could make drafts worse, but never a token. Rule 3: when no block is free, sequences
that have ended lose their blocks first, then those that have drafted least recently, but none that
is in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RESIDENTS_MAX = 64  # Not tuned: so many sequences are searched for equal tokens.
PIECE = 256  # So many tokens are compared at once by `num_common`.


class Resident:
    """One sequence in the cache: the keys and values of ``tokens`` are in ``blocks``."""

    __slots__ = ("blocks", "has_ended", "known", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.blocks: list[int] = []
        self.known = 0  # so many first tokens are known to be the sequence's own
        self.has_ended = False

    def roll_back(self, tokens: Sequence[int]) -> None:
        """Drop the tokens that the sequence does not have: the drafts that were rejected."""
        self.known = num_common(self.tokens, tokens, self.known)
        del self.tokens[self.known :]


class DraftCache:
    """The `Resident` of each sequence in ``num_blocks`` blocks of ``block_size`` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._free = list(range(num_blocks))
        self._residents: dict[int, Resident] = {}  # the least recently used first
        self._in_use: list[Resident] = []

    @property
    def num_free(self) -> int:
        """The number of blocks that no sequence has."""
        return len(self._free)

    def begin(self) -> None:
        """Begin a step: no sequence is in use yet."""
        self._in_use = []

    def open(self, sequence: int, tokens: Sequence[int]) -> tuple[Resident, list[tuple[int, int]]]:
        """Return the `Resident` of a sequence with these ``tokens``, which never holds the last
        one, and the pairs (source, target) of blocks to copy first. Until the next `begin`, the
        `Resident` is not evicted."""
        place = self._residents.pop(sequence, None)
        if place is None:
            place = Resident()
        self._residents[sequence] = place
        self._in_use.append(place)
        place.roll_back(tokens[:-1])
        copies = [] if place.tokens else self._adopt(place, tokens[:-1])
        while len(self._residents) > RESIDENTS_MAX and self._evict():
            pass
        return place, copies

    def try_grow(self, place: Resident, num_tokens: int) -> bool:
        """Give a `Resident` blocks for ``num_tokens`` tokens. Returns False if too few blocks can
        be freed; it then keeps those that it has."""
        missing = -(-num_tokens // self._size) - len(place.blocks)
        while len(self._free) < missing and self._evict():
            pass
        if len(self._free) < missing:
            return False
        for _ in range(missing):
            place.blocks.append(self._free.pop())
        return True

    def release(self, sequences: Iterable[int]) -> None:
        """Mark sequences that have ended. Until they are evicted, others may copy their blocks."""
        for sequence in sequences:
            if (place := self._residents.get(sequence)) is not None:
                place.has_ended = True

    def _adopt(self, place: Resident, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Let ``place`` begin with the whole blocks that it has in common with another sequence.
        Return the (source, target) pairs of blocks to copy."""
        best, most = None, 0
        for other in self._residents.values():
            if other is not place and len(other.tokens) > most:
                common = num_common(other.tokens, tokens)
                if common > most:
                    best, most = other, common
        count = most // self._size
        if best is None or not count:
            return []
        self._in_use.append(best)  # so that its blocks are not freed to make room for their copy
        if not self.try_grow(place, count * self._size):
            return []
        place.tokens = list(tokens[: count * self._size])
        place.known = len(place.tokens)
        return list(zip(best.blocks, place.blocks[:count], strict=False))

    def _evict(self) -> bool:
        """Free the blocks of a sequence that is not in use. Returns False if all are in use."""
        idle = [name for name, resident in self._residents.items() if resident not in self._in_use]
        if not idle:
            return False
        ended = (name for name in idle if self._residents[name].has_ended)
        self._free += self._residents.pop(next(ended, idle[0])).blocks
        return True


def num_common(tokens: Sequence[int], other: Sequence[int], start: int = 0) -> int:
    """Return how many first tokens are equal. The first ``start`` tokens are not compared."""
    end = min(len(tokens), len(other))
    while start < end:
        stop = min(start + PIECE, end)
        if list(tokens[start:stop]) != list(other[start:stop]):
            while tokens[start] == other[start]:
                start += 1
            return start
        start = stop
    return min(start, end)
