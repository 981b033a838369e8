"""Chooses how a model runs: compiled, stock with a kernel's attention, or entirely stock.

Rule 1: the choice depends only on the device, the dtype and the model's layers. It is logged once
with its reason. Rule 2: the runner's call is the same for all of them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.core.text.plan import SCORED_TOKENS_MAX
from engine.worker.forward import native
from engine.worker.forward.decoder import NativeDecoder, pack_linears
from engine.worker.forward.native_attention import NativeBackend
from engine.worker.forward.reference_attention import ReferenceBackend
from engine.worker.forward.rewrites import WIDTH_MOST, WIDTH_STEP, NotRewritten, take_apart
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from engine.worker.forward.attention import AttentionBackend, AttentionCall
    from engine.worker.forward.kv_cache import KvCache, PoolSize
    from engine.worker.interface import RunnerSpec
    from engine.worker.load.architectures import LayerShape
    from engine.worker.load.loader import LoadedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Execution:
    """A model and its attention backend. ``reason`` is one sentence for the log and for users."""

    model: LoadedModel
    backend: AttentionBackend
    reason: str

    def activation_bytes(self, spec: RunnerSpec, pool: PoolSize) -> int | None:
        """Return the bytes of the largest step's activations without logits, or None if they are
        unknown."""
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
    """Return the fastest attention that supports the device, the dtype and the layers, and the
    reason why no faster one does ("": there is no faster one)."""
    if device.type == "cuda":
        # It imports torch's compiler, which takes longer than the rest of torch.
        from engine.worker.forward import varlen_attention

        why = varlen_attention.objection(device, dtype, shapes, calls)
        if why:
            return ReferenceBackend(), why
        return varlen_attention.VarlenBackend(), "there is no compiled decoder for cuda"
    why = objection_to_kernels(device, dtype, shapes)
    return (ReferenceBackend(), why) if why else (NativeBackend(native.load()), "")


def objection_to_kernels(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape]
) -> str:
    """Return why the compiled kernels cannot run layers of these shapes; empty if they can. The
    kernels are compiled by the first call that needs them."""
    if device.type != "cpu":
        return f"there is no kernel for {device.type}"
    if dtype not in native.KINDS:
        return f"the kernels do not compute in {dtype}"
    widths = sorted({shape.head_dim for shape in shapes})
    if any(width % WIDTH_STEP or width > WIDTH_MOST for width in widths):
        return (
            f"its heads are {widths[-1]} wide, and the kernels need a multiple of {WIDTH_STEP} up "
            f"to {WIDTH_MOST}"
        )
    try:
        native.load()
    except native.Unavailable as error:
        return str(error)
    return ""


def prepare(
    model: LoadedModel,
    backend: AttentionBackend,
    reason: str,
    calls: Sequence[AttentionCall],
    cache: KvCache,
    *,
    quantization: str = "none",
) -> Execution:
    """Prepare the model to run over ``cache``. A stock module that is compiled cannot be used
    afterwards.

    Raises:
        Refusal: ``quantization`` is not supported here.
    """
    name = model.architecture.name
    is_int8 = quantization == "int8"
    if not isinstance(backend, NativeBackend):
        if is_int8:
            raise Refusal(f"int8 weights need the compiled kernels, and {reason}")
        return _logged(Execution(model, backend, f"{name} runs stock with {backend.label} attention"
                               f"{f': {reason}' if reason else ''}"))  # fmt: skip
    library = backend.library
    kind = native.kind(library)
    try:
        parts = take_apart(model.module, calls)
    except NotRewritten as error:
        if is_int8:
            raise Refusal(f"int8 weights need the compiled decoder, and {error}") from error
        module = pack_linears(model.module, backend, model.dtype)
        return _logged(Execution(_with(model, module), backend, f"{name} runs stock with compiled "
                               f"attention and products ({kind}): {error}"))  # fmt: skip
    module = NativeDecoder(library, parts, cache, model.dtype, is_int8=is_int8)
    what = "int8 weights" if is_int8 else str(model.dtype).removeprefix("torch.")
    return _logged(Execution(_with(model, module), backend,
                           f"{name} runs compiled ({kind}, {what})"))  # fmt: skip


def _with(model: LoadedModel, module: torch.nn.Module) -> LoadedModel:
    """Return ``model`` with another module and its size."""
    num_bytes = sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*module.parameters(), *module.buffers())
    )
    return replace(model, module=module, num_bytes=num_bytes)


def _logged(execution: Execution) -> Execution:
    log.info("%s", execution.reason)
    return execution
