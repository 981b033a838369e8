"""Which tokens of which sequences a draft model's KV cache holds.

Rule 1: a sequence keeps its own blocks, apart from those of the model that answers. So a preempted
or parked sequence keeps what its draft model has read, and a prefix hit or a fork begins with a
copy of the blocks whose tokens are the same (`open`). Rule 2: what is held is known by its tokens:
those that were rejected are dropped when the sequence comes again (`Resident.roll_back`). A wrong
entry could make drafts worse, and never a token. Rule 3: when no block is free, sequences that have
ended give theirs first, then those that have drafted least recently, but none that is in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RESIDENTS_MAX = 64  # guess: bounds the search for equal tokens, not the memory
PIECE = 256  # tokens compared at once


class Resident:
    """One sequence in the cache: ``tokens`` have their keys and values in ``blocks``."""

    __slots__ = ("blocks", "has_ended", "known", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.blocks: list[int] = []
        self.known = 0  # of the tokens; they are the sequence's own
        self.has_ended = False

    def roll_back(self, tokens: Sequence[int]) -> None:
        """Drop what the sequence does not have: the drafts that were not taken."""
        self.known = num_common(self.tokens, tokens, self.known)
        del self.tokens[self.known :]


class DraftCache:
    """The places of sequences in ``num_blocks`` blocks of ``block_size`` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._free = list(range(num_blocks))
        self._residents: dict[int, Resident] = {}  # the one that drafted last is the last
        self._in_use: list[Resident] = []

    @property
    def num_free(self) -> int:
        """How many blocks no sequence has."""
        return len(self._free)

    def begin(self) -> None:
        """Begin a step: nothing is in use."""
        self._in_use = []

    def open(self, sequence: int, tokens: Sequence[int]) -> tuple[Resident, list[tuple[int, int]]]:
        """Return the place of a sequence of these tokens, which is then in use, with what it holds
        of them; all but the last at most. The pairs of blocks must be copied before it is used."""
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
        """Give the place blocks for so many tokens. Returns False if they cannot be had; it then
        keeps what it has."""
        missing = -(-num_tokens // self._size) - len(place.blocks)
        while len(self._free) < missing and self._evict():
            pass
        if len(self._free) < missing:
            return False
        for _ in range(missing):
            place.blocks.append(self._free.pop())
        return True

    def release(self, sequences: Iterable[int]) -> None:
        """Note sequences that have ended. Others may copy from them until they are evicted."""
        for sequence in sequences:
            if (place := self._residents.get(sequence)) is not None:
                place.has_ended = True

    def _adopt(self, place: Resident, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Take over what another sequence holds of these tokens, in whole blocks."""
        best, most = None, 0
        for other in self._residents.values():
            if other is not place and len(other.tokens) > most:
                common = num_common(other.tokens, tokens)
                if common > most:
                    best, most = other, common
        count = most // self._size
        if best is None or not count:
            return []
        self._in_use.append(best)  # it must not be evicted for its copy
        if not self.try_grow(place, count * self._size):
            return []
        place.tokens = list(tokens[: count * self._size])
        place.known = len(place.tokens)
        return list(zip(best.blocks, place.blocks[:count], strict=False))

    def _evict(self) -> bool:
        """Free the blocks of one sequence that is not in use. Returns False if there is none."""
        idle = [name for name, one in self._residents.items() if one not in self._in_use]
        if not idle:
            return False
        ended = (name for name in idle if self._residents[name].has_ended)
        self._free += self._residents.pop(next(ended, idle[0])).blocks
        return True


def num_common(one: Sequence[int], other: Sequence[int], start: int = 0) -> int:
    """Return how many first tokens are equal; the first ``start`` are known to be."""
    end = min(len(one), len(other))
    while start < end:
        stop = min(start + PIECE, end)
        if list(one[start:stop]) != list(other[start:stop]):
            while one[start] == other[start]:
                start += 1
            return start
        start = stop
    return min(start, end)
