"""The paged keys and values of one model, and the number of blocks that fit into memory.

Rule 1: no other file allocates or indexes KV tensors, except the compiled kernels. Rule 2: the
block ids 0 … num_blocks - 1 are all usable; there is no padding block. Masked positions are read
from the sequence's own first slot, so that an earlier sequence's NaN in a block never reaches a
sum. Rule 3: a cache of int8 has a scale for each token's keys, and one for its values, of each
head; what is written at a token never depends on another.

Index spaces: a *slot* is ``block_id * block_size + position % block_size``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.worker.forward.transfer import send
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.common.types import BlockId
    from engine.worker.interface import RunnerSpec
    from engine.worker.load.architectures import LayerShape

# The rule of the pool's default size, which the help of --kv-cache-memory states (D16); not tuned.
DEFAULT_KV_BYTES = 4 << 30  # At most so much, unless one sequence of full length needs more.
MEMORY_PART = 16  # At least the memory limit divided by this.
MEMORY_PART_MOST = 4  # At most the memory limit divided by this.
# The values of ``--kv-cache-dtype`` other than auto.
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
SCALE_BYTES = 4
INT8_MOST = 127
STATES_PER_SEQUENCE = 2  # Slots for its state and for a snapshot. Guess: one snapshot is enough.


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The number and size of the pool's blocks, the longest sequence that is served, and the number
    and size of state slots, for a model with recurrent layers."""

    num_blocks: int
    block_size: int
    max_model_len: int
    bytes_per_block: int
    num_states: int = 0
    bytes_per_state: int = 0

    @property
    def num_bytes(self) -> int:
        """The size of the whole pool, state slots included."""
        return self.num_blocks * self.bytes_per_block + self.num_states * self.bytes_per_state

    @property
    def new_state_bytes(self) -> int:
        """The most memory that a step's new states take until they are written into their slots. A
        step writes each slot at most once: for its rows, choices that fork, and snapshots."""
        return self.num_states * self.bytes_per_state


def pick_kv_dtype(spec: RunnerSpec, dtype: torch.dtype, stored: str) -> torch.dtype:
    """Return the dtype of the cache of a model for which `pick_dtype` has chosen ``dtype``.
    ``stored`` is the name that safetensors has for its checkpoint's dtype. ``auto`` is that dtype;
    but float16 if it is float32 only because the processor has nothing narrower (D12)."""
    if spec.kv_cache_dtype != "auto":
        return DTYPES[spec.kv_cache_dtype]
    is_makeshift = spec.dtype == "auto" and dtype is torch.float32 and stored != "F32"
    return torch.float16 if is_makeshift else dtype


