"""Runs a transformers model by one compiled call per step.

Rule: a step computes exactly the rows it was given. The forward keeps no state except memory that
it reuses, so that a step that failed can be repeated.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.worker.forward import kernel_structs as structs
from engine.worker.forward import native
from engine.worker.forward.attention import KEYWORD
from engine.worker.forward.image_rows import IMAGES
from engine.worker.forward.native_attention import NativeStep, native_call
from engine.worker.forward.packer import Packer, form_of, read
from engine.worker.forward.packing import SHORT_MAX
from engine.worker.forward.rewrites import ExpertParts, MlpParts
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.gguf_blocks import StoredBlocks
from engine.worker.quantized.weight import (
    release,
    weight_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.worker.forward.adapters import AdapterGroup
    from engine.worker.forward.collectives import SumCall
    from engine.worker.forward.kv_cache import KvCache, PoolSize
    from engine.worker.forward.native_attention import NativeBackend
    from engine.worker.forward.packed_cache import Layers
    from engine.worker.forward.rewrites import ConvolutionParts, DecoderParts, LayerParts

PART = 512  # Attention splits a context into parts of so many tokens (PART in paged_cache.h).
FLOAT_BYTES = 4
TASK_BYTES = 32  # The size of a DecodeTask of engine/kernels/attention.h.
GROUPS = "adapter_groups"  # The forward's keyword for its sequence of `AdapterGroup`.


@dataclass(frozen=True, slots=True)
class Output:
    """The part of a model's output that the runner reads. ``logits`` are [1, num_kept, vocab]
    float32; the next forward overwrites them."""

    logits: torch.Tensor


class NativeDecoder(torch.nn.Module):
    """A compiled causal language model with the forward call of a transformers model.

    It is made from the parts of a stock module; the module cannot be used afterwards.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        parts: DecoderParts,
        cache: KvCache,
        dtype: torch.dtype,
        layers: Layers | None = None,
        note: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()
        self._library = library
        self._rotaries = parts.rotaries
        _check_rotaries(parts)
        self._vocab = parts.head.out_features
        self._packer = packer = Packer(library, dtype, layers, note)
        self._layers = (structs.Layer * len(parts.layers))()
        self._experts: list[ctypes.Array[structs.Linear]] = []  # the layers have their addresses
        self._num_convolutions = 0
        self._states: structs.StateRows | None = None
        self._model = self._pack_ends(parts)  # first: packing the head takes the most memory
        for index, layer in enumerate(parts.layers):
            self._layers[index] = self._pack_layer(parts, layer, cache)
        packer.finish()
        self._arena = native.new_arena(library, self)
        self._logits = torch.empty(0)
        self._sum: SumCall | None = None
        self._has_logits = True
        for index, tensor in enumerate(packer.packed):
            self.register_parameter(f"w{index}", torch.nn.Parameter(tensor, requires_grad=False))
        for index, tensor in enumerate(packer.small):
            self.register_buffer(f"s{index}", tensor)

    def _pack_layer(self, parts: DecoderParts, layer: LayerParts, cache: KvCache) -> structs.Layer:
        packer = self._packer
        return structs.Layer(
            packer.linear(layer.qkv),
            packer.linear([layer.output]),
            *self._pack_mlp(layer.mlp),
            *(packer.keep(norm) for norm in layer.norms),
            packer.keep(layer.query_norm),
            packer.keep(layer.key_norm),
            int(layer.is_norm_of_heads),
            layer.query_rotary,
            layer.key_rotary,
            self._pack_experts(layer.mlp),
            self._pack_convolution(layer.convolution),
            structs.Attention()
            if layer.call is None
            else native_call(
                layer.call,
                cache,
                parts.heads,
                parts.kv_heads,
                parts.head_dim,
                packer.keep(layer.call.sinks),
            ),
        )

    def _pack_convolution(self, parts: ConvolutionParts | None) -> structs.Convolution:
        """Return a layer's short convolution, whose states' address `place_states` sets later."""
        if parts is None:
            return structs.Convolution()
        weight = self._packer.keep(parts.weight.T)
        length = parts.weight.shape[1]
        self._num_convolutions += 1
        return structs.Convolution(
            weight, self._packer.keep(parts.bias), None, length, self._num_convolutions - 1
        )

    def _pack_mlp(
        self, parts: MlpParts | ExpertParts
    ) -> tuple[structs.Linear, structs.Linear, structs.Linear]:
        """Return the gates and ups, the downs, and the shared gate of a layer's MLP, or of its
        expert that computes every row."""
        packer, gate = self._packer, structs.Linear()
        if isinstance(parts, ExpertParts):
            if parts.shared is None:
                return structs.Linear(), structs.Linear(), gate
            gate, parts = packer.linear([parts.shared_gate]), parts.shared
        return packer.linear(parts.gate_up, is_paired=True), packer.linear([parts.down]), gate

    def _pack_experts(self, parts: MlpParts | ExpertParts) -> structs.Experts:
        """Return the experts of a layer that has them.

        Raises:
            Refusal: The weights of its experts are in different forms, or it has too few.
        """
        if isinstance(parts, MlpParts):
            return structs.Experts()
        packer, array = self._packer, structs.Linear * len(parts.experts)
        gate_up = array(*(packer.linear(e.gate_up, is_paired=True) for e in parts.experts))
        down = array(*(packer.linear([e.down]) for e in parts.experts))
        for linears in (gate_up, down):
            if len({form_of(linear) for linear in linears}) > 1:
                raise Refusal("the weights of one layer's experts are in different forms")
        self._experts += gate_up, down
        if parts.stock is not None:
            for name in ("gate_up_proj", "down_proj"):
                parts.stock.register_parameter(name, None)
        router, count = packer.linear([parts.router]), len(parts.experts)
        if not 0 < parts.chosen <= count == router.outputs:
            raise Refusal(
                f"{parts.chosen} of {router.outputs} experts are to compute a token, and a layer "
                f"has {count}"
            )
        return structs.Experts(router, gate_up, down, count, parts.chosen, int(parts.is_normalised))

    def _pack_ends(self, parts: DecoderParts) -> structs.Model:
        packer = self._packer
        shared = weight_of(parts.embedding)
        is_tied = weight_of(parts.head) is shared
        plain = None if is_tied or not isinstance(shared, torch.Tensor) else shared.detach()
        hidden = parts.embedding.embedding_dim
        release(parts.embedding)
        head = packer.linear([parts.head])
        table = head
        if plain is not None:
            packer.packed.append(plain)
            table = structs.Linear(kind=packer.kind_of(plain.dtype))
        elif isinstance(shared, StoredBlocks):
            table = head if is_tied else packer.pack_blocks([shared], None)
        elif not is_tied:
            table = packer.pack(read(shared), None)
        packer.note(getattr(parts.embedding, "stored_bytes", 0))
        return structs.Model(
            self._layers,
            len(parts.layers),
            hidden,
            parts.mlp,
            self._vocab,
            parts.embedding.num_embeddings,
            parts.activation.kind,
            parts.eps,
            parts.embedding_scale,
            parts.residual_scale,
            parts.logits_scale,
            parts.logits_softcap,
            parts.activation.alpha,
            parts.activation.limit,
            int(plain is None),
            None if plain is None else plain.data_ptr(),
            table,
            packer.keep(parts.final_norm),
            head,
        )

    def place_states(self, states: Sequence[torch.Tensor]) -> None:
        """Set the state tensors of the layers with convolutions, [slots, length, hidden] each, in
        the order of the layers. The tensors must live as long as the decoder."""
        convolutions = [layer.convolution for layer in self._layers if layer.convolution.length]
        for convolution, own in zip(convolutions, states, strict=True):
            convolution.states = own.data_ptr()

    def begin_states(self, rows: structs.StateRows) -> None:
        """Set the rows of the next forward, for a model with convolutions. The arrays that ``rows``
        points to must live until that forward has ended."""
        self._states = rows

    def add_up_by(self, call: SumCall, *, has_logits: bool) -> None:
        """Make this decoder a rank's part of a divided model: from now on, ``call`` adds up each
        branch over the ranks. Without ``has_logits``, a forward computes no logits."""
        self._sum = call
        self._has_logits = has_logits
        self._model.add_up = ctypes.cast(call.function, ctypes.c_void_p)

    def forward(
        self,
        input_ids: torch.Tensor,  # [1, num_tokens] int64
        position_ids: torch.Tensor,  # [1, num_tokens] int64, or [3, 1, num_tokens] for 3D rotaries
        logits_to_keep: torch.Tensor,  # [num_kept] int64, strictly ascending
        **keywords: Any,
    ) -> Output:
        """Compute the logits of one step.

        Raises:
            MemoryError: There is no memory for the activations.
            EngineBug: An index is outside its bounds. Nothing was computed.
            Exception: A sum over the ranks raised it.
        """
        prepared = keywords[KEYWORD]
        assert isinstance(prepared, NativeStep)
        angles = [rotary(position_ids) for rotary in self._rotaries]
        half = angles[0][0].shape[-1] // 2
        # Transformers' cosines and sines have the same numbers in both halves; kernels read one.
        cosines = [cosine[0, :, :half].contiguous() for cosine, _ in angles]
        sines = [sine[0, :, :half].contiguous() for _, sine in angles]
        keep, ids = logits_to_keep.contiguous(), input_ids.contiguous()
        logits = self._room_for(len(keep) if self._has_logits else 0)
        step = structs.Step(
            prepared.rows,
            ids.data_ptr(),
            keep.data_ptr(),
            _addresses(cosines),
            _addresses(sines),
            2 * half,
            len(keep),
            torch.get_num_threads(),
            logits.data_ptr() if self._has_logits else None,
        )
        images = keywords.get(IMAGES)
        if images is not None:
            step.image_tokens = images.tokens.data_ptr()
            step.image_rows = images.rows.data_ptr()
            step.num_image_tokens, step.num_deep = len(images.tokens), len(images.rows) - 1
        if self._num_convolutions:
            assert self._states is not None, "a forward without states"
            step.states, self._states = self._states, None
        groups = keywords.get(GROUPS, ())
        if groups:
            own = _groups_of(groups)
            step.groups, step.num_groups = ctypes.addressof(own), len(own)
            step.shrunk_width = max(group.adapter.width for group in groups)
        status = self._library.triolet_step(
            self._packer.kind, ctypes.byref(self._model), ctypes.byref(step), self._arena
        )
        if self._sum is not None:
            self._sum.raise_error()
        native.check(status, "a step")
        return Output(logits[None])

    def activation_bytes(
        self, num_tokens: int, num_kept: int, num_rows: int, pool: PoolSize
    ) -> int:
        """Return an upper bound of the bytes for the activations of a step of ``num_rows`` rows,
        which share no blocks. ``num_kept`` of its ``num_tokens`` tokens have logits."""
        count = min(num_tokens, pool.max_model_len)
        starts = np.array([pool.max_model_len - count, pool.max_model_len, 0], np.int64)
        offsets = np.array([0, count], np.int64)
        rows = structs.Rows(
            starts.ctypes.data,
            starts[1:].ctypes.data,
            offsets.ctypes.data,
            None,
            None,
            None,
            1,
            0,
            pool.block_size,
            num_tokens,
            pool.num_blocks,
        )
        step = structs.Step(rows=rows, num_kept=num_kept, num_threads=torch.get_num_threads())
        chunks = self._library.triolet_step_bytes(
            self._packer.kind, ctypes.byref(self._model), ctypes.byref(step)
        )
        attention = next(layer.attention for layer in self._layers if not layer.convolution.length)
        # Each token of a short row reads its whole context in parts; the last part may not be full.
        num_short = min(num_tokens, SHORT_MAX * num_rows)
        each = -(-pool.max_model_len // PART)
        fitting = SHORT_MAX * (pool.num_blocks * pool.block_size // PART) + num_short
        parts = min(num_short * each, fitting)
        sums = attention.heads * (attention.width + 2) * FLOAT_BYTES if each > 1 else 0
        return chunks + parts * (sums + TASK_BYTES)

    def _room_for(self, rows: int) -> torch.Tensor:
        """Return a tensor [rows, vocab] float32 for logits, in memory that steps reuse: getting new
        pages from the system takes milliseconds."""
        if self._logits.shape[0] < rows:
            self._logits = torch.empty((rows, self._vocab), dtype=torch.float32)
        return self._logits[:rows]


def _check_rotaries(parts: DecoderParts) -> None:
    """Check that all rotary embeddings rotate the same number of a head's numbers.

    Raises:
        Refusal: Their widths differ, or one is wider than a head.
    """
    position = torch.zeros((1, 1), dtype=torch.int64)
    widths = {angle.shape[-1] for rotary in parts.rotaries for angle in rotary(position)}
    if len(widths) > 1 or max(widths) > parts.head_dim:
        listed = ", ".join(map(str, sorted(widths)))
        raise Refusal(f"its rotary embeddings turn {listed} numbers of heads of {parts.head_dim}")


class PackedLinear(torch.nn.Module):
    """A `torch.nn.Linear` computed by the compiled kernels. It takes the stock layer's weight."""

    def __init__(
        self,
        stock: torch.nn.Linear,
        backend: NativeBackend,
        dtype: torch.dtype,
        note: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()
        self._backend = backend
        self._packer = packer = Packer(backend.library, dtype, note=note)
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
        native.check(status, "a linear layer")
        return out


def pack_linears(
    module: torch.nn.Module,
    backend: NativeBackend,
    dtype: torch.dtype,
    note: Callable[[int], None] | None = None,
) -> torch.nn.Module:
    """Pack the linear layers of ``module`` one after another and return it. ``note`` gets the bytes
    of each weight that was still in its file. A layer that shares its
    weight with another part (a tied head) is not packed: its weight would be stored twice."""
    seen: dict[int, int] = {}
    for submodule in module.modules():
        for parameter in submodule.parameters(recurse=False):
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            is_deferred = child.__dict__.get("stored") is not None
            if type(child) is torch.nn.Linear and (is_deferred or seen[id(child.weight)] == 1):
                setattr(owner, name, PackedLinear(child, backend, dtype, note))
    return module


def _groups_of(groups: Sequence[AdapterGroup]) -> Any:
    return (structs.Group * len(groups))(
        *(
            structs.Group(
                group.first,
                group.count,
                group.kept_first,
                group.kept_count,
                ctypes.addressof(group.adapter.products),
            )
            for group in groups
        )
    )


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
