"""Mirrors the prefix caches of a model's replicas, as far as requests can find them. Pure.

A cache may hold blocks that no request can find, because a block before them, which belonged to
another sequence, was dropped first. The gateway places a block whose parent it does not know at the
beginning of a prompt, and would send requests to the wrong server. So a mirror announces a block
when all blocks before it are cached, and withdraws it as soon as one of them is gone.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Block(NamedTuple):
    """A block that requests can find. ``parent`` is the key of the block before it, None for the
    first block of a prompt."""

    key: bytes
    parent: bytes | None
    tokens: Sequence[int]


class ModelPrefixes:
    """The blocks that requests find at one or more replicas of a model.

    ``blocks`` has them by key, every block after its parent. ``on_change`` is called after each
    change, which `take_changes` then returns. When more than ``changes_max`` changes wait, these
    are dropped, and `take_changes` returns None.
    """

    def __init__(self, on_change: Callable[[], None], changes_max: int) -> None:
        self.blocks: dict[bytes, Block] = {}
        self._counts: Counter[bytes] = Counter()  # how many replicas have the block
        self._on_change = on_change
        self._changes_max = changes_max
        self._changes: list[Block | bytes] | None = []

    def add(self, block: Block) -> None:
        """Take note that one more replica has a block."""
        self._counts[block.key] += 1
        if self._counts[block.key] == 1:
            self.blocks[block.key] = block
            self._note(block)

    def discard(self, key: bytes) -> None:
        """Take note that one replica less has a block."""
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            del self.blocks[key]
            self._note(key)

    def take_changes(self) -> list[Block | bytes] | None:
        """Return the changes since the last call: a block that is new, or the key of one that is
        gone. None if there were too many."""
        changes, self._changes = self._changes, []
        return changes

    def _note(self, change: Block | bytes) -> None:
        if self._changes is not None:
            self._changes.append(change)
            if len(self._changes) > self._changes_max:
                self._changes = None
        self._on_change()


class ReplicaPrefixes:
    """The `PrefixObserver` of one replica; it keeps in ``model`` the blocks that requests find."""

    def __init__(self, model: ModelPrefixes) -> None:
        self._model = model
        self._blocks: dict[bytes, Block] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}  # keys of blocks, by their parent's
        self._reachable: set[bytes] = set()

    def stored(self, key: bytes, parent: bytes | None, tokens: Sequence[int]) -> None:
        """Take note of a new block."""
        self._blocks[key] = Block(key, parent, array("I", tokens))
        if parent is not None:
            self._children.setdefault(parent, {})[key] = None
        if parent is None or parent in self._reachable:
            for descendant in self._descendants(key):
                self._reachable.add(descendant)
                self._model.add(self._blocks[descendant])

    def removed(self, key: bytes) -> None:
        """Take note that a block is gone. A block that was never stored is ignored."""
        block = self._blocks.get(key)
        if block is None:
            return
        if key in self._reachable:
            for descendant in self._descendants(key):
                self._reachable.discard(descendant)
                self._model.discard(descendant)
        del self._blocks[key]
        if block.parent is not None:
            siblings = self._children[block.parent]
            del siblings[key]
            if not siblings:
                del self._children[block.parent]

    def cleared(self) -> None:
        """Take note that every block is gone."""
        for key in self._reachable:
            self._model.discard(key)
        self._blocks.clear()
        self._children.clear()
        self._reachable.clear()

    def _descendants(self, key: bytes) -> list[bytes]:
        """Return the key and those of all blocks after it, every block after its parent."""
        keys = [key]
        for block_key in keys:  # the list grows in the loop
            keys += self._children.get(block_key, ())
        return keys
