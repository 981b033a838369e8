"""Runs a transformers model by one compiled call per step.

Rule 1: every weight is stored once. Packing replaces a stock layer's tensors one by one and frees
each before the next is packed, so that at its peak a load holds only one weight twice. Rule 2: a
step computes exactly the rows it was given. The forward keeps no state except memory that it
reuses, so that a step that failed can be repeated.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import pad

from engine.worker.forward import native
from engine.worker.forward.attention import KEYWORD
from engine.worker.forward.native_attention import NativeStep, native_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.worker.forward.kv_cache import KvCache, PoolSize
    from engine.worker.forward.native_attention import NativeBackend
    from engine.worker.forward.rewrites import DecoderParts, LayerParts

PANEL = 16  # PANEL in engine/kernels/matmul.h
PART = 512  # PART in engine/kernels/paged_cache.h: a longer context is computed in such parts
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Output:
    """The part of a model's output that the runner reads. ``logits`` are [1, num_kept, vocab]
    float32; the next forward overwrites them."""

    logits: torch.Tensor


class Packer:
    """Packs weights for one library and dtype, and keeps the packed tensors alive."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, *, is_int8: bool = False) -> None:
        self.library = library
        self.dtype = dtype
        self.kind = native.KINDS[dtype]
        self.is_int8 = is_int8
        self.packed: list[torch.Tensor] = []  # weights, in the model's dtype or int8
        self.small: list[torch.Tensor] = []  # norms, biases and scales, float32

    def linear(
        self, layers: Sequence[torch.nn.Linear], *, is_paired: bool = False
    ) -> native.Linear:
        """Pack ``layers`` into one and free their own tensors. Their outputs follow one another;
        if ``is_paired``, the panels of gates and ups alternate."""
        bias = self._joined_bias(layers, is_paired)
        weights = [layer.weight.detach() for layer in layers]
        for layer in layers:
            layer.register_parameter("weight", None)
            layer.register_parameter("bias", None)
        if is_paired:
            halves = weights[0].chunk(2) if len(weights) == 1 else weights
            weights = [_whole_panels(half) for half in halves]
            del halves
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        del weights
        return self.pack(weight, bias, pair=2 if is_paired else 0)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None, pair: int = 0) -> native.Linear:
        """Pack ``weight`` [outputs, inputs] into panels. ``pair`` is 2 for gates and ups, else
        0."""
        outputs, inputs = weight.shape
        scale = None
        if self.is_int8:
            weight, scales = quantise(weight)
            scale = self.keep(
                _alternate_panels(*scales.chunk(2)) if pair else _whole_panels(scales)
            )
        elif weight.dtype != self.dtype:
            weight = weight.to(self.dtype)
        weight = weight.contiguous()
        count = self.library.triolet_packed_numbers(self.kind, outputs, inputs)
        panels = torch.empty(count, dtype=weight.dtype)
        self.library.triolet_pack(
            self.kind, self.is_int8, weight.data_ptr(), outputs, inputs, pair, panels.data_ptr()
        )
        self.packed.append(panels)
        kept = None if bias is None else self.keep(_whole_panels(bias.to(torch.float32)))
        return native.Linear(panels.data_ptr(), scale, kept, outputs, inputs)

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


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 numbers [outputs, inputs] and float32 scales [outputs]. The largest weight of
    each output becomes 127; the others are rounded to nearest."""
    wide = weight.to(torch.float32)
    scales = wide.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny) / 127.0
    return (wide / scales[:, None]).round_().to(torch.int8), scales


def _alternate_panels(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return one number per output of gates and ups, in the order of their packed panels."""
    pairs = torch.stack((_whole_panels(gate), _whole_panels(up)))
    return pairs.view(2, -1, PANEL).transpose(0, 1).reshape(-1)


