"""Reads safetensors checkpoints whose linear layers are packed: GPTQ, AWQ and compressed-tensors.

Rule 1: config.json's `quantization_config` names the layout; a layout that is not supported is a
`Refusal`. Rule 2: the tensors of a packed layer become one weight with its name in a float
checkpoint. A tensor that belongs to no layer stays in the list for the loader's refusal.

A code of 4 bits stands for code - 8, and one of 8 bits for code - 128, as in symmetric layouts. If
a group has another zero point, it gets an offset: scale * (8 - zero), or scale * (128 - zero).
Source: AutoGPTQ's `qlinear_cuda_old`, AutoAWQ's `packing_utils`, compressed-tensors'
`compressors/quantized_compressors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine.worker.load.checkpoint import Checkpoint, StoredTensor
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.weight import CENTRED, DEPTH_PAD, Form, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

WORD = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs each nibble of a word belongs to
FINEST_GROUP = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """How the packed layers of a checkpoint are stored. ``parts`` are the suffixes of a layer's
    tensors, the packed tensor's first; only the first ``num_needed`` must be there."""

    name: str
    bits: int
    group: int  # inputs that share a scale; 0: all inputs of an output
    is_symmetric: bool
    parts: tuple[str, ...]
    num_needed: int
    is_zero_less_one: bool = False  # whether zero points are stored less 1, as by GPTQ's version 1


def read_layout(config: Mapping[str, Any]) -> Layout | None:
    """Return the layout that a config.json names, or None if its weights are plain.

    Raises:
        Refusal: The layout is not supported.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method == "gptq":
        return _gptq(settings)
    if method == "awq":
        return _awq(settings)
    if method == "compressed-tensors":
        return _compressed(settings)
    return None  # `architectures.find` has refused it


def _gptq(settings: Mapping[str, Any]) -> Layout:
    form = str(settings.get("checkpoint_format", "gptq"))
    if form not in ("gptq", "gptq_v2"):
        raise Refusal(f"its GPTQ weights are in the format {form!r}; gptq and gptq_v2 are read")
    parts = ("qweight", "scales", "qzeros", "g_idx")
    bits, group = _size("GPTQ", settings.get("bits"), settings.get("group_size"))
    return Layout("GPTQ", bits, group, bool(settings.get("sym", True)), parts, 3, form == "gptq")


def _awq(settings: Mapping[str, Any]) -> Layout:
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise Refusal(f"its AWQ weights are of the version {version!r}; only gemm is read")
    bits, group = _size("AWQ", settings.get("bits"), settings.get("group_size"))
    if bits != 4:
        raise Refusal(f"its AWQ weights have {bits} bits; only 4 are read")
    return Layout("AWQ", bits, group, False, ("qweight", "scales", "qzeros"), 3)


def _compressed(settings: Mapping[str, Any]) -> Layout:
    form, groups = str(settings.get("format")), settings.get("config_groups") or {}
    if form not in ("pack-quantized", "int-quantized"):
        raise Refusal(f"its compressed-tensors weights are in the format {form!r}; pack-quantized "
                      "and int-quantized are read")  # fmt: skip
    if len(groups) != 1:
        raise Refusal(f"its compressed-tensors weights have {len(groups)} schemes; one is read")
    scheme = next(iter(groups.values()))
    weights, inputs = scheme.get("weights") or {}, scheme.get("input_activations")
    if weights.get("type", "int") != "int":
        raise Refusal(f"its compressed-tensors weights are of type {weights['type']}; int is read")
    if inputs and not (inputs.get("dynamic") and inputs.get("num_bits") == 8):
        raise Refusal("its compressed-tensors activations are not int8 with dynamic scales")
    strategy = str(weights.get("strategy"))
    if strategy not in ("group", "channel"):
        raise Refusal(f"its compressed-tensors scales are one for each {strategy}; one for each "
                      "group or channel is read")  # fmt: skip
    size = weights.get("group_size") if strategy == "group" else -1
    bits, group = _size("compressed-tensors", weights.get("num_bits"), size)
    is_symmetric = bool(weights.get("symmetric", True))
    if form == "int-quantized":
        if bits != 8 or not is_symmetric:
            raise Refusal("its int-quantized weights are not symmetric int8")
        return Layout("W8A8", 8, group, True, ("weight", "weight_scale"), 2)
    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    return Layout(f"W{bits}A16", bits, group, is_symmetric, parts, 3 if is_symmetric else 4)


def _size(name: str, bits: Any, group: Any) -> tuple[int, int]:
    """Check a layout's bits and its inputs of a group, and return both; 0 inputs mean all."""
    if bits not in (4, 8):
        raise Refusal(f"its {name} weights have {bits} bits; 4 and 8 are read")
    if group in (None, -1):
        return bits, 0
    if not isinstance(group, int) or group <= 0 or group % FINEST_GROUP:
        raise Refusal(f"its {name} weights have groups of {group}; multiples of {FINEST_GROUP} "
                      "are read")  # fmt: skip
    return bits, group


