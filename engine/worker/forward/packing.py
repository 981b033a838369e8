"""Packs the rows of a step into one row of tokens, and computes each token's slot.

Rule 1: everything is computed once per step, with numpy, and not once per layer. Rule 2: there is
no sequence state here; the runner passes starts, counts and block tables.

Index spaces: a *row* is one sequence's part of the step; a *token* counts the packed tokens of
all rows in order; positions and slots are those of `engine.core.text.plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


SHORT_MAX = 16  # a longer row's context is packed; a shorter one's tokens attend like decodes


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The positions and slots of a step's tokens. Row ``r`` computes the positions ``starts[r] …
    ends[r] - 1``; its tokens are ``offsets[r] … offsets[r + 1] - 1``."""

    starts: Ints  # [num_rows] the first position to compute
    ends: Ints  # [num_rows] the length of the context that the row's last token attends to
    offsets: Ints  # [num_rows + 1] into the packed tokens
    tables: Ints  # [num_rows, max_blocks] block ids, 0 beyond a row's own
    positions: Ints  # [num_tokens]
    slots: Ints  # [num_tokens] where each token's key and value are written
    untils: Ints  # [num_tokens] a token sees the positions before this one
    block_size: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all rows together."""
        return int(self.offsets[-1])

    @property
    def is_causal(self) -> bool:
        """Whether no token sees a later one."""
        return bool((self.untils == self.positions + 1).all())

    def slots_at(self, rows: Ints, positions: Ints) -> Ints:
        """Return the slots of ``positions`` [len(rows), length] of ``rows``."""
        blocks = self.tables[rows[:, None], positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def short_apart(self) -> PackedRows:
        """Return the same tokens with a row for each token of a short row, of 2 to `SHORT_MAX`.
        These tokens are then computed like decodes, with bit-identical results: a step's keys and
        values are written before any of its tokens attends."""
        rows = list(zip(self.starts.tolist(), self.ends.tolist(), strict=True))
        if not any(1 < end - start <= SHORT_MAX for start, end in rows):
            return self
        starts: list[int] = []
        ends: list[int] = []
        owners: list[int] = []
        offsets: list[int] = []
        tokens = self.offsets.tolist()
        for row, (start, end) in enumerate(rows):  # numpy would be slower for a step's few rows
            if end - start <= SHORT_MAX:
                starts += range(start, end)
                ends += self.untils[tokens[row] : tokens[row + 1]].tolist()
                offsets += range(tokens[row], tokens[row + 1])
                owners += [row] * (end - start)
            else:
                starts.append(start)
                ends.append(end)
                offsets.append(tokens[row])
                owners.append(row)
        first, behind = np.array(starts, np.int64), np.array(ends, np.int64)
        own = np.array([*offsets, tokens[-1]], np.int64)
        tables = self.tables[owners]
        return replace(self, starts=first, ends=behind, offsets=own, tables=tables)


def pack(
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Ints],
    block_size: int,
    wholes: Sequence[tuple[int, int]] = (),
) -> PackedRows:
    """Pack the rows one after another. Each table must reach the row's last block. ``wholes`` are
    (first token, last token + 1) of spans whose tokens all see each other, each within one row."""
    first = np.asarray(starts, np.int64)
    count = np.asarray(counts, np.int64)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(count)))
    padded = np.zeros((len(tables), max(len(table) for table in tables)), np.int64)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    owner = np.repeat(np.arange(len(tables)), count)
    positions = np.arange(offsets[-1]) + (first - offsets[:-1])[owner]
    slots = padded[owner, positions // block_size] * block_size + positions % block_size
    untils = positions + 1
    for begin, end in wholes:
        untils[begin:end] = untils[end - 1]
    return PackedRows(first, first + count, offsets, padded, positions, slots, untils, block_size)