def _whole_panels(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` padded with zeros to a multiple of PANEL along its first dimension."""
    missing = -len(tensor) % PANEL
    if not missing:
        return tensor
    return pad(tensor, (0,) * (2 * tensor.dim() - 1) + (missing,))


class NativeDecoder(torch.nn.Module):
    """A compiled causal language model with the forward call of a transformers model.

    It is made from the parts of a stock module, which cannot be used afterwards.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        parts: DecoderParts,
        cache: KvCache,
        dtype: torch.dtype,
        *,
        is_int8: bool = False,
    ) -> None:
        super().__init__()
        self._library = library
        self._rotaries = parts.rotaries
        self._vocab = parts.head.out_features
        self._packer = packer = Packer(library, dtype, is_int8=is_int8)
        self._layers = (native.Layer * len(parts.layers))(
            *(self._pack_layer(parts, layer, cache) for layer in parts.layers)
        )
        self._model = self._pack_ends(parts)
        self._arena = native.new_arena(library, self)
        self._logits = torch.empty(0)
        for index, tensor in enumerate(packer.packed):
            self.register_parameter(f"w{index}", torch.nn.Parameter(tensor, requires_grad=False))
        for index, tensor in enumerate(packer.small):
            self.register_buffer(f"s{index}", tensor)

    def _pack_layer(self, parts: DecoderParts, layer: LayerParts, cache: KvCache) -> native.Layer:
        packer = self._packer
        return native.Layer(
            packer.linear(layer.qkv),
            packer.linear([layer.output]),
            packer.linear(layer.gate_up, is_paired=True),
            packer.linear([layer.down]),
            *(packer.keep(norm) for norm in layer.norms),
            packer.keep(layer.query_norm),
            packer.keep(layer.key_norm),
            int(layer.is_norm_of_heads),
            layer.rotary,
            native_call(layer.call, cache, parts.heads, parts.kv_heads, parts.head_dim),
        )

    def _pack_ends(self, parts: DecoderParts) -> native.Model:
        packer = self._packer
        is_tied = parts.head.weight is parts.embedding.weight
        hidden = parts.embedding.embedding_dim
        table = None if is_tied else parts.embedding.weight.detach()
        parts.embedding.register_parameter("weight", None)
        head = packer.linear([parts.head])
        if table is not None:
            packer.packed.append(table)
        return native.Model(
            self._layers,
            len(parts.layers),
            hidden,
            parts.mlp,
            self._vocab,
            parts.activation,
            parts.eps,
            parts.embedding_scale,
            parts.residual_scale,
            parts.logits_scale,
            parts.logits_softcap,
            int(is_tied),
            head.weight if table is None else table.data_ptr(),
            packer.keep(parts.final_norm),
            head,
        )

    def forward(
        self,
        input_ids: torch.Tensor,  # [1, num_tokens] int64
        position_ids: torch.Tensor,  # [1, num_tokens] int64
        logits_to_keep: torch.Tensor,  # [num_kept] int64, strictly ascending
        **keywords: Any,
    ) -> Output:
        """Compute the logits of one step.

        Raises:
            MemoryError: There is no memory for the activations. Nothing was computed.
        """
        prepared = keywords[KEYWORD]
        assert isinstance(prepared, NativeStep)
        angles = [rotary(position_ids) for rotary in self._rotaries]
        half = angles[0][0].shape[-1] // 2
        # Both halves of transformers' cosines and sines are the same.
        cosines = [cosine[0, :, :half].contiguous() for cosine, _ in angles]
        sines = [sine[0, :, :half].contiguous() for _, sine in angles]
        keep, ids = logits_to_keep.contiguous(), input_ids.contiguous()
        logits = self._room_for(len(keep))
        step = native.Step(
            prepared.rows,
            ids.data_ptr(),
            keep.data_ptr(),
            _addresses(cosines),
            _addresses(sines),
            2 * half,
            len(keep),
            torch.get_num_threads(),
            logits.data_ptr(),
        )
        status = self._library.triolet_step(
            self._packer.kind, ctypes.byref(self._model), ctypes.byref(step), self._arena
        )
        if status:
            raise MemoryError("no memory for a step's activations")
        return Output(logits[None])

    def activation_bytes(self, num_tokens: int, num_kept: int, pool: PoolSize) -> int:
        """Return an upper bound of the memory for the activations of a step, in bytes.
        ``num_kept`` of its ``num_tokens`` tokens have logits."""
        count = min(num_tokens, pool.max_model_len)
        starts = np.array([pool.max_model_len - count, pool.max_model_len, 0], np.int64)
        offsets = np.array([0, count], np.int64)
        rows = native.Rows(
            starts.ctypes.data,
            starts[1:].ctypes.data,
            offsets.ctypes.data,
            None,
            None,
            1,
            0,
            pool.block_size,
            num_tokens,
        )
        step = native.Step(rows=rows, num_kept=num_kept, num_threads=torch.get_num_threads())
        chunks = self._library.triolet_step_bytes(
            self._packer.kind, ctypes.byref(self._model), ctypes.byref(step)
        )
        attention = self._layers[0].attention
        parts = pool.num_blocks * pool.block_size // PART + num_kept
        return chunks + parts * attention.heads * (attention.width + 2) * FLOAT_BYTES

    def _room_for(self, rows: int) -> torch.Tensor:
        """Return [rows, vocab] float32 in memory that is reused: fresh pages would cost a step
        milliseconds."""
        if self._logits.shape[0] < rows:
            self._logits = torch.empty((rows, self._vocab), dtype=torch.float32)
        return self._logits[:rows]


class PackedLinear(torch.nn.Module):
    """A `torch.nn.Linear` computed by the compiled kernels. It takes the stock layer's weight."""

    def __init__(self, stock: torch.nn.Linear, backend: NativeBackend, dtype: torch.dtype) -> None:
        super().__init__()
        self._backend = backend
        self._packer = packer = Packer(backend.library, dtype)
        self._linear = packer.linear([stock])
        self._outputs = stock.out_features
        self.packed = torch.nn.Parameter(packer.packed[0], requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., inputs] to [..., outputs], as the stock layer does.

        Raises:
            MemoryError: There is no scratch memory.
        """
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self._outputs), dtype=x.dtype)
        status = self._backend.library.triolet_linear(
            self._packer.kind,
            ctypes.byref(self._linear),
            x.data_ptr(),
            x.numel() // x.shape[-1],
            out.data_ptr(),
            torch.get_num_threads(),
            self._backend.arena,
        )
        if status:
            raise MemoryError("no memory for a linear layer")
        return out


def pack_linears(
    module: torch.nn.Module, backend: NativeBackend, dtype: torch.dtype
) -> torch.nn.Module:
    """Pack the linear layers of ``module`` one after another and return it. A layer that shares
    its weight with another part (a tied head) is not packed, because its weight would then be
    stored twice."""
    seen: dict[int, int] = {}
    for one in module.modules():
        for parameter in one.parameters(recurse=False):
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is torch.nn.Linear and seen[id(child.weight)] == 1:
                setattr(owner, name, PackedLinear(child, backend, dtype))
    return module


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
