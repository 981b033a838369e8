"""Decodes the blocks of GGUF's quantised types into the one form of quantized weights.

A row of a tensor is a sequence of blocks. Each function takes blocks [outputs, blocks, bytes] uint8
and returns numbers [outputs, inputs], scales and offsets [outputs, groups], and what they are
multiplied by if they are nested. Expanded to float32, weights equal ggml's, bit for bit. Source:
ggml-quants.c, and gguf's quants.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from engine.worker.quantized.mxfp4_checkpoint import DOUBLED
from engine.worker.quantized.weight import CENTRED, CENTRED_OF_6, Form, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable

    Parts = dict[str, torch.Tensor]

UNSIGNED = tuple(range(16))
UNSIGNED_OF_2, CENTRED_OF_3 = tuple(range(4)), tuple(range(-4, 4))
UNSIGNED_OF_5, CENTRED_OF_5 = tuple(range(32)), tuple(range(-16, 16))
# The numbers of IQ4_NL and IQ4_XS: denser about zero, as the weights are.
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class BlockType:
    """One of GGUF's quantised types: a block's inputs and bytes, its weights' ``form``, and
    ``decode``, which returns the tensors of blocks' `QuantizedWeight`."""

    inputs: int
    num_bytes: int
    form: Form
    decode: Callable[[torch.Tensor], Parts]
    table: tuple[int, ...] = ()


def decode(
    raw: torch.Tensor, kind: BlockType, order: torch.Tensor | None = None
) -> QuantizedWeight:
    """Return the weight in a tensor's bytes, uint8 [rows, bytes]. ``order`` has for each output the
    index of its row; None: the order is the same."""
    rows = raw if order is None else raw[order]
    parts = kind.decode(rows.view(len(rows), -1, kind.num_bytes))
    flat = {name: tensor.flatten(1) for name, tensor in parts.items()}
    return QuantizedWeight(group=kind.form.group, table=kind.table, **flat)


