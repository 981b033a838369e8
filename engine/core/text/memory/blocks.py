"""The KV pool: which sequences hold which blocks, and in what order free blocks are reused.

Rule 1: this file alone changes a reference count. Rule 2: a block is in the free list exactly when
no sequence holds it. A free block may still carry a cached prefix; the free list's order, least
recently used first, is the cache's eviction order (D5). Rule 3: free blocks whose prefixes only
background work has used are in a list of their own, which is reused before the other cached ones.

Lifecycle of a block's holding:
1. `open` a reservation for a plan.
2. `take` fresh blocks or `share` held or cached ones under it.
3. `commit` the reservation when the step succeeded: its blocks stay taken. Or `rollback` it: all of
   them are given back; the caller has taken them out of the block tables before. Each reservation
   ends once.
4. `release` what a sequence holds, once for each holding.

Every operation takes constant time per block.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from engine.core.common.types import BlockId
from engine.errors import EngineBug

if TYPE_CHECKING:
    from collections.abc import Sequence


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


class Reservation:
    """Blocks promised to one plan. Using it after its end is an `EngineBug`."""

    __slots__ = ("blocks", "is_open")

    def __init__(self) -> None:
        self.is_open = True
        self.blocks: list[BlockId] = []  # one entry for each reference that is held

    def __repr__(self) -> str:
        return f"<Reservation of {len(self.blocks)} blocks, {'open' if self.is_open else 'ended'}>"


class BlockPool:
    """``num_blocks`` blocks, numbered from 0. Not thread-safe.

    `drain_reused` returns the blocks that are about to be overwritten, so that a cached prefix in
    them can be forgotten. ``num_open`` is how many reservations have not ended: one for each plan
    that exists; read-only outside.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(
            map(BlockId, range(num_blocks))
        )
        self._cached: set[BlockId] = set()
        self._background: set[BlockId] = set()  # cached blocks that only background work has used
        self._free_background: OrderedDict[BlockId, None] = OrderedDict()
        self._reused: list[BlockId] = []
        self.num_open = 0

    def __repr__(self) -> str:
        return f"<BlockPool {self.num_free} free of {self.num_blocks}, {self.num_open} open>"

    @property
    def num_free(self) -> int:
        """Number of blocks that no sequence holds, including cached ones."""
        return len(self._free) + len(self._free_background)

    @property
    def num_cached(self) -> int:
        """Number of blocks that carry a cached prefix, held or free."""
        return len(self._cached)

    def references(self, block: BlockId) -> int:
        """Return how many holdings the block has."""
        return self._references[block]

    # ---- reservations

    def open(self) -> Reservation:
        """Return a new reservation for one plan; it must end by `commit` or `rollback`."""
        self.num_open += 1
        return Reservation()

    def take(self, reservation: Reservation, count: int) -> tuple[BlockId, ...] | None:
        """Return ``count`` fresh blocks, the longest unused ones first; None, and take nothing, if
        fewer are free. The next `drain_reused` reports those that carried a cached prefix."""
        self._require_open(reservation)
        free, background, cached = self._free, self._free_background, self._cached
        if count > len(free) + len(background):
            return None
        taken = []
        for _ in range(count):
            if background and (not free or next(iter(free)) in cached):
                block, _nothing = background.popitem(last=False)
                self._background.discard(block)
            else:
                block, _nothing = free.popitem(last=False)
            if block in cached:
                cached.discard(block)
                self._reused.append(block)
            self._references[block] = 1
            taken.append(block)
        reservation.blocks.extend(taken)
        return tuple(taken)

    def share(self, reservation: Reservation, blocks: Sequence[BlockId]) -> None:
        """Hold blocks whose contents exist already: a live sequence's, or cached ones."""
        self._require_open(reservation)
        for block in blocks:
            if self._references[block] == 0:
                del self._free_list_of(block)[block]
            self._references[block] += 1
        reservation.blocks.extend(blocks)

    def give_back(self, reservation: Reservation, blocks: Sequence[BlockId]) -> None:
        """Take single holdings out of a reservation that stays open: a row was dropped."""
        self._require_open(reservation)
        for block in blocks:
            reservation.blocks.remove(block)
        self.release(blocks)

    def commit(self, reservation: Reservation) -> None:
        """End a reservation whose step succeeded: its holdings belong to the sequences."""
        self._close(reservation)

    def rollback(self, reservation: Reservation) -> None:
        """End a reservation whose step failed: give every holding of it back."""
        self._close(reservation)
        self.release(reservation.blocks)

    def _close(self, reservation: Reservation) -> None:
        self._require_open(reservation)
        reservation.is_open = False
        self.num_open -= 1

    def _require_open(self, reservation: Reservation) -> None:
        if not reservation.is_open:
            raise EngineBug("a reservation was used after its end")

    # ---- holdings

    def release(self, blocks: Sequence[BlockId]) -> None:
        """End one holding of each block. The last blocks of a table are reused first: a shorter
        prefix of it is likelier to be asked for again.

        Raises:
            EngineBug: A block is not held; those after it in ``blocks`` have been released.
        """
        for block in reversed(blocks):
            references = self._references[block]
            if references == 0:
                raise EngineBug(f"block {block} is released twice")
            self._references[block] = references - 1
            if references == 1:
                if block in self._background:
                    self._free_background[block] = None
                    continue
                self._free[block] = None
                if block not in self._cached:
                    self._free.move_to_end(block, last=False)

    # ---- for the prefix cache

    def mark_cached(self, block: BlockId, *, is_background: bool = False) -> None:
        """Note that a held block's contents can be matched from now on, and whether only background
        work has used them."""
        self._cached.add(block)
        if is_background:
            self._background.add(block)

    def keep_longer(self, blocks: Sequence[BlockId]) -> None:
        """Note that a request that is not background work has used these cached blocks."""
        if not self._background:
            return
        for block in blocks:
            free = self._free_list_of(block)
            self._background.discard(block)
            if block in free:
                del free[block]
                self._free[block] = None

    def unmark_cached(self, block: BlockId) -> None:
        """Note that the block's contents cannot be matched any more; it is reused first if free."""
        free = self._free_list_of(block)
        self._cached.discard(block)
        self._background.discard(block)
        if block in free:
            del free[block]
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def _free_list_of(self, block: BlockId) -> OrderedDict[BlockId, None]:
        return self._free_background if block in self._background else self._free

    def drain_reused(self) -> list[BlockId]:
        """Return the blocks whose cached contents were given up since the last call."""
        reused, self._reused = self._reused, []
        return reused

    # ---- invariants

    def check(self, tables: Sequence[Sequence[BlockId]]) -> None:
        """Check that the holdings are exactly those that ``tables`` list. A block under an open
        reservation is in the table that it is meant for.

        Raises:
            AssertionError: The message names the first block whose holdings differ.
        """
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        if self._references != expected:  # seldom true, so the usual check is one comparison in C
            for index, (references, holders) in enumerate(
                zip(self._references, expected, strict=True)
            ):
                assert references == holders, (
                    f"block {index} has {references} references, {holders} holders"
                )
        for table in tables:
            for block in table:
                assert block not in self._free, f"block {block}, which is held, is misfiled"
                assert block not in self._free_background, f"block {block} is held and misfiled"
        assert self.num_free == expected.count(0), "a block without a holder is misfiled"
        assert self._background <= self._cached, "a block without a prefix is background work's"
        assert self._free_background.keys() <= self._background, "a free block is misfiled"
