"""Packs linear layers for the compiled kernels.

Rule: every weight is stored once. A layer's own tensors are freed before the next is packed, so
that at its peak a load holds only one weight twice.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from engine.worker.forward import kernel_structs as structs
from engine.worker.forward.block_layer import PANEL, BlockLayer
from engine.worker.forward.packed_cache import Layers
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.gguf_blocks import StoredBlocks
from engine.worker.quantized.weight import (
    QuantizedWeight,
    are_alike,
    centre_of,
    join,
    release,
    weight_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Packer:
    """Packs weights for one library and dtype, and keeps the packed tensors alive. ``layers`` packs
    those that are in blocks. ``note`` gets the bytes of each weight of a file that is packed."""

    def __init__(
        self,
        library: ctypes.CDLL,
        dtype: torch.dtype,
        layers: Layers | None = None,
        note: Callable[[int], None] | None = None,
    ) -> None:
        self._layers = layers or Layers()
        self.note = note or (lambda _: None)
        self.library = library
        self.dtype = dtype
        self.kind = structs.KINDS[dtype]
        self.packed: list[torch.Tensor] = []  # Weights: floats, or bytes.
        self.small: list[torch.Tensor] = []  # Norms and biases in float32, scales in their bytes.
        self._parts: list[ctypes.Array[structs.Linear]] = []  # layers have their addresses

    def linear(
        self, layers: Sequence[torch.nn.Linear], *, is_paired: bool = False
    ) -> structs.Linear:
        """Pack ``layers`` into one and free their own tensors. Their outputs follow one another;
        if ``is_paired``, the panels of gates and ups alternate. Weights of different forms become
        parts, each in its own form.

        Raises:
            Refusal: Such parts are not paired, and one before the last has no whole panels. Or half
                precision cannot hold a scale.
        """
        bias = self._joined_bias(layers, is_paired)
        stored = [weight_of(layer) for layer in layers]
        for layer in layers:
            release(layer)
            layer.register_parameter("bias", None)
        packed = self._pack_together(stored, bias, is_paired=is_paired)
        self.note(sum(getattr(layer, "stored_bytes", 0) for layer in layers))
        return packed

    def _pack_together(
        self, stored: list[Any], bias: torch.Tensor | None, *, is_paired: bool
    ) -> structs.Linear:
        blocks = [weight for weight in stored if isinstance(weight, StoredBlocks)]
        if len(blocks) == len(stored) and len({block.kind for block in blocks}) == 1:
            return self.pack_blocks(blocks, bias, is_paired=is_paired)
        if blocks and len(stored) > 1:
            return self._pack_parts(stored, bias, is_paired=is_paired)
        weights = []
        while stored:
            weights.append(read(stored.pop(0)))
        if is_paired:
            weights = [part for weight in weights for part in _whole_halves(weight, len(weights))]
        weight = _joined(weights)
        if weight is None:
            return self._pack_parts(weights, bias, is_paired=is_paired)
        del weights
        return self.pack(weight, bias, pair=2 if is_paired else 0)

    def _pack_parts(
        self, stored: list[Any], bias: torch.Tensor | None, *, is_paired: bool
    ) -> structs.Linear:
        linears = []
        while stored:
            weight = stored.pop(0)
            if isinstance(weight, StoredBlocks):
                linears.append(self.pack_blocks([weight], None))
            else:
                linears.append(self.pack(read(weight), None))
        array = (structs.Linear * len(linears))(*linears)
        self._parts.append(array)
        sizes = [linear.outputs for linear in linears]
        if is_paired:
            sizes = [-(-size // PANEL) * PANEL for size in sizes]
        if any(size % PANEL for size in sizes[:-1]):
            listed = ", ".join(map(str, sizes))
            raise Refusal(
                f"one of its products joins weights of {listed} outputs in different types, and "
                f"each but the last needs a multiple of {PANEL}"
            )
        return structs.Linear(
            bias=self._keep_bias(bias),
            parts=ctypes.addressof(array),
            outputs=sum(sizes),
            inputs=linears[0].inputs,
            num_parts=len(linears),
            alternates=is_paired,
        )

    def _keep_bias(self, bias: torch.Tensor | None) -> int | None:
        return None if bias is None else self.keep(_whole_panels(bias.to(torch.float32)))

    def pack(
        self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, pair: int = 0
    ) -> structs.Linear:
        """Pack ``weight`` [outputs, inputs] into panels. ``pair``: 2 for gates and ups, else 0."""
        kept = self._keep_bias(bias)
        if isinstance(weight, QuantizedWeight):
            return self._pack_small(weight.in_halves(), kept, pair)
        outputs, inputs = weight.shape
        kind = self.kind_of(weight.dtype)
        weight = (weight if kind else weight.to(self.dtype)).contiguous()
        count = self.library.triolet_packed_numbers(self.kind, outputs, inputs)
        panels = torch.empty(count, dtype=weight.dtype)
        self.library.triolet_pack(
            self.kind, kind, weight.data_ptr(), outputs, inputs, pair, panels.data_ptr()
        )
        self.packed.append(panels)
        return structs.Linear(panels.data_ptr(), kept, outputs=outputs, inputs=inputs, kind=kind)

    def kind_of(self, dtype: torch.dtype) -> int:
        """Return `kernel_structs.Linear.kind` of float weights of this dtype: 0 if it is the
        model's."""
        return structs.WEIGHT_KINDS.get(dtype, 0) if self.dtype is torch.float32 else 0

    def pack_blocks(
        self, parts: Sequence[StoredBlocks], bias: torch.Tensor | None, *, is_paired: bool = False
    ) -> structs.Linear:
        """Pack tensors that are in GGUF's blocks of one type into one layer, as `linear` says.

        Raises:
            Refusal: Half precision cannot hold a scale.
        """
        layer = BlockLayer(self.library, parts, is_paired=is_paired)
        panels, scales, offsets = self._layers.packed(layer)
        self.packed.append(panels)
        self.small += scales, offsets
        return structs.Linear(
            panels.data_ptr(),
            self._keep_bias(bias),
            scales.data_ptr(),
            offsets.data_ptr() if len(offsets) else None,
            **self._codes(layer.table),
            outputs=layer.outputs,
            inputs=layer.inputs,
            group=layer.form.group,
            bits=layer.form.bits,
            nested=layer.form.nested,
        )

    def finish(self) -> None:
        """Keep the packed layers, where that is wanted. Call it after the last one."""
        self._layers.finish()

    def _codes(self, table: tuple[int, ...]) -> dict[str, int]:
        """Return the fields of `structs.Linear` that say what codes stand for."""
        centre = centre_of(table) if table else 0
        if centre is not None:
            return {"centre": centre}
        self.small.append(torch.tensor(table, dtype=torch.int8))
        return {"table": self.small[-1].data_ptr()}

    def _pack_small(self, weight: QuantizedWeight, bias: int | None, pair: int) -> structs.Linear:
        outputs, inputs = weight.numbers.shape
        numbers = weight.numbers.contiguous()
        size = self.library.triolet_small_bytes(weight.bits, outputs, inputs)
        panels = torch.empty(size, dtype=torch.uint8)
        self.library.triolet_pack_small(
            weight.bits, numbers.data_ptr(), outputs, inputs, pair, panels.data_ptr()
        )
        self.packed.append(panels)
        scales, offsets = self._pack_scales(weight, pair)
        return structs.Linear(
            panels.data_ptr(),
            bias,
            scales,
            offsets,
            **self._codes(weight.table),
            outputs=outputs,
            inputs=inputs,
            group=weight.group,
            bits=weight.bits,
            nested=weight.form.nested,
        )

    def _pack_scales(self, weight: QuantizedWeight, pair: int) -> tuple[int, int | None]:
        """Return the addresses of a weight's packed scales and offsets; None for nested offsets."""
        outputs, inputs = weight.numbers.shape
        nested = weight.form.nested
        count = self.library.triolet_scale_bytes(outputs, inputs, weight.group, nested)
        kept: list[int | None] = []
        own = ((weight.scales, weight.factors), (weight.offsets, weight.offset_factors))
        for kind, (tensor, factors) in enumerate(own):
            if tensor is None:
                kept.append(None)
                continue
            given = tensor.contiguous()
            if factors is None or not kind:
                self.small.append(torch.zeros(count, dtype=torch.uint8))
            panels = self.small[-1].data_ptr()
            if factors is None:
                self.library.triolet_pack_scales(
                    given.data_ptr(), outputs, inputs, weight.group, pair, panels
                )
            else:
                self.library.triolet_pack_nested(
                    kind, given.data_ptr(), factors.data_ptr(), outputs, inputs, weight.group,
                    nested, pair, panels,
                )  # fmt: skip
            kept.append(panels if factors is None or not kind else None)
        scales, offsets = kept
        assert scales is not None
        return scales, offsets

    def keep(self, tensor: torch.Tensor | None) -> int | None:
        """Keep a tensor in float32 for as long as the model lives, and return its address."""
        if tensor is None:
            return None
        self.small.append(tensor.to(torch.float32).contiguous())
        return self.small[-1].data_ptr()

    def _joined_bias(
        self, layers: Sequence[torch.nn.Linear], is_paired: bool
    ) -> torch.Tensor | None:
        """Return the layers' biases in one tensor, with zeros for a layer without one, or None if
        no layer has one."""
        if all(layer.bias is None for layer in layers):
            return None
        parts = [
            torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach().float()
            for layer in layers
        ]
        if not is_paired:
            return torch.cat(parts)
        return _alternate_panels(*(parts[0].chunk(2) if len(parts) == 1 else parts))