class StoredBlocks:
    """Rows of blocks in a mapped file: of ``raw``, uint8 [rows, bytes], those that ``order`` lists,
    or all. ``kind`` is GGUF's number of their type, and ``name`` the tensor's. A call decodes
    them."""

    def __init__(
        self, raw: torch.Tensor, kind: int, order: torch.Tensor | None = None, name: str = ""
    ) -> None:
        self.raw = raw
        self.kind = kind
        self.order = order
        self.name = name

    def __call__(self) -> QuantizedWeight:
        """Return the decoded weight."""
        return decode(self.raw, self.type, self.order)

    def __len__(self) -> int:
        return len(self.raw if self.order is None else self.order)

    @property
    def type(self) -> BlockType:
        """The type of the blocks."""
        return BLOCK_TYPES[self.kind][1]

    @property
    def inputs(self) -> int:
        """The number of weights in a row."""
        return self.raw.shape[1] // self.type.num_bytes * self.type.inputs

    def halves(self) -> list[StoredBlocks]:
        """Return the first half of the rows and the second."""
        middle = len(self) // 2
        return [self._rows(slice(middle)), self._rows(slice(middle, None))]

    def _rows(self, chosen: slice) -> StoredBlocks:
        if self.order is None:
            return StoredBlocks(self.raw[chosen], self.kind, None, self.name)
        return StoredBlocks(self.raw, self.kind, self.order[chosen], self.name)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return each block's float16 number at byte ``start``, [outputs, blocks] float32."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the low nibbles of each block's bytes and then the high ones, [..., 2 x bytes]."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the bits of each block's bytes, the lowest first, [..., 8 x bytes]."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _with_fifth(nibbles: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    return nibbles | _bits(bits) << 4


def _q4_0(blocks: torch.Tensor) -> Parts:
    return {"numbers": _nibbles(blocks[..., 2:]), "scales": _half(blocks, 0)}


def _q4_1(blocks: torch.Tensor) -> Parts:
    return {"numbers": _nibbles(blocks[..., 4:]), **_halves(blocks)}


def _q5_0(blocks: torch.Tensor) -> Parts:
    numbers = _with_fifth(_nibbles(blocks[..., 6:]), blocks[..., 2:6])
    return {"numbers": numbers, "scales": _half(blocks, 0)}


def _q5_1(blocks: torch.Tensor) -> Parts:
    return {"numbers": _with_fifth(_nibbles(blocks[..., 8:]), blocks[..., 4:8]), **_halves(blocks)}


def _q8_0(blocks: torch.Tensor) -> Parts:
    return {"numbers": blocks[..., 2:].contiguous().view(torch.int8), "scales": _half(blocks, 0)}


def _halves(blocks: torch.Tensor) -> Parts:
    return {"scales": _half(blocks, 0), "offsets": _half(blocks, 2)}


def _k_scales(blocks: torch.Tensor) -> Parts:
    """Return the nested scales and offsets of the eight groups of each block of Q4_K or Q5_K. A
    block packs them, of six bits, into twelve bytes. Minima are subtracted."""
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    return {
        "scales": scales.to(torch.int8),
        "offsets": minima.to(torch.int8),
        "factors": _half(blocks, 0),
        "offset_factors": -_half(blocks, 2),
    }


def _pairs_of_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return for every 32 bytes their low nibbles and then their high ones, [..., 256]."""
    return _nibbles(packed.unflatten(-1, (4, 32))).flatten(-2)


def _quarters(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of two bits in 64 bytes, of which each 32 have four times 32, [..., 256]."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return (packed.unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-3)


def _planes(packed: torch.Tensor) -> torch.Tensor:
    """Return the bits of 32 bytes: the lowest of all bytes, then the next ones, [..., 256]."""
    return (packed[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(-2)


def _q2_k(blocks: torch.Tensor) -> Parts:
    both = blocks[..., :16]
    return {
        "numbers": _quarters(blocks[..., 16:80]),
        "scales": (both & 15).to(torch.int8),
        "offsets": (both >> 4).to(torch.int8),
        "factors": _half(blocks, 80),
        "offset_factors": -_half(blocks, 82),
    }


def _q3_k(blocks: torch.Tensor) -> Parts:
    """A block's first 32 bytes have the third bits of its numbers; the scales of its 16
    groups are of six bits, less 32, the high two in the last four of twelve bytes."""
    codes = _quarters(blocks[..., 32:96]) | _planes(blocks[..., :32]) << 2
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[..., None, 104:108] >> shifts & 3).flatten(-2)
    return {
        "numbers": codes,
        "scales": (_nibbles(blocks[..., 96:104]) | high << 4).to(torch.int8) - 32,
        "factors": _half(blocks, 108),
    }


def _q4_k(blocks: torch.Tensor) -> Parts:
    return {"numbers": _pairs_of_nibbles(blocks[..., 16:]), **_k_scales(blocks)}


def _q5_k(blocks: torch.Tensor) -> Parts:
    numbers = _pairs_of_nibbles(blocks[..., 48:]) | _planes(blocks[..., 16:48]) << 4
    return {"numbers": numbers, **_k_scales(blocks)}


def _q6_k(blocks: torch.Tensor) -> Parts:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    return {
        "numbers": low | _quarters(blocks[..., 128:192]) << 4,
        "scales": blocks[..., 192:208].contiguous().view(torch.int8),
        "factors": _half(blocks, 208),
    }


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    """A block has for each of eight groups a scale of six bits, less 32: the high two are in two
    bytes, and the low four in four."""
    high = blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3
    low = blocks[..., 4:8, None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15
    return {
        "numbers": _nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2),
        "scales": (low.flatten(-2) | high.flatten(-2) << 4).to(torch.int8) - 32,
        "factors": _half(blocks, 0),
    }


def _mxfp4(blocks: torch.Tensor) -> Parts:
    """The scale of a block is the power of two that its first byte says, halved, because numbers
    are doubled. The smallest two are below float32's normal numbers."""
    power = blocks[..., 0].to(torch.int32)
    bits = torch.where(power < 2, 0x0020_0000 << power.clamp(max=1), (power - 1).clamp(min=0) << 23)
    return {"numbers": _nibbles(blocks[..., 1:]), "scales": bits.view(torch.float32)}


_K = Form(4, 32, has_offsets=True, is_nested=True)
# The block types by GGUF's numbers for them.
BLOCK_TYPES = {
    2: ("Q4_0", BlockType(32, 18, Form(4, 32), _q4_0, CENTRED)),
    3: ("Q4_1", BlockType(32, 20, Form(4, 32, has_offsets=True), _q4_1, UNSIGNED)),
    6: ("Q5_0", BlockType(32, 22, Form(5, 32), _q5_0, CENTRED_OF_5)),
    7: ("Q5_1", BlockType(32, 24, Form(5, 32, has_offsets=True), _q5_1, UNSIGNED_OF_5)),
    8: ("Q8_0", BlockType(32, 34, Form(8, 32), _q8_0)),
    10: ("Q2_K", BlockType(256, 84, replace(_K, bits=2, group=16), _q2_k, UNSIGNED_OF_2)),
    11: ("Q3_K", BlockType(256, 110, Form(3, 16, is_nested=True), _q3_k, CENTRED_OF_3)),
    12: ("Q4_K", BlockType(256, 144, _K, _q4_k, UNSIGNED)),
    13: ("Q5_K", BlockType(256, 176, replace(_K, bits=5), _q5_k, UNSIGNED_OF_5)),
    14: ("Q6_K", BlockType(256, 210, Form(6, 16, is_nested=True), _q6_k, CENTRED_OF_6)),
    20: ("IQ4_NL", BlockType(32, 18, Form(4, 32), _q4_0, UNEVEN)),
    23: ("IQ4_XS", BlockType(256, 136, Form(4, 32, is_nested=True), _iq4_xs, UNEVEN)),
    39: ("MXFP4", BlockType(32, 17, Form(4, 32), _mxfp4, DOUBLED)),
}
FLOAT_TYPES = {0: ("F32", torch.float32), 1: ("F16", torch.float16), 30: ("BF16", torch.bfloat16)}
# The names of types that are not read, and by their beginnings the names of published files that
# are read and of about the same size, or the smallest. Source: ggml.h.
INSTEAD = {"IQ1": "Q2_K", "IQ2": "Q2_K", "IQ3": "Q3_K_S", "TQ": "Q2_K"}
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