def token_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers, scales included."""
    total = dtype.itemsize * sum(shape.numbers_per_token for shape in shapes)
    if dtype is torch.int8:
        total += SCALE_BYTES * sum(2 * shape.num_kv_heads for shape in shapes)
    return total


def size_pool(
    spec: RunnerSpec,
    shapes: Sequence[LayerShape],
    dtype: torch.dtype,
    context_limit: int,
    bytes_per_state: int = 0,
    weight_bytes: int = 0,
) -> PoolSize:
    """Return how many blocks of a cache in ``dtype`` fit into the memory of ``spec``. A rank of a
    divided model has its part of that memory. If ``spec`` sets no memory, the size of the weights
    helps to choose it (`_default_budget`).

    If the model has states, of ``bytes_per_state`` for each sequence, up to half of the memory is
    for state slots: two for each sequence that may run, one for its state and one for a snapshot.

    A sequence of max_model_len tokens must fit if ``spec`` sets that length. Otherwise the length
    is ``context_limit``, or as much of it as the pool holds.

    Raises:
        Refusal: The pool cannot hold one sequence. The message contains the numbers.
    """
    block_size = spec.block_size
    per_token = token_bytes(shapes, dtype)
    if not per_token:
        raise Refusal("none of its layers has attention, and such models are not served")
    per_block = per_token * block_size
    wanted = spec.max_num_seqs * _ceil_div(context_limit, block_size) * per_block
    wanted_states = STATES_PER_SEQUENCE * spec.max_num_seqs
    if spec.kv_bytes is not None:
        budget = spec.kv_bytes // spec.tp
    else:
        one = _ceil_div(context_limit, block_size) * per_block
        if bytes_per_state:  # states take half of the budget
            one = 2 * max(one, STATES_PER_SEQUENCE * bytes_per_state)
        most = wanted + wanted_states * bytes_per_state
        budget = _default_budget(spec, weight_bytes, one, most)
    num_states = min(wanted_states, budget // 2 // bytes_per_state) if bytes_per_state else 0
    if bytes_per_state and not num_states:
        raise Refusal(
            f"half of the KV pool of {budget:,} bytes is less than the {bytes_per_state:,} bytes "
            "that the states of one sequence take; raise --kv-cache-memory"
        )
    budget -= num_states * bytes_per_state
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
    return PoolSize(num_blocks, block_size, length, per_block, num_states, bytes_per_state)


def _default_budget(spec: RunnerSpec, weight_bytes: int, one: int, most: int) -> int:
    """Return a rank's default memory in bytes: the size of its weights or a 16th of the memory
    limit, whichever is larger, but at most 4 GiB for all ranks. It is raised to ``one``, the need
    of one sequence of full length, and then cut to a quarter of the limit and to ``most``, the need
    of all sequences."""
    limit = spec.memory_limit // spec.tp
    budget = min(max(weight_bytes, limit // MEMORY_PART), DEFAULT_KV_BYTES // spec.tp)
    return min(max(budget, one), limit // MEMORY_PART_MOST if limit else most, most)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


class KvCache:
    """Keys and values of every layer, each [num_blocks, block_size, num_kv_heads, head_dim] in
    ``dtype``, which need not be the one that the model computes in. If it is int8, ``scales`` are
    those of the keys and those of the values, of every layer, [num_blocks, block_size,
    num_kv_heads] float32; else two empty lists.

    One runner owns the cache. Its memory is not initialised: no slot is read before it was written
    (Rule 2), and on a CPU a block takes no memory before it is written.
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
        self.dtype = dtype
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.scales: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for shape in self.shapes:
            size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
            self.keys.append(torch.empty(size, dtype=dtype, device=device))
            self.values.append(torch.empty(size, dtype=dtype, device=device))
            for scales in self.scales if dtype is torch.int8 else ():
                scales.append(torch.empty(size[:3], device=device))

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [*self.keys, *self.values, *self.scales[0], *self.scales[1]]

    def prefault(self) -> None:
        """Write zeros to the whole pool of a CPU, so that the operating system provides its memory
        now and no request waits for it. Other devices provide it when the tensors are allocated."""
        for tensor in self._tensors:
            if tensor.device.type == "cpu":
                tensor.zero_()

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Round each token's key and value, [num_tokens, num_kv_heads, head_dim], to the cache's
        dtype and write them into its slot. ``slots`` are [num_tokens] int64."""
        for numbers, cache, scales in zip(
            (key, value), (self.keys, self.values), self.scales, strict=True
        ):
            if self.dtype is torch.int8:
                numbers, own = _round_to_int8(numbers)
                scales[layer].flatten(0, 1).index_copy_(0, slots, own)
            elif self.dtype is torch.float16 and numbers.dtype is not torch.float16:
                numbers = _round_to_float16(numbers)
            cache[layer].flatten(0, 1).index_copy_(0, slots, numbers.to(self.dtype))

    def read(
        self, layer: int, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values at ``slots``, which may have any shape, in ``dtype``. Both
        are [*slots.shape, num_kv_heads, head_dim]."""
        size, flat = (*slots.shape, *self.keys[layer].shape[2:]), slots.flatten()
        found = []
        for cache, scales in zip((self.keys, self.values), self.scales, strict=True):
            numbers = cache[layer].flatten(0, 1).index_select(0, flat)
            if self.dtype is torch.int8:
                own = scales[layer].flatten(0, 1).index_select(0, flat)
                numbers = numbers.float() * own[..., None]
            found.append(numbers.to(dtype).view(size))
        return found[0], found[1]

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks, (source, target). All sources are read before a target is written."""
        if not pairs:
            return
        sources, targets = send(tuple(np.array(pairs, np.int64).T), self.keys[0].device)
        for tensor in self._tensors:
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))


def _round_to_int8(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [num_tokens, num_kv_heads, head_dim] to int8 with a scale for each token and head. If a
    head's numbers are not all finite, its scale is NaN, and so are the numbers read from it."""
    numbers = numbers.float()
    most = numbers.abs().amax(-1)
    is_finite = most.isfinite()
    whole = torch.full_like(most, INT8_MOST)  # scalar / tensor multiplies by a reciprocal
    factor = torch.where(is_finite & (most > 0), whole / most, 0.0)
    rounded = torch.where(is_finite[..., None], numbers * factor[..., None], 0.0).round()
    return rounded.to(torch.int8), torch.where(is_finite, most / INT8_MOST, torch.nan)


def _round_to_float16(numbers: torch.Tensor) -> torch.Tensor:
    """Round to float16. A finite number beyond its range becomes its largest number."""
    most = torch.finfo(torch.float16).max
    return torch.where(numbers.isfinite(), numbers.clamp(-most, most), numbers)