class PackedCheckpoint(Checkpoint):
    """The open files of a checkpoint with packed layers."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        super().__init__(directory)
        self._layout = layout
        self._packed: dict[str, dict[str, str]] = {}  # names of stored tensors, by weight and part

    def __enter__(self) -> PackedCheckpoint:
        super().__enter__()
        try:
            self._combine()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def form(self, name: str) -> Form | None:
        """Return the form of a packed weight, or None for a plain tensor."""
        if name not in self._packed:
            return None
        layout, inputs = self._layout, self.tensors[name].shape[1]
        return Form(layout.bits, self._group_of(inputs), has_offsets=not layout.is_symmetric)

    def small(self, name: str) -> Callable[[], QuantizedWeight] | None:
        """Return a function that reads a packed weight in its form; None for a plain tensor."""
        if name not in self._packed:
            return None
        parts = {
            part: self._view(own, self._stored_in[own]) for part, own in self._packed[name].items()
        }
        return partial(_unpack, self._layout, parts, self.tensors[name].shape,
                       self._group_of(self.tensors[name].shape[1]), name)  # fmt: skip

    @property
    def main_dtype(self) -> str:
        """The dtype to compute in."""
        return "BF16"

    def _group_of(self, inputs: int) -> int:
        return self._layout.group or -(-inputs // DEPTH_PAD) * DEPTH_PAD

    def _combine(self) -> None:
        """Replace the tensors of each packed layer by one weight.

        Raises:
            Refusal: A layer lacks one of its tensors.
        """
        layout, first = self._layout, f".{self._layout.parts[0]}"
        self._stored_in = {name: tensor.file for name, tensor in self.tensors.items()}
        bases = [
            name.removesuffix(first)
            for name, tensor in self.tensors.items()
            if name.endswith(first) and tensor.dtype in ("I32", "I8")
        ]
        for base in bases:
            names = {part: f"{base}.{part}" for part in layout.parts}
            names = {part: name for part, name in names.items() if name in self.tensors}
            for part in layout.parts[: layout.num_needed]:
                if part not in names:
                    raise Refusal(f"its checkpoint lacks the tensor {base}.{part}")
            stored = {part: self.tensors.pop(name) for part, name in names.items()}
            name, main = f"{base}.weight", stored[layout.parts[0]]
            shape = _shape_of(layout, stored)
            self.tensors[name] = StoredTensor(name, shape, f"{layout.name} {layout.bits}-bit",
                                              main.file)  # fmt: skip
            self._packed[name] = names


def _shape_of(layout: Layout, stored: Mapping[str, StoredTensor]) -> tuple[int, int]:
    """Return [outputs, inputs] of a packed weight."""
    rows, columns = stored[layout.parts[0]].shape
    per_word = WORD // layout.bits
    if layout.name == "GPTQ":
        return columns, rows * per_word
    if layout.name == "AWQ":
        return columns * per_word, rows
    return rows, columns if layout.name == "W8A8" else columns * per_word


def _unpack(
    layout: Layout,
    parts: Mapping[str, torch.Tensor],
    shape: tuple[int, ...],
    group: int,
    name: str,
) -> QuantizedWeight:
    """Return a packed weight. Codes are [outputs, inputs], zeros and scales [outputs, groups].

    Raises:
        Refusal: Its inputs are permuted, or its scales have another shape.
    """
    order = parts.get("g_idx", parts.get("weight_g_idx"))
    if order is not None and not torch.equal(
        order.long(), torch.arange(shape[1]) // (layout.group or shape[1])
    ):
        raise Refusal(f"the inputs of its {name} are in another order (desc_act or actorder), "
                      "which is not read")  # fmt: skip
    middle, zeros = 1 << layout.bits - 1, None
    if layout.name == "W8A8":
        return QuantizedWeight(parts["weight"], parts["weight_scale"].float(), group)
    if layout.name == "GPTQ":
        codes = _codes(parts["qweight"].T, layout.bits)
        zeros = _codes(parts["qzeros"], layout.bits).T.to(torch.int16)
        zeros = zeros + int(layout.is_zero_less_one) & (1 << layout.bits) - 1
        scales = parts["scales"].T.float()
    elif layout.name == "AWQ":
        codes = _awq_codes(parts["qweight"]).T
        zeros, scales = _awq_codes(parts["qzeros"]).T, parts["scales"].T.float()
    else:
        codes, scales = _codes(parts["weight_packed"], layout.bits), parts["weight_scale"].float()
        codes = codes[:, : shape[1]]
        if not layout.is_symmetric:
            zeros = _codes(parts["weight_zero_point"].T, layout.bits).T[: shape[0]]
    wanted = (shape[0], -(-shape[1] // group))
    for part in (scales, zeros):
        if part is not None and tuple(part.shape) != wanted:
            raise Refusal(f"its {name} has scales or zeros of the shape {list(part.shape)}, and "
                          f"{list(wanted)} belong to its groups")  # fmt: skip
    offsets = None
    if zeros is not None and not bool((zeros == middle).all()):
        offsets = scales * (middle - zeros.float())
    if layout.bits == 4:
        return QuantizedWeight(codes, scales, group, offsets, CENTRED)
    numbers = (codes.to(torch.int16) - middle).to(torch.int8)
    return QuantizedWeight(numbers, scales, group, offsets)


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return as uint8 the codes in words [rows, words] of 32 bits, from the lowest bits on."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    codes = words[..., None] >> shifts & (1 << bits) - 1
    return codes.to(torch.uint8).flatten(1)


def _awq_codes(words: torch.Tensor) -> torch.Tensor:
    """Return the codes of AWQ's words, in the order of the outputs."""
    places = torch.tensor([AWQ_ORDER.index(output) for output in range(len(AWQ_ORDER))])
    return _codes(words, 4).unflatten(1, (-1, len(AWQ_ORDER)))[..., places].flatten(1)
