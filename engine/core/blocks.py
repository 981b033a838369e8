"""The KV pool's books: who holds which block, and in what order free ones are reused.

Rule 1: this file alone changes a reference count. Rule 2: a block is in the free list exactly
when nobody holds it; a free block may still carry a cached prefix, and the free list's order,
least recently used first, is the cache's eviction order (D5).

Lifecycle of a block's holding:
1. `open` a reservation for a plan.
2. `take` fresh blocks or `share` held or cached ones under it.
3. `commit` it when the step succeeded: what it took stays taken; or `rollback`: all of it is
   given back (whoever listed it in a table has struck it out). Each reservation ends once.
4. `release` what a sequence holds, once per holding. Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from engine.core.types import BlockId
from engine.errors import EngineBug

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Reservation:
    """Blocks promised to one plan. ``session`` numbers make a stale one an `EngineBug`."""

    __slots__ = ("blocks", "is_open", "session")

    def __init__(self, session: int) -> None:
        self.session = session
        self.is_open = True
        self.blocks: list[BlockId] = []  # one entry per holding, fresh and shared alike

    def __repr__(self) -> str:
        return f"<Reservation {self.session}: {len(self.blocks)} blocks>"


class BlockPool:
    """``num_blocks`` blocks, numbered from 0. Not thread-safe.

    ``on_reuse`` is told of every block that is about to be overwritten, so that a cached prefix
    in it can be forgotten; it must not call back.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(
            map(BlockId, range(num_blocks))
        )
        self._cached: set[BlockId] = set()
        self._reused: list[BlockId] = []
        self._open: dict[int, Reservation] = {}
        self._next_session = 1

    def __repr__(self) -> str:
        return f"<BlockPool {self.num_free} free of {self.num_blocks}, {len(self._open)} open>"

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that carry a cached prefix, held or free."""
        return len(self._cached)

    @property
    def num_open(self) -> int:
        """Reservations that have not ended: one for each plan there is."""
        return len(self._open)

    def references(self, block: BlockId) -> int:
        """How many holdings the block has."""
        return self._references[block]

    # ---- reservations

    def open(self) -> Reservation:
        """A reservation for one plan; it must end by `commit` or `rollback`."""
        reservation = Reservation(self._next_session)
        self._next_session += 1
        self._open[reservation.session] = reservation
        return reservation

    def take(self, reservation: Reservation, count: int) -> tuple[BlockId, ...] | None:
        """``count`` fresh blocks, the longest unused ones first; None, and nothing taken, if
        fewer are free. What they cached is reported by the next `drain_reused`."""
        self._require_open(reservation)
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block, _nothing = self._free.popitem(last=False)
            if block in self._cached:
                self._cached.discard(block)
                self._reused.append(block)
            self._references[block] = 1
            taken.append(block)
        reservation.blocks.extend(taken)
        return tuple(taken)

    def share(self, reservation: Reservation, blocks: Sequence[BlockId]) -> None:
        """Hold blocks whose contents exist already: of a live sequence, or cached ones."""
        self._require_open(reservation)
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        reservation.blocks.extend(blocks)

    def give_back(self, reservation: Reservation, blocks: Sequence[BlockId]) -> None:
        """Take single holdings out of a reservation that goes on: a row was dropped from it."""
        self._require_open(reservation)
        for block in blocks:
            reservation.blocks.remove(block)
        self.release(blocks)

    def commit(self, reservation: Reservation) -> None:
        """The step succeeded: the reservation's holdings belong to its sequences."""
        self._close(reservation)

    def rollback(self, reservation: Reservation) -> None:
        """The step failed: every holding of the reservation is given back."""
        self._close(reservation)
        self.release(reservation.blocks)

    def _close(self, reservation: Reservation) -> None:
        self._require_open(reservation)
        reservation.is_open = False
        del self._open[reservation.session]

    def _require_open(self, reservation: Reservation) -> None:
        if self._open.get(reservation.session) is not reservation:
            raise EngineBug(f"reservation {reservation.session} is stale")

    # ---- holdings

    def release(self, blocks: Sequence[BlockId]) -> None:
        """End one holding of each block. The last blocks of a table are reused first: a shorter
        prefix of it is likelier to be asked for again.

        Raises:
            EngineBug: a block is not held; blocks before it in reverse order are released.
        """
        for block in reversed(blocks):
            references = self._references[block]
            if references == 0:
                raise EngineBug(f"block {block} is released twice")
            self._references[block] = references - 1
            if references == 1:
                self._free[block] = None
                if block not in self._cached:
                    self._free.move_to_end(block, last=False)

    # ---- what the prefix cache tells and asks

    def mark_cached(self, block: BlockId) -> None:
        """The block's contents can be matched from now on."""
        self._cached.add(block)

    def unmark_cached(self, block: BlockId) -> None:
        """The block's contents cannot be matched any more; free, it is reused first."""
        self._cached.discard(block)
        if block in self._free:
            self._free.move_to_end(block, last=False)

    def drain_reused(self) -> list[BlockId]:
        """Blocks whose cached contents were given up since the last call."""
        reused, self._reused = self._reused, []
        return reused

    # ---- the books

    def check(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """Balance the books: the holdings are exactly what ``tables`` list, blocks under an
        open reservation standing in the table they are meant for.

        Raises:
            AssertionError: naming the first block that does not balance.
        """
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        for index, references in enumerate(self._references):
            block = BlockId(index)
            assert references == expected[block], (
                f"block {block} has {references} references, {expected[block]} holders"
            )
            assert (references == 0) == (block in self._free), (
                f"block {block} with {references} references is misfiled"
            )
        assert len(self._free) + sum(1 for r in self._references if r) == self.num_blocks
