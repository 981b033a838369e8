"""Reads safetensors checkpoints whose experts are in MXFP4, as OpenAI published GPT-OSS.

The weights of a layer's experts are two tensors: blocks [experts, outputs, groups, 16] of bytes,
each with two codes, the first in its low four bits, and scales [experts, outputs, groups], which
are powers of two. A code is a number of one sign, two exponent and one mantissa bit; 32 codes share
a scale. Gates and ups alternate as in the float weights, but outputs come before inputs.

Here codes stand for twice their numbers, so that all are integers, and the scales are halved.
Source: OCP Microscaling Formats (MX) Specification 1.0, 5.3.3 and 6.3; transformers'
`integrations/mxfp4.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from engine.worker.load.checkpoint import Checkpoint, StoredTensor
from engine.worker.load.joined_experts import JOINED_EXPERTS, Joining
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.weight import Form, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from engine.worker.load.joined_experts import Piece

METHOD = "mxfp4"  # MXFP4's name in config.json
BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # Twice each code's number.
BIAS = 127  # A scale whose byte is b is 2 ** (b - BIAS).
SCALE_NAN = 255  # A scale with this byte is NaN.


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json says that the experts are in MXFP4."""
    settings = config.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == METHOD


class Mxfp4Checkpoint(Checkpoint):
    """The open files of a checkpoint with experts in MXFP4."""

    def form(self, name: str) -> Form | None:
        """Return the form of an expert's weight, or None for a plain tensor."""
        return Form(4, GROUP) if name in self._packed else None

    def small(self, name: str) -> Callable[[], QuantizedWeight] | None:
        """Return a function that reads an expert's weight in its form; None for a plain tensor."""
        if name not in self._packed:
            return None
        base, piece = self._packed[name]
        blocks, scales = (
            self._view(base + part, file)[piece.expert, piece.outputs]
            for part, file in zip((BLOCKS, SCALES), self._packed_in[base], strict=True)
        )
        return partial(_unpack, blocks, scales, name)

    @property
    def main_dtype(self) -> str:
        """The dtype to compute in."""
        return "BF16"

    def _split_experts(self) -> None:
        """Replace the tensors of all experts (blocks, scales, biases) by those of single experts.

        Raises:
            Refusal: A layer lacks its scales, or its tensors do not fit each other.
        """
        self._packed: dict[str, tuple[str, Piece]] = {}
        self._packed_in: dict[str, tuple[str, str]] = {}  # the files of blocks and scales
        for base in [name.removesuffix(BLOCKS) for name in self.tensors if name.endswith(BLOCKS)]:
            if JOINED_EXPERTS.fullmatch(base):
                self._combine(base)
        super()._split_experts()

    def _combine(self, base: str) -> None:
        blocks, scales = (self.tensors.pop(base + part, None) for part in (BLOCKS, SCALES))
        if blocks is None or scales is None:
            raise Refusal(f"its checkpoint lacks the tensor {base}{SCALES}")
        experts, outputs, groups, width = (*blocks.shape, 0, 0, 0)[:4]
        if width * 2 != GROUP or scales.shape != blocks.shape[:3]:
            raise Refusal(
                f"its {base}{BLOCKS} has the shape {list(blocks.shape)}, and its scales "
                f"{list(scales.shape)}, which MXFP4 does not have"
            )
        joining = Joining(alternating=True)
        joined = (experts, groups * GROUP, outputs)
        shape = joining.shape(base, joined)
        self._packed_in[base] = blocks.file, scales.file
        for piece in joining.pieces(base, joined):
            self.tensors[piece.name] = StoredTensor(piece.name, shape, "MXFP4", blocks.file)
            self._packed[piece.name] = base, piece


def _unpack(blocks: torch.Tensor, scales: torch.Tensor, name: str) -> QuantizedWeight:
    """Return a weight of blocks [outputs, groups, 16] and scales [outputs, groups].

    Raises:
        Refusal: A scale is NaN.
    """
    if bool((scales == SCALE_NAN).any()):
        raise Refusal(f"the scales of its {name} hold NaN; the file is damaged")
    steps = torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - (BIAS + 1))
    return QuantizedWeight(_codes(blocks), steps, GROUP, table=DOUBLED)


def _codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of blocks [outputs, groups, 16], as [outputs, inputs] uint8."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
