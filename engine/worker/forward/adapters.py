"""Adds adapters (LoRA) to a model's linear layers, compiled or stock.

Rule 1: an adapter is computed at its stored rank, for the tokens of its own sequences only. These
follow one another in a step, so that each adapter has one range of tokens. Rule 2: a step without
adapters runs exactly what a model without adapters runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.functional import pad

from engine.errors import EngineBug
from engine.worker.forward import kernel_structs as structs
from engine.worker.forward.block_layer import PANEL
from engine.worker.forward.decoder import GROUPS
from engine.worker.forward.rewrites import ExpertParts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from engine.worker.forward.decoder import NativeDecoder
    from engine.worker.forward.rewrites import DecoderParts
    from engine.worker.load.adapter import LowRank, StoredAdapter

DEPTH_PAD = 32  # Inputs of packed bfloat16 are padded to a multiple of it; as in simd_amx.h.
QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS = 0, 1, 2, 3, 4  # A layer's products, as in adapters.h.


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """The tokens of a step that have one adapter: ``count`` of the step's tokens from ``first`` on,
    and ``kept_count`` of the tokens whose logits are computed from ``kept_first`` on."""

    adapter: Any  # the result of `AdapterHost.place`
    first: int
    count: int
    kept_first: int
    kept_count: int


class AdapterHost(Protocol):
    """Computes a model together with adapters."""

    @property
    def places(self) -> Mapping[str, tuple[int, int]]:
        """By name, the inputs and outputs (numbers) of each layer that an adapter may change."""

    @property
    def head(self) -> str:
        """The name of the model's head."""

    def place(self, stored: StoredAdapter) -> Any:
        """Return an adapter in the form that `forward` takes, with ``num_bytes``, its memory, and
        ``width``, the most numbers to which A shrinks a token's input in any product."""

    def forward(self, groups: Sequence[AdapterGroup], inputs: Mapping[str, Any]) -> Any:
        """Return the model's output for a step with at least one group."""


def linear_places(module: Any, recurrent: str = "") -> dict[str, tuple[int, int]]:
    """Return the numbers of inputs and outputs of a stock model's linear layers, by their names.
    Layers inside modules of the class named ``recurrent`` are left out, because they do not get a
    step's tokens in the step's order."""
    places: dict[str, tuple[int, int]] = {}
    without = [name for name, child in module.named_modules() if type(child).__name__ == recurrent]
    for name, child in module.named_modules():
        if name.startswith(tuple(f"{prefix}." for prefix in without)):
            continue
        if isinstance(child, torch.nn.Linear):
            places[name] = (child.in_features, child.out_features)
        elif type(child).__name__ == "Conv1D":  # a linear layer of GPT-2, with transposed weights
            inputs, outputs = child.weight.shape
            places[name] = (int(inputs), int(outputs))
    return places


def head_name(module: Any) -> str:
    """Return the name of a stock model's head; "" if it has none."""
    head = module.get_output_embeddings()
    return next((name for name, child in module.named_modules() if child is head), "")


# ---- compiled decoders


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """The place of a linear layer's outputs in a packed product. Each of ``slices`` is (first
    panel, step to the next panel, first output, end of the outputs)."""

    product: int
    slices: tuple[tuple[int, int, int, int], ...]


