"""The paged keys and values of one model, and the arithmetic of how many blocks fit.

Rule 1: nobody else allocates or indexes KV tensors. Rule 2: ids are 0 … num_blocks - 1, all
usable; there is no padding block (masked places are read from the sequence's own first slot,
so that a stale NaN of an earlier owner can never reach a sum).

Index spaces: a *slot* is ``block_id * block_size + position % block_size``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.model.refusal import Refusal
from engine.model.transfer import send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.plan import RunnerSpec
    from engine.core.types import BlockId
    from engine.model.architectures import LayerShape

# Upper end of the default pool, as `serve --help` tells of --kv-cache-memory; a guess.
DEFAULT_KV_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many blocks the pool has, and the longest sequence that is served."""

    num_blocks: int
    block_size: int
    max_model_len: int
    bytes_per_block: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def size_pool(
    spec: RunnerSpec, shapes: Sequence[LayerShape], element_size: int, context_limit: int
) -> PoolSize:
    """Turn bytes into blocks.

    A length that nobody asked for shrinks to what the pool holds; one that was asked for must fit.

    Raises:
        Refusal: the pool cannot hold one sequence; the sentence carries the arithmetic.
    """
    block_size = spec.block_size
    per_token = element_size * sum(shape.numbers_per_token for shape in shapes)
    per_block = per_token * block_size
    wanted = spec.max_num_seqs * _ceil_div(context_limit, block_size) * per_block
    budget = spec.kv_bytes if spec.kv_bytes is not None else _default_budget(spec, wanted)
    num_blocks = min(budget, wanted) // per_block
    length = context_limit
    if spec.max_model_len is None:
        length = min(length, num_blocks * block_size)
    needed = _ceil_div(max(length, 1), block_size)
    if num_blocks < needed:
        raise Refusal(
            f"the KV pool of {budget:,} bytes holds {num_blocks} blocks of {block_size} tokens "
            f"({per_block:,} bytes each), and one sequence of {max(length, 1)} tokens needs "
            f"{needed} blocks, {needed * per_block:,} bytes; raise --kv-cache-memory"
            + (" or lower --max-model-len" if spec.max_model_len is not None else "")
        )
    return PoolSize(num_blocks, block_size, length, per_block)


def _default_budget(spec: RunnerSpec, wanted: int) -> int:
    """The least of 4 GiB, a quarter of the limit (where known), and what could be used."""
    quarter = spec.memory_limit // 4 if spec.memory_limit else DEFAULT_KV_BYTES
    return min(DEFAULT_KV_BYTES, quarter, wanted)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


class KvCache:
    """Keys and values of every layer, ``[num_blocks, block_size, num_kv_heads, head_dim]``.

    Owned by one runner. Not filled: nothing is read that was not written first (Rule 2), and on a
    CPU a block costs no memory before that.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.shapes = tuple(shapes)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for shape in self.shapes:
            size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
            self.keys.append(torch.empty(size, dtype=dtype, device=device))
            self.values.append(torch.empty(size, dtype=dtype, device=device))

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Put each token's key and value, [num_tokens, num_kv_heads, head_dim], into its slot.

        ``slots``: [num_tokens] int64.
        """
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at ``slots``, which has any shape, each as
        [*slots.shape, num_kv_heads, head_dim]."""
        size = (*slots.shape, *self.keys[layer].shape[2:])
        flat = slots.flatten()
        keys = self.keys[layer].flatten(0, 1).index_select(0, flat)
        values = self.values[layer].flatten(0, 1).index_select(0, flat)
        return keys.view(size), values.view(size)

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks, source to target, as if all at once."""
        if not pairs:
            return
        sources, targets = send(tuple(np.array(pairs, np.int64).T), self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))
