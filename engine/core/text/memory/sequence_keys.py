"""Which prefix-cache keys a request and its sequences have (D5).

Rule: nothing here looks into the cache; keys are hashes of tokens, computed once and kept by their
sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.text.memory.prefix import extend_keys, root_key
from engine.core.text.prompt_images import contents_of_blocks

if TYPE_CHECKING:
    from engine.config import SchedulerConfig
    from engine.core.text.sequence import Sequence
    from engine.core.text.types import Request


class SequenceKeys:
    """Computes keys as the scheduler's configuration says."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self._namespace = config.cache_namespace
        self._is_enabled = config.prefix_cache
        self._plain_root = root_key(config.cache_namespace, "")

    def uses_cache(self, request: Request) -> bool:
        """Return whether the prefix cache is on and the request does not bypass it."""
        return self._is_enabled and not request.bypass_prefix_cache

    def root_of(self, request: Request) -> bytes:
        """Return the parent key of the request's first block."""
        return root_key(self._namespace, request.cache_salt, request.adapter)

    def is_plain(self, seq: Sequence) -> bool:
        """Return whether the sequence's keys hold no more than its tokens: no salt, no adapter and
        no image."""
        return seq.live.root == self._plain_root and not seq.live.request.images

    def extend(self, seq: Sequence, num_tokens: int) -> list[bytes]:
        """Return the sequence's keys, with at least those of the full blocks within its first
        ``num_tokens`` tokens."""
        size, keys = self._block_size, seq.keys
        if len(keys) < num_tokens // size:
            assert num_tokens <= seq.num_known, f"{seq}: a block's key needs all of its tokens"
            # Tokens that have a key are not read again, so each block's key costs the same.
            extend_keys(
                keys,
                seq.live.root,
                seq.tokens(len(keys) * size, num_tokens),
                size,
                contents_of_blocks(seq.live.request.images, size),
            )
        return keys

    def of_prompt(self, request: Request) -> list[bytes]:
        """Return the keys of a prompt's full blocks that may be cached; none where the request does
        not use the cache. Hashes the whole prompt."""
        keys: list[bytes] = []
        if self.uses_cache(request) and request.sampling.prompt_logprobs is None:
            contents = contents_of_blocks(request.images, self._block_size)
            root = self.root_of(request)
            extend_keys(keys, root, request.prompt[:-1], self._block_size, contents)
        return keys
