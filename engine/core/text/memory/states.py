"""The state slots of a model with recurrent layers: whose state is where, and which states are kept
as snapshots (D32).

A recurrent layer keeps no keys and values. It has one state of fixed size for each sequence, which
every token changes. A *state slot* is the place in the worker's memory of one sequence's states in
all layers; a *snapshot* is a copy of them as they were at a block's border.

Rule 1: slots are the blocks of a second pool, with the same life: reserved, committed or rolled
back, released. A sequence that has blocks holds a slot, and so does a step that writes a snapshot
into it. A free slot may carry a snapshot, and the one unused for the longest is overwritten first.
Rule 2: a step reads all states before it writes any. So a snapshot that a row begins from is not
held: its slot may be given away in the same step, and is overwritten only at the step's end.
Rule 3: a snapshot becomes matchable once the step that wrote it has succeeded. Its key is the key
of the last block of its prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.text.memory.blocks import BlockPool
from engine.core.text.memory.prefix import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from engine.core.common.types import BlockId
    from engine.core.text.memory.blocks import Reservation
    from engine.core.text.plan import StateDelta
    from engine.core.text.sequence import Sequence


class States:
    """The state slots of one scheduler. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self.pool = BlockPool(num_slots)
        self.snapshots = PrefixCache(self.pool)

    def cut(self, keys: SequenceOf[bytes], matched: tuple[BlockId, ...]) -> tuple[BlockId, ...]:
        """Return the longest part of ``matched``, the cached blocks of a prefix with these
        ``keys``, at whose end there is a snapshot: a hit needs keys and values, and the state."""
        for length in range(len(matched), 0, -1):
            if self.snapshots.match(keys[length - 1 : length]):
                return matched[:length]
        return ()

    def take(self, reservation: Reservation) -> BlockId:
        """Return a free slot and forget its snapshot. The caller has checked that one is free."""
        taken = self.pool.take(reservation, 1)
        assert taken is not None, "no state slot is free"
        self.snapshots.forget(self.pool.drain_reused())
        return taken[0]

    def end_snapshot(
        self, slot: BlockId, key: bytes | None, *, is_background: bool = False
    ) -> None:
        """Release the slot of a snapshot whose step is over, and publish the snapshot under
        ``key``; with None, drop it. Those of background work are overwritten first."""
        if key is not None:
            self.snapshots.publish(key, slot, is_background=is_background)
        self.pool.release((slot,))

    def release(self, seq: Sequence) -> None:
        """Release the slot of a sequence that loses its blocks."""
        if seq.state_slot is not None:
            self.pool.release((seq.state_slot,))
            seq.state_slot = None

    def check(self, sequences: Iterable[Sequence], steps: Iterable[StepStates]) -> None:
        """Check that the held slots are exactly those of sequences and of the snapshots that
        planned ``steps`` write, and that every sequence with blocks has one.

        Raises:
            AssertionError: The message names the slot, sequence or step that differs.
        """
        held = [step.snapshots for step in steps]
        for seq in sequences:
            assert (seq.state_slot is not None) == bool(seq.blocks), f"{seq}: {seq.state_slot}"
            if seq.state_slot is not None:
                held.append([seq.state_slot])
        self.pool.check(held)
        self.snapshots.check()


class StepStates:
    """The state slots that one planned step takes. It ends once, by `keep` or `undo`, as its step
    does. ``snapshots`` are the slots that its rows write snapshots into."""

    def __init__(self, states: States) -> None:
        self._states = states
        self._reservation = states.pool.open()
        self.snapshots: list[BlockId] = []

    def begin(self, seq: Sequence, key: bytes | None) -> BlockId | None:
        """Give a starting sequence its slot. Return the slot of the snapshot with this ``key``,
        from which it begins; None if it begins from nothing."""
        snapshot = None
        if key is not None:
            (snapshot,) = self._states.snapshots.match((key,))
            self._touch(snapshot)
            if not seq.is_background:
                self._states.pool.keep_longer((snapshot,))
        self.give(seq)
        return snapshot

    def _touch(self, slot: BlockId) -> None:
        """Make a free slot the last to be overwritten."""
        if not self._states.pool.references(slot):
            self._states.pool.share(self._reservation, (slot,))
            self._states.pool.give_back(self._reservation, (slot,))

    def give(self, seq: Sequence) -> BlockId:
        """Give a sequence its slot, and return it."""
        seq.state_slot = slot = self._states.take(self._reservation)
        return slot

    def snapshot(self, num_kept: int) -> BlockId | None:
        """Return a slot for a snapshot; None unless more than ``num_kept`` slots are free: those
        that choices which will fork, and the next sequence to start, need."""
        if self._states.pool.num_free <= num_kept:
            return None
        slot = self._states.take(self._reservation)
        self.snapshots.append(slot)
        return slot

    def keep(self) -> None:
        """End a step that succeeded: its slots belong to the sequences. Each snapshot is still to
        be ended (`States.end_snapshot`)."""
        self._states.pool.commit(self._reservation)

    def undo(self, started: Iterable[Sequence]) -> None:
        """End a step that failed or is discarded. ``started`` are the sequences that it gave their
        slots."""
        for seq in started:
            seq.state_slot = None
        self._states.pool.rollback(self._reservation)

    def drop(self, delta: StateDelta | None, started: Iterable[Sequence]) -> None:
        """Give back the slots that one row took: its snapshot's, and those of the sequences that
        ``started`` in it."""
        slots = [seq.state_slot for seq in started if seq.state_slot is not None]
        for seq in started:
            seq.state_slot = None
        if delta is not None and delta.snapshot is not None:
            self.snapshots.remove(delta.snapshot)
            slots.append(delta.snapshot)
        self._states.pool.give_back(self._reservation, slots)
