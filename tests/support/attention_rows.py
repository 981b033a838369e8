"""Rows of a step, caches and numbers for one layer of attention by itself."""

import math

import numpy as np
import torch

from engine.worker.forward.kv_cache import KvCache
from engine.worker.forward.packing import pack
from engine.worker.load.architectures import LayerShape


def lay_out(layout, rng):
    """Return packed rows whose block tables are in random order, and the number of blocks."""
    block_size, prefixes, rows = layout
    starts = [(0 if p is None else prefixes[p] * block_size) + known for p, known, _ in rows]
    counts = [count for _, _, count in rows]
    needed = [-(-(s + c) // block_size) for s, c in zip(starts, counts, strict=True)]
    num_blocks = sum(prefixes) + sum(needed) + 1
    free = rng.sample(range(num_blocks), num_blocks)
    shared = [[free.pop() for _ in range(count)] for count in prefixes]
    tables = []
    for (prefix, _, _), blocks in zip(rows, needed, strict=True):
        table = [] if prefix is None else list(shared[prefix])
        table += [free.pop() for _ in range(blocks - len(table))]
        tables.append(np.array(table))
    return pack(starts, counts, tables, block_size), num_blocks


def fill(cache, rows):
    """Fill the caches: numbers where earlier steps would have written, NaN elsewhere."""
    written = {
        int(slot)
        for row, start in enumerate(rows.starts.tolist())
        for slot in rows.slots_at(np.array([row]), np.arange(start)[None])[0]
    }
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(math.nan)
        at = sorted(written)
        tensor.flatten(0, 1)[at] = torch.randn(len(at), *tensor.shape[2:]).to(tensor)


def caches(rows, num_blocks, shape, *kinds):
    """Return caches with the same numbers for each of ``kinds``, (dtype, device)."""
    _, kv_heads, width = shape
    made = [
        KvCache([LayerShape(kv_heads, width)] * 2, num_blocks, rows.block_size,
                dtype=dtype, device=device)
        for dtype, device in kinds
    ]  # fmt: skip
    fill(made[0], rows)
    for other in made[1:]:
        for to, source in zip((*other.keys, *other.values),
                              (*made[0].keys, *made[0].values), strict=True):  # fmt: skip
            to.copy_(source)
    return made


def numbers(rows, shape, dtype):
    """Return query, key and value, with a model's strides."""
    heads, kv_heads, width = shape
    return [
        torch.randn(n, rows.num_tokens, width).to(dtype).transpose(0, 1)
        for n in (heads, kv_heads, kv_heads)
    ]
