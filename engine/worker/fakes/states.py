"""The state slots of the fake text model: each holds the digest of a prefix, or `NOTHING`.

As in a real worker, a step reads all states before it writes any, and writes none if it fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.common.types import BlockId
    from engine.core.text.plan import Row

NOTHING = -1


class FakeStates:
    """The state slots of a fake model, and the states that the running step will write there."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [NOTHING] * num_slots
        self._written: dict[BlockId, int] = {}

    @property
    def has_slots(self) -> bool:
        """Whether the fake model has recurrent layers, and so states."""
        return bool(self._slots)

    def begin(self, row: Row, slot: BlockId | None, digest: int) -> BlockId | None:
        """Return the sequence's state slot from this step on. ``slot`` is its slot before the step,
        and ``digest`` the digest of the tokens before the row.

        Raises:
            AssertionError: The row begins from the state of another prefix.
        """
        source = slot
        if row.state is not None:
            slot = row.state.slot
            source = slot if row.state.source is None else row.state.source
        if self._slots and row.start:
            stored = NOTHING if source is None else self._slots[source]
            assert stored == digest, f"{row} begins from another state than that of its prefix"
        return slot

    def put(self, row: Row, slot: BlockId | None, digest: int) -> None:
        """Record the states that a row writes: for its sequence, its children, and a snapshot.

        Raises:
            AssertionError: Two rows of the step write into the same slot, or a row has no slot.
        """
        if not self._slots:
            return
        snapshot = None if row.state is None else row.state.snapshot
        targets = [slot, *(child.state for child in row.children)]
        for target in targets if snapshot is None else [*targets, snapshot]:
            assert target is not None, f"{row} has no state slot"
            assert target not in self._written, f"two states are written into slot {target}"
            self._written[target] = digest

    def write(self) -> None:
        """Write the recorded states into their slots."""
        for slot, digest in self._written.items():
            self._slots[slot] = digest
        self._written.clear()
