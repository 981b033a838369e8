"""Weights of 8 bits or fewer: the form that every stored format is decoded to, and rounding to it.

A weight is scale * number, or scale * number + offset. The inputs of an output are divided into
groups; the weights of a group share scale and offset. These may be nested: then they are int8,
times a factor that `NESTED` inputs share.

Rule 1: a weight that will be quantized stays in its file until its layer is packed or expanded
(`defer`), so that a load never holds the float weights of a whole model. Rule 2: rounding is to
nearest, and depends on the weight alone: the same checkpoint gives the same numbers everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEPTH_PAD = 32  # packed inputs are a multiple; SMALL_DEPTH_PAD in engine/kernels/small_weights.h
NESTED = 256  # inputs that share a factor; NESTED in small_weights.h
GROUP = 32  # inputs of a group, as in llama.cpp's Q8_0 and Q4_0
CENTRED = tuple(range(-8, 8))
CENTRED_OF_6 = tuple(range(-32, 32))
TABLES = {4: CENTRED, 6: CENTRED_OF_6, 8: ()}  # the tables that `quantise` uses, by bits
ROUNDED = {"int8": 8, "int4": 4}  # the bits of each value of `--quantization`
ENDS = {"int8": 8, "int4": 6}  # bits of the embedding and the head, as in llama.cpp's files
# For a group in 4 bits, these multiples of the scale at which its largest magnitude becomes -8 are
# tried, and the one with the smallest square error is taken. The factor 1.0 alone is llama.cpp's
# Q4_0; five factors have less than 0.93 of its square error (`test_quantized_weights.py`).
FACTORS = (1.0, 0.94, 0.88, 1.06, 0.82)
ROUNDED_AT_ONCE = 1 << 19  # weights: a few float32 tensors of so many fit a core's cache


@dataclass(frozen=True, slots=True)
class Form:
    """A packed weight's form: a number's bits, a group's inputs, whether it has offsets, and
    whether scales and offsets are nested. Nested scales and offsets of 2 bits are of 4 bits."""

    bits: int
    group: int
    has_offsets: bool = False
    is_nested: bool = False

    @property
    def nested(self) -> int:
        """`kernel_structs.Linear.nested`: how many of scales and offsets are nested; 3 if both are
        in one byte."""
        if self.is_nested and self.has_offsets and self.bits == 2:
            return 3
        return (1 + self.has_offsets) * self.is_nested

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the memory of a weight of this shape, without padding."""
        outputs, inputs = shape
        groups, size = -(-inputs // self.group), torch.float16.itemsize
        if not self.is_nested:
            of_scales = groups * size * (1 + self.has_offsets)
        else:
            factors = -(-inputs // NESTED) * size * (1 + self.has_offsets)
            of_scales = factors + groups * (1 if self.nested == 3 else self.nested)
        return outputs * (inputs * self.bits // 8 + of_scales)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [outputs, inputs] in 8 bits, or 2 to 6. ``group`` is a multiple of 16, and of 32 in
    5 bits. If scales and offsets are nested, they are int8, or of 2 bits 0 to 15, and it is 16 or
    32."""

    numbers: torch.Tensor  # [outputs, inputs] int8; with a table: codes, uint8
    scales: torch.Tensor  # [outputs, groups] float16 or float32
    group: int
    offsets: torch.Tensor | None = None  # [outputs, groups], in the scales' type
    table: tuple[int, ...] = ()  # the 4 to 64 numbers that codes stand for
    factors: torch.Tensor | None = None  # [outputs, inputs / NESTED] of nested scales
    offset_factors: torch.Tensor | None = None  # likewise, of nested offsets

    @property
    def bits(self) -> int:
        """The bits of one number: 2 to 6, or 8."""
        return bits_of(self.table)

    @property
    def form(self) -> Form:
        """The form that it is packed in."""
        return Form(self.bits, self.group, self.offsets is not None, self.factors is not None)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        """Return the weight with ``change`` applied to every tensor. It may select rows (outputs)
        or change their order, and must keep the columns."""
        return self._with({name: change(tensor) for name, tensor in self.tensors.items()})

    def _with(self, tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
        changed: dict[str, Any] = dict(tensors)
        return replace(self, **changed)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The weight's tensors by the names of their fields."""
        own = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    def halves(self) -> list[QuantizedWeight]:
        """Return the first half of the outputs and the second."""
        middle = len(self.numbers) // 2
        return [self.each(lambda t: t[:middle]), self.each(lambda t: t[middle:])]

    def expand(self) -> torch.Tensor:
        """Return the weight in float32, [outputs, inputs]."""
        values = self.plain_numbers().float() * self._per_input(self.scales, self.factors)
        if self.offsets is not None:
            values += self._per_input(self.offsets, self.offset_factors)
        return values

    def _per_input(self, grouped: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        """Return scales or offsets as [outputs, inputs] float32."""
        inputs = self.numbers.shape[1]
        own = grouped.float().repeat_interleave(self.group, 1)[:, :inputs]
        if factors is None:
            return own
        return factors.float().repeat_interleave(NESTED, 1)[:, :inputs] * own

    def in_halves(self) -> QuantizedWeight:
        """Return the weight with scales and offsets in half precision, as the kernels take them.

        Raises:
            Refusal: Half precision cannot hold one of them, or there is not one for each group.
        """
        wanted = (len(self.numbers), -(-self.numbers.shape[1] // self.group))
        for tensor in (self.scales, self.offsets):
            if tensor is not None and tuple(tensor.shape) != wanted:
                raise Refusal(
                    f"one of its weights, {list(self.numbers.shape)} in groups of {self.group}, "
                    f"has scales of the shape {list(tensor.shape)}, and needs {list(wanted)}"
                )
        names = ("factors", "offset_factors") if self.factors is not None else ("scales", "offsets")
        halves = {
            name: tensor.half().contiguous()
            for name, tensor in self.tensors.items()
            if name in names
        }
        if not all(tensor.isfinite().all() for tensor in halves.values()):
            raise Refusal("one of its weights has a scale that half precision cannot hold")
        return self._with(halves)

    def plain_numbers(self) -> torch.Tensor:
        """Return the numbers, int8, that the codes stand for."""
        if not self.table:
            return self.numbers
        return torch.tensor(self.table, dtype=torch.int8)[self.numbers.long()]


TENSORS = ("numbers", "scales", "offsets", "factors", "offset_factors")


def bits_of(table: tuple[int, ...]) -> int:
    """Return the bits of numbers that are codes of this table, or int8 without one."""
    return len(table).bit_length() - 1 if table else 8


def centre_of(table: tuple[int, ...]) -> int | None:
    """Return the difference of a code and its number in this table, or None if that is not the same
    for all codes."""
    return -table[0] if table == tuple(range(table[0], table[0] + len(table))) else None


def are_alike(weights: Sequence[QuantizedWeight]) -> bool:
    """Return whether weights have one form, in which `join` joins them."""
    return len({(weight.form, weight.table) for weight in weights}) == 1


def join(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight with the outputs (rows) of all these weights, which `are_alike`, in their
    order."""
    if len(weights) == 1:
        return weights[0]
    return weights[0]._with(
        {
            name: torch.cat([weight.tensors[name] for weight in weights])
            for name in weights[0].tensors
        }
    )


def quantise(weight: torch.Tensor, bits: int, group: int = GROUP) -> QuantizedWeight:
    """Round a float weight [outputs, inputs] to 8, 6 or 4 bits."""
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    kind = torch.int8 if bits == 8 else torch.uint8
    numbers = torch.empty((outputs, inputs), dtype=kind)
    scales = torch.empty((outputs, groups), dtype=torch.float16)
    table = TABLES[bits]
    step = max(1, ROUNDED_AT_ONCE // inputs)
    for start in range(0, outputs, step):
        part = weight[start : start + step].float()
        if inputs % group:
            part = torch.nn.functional.pad(part, (0, groups * group - inputs))
        own, own_scales = _round(part.view(len(part), groups, group), table)
        numbers[start : start + step] = own.view(len(part), -1)[:, :inputs]
        scales[start : start + step] = own_scales
    return QuantizedWeight(numbers, scales, group, table=table)


def _round(groups: torch.Tensor, table: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return _round_to_codes(groups, table) if table else _round_to_8(groups)


def _round_to_8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round weights [outputs, groups, inputs]: return numbers of -127 to 127, and scales."""
    scales = (groups.abs().amax(2) / 127.0).half()
    numbers = (groups * _inverse(scales)[:, :, None]).round_().clamp_(-127, 127)
    return numbers.to(torch.int8), scales


def _round_to_codes(
    groups: torch.Tensor, table: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round weights [outputs, groups, inputs]: return codes of a table, and scales."""
    low, high = groups.aminmax(dim=2)
    largest = torch.where(-low > high, low, high)
    best_error = torch.full_like(largest, torch.inf)
    best_scale = torch.zeros_like(largest, dtype=torch.float16)
    for factor in FACTORS if table == CENTRED else FACTORS[:1]:
        scale = (largest * (factor / table[0])).half()
        error = (
            (_nearest(groups, scale, table) * scale.float()[:, :, None] - groups).square_().sum(2)
        )
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
    return (_nearest(groups, best_scale, table) - table[0]).to(torch.uint8), best_scale


def _nearest(groups: torch.Tensor, scale: torch.Tensor, table: tuple[int, ...]) -> torch.Tensor:
    numbers = groups * _inverse(scale)[:, :, None]
    return numbers.round_().clamp_(table[0], table[-1])


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    wide = scales.float()
    return torch.where(wide == 0, wide, 1.0 / wide)


# ---- layers whose weight is still in its file


class RoundedLater:
    """Reads a float weight from its mapped file and rounds it. Two are equal if they read equal
    weights and round to as many bits."""

    def __init__(self, stored: torch.Tensor, bits: int) -> None:
        self._stored = stored
        self._bits = bits

    def __call__(self) -> QuantizedWeight:
        """Return the rounded weight."""
        return quantise(self._stored, self._bits)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RoundedLater)
            and (self._bits, self._stored.dtype) == (other._bits, other._stored.dtype)
            and torch.equal(self._stored, other._stored)
        )

    __hash__ = object.__hash__


class NarrowLater:
    """Reads a float weight of 16 bits from its mapped file, to be packed as it is."""

    def __init__(self, stored: torch.Tensor) -> None:
        self._stored = stored
        self.dtype = stored.dtype

    def __call__(self) -> torch.Tensor:
        """Return the weight."""
        return self._stored


def defer(
    layer: Any, stored: Callable[[], QuantizedWeight | torch.Tensor], dtype: torch.dtype
) -> None:
    """Leave a layer's weight in its file until it is packed or expanded. Until then the layer,
    a torch.nn.Linear or an Embedding, computes zeros of the right shape in ``dtype``, which is all
    that `engine.worker.load.probe` needs."""
    width = getattr(layer, "out_features", None) or layer.embedding_dim
    layer.register_parameter("weight", None)
    layer.stored = stored
    layer.forward = partial(_zeros, width=width, dtype=dtype, is_linear=hasattr(layer, "bias"))


def _zeros(given: torch.Tensor, *, width: int, dtype: torch.dtype, is_linear: bool) -> torch.Tensor:
    shape = given.shape[:-1] if is_linear else given.shape
    return torch.zeros((*shape, width), dtype=dtype, device=given.device)


def weight_of(layer: Any) -> torch.Tensor | Callable[[], QuantizedWeight | torch.Tensor]:
    """Return a layer's weight, or the function that reads it from its file. Layers that share a
    weight return the same object."""
    stored: Callable[[], QuantizedWeight | torch.Tensor] | None = getattr(layer, "stored", None)
    return layer.weight if stored is None else stored


def release(layer: Any) -> None:
    """Remove a layer's weight, or its function that reads the weight."""
    layer.register_parameter("weight", None)
    layer.__dict__.pop("stored", None)
    layer.__dict__.pop("forward", None)


def expand_deferred(module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give every deferred layer of 8 bits or fewer its weight in ``dtype``, for a model that runs
    stock."""
    expanded: dict[int, torch.nn.Parameter] = {}
    for layer in module.modules():
        stored = layer.__dict__.get("stored")
        if stored is None or isinstance(stored, NarrowLater):
            continue
        if id(stored) not in expanded:
            value = stored().expand().to(device=device, dtype=dtype)
            expanded[id(stored)] = torch.nn.Parameter(value, requires_grad=False)
        release(layer)
        layer.weight = expanded[id(stored)]
