"""The prefix cache: which block holds the KV of which token prefix (D5).

Rule 1: a block is published only when all its tokens were computed by a committed step.
Rule 2: `match` is read-only; the caller holds the blocks that it found by `BlockPool.share`.

A block's key is a hash chain: blake2b-128 over the parent's key and the block's own token ids,
rooted in the model, adapter and salt. Equal keys mean equal prefixes, up to collisions of a
128-bit hash; Python's ``hash()`` is never used (vLLM's default of that kind let one tenant hit
another's blocks).
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.core.common.types import BlockId
    from engine.core.text.memory.blocks import BlockPool
    from engine.core.text.types import PrefixObserver

KEY_BYTES = 16
FRESH = blake2b(digest_size=KEY_BYTES)


def root_key(namespace: str, salt: str, adapter: str = "") -> bytes:
    """Return the parent key of a sequence's first block. ``adapter`` is the digest of its content,
    never a name, which may come to stand for another content; "": the base model alone."""
    own = f"+{len(adapter)}:{adapter}" if adapter else ""
    text = f"{own}{len(namespace)}:{namespace}{salt}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=KEY_BYTES).digest()


def extend_keys(
    keys: list[bytes],
    root: bytes,
    tokens: Sequence[int],
    block_size: int,
    content_of: Callable[[int], bytes] | None = None,
) -> None:
    """Append the keys of the full blocks of ``tokens``, which begin at the sequence's token number
    ``len(keys) * block_size``. ``content_of`` returns, for the position at which a block begins,
    what the block's key hashes besides tokens: tokens do not identify an image."""
    key, ids = keys[-1] if keys else root, array("I", tokens)
    for start in range(0, len(ids) - block_size + 1, block_size):
        hasher = FRESH.copy()  # copying a hasher takes half the time of making one
        hasher.update(key)
        hasher.update(ids[start : start + block_size])
        if content_of is not None:
            hasher.update(content_of(len(keys) * block_size))
        key = hasher.digest()
        keys.append(key)


class PrefixCache:
    """Keys of published blocks. The pool's free list decides what is evicted, and when.

    ``queried_tokens`` counts the tokens of sequences that have started, ``hit_tokens`` those of
    them that were cached. ``observer`` is notified of forgotten keys here, and of published keys by
    `Ledger.publish_computed`, which knows the tokens.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_of: dict[bytes, BlockId] = {}
        self._key_of: dict[BlockId, bytes] = {}
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.observer: PrefixObserver | None = None

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Sequence[bytes]) -> tuple[BlockId, ...]:
        """Return the blocks of the longest published prefix of ``keys``."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def publish(self, key: bytes, block: BlockId, *, is_background: bool = False) -> bool:
        """Make a computed block matchable. A key that was published before keeps its block. Return
        whether the key is new. Blocks of background work are evicted first, unless another request
        computes or matches them, too."""
        known = self._block_of.get(key)
        if known is not None or block in self._key_of:
            if known is not None and not is_background:
                self._pool.keep_longer((known,))
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        self._pool.mark_cached(block, is_background=is_background)
        return True

    def forget(self, blocks: Sequence[BlockId]) -> None:
        """Forget the prefixes in blocks that the pool reuses."""
        for block in blocks:
            key = self._key_of.pop(block)
            del self._block_of[key]
            if self.observer is not None:
                self.observer.removed(key)

    def reset(self) -> None:
        """Forget everything; live sequences keep the blocks they hold."""
        for block in self._key_of:
            self._pool.unmark_cached(block)
        self._block_of.clear()
        self._key_of.clear()
        if self.observer is not None:
            self.observer.cleared()

    def check(self) -> None:
        """Check that keys and blocks map to each other, and that the pool counts as many blocks.

        Raises:
            AssertionError: One of these does not hold.
        """
        assert len(self._block_of) == len(self._key_of) == self._pool.num_cached
        for key, block in self._block_of.items():
            assert self._key_of[block] == key, f"block {block} is published under two keys"