def packed_places(parts: DecoderParts, module: Any) -> dict[str, PackedPlace]:
    """Return the places of a model's linear layers in its packed products, by their names."""
    names = {child: name for name, child in module.named_modules()}
    places = {}
    for index, layer in enumerate(parts.layers):
        product, first = index * PRODUCTS, 0
        for linear in layer.qkv:
            size = linear.out_features
            places[names[linear]] = PackedPlace(product + QKV, ((first // PANEL, 1, 0, size),))
            first += size
        size = layer.output.out_features
        places[names[layer.output]] = PackedPlace(product + OUTPUT, ((0, 1, 0, size),))
        mlp = layer.mlp
        if isinstance(mlp, ExpertParts):  # as in peft, adapters do not change experts
            if mlp.shared is None:
                continue
            mlp = mlp.shared
        gate_up, down = mlp.gate_up, mlp.down
        places[names[down]] = PackedPlace(product + DOWN, ((0, 1, 0, down.out_features),))
        if len(gate_up) == 2:  # the panels of gate and up alternate
            for start, linear in enumerate(gate_up):
                half = (start, 2, 0, linear.out_features)
                places[names[linear]] = PackedPlace(product + GATE_UP, (half,))
        else:
            each = gate_up[0].out_features // 2
            halves = ((0, 2, 0, each), (1, 2, each, 2 * each))
            places[names[gate_up[0]]] = PackedPlace(product + GATE_UP, halves)
    size = parts.head.out_features
    places[names[parts.head]] = PackedPlace(len(parts.layers) * PRODUCTS, ((0, 1, 0, size),))
    return places


class PackedAdapter:
    """An adapter in the panels of the compiled kernels."""

    def __init__(self, num_products: int, dtype: torch.dtype) -> None:
        self.products = (structs.Adapted * num_products)()
        self.width = 0
        self.num_bytes = 0
        self._dtype = dtype
        self._kept: list[torch.Tensor] = []

    def add(self, product: int, parts: Sequence[tuple[PackedPlace, LowRank]]) -> None:
        """Pack the adapter's parts of one product."""
        pair = 2 if self._dtype is torch.bfloat16 else 1
        shrinks, scales, offset, index = [], [], 0, 0
        target = self.products[product]
        for place, part in parts:
            depth = part.rank + -part.rank % pair
            shrinks.append(pad(part.shrink.to(self._dtype), (0, 0, 0, depth - part.rank)))
            scales.append(torch.full((depth,), part.scale))
            for first, step, start, end in place.slices:
                own = part.expand[start:end].to(self._dtype)
                weight = self._keep(_panels(pad(own, (0, depth - part.rank)), pair))
                count = -(-(end - start) // PANEL)
                target.parts[index] = structs.Expansion(weight, first, step, count, depth, offset)
                index += 1
            offset += depth
        shrink, scale = torch.cat(shrinks), torch.cat(scales)
        inputs = shrink.shape[1]
        depth = inputs if pair == 1 else inputs + -inputs % DEPTH_PAD
        weight = self._keep(_panels(pad(shrink, (0, depth - inputs)), pair))
        target.shrink = structs.Linear(weight, outputs=offset, inputs=inputs)
        target.scales = self._keep(pad(scale, (0, -offset % PANEL)))
        self.width = max(self.width, offset + -offset % PANEL)

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor.data_ptr()


def _panels(weight: torch.Tensor, pair: int) -> torch.Tensor:
    """Return ``weight`` [outputs, depth] in panels of 16 outputs, [panels, depth / pair, 16, pair]
    (see engine/kernels/matmul.h)."""
    weight = pad(weight, (0, 0, 0, -len(weight) % PANEL))
    return weight.view(-1, PANEL, weight.shape[1] // pair, pair).transpose(1, 2).contiguous()


class CompiledAdapters:
    """Implements `AdapterHost` for a compiled decoder."""

    def __init__(
        self,
        decoder: NativeDecoder,
        dtype: torch.dtype,
        places: Mapping[str, tuple[int, int]],
        packed: Mapping[str, PackedPlace],
        head: str,
    ) -> None:
        self.places = {name: places[name] for name in packed}
        self.head = head
        self._decoder = decoder
        self._dtype = dtype
        self._packed = packed
        self._num_products = 1 + max(place.product for place in packed.values())

    def place(self, stored: StoredAdapter) -> PackedAdapter:
        """Return the adapter in panels."""
        products: dict[int, list[tuple[PackedPlace, LowRank]]] = {}
        for name, part in stored.parts.items():
            place = self._packed[name]
            products.setdefault(place.product, []).append((place, part))
        adapter = PackedAdapter(self._num_products, self._dtype)
        for product, parts in products.items():
            adapter.add(product, parts)
        return adapter

    def forward(self, groups: Sequence[AdapterGroup], inputs: Mapping[str, Any]) -> Any:
        """Return the decoder's output."""
        return self._decoder(**inputs, **{GROUPS: groups})


# ---- stock models


class PlacedAdapter:
    """An adapter's tensors in the model's dtype, on its device."""

    def __init__(self, stored: StoredAdapter, dtype: torch.dtype, device: torch.device) -> None:
        self.parts = {
            name: (
                part.shrink.to(device, dtype, copy=True),
                part.expand.to(device, dtype, copy=True),
                part.scale,
            )
            for name, part in stored.parts.items()
        }
        pairs = [tensor for part in self.parts.values() for tensor in part[:2]]
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in pairs)
        self.width = max(len(shrink) for shrink, _, _ in self.parts.values())


@dataclass(eq=False)
class StockAdapters:
    """Implements `AdapterHost` for a stock module. The hooks that add the adapters are on its
    layers only while a step with adapters runs."""

    _module: Any
    _dtype: torch.dtype
    _device: torch.device
    places: Mapping[str, tuple[int, int]]
    head: str

    def place(self, stored: StoredAdapter) -> PlacedAdapter:
        """Return the adapter on the model's device."""
        return PlacedAdapter(stored, self._dtype, self._device)

    def forward(self, groups: Sequence[AdapterGroup], inputs: Mapping[str, Any]) -> Any:
        """Return the module's output."""
        hooks = [
            self._module.get_submodule(name).register_forward_hook(hook)
            for name, hook in self._hooks(groups, inputs)
        ]
        try:
            return self._module(**inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def _hooks(
        self, groups: Sequence[AdapterGroup], inputs: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield the hook of each layer that one of the groups changes."""
        for name in dict.fromkeys(name for group in groups for name in group.adapter.parts):
            is_head = name == self.head
            rows = len(inputs["logits_to_keep"]) if is_head else inputs["input_ids"].shape[1]
            yield name, _adding(name, groups, rows, is_head=is_head)


def _adding(name: str, groups: Sequence[AdapterGroup], rows: int, *, is_head: bool) -> Any:
    """Return a hook that adds the groups' adapters to the output of the layer ``name``, which
    computes ``rows`` rows."""
    added = [
        (group.kept_first, group.kept_count, group.adapter.parts[name])
        if is_head
        else (group.first, group.count, group.adapter.parts[name])
        for group in groups
        if name in group.adapter.parts
    ]

    def hook(_module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if args[0].shape[-2] != rows:
            raise EngineBug(f"{name} computed {args[0].shape[-2]} of {rows} rows")
        for first, count, (shrink, expand, scale) in added:
            own = args[0][..., first : first + count, :]
            output[..., first : first + count, :] += (own @ shrink.T) @ expand.T * scale

    return hook
