"""Packs layers whose tensors are in GGUF's blocks, in parallel and without numbers in between.

Rule: the packed bytes are those of the decoded weights (`engine/kernels/pack_blocks.h`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.worker.forward import kernel_structs as structs
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator, Sequence

    from engine.worker.quantized.gguf_blocks import StoredBlocks

PANEL = 16  # outputs in a panel of a packed weight; PANEL in engine/kernels/simd_amx.h


class Packed(NamedTuple):
    """The bytes of a packed layer, uint8. Without offsets, or with nested ones, these are empty."""

    panels: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Some panels of a layer. ``firsts`` are the bytes before them in each of the layer's
    tensors."""

    packed: Packed
    firsts: tuple[int, int, int]


class BlockLayer:
    """A layer that is packed of tensors in blocks of one type, whose outputs follow one another. If
    ``is_paired``, the tensors are gates and ups, or one with both; their panels alternate, and each
    half has whole panels. ``sizes`` are the bytes of the layer's panels, scales and offsets."""

    def __init__(
        self, library: ctypes.CDLL, parts: Sequence[StoredBlocks], *, is_paired: bool = False
    ) -> None:
        if is_paired and len(parts) == 1:
            parts = parts[0].halves()
        self._library = library
        self._parts = parts
        self._pair = 2 if is_paired else 0
        rows = [len(part) for part in parts]
        if is_paired:
            rows = [-(-count // PANEL) * PANEL for count in rows]
        self._firsts = [sum(rows[:index]) for index in range(len(rows))]
        self.outputs, self.inputs = sum(rows), parts[0].inputs
        self.form, self.table = parts[0].type.form, parts[0].type.table
        scales = library.triolet_scale_bytes(
            self.outputs, self.inputs, self.form.group, self.form.nested
        )
        has_own_offsets = self.form.has_offsets and not self.form.is_nested
        self.sizes = (
            int(library.triolet_small_bytes(self.form.bits, self.outputs, self.inputs)),
            int(scales),
            int(scales) if has_own_offsets else 0,
        )

    @property
    def signature(self) -> str:
        """The names, types and places of its tensors, and its form."""
        parts = [
            (part.name, part.kind, len(part), first)
            for part, first in zip(self._parts, self._firsts, strict=True)
        ]
        return repr((parts, self._pair, self.outputs, self.inputs, self.form, self.table))

    def pack(self, packed: Packed) -> None:
        """Pack the layer into tensors of its ``sizes``.

        Raises:
            Refusal: Half precision cannot hold a scale.
        """
        self._pack(packed, 0, self._count)

    def pieces(self, room: torch.Tensor) -> Iterator[Piece]:
        """Pack the layer piece by piece into ``room``, uint8, whose memory each piece takes anew.
        If it cannot hold a panel, there is memory for one panel after the other.

        Raises:
            Refusal: Half precision cannot hold a scale.
        """
        of_panel = [size // self._count for size in self.sizes]
        step = min(self._count, max(1, len(room) // sum(of_panel)))
        if step * sum(of_panel) > len(room):
            room = torch.empty(step * sum(of_panel), dtype=torch.uint8)
        for begin in range(0, self._count, step):
            count = min(step, self._count - begin)
            sizes = [count * size for size in of_panel]
            own = Packed(*room[: sum(sizes)].split(sizes))
            self._pack(own, begin, begin + count)
            panels, scales, offsets = (begin * size for size in of_panel)
            yield Piece(own, (panels, scales, offsets))

    @property
    def _count(self) -> int:
        return -(-self.outputs // PANEL)

    def _pack(self, packed: Packed, begin: int, end: int) -> None:
        sources = (structs.BlockRows * len(self._parts))(
            *(
                structs.BlockRows(
                    part.raw.data_ptr(),
                    None if part.order is None else part.order.data_ptr(),
                    part.raw.shape[1],
                    first,
                    len(part),
                    part.kind,
                )
                for part, first in zip(self._parts, self._firsts, strict=True)
            )
        )
        is_finite = self._library.triolet_pack_blocks(
            sources,
            len(sources),
            self.outputs,
            self.inputs,
            self._pair,
            begin,
            end,
            packed.panels.data_ptr(),
            packed.scales.data_ptr(),
            packed.offsets.data_ptr() if len(packed.offsets) else None,
        )
        if not is_finite:
            raise Refusal("one of its weights has a scale that half precision cannot hold")
