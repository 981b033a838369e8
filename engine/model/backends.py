"""Which way a model is run: compiled as a whole, stock with a kernel's attention, or all stock.

Rule 1: what is chosen follows from device, dtype and the model's layers alone, and is logged once
with its reason. Rule 2: whichever it is, the runner's one call is the same.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.core.plan import SCORED_TOKENS_MAX
from engine.model import native, varlen_attention
from engine.model.decoder import NativeDecoder, pack_linears
from engine.model.native_attention import NativeBackend
from engine.model.reference import ReferenceBackend
from engine.model.refusal import Refusal
from engine.model.rewrites import WIDTH_MOST, WIDTH_STEP, NotRewritten, take_apart
from engine.model.varlen_attention import VarlenBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from engine.core.plan import RunnerSpec
    from engine.model.architectures import LayerShape
    from engine.model.attention import AttentionBackend, AttentionCall
    from engine.model.kv_cache import KvCache, PoolSize
    from engine.model.loader import LoadedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Execution:
    """How a model is run, and why: one sentence for the log and for people."""

    model: LoadedModel
    backend: AttentionBackend
    reason: str

    def activation_bytes(self, spec: RunnerSpec, pool: PoolSize) -> int | None:
        """What the largest step takes beside logits; None where it is not known."""
        if not isinstance(self.model.module, NativeDecoder):
            return None
        kept = spec.max_num_seqs + SCORED_TOKENS_MAX
        return self.model.module.activation_bytes(spec.max_num_batched_tokens, kept, pool)


def pick_backend(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[LayerShape],
    calls: Sequence[AttentionCall],
) -> tuple[AttentionBackend, str]:
    """The fastest attention that serves this device, dtype and these layers, and why not a
    faster one ("" where there is none)."""
    if device.type == "cuda":
        why = varlen_attention.objection(device, dtype, shapes, calls)
        if why:
            return ReferenceBackend(), why
        return VarlenBackend(), "there is no compiled decoder for cuda"
    if device.type != "cpu":
        return ReferenceBackend(), f"there is no kernel for {device.type}"
    if dtype not in native.KINDS:
        return ReferenceBackend(), f"the kernels do not compute in {dtype}"
    widths = sorted({shape.head_dim for shape in shapes})
    if any(width % WIDTH_STEP or width > WIDTH_MOST for width in widths):
        return ReferenceBackend(), (
            f"its heads are {widths[-1]} wide, and the kernels need a multiple of {WIDTH_STEP} up "
            f"to {WIDTH_MOST}"
        )
    try:
        return NativeBackend(native.load()), ""
    except native.Unavailable as error:
        return ReferenceBackend(), str(error)


def prepare(
    model: LoadedModel,
    backend: AttentionBackend,
    reason: str,
    calls: Sequence[AttentionCall],
    cache: KvCache,
    *,
    quantization: str = "none",
) -> Execution:
    """The model as it will be run over ``cache``. The stock module is spent where it is compiled.

    Raises:
        Refusal: ``quantization`` is asked for and cannot be had here.
    """
    name = model.architecture.name
    is_int8 = quantization == "int8"
    if not isinstance(backend, NativeBackend):
        if is_int8:
            raise Refusal(f"int8 weights need the compiled kernels, and {reason}")
        what = "CUDA's variable-length" if isinstance(backend, VarlenBackend) else "reference"
        return _told(Execution(model, backend, f"{name} runs stock with {what} attention"
                               f"{f': {reason}' if reason else ''}"))  # fmt: skip
    library = backend.library
    kind = native.kind(library)
    try:
        parts = take_apart(model.module, calls)
    except NotRewritten as error:
        if is_int8:
            raise Refusal(f"int8 weights need the compiled decoder, and {error}") from error
        module = pack_linears(model.module, backend, model.dtype)
        return _told(Execution(_with(model, module), backend, f"{name} runs stock with compiled "
                               f"attention and products ({kind}): {error}"))  # fmt: skip
    module = NativeDecoder(library, parts, cache, model.dtype, is_int8=is_int8)
    what = "int8 weights" if is_int8 else str(model.dtype).removeprefix("torch.")
    return _told(Execution(_with(model, module), backend,
                           f"{name} runs compiled ({kind}, {what})"))  # fmt: skip


def _with(model: LoadedModel, module: torch.nn.Module) -> LoadedModel:
    num_bytes = sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*module.parameters(), *module.buffers())
    )
    return replace(model, module=module, num_bytes=num_bytes)


def _told(execution: Execution) -> Execution:
    log.info("%s", execution.reason)
    return execution
