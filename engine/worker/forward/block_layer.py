"""Packs layers whose tensors are in GGUF's blocks, in parallel and without numbers in between.

Rule: the packed bytes are those of the decoded weights (`engine/kernels/pack_blocks.h`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.worker.forward import kernel_structs as structs
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.gguf_blocks import joined_type

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence

    from engine.worker.quantized.gguf_blocks import StoredBlocks

PANEL = 16  # outputs in a panel of a packed weight; PANEL in engine/kernels/simd_amx.h


class BlockLayer:
    """A layer that is packed of tensors in blocks, whose outputs follow one another. If
    ``is_paired``, they are gates and ups, or one tensor with both; their panels alternate, and each
    half has whole panels."""

    def __init__(self, parts: Sequence[StoredBlocks], *, is_paired: bool = False) -> None:
        if is_paired and len(parts) == 1:
            parts = parts[0].halves()
        self._parts = parts
        self._pair = 2 if is_paired else 0
        rows = [len(part) for part in parts]
        if is_paired:
            rows = [-(-count // PANEL) * PANEL for count in rows]
        self._firsts = [sum(rows[:index]) for index in range(len(rows))]
        self.outputs, self.inputs = sum(rows), parts[0].inputs
        self.form, self.table = joined_type(parts)

    def sizes(self, library: ctypes.CDLL) -> tuple[tuple[int, torch.dtype], ...]:
        """Return the sizes and types of the panels, the scales and the offsets."""
        scales = library.triolet_packed_scales(self.outputs, self.inputs, self.form.group)
        return (
            (library.triolet_small_bytes(self.form.bits, self.outputs, self.inputs), torch.uint8),
            (scales, torch.float16),
            (scales if self.form.has_offsets else 0, torch.float16),
        )

    def pack(
        self,
        library: ctypes.CDLL,
        panels: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        """Pack the layer into tensors of these `sizes`.

        Raises:
            Refusal: Half precision cannot hold a scale.
        """
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
        is_finite = library.triolet_pack_blocks(
            sources,
            len(sources),
            self.outputs,
            self.inputs,
            self._pair,
            self.form.bits,
            self.form.group,
            panels.data_ptr(),
            scales.data_ptr(),
            offsets.data_ptr() if self.form.has_offsets else None,
        )
        if not is_finite:
            raise Refusal("one of its weights has a scale that half precision cannot hold")