def form_of(linear: structs.Linear) -> tuple[object, ...]:
    """Return how a layer's rows are rounded, which must be the same for a mixture's experts."""
    parts = ctypes.cast(linear.parts, ctypes.POINTER(structs.Linear))
    own = [parts[index] for index in range(linear.num_parts)] or [linear]
    return tuple((one.scales is None, one.group) for one in own)


def read(weight: Any) -> torch.Tensor | QuantizedWeight:
    """Return a layer's weight, read from its file if it is still there."""
    if isinstance(weight, QuantizedWeight):
        return weight
    return weight.detach() if isinstance(weight, torch.Tensor) else weight()


def _joined(
    weights: list[torch.Tensor | QuantizedWeight],
) -> torch.Tensor | QuantizedWeight | None:
    """Join ``weights`` by outputs, or return None if they are not alike."""
    if len(weights) == 1:
        return weights[0]
    small = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if small:
        return join(small) if len(small) == len(weights) and are_alike(small) else None
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    return torch.cat(tensors) if len({one.dtype for one in tensors}) == 1 else None


def _whole_halves(weight: torch.Tensor | QuantizedWeight, count: int) -> list[Any]:
    """Return ``weight`` padded to whole panels, as a list. If ``count`` is 1, it holds both gates
    and ups, and becomes two parts."""
    if isinstance(weight, QuantizedWeight):
        halves = weight.halves() if count == 1 else [weight]
        return [half.each(_whole_panels) for half in halves]
    return [_whole_panels(half) for half in (weight.chunk(2) if count == 1 else [weight])]


def _alternate_panels(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return biases of gates and ups as one tensor, in the order of their packed panels."""
    pairs = torch.stack((_whole_panels(gate), _whole_panels(up)))
    return pairs.view(2, -1, PANEL).transpose(0, 1).reshape(-1)


def _whole_panels(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` padded with zeros to a multiple of PANEL along its first dimension."""
    missing = -len(tensor) % PANEL
    if not missing:
        return tensor
    return pad(tensor, (0,) * (2 * tensor.dim() - 1) + (missing,))
