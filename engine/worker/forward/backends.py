"""Chooses how a model runs: compiled, stock with a kernel's attention, or entirely stock.

Rule 1: the choice depends only on the device, the dtype and the model's layers. The choice is
logged once with its reason. Rule 2: a runner calls all three ways of running alike.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.core.text.plan import DRAFTING_STEP_MAX, SCORED_TOKENS_MAX
from engine.worker.forward import kernel_structs as structs
from engine.worker.forward import native
from engine.worker.forward.adapters import (
    CompiledAdapters,
    StockAdapters,
    head_name,
    linear_places,
    packed_places,
)
from engine.worker.forward.attention import AttentionCall
from engine.worker.forward.decoder import NativeDecoder, pack_linears
from engine.worker.forward.native_attention import NativeBackend
from engine.worker.forward.reference_attention import ReferenceBackend
from engine.worker.forward.rewrites import WIDTH_MOST, WIDTH_STEP, NotRewritten, take_apart
from engine.worker.load.architectures import NO_KEYS
from engine.worker.load.loader import build_empty
from engine.worker.load.refusal import Refusal
from engine.worker.quantized.weight import expand_deferred
from engine.worker.skeleton.config import SkeletonConfig
from engine.worker.skeleton.families import LISTED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from engine.worker.forward.adapters import AdapterHost
    from engine.worker.forward.attention import AttentionBackend
    from engine.worker.forward.kv_cache import KvCache, PoolSize
    from engine.worker.forward.packed_cache import Layers
    from engine.worker.interface import RunnerSpec
    from engine.worker.load.architectures import Architecture, LayerShape
    from engine.worker.load.loader import LoadedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Execution:
    """A model, its attention backend, and the host of its adapters. ``reason`` is one sentence for
    the log and for users."""

    model: LoadedModel
    backend: AttentionBackend
    reason: str
    adapters: AdapterHost

    def activation_bytes(self, spec: RunnerSpec, pool: PoolSize) -> int | None:
        """Return the bytes of the largest step's activations without logits; None: unknown."""
        if not isinstance(self.model.module, NativeDecoder):
            return None
        kept = max(spec.max_num_seqs, DRAFTING_STEP_MAX) + SCORED_TOKENS_MAX
        return self.model.module.activation_bytes(
            spec.max_num_batched_tokens, kept, spec.max_num_seqs, pool
        )


def pick_backend(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[LayerShape],
    calls: Sequence[AttentionCall],
) -> tuple[AttentionBackend, str]:
    """Return the fastest attention that supports the device, the dtype and the layers, and the
    reason why no faster one does ("": there is no faster one)."""
    if device.type == "cuda":
        # Imported late: it imports torch's compiler, which takes longer than the rest of torch.
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
    if dtype not in structs.KINDS:
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


def objection_to_decoder(
    architecture: Architecture,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[LayerShape],
) -> str:
    """Return why a model does not run as one compiled decoder here; empty if it does. No weights
    are read: transformers' module, if the config needs it, is taken apart on the meta device.

    Raises:
        Refusal: The config does not describe such a model.
    """
    if architecture.name not in LISTED:
        return f"{architecture.name} has no compiled form"
    if why := objection_to_kernels(device, dtype, shapes):
        return why
    if isinstance(config, SkeletonConfig):
        return ""
    calls = [AttentionCall(layer, 1.0) for layer, own in enumerate(shapes) if own != NO_KEYS]
    try:
        take_apart(build_empty(architecture, config), calls)
    except NotRewritten as error:
        return str(error)
    return ""


def how_it_runs(
    objection: str, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape]
) -> str:
    """Return in words how a model will run; ``objection`` is that to the compiled decoder."""
    if not objection:
        return f"compiled ({native.kind(native.load())})"
    has_kernels = not objection_to_kernels(device, dtype, shapes)
    attention = " with compiled attention and products" if has_kernels else ""
    return f"transformers' modules{attention}: {objection}"


def prepare(
    model: LoadedModel,
    backend: AttentionBackend,
    reason: str,
    calls: Sequence[AttentionCall],
    cache: KvCache,
    *,
    quantization: str = "none",
    objection: str = "",
    recurrent: str = "",
    layers: Layers | None = None,
    note: Callable[[int], None] | None = None,
) -> Execution:
    """Prepare the model to run over ``cache``. A stock module that is compiled cannot be used
    afterwards. ``objection`` says why the model cannot run compiled as a whole; empty if it can.
    ``recurrent`` is the class of its recurrent layers, which adapters cannot change if stock.
    ``layers`` packs the layers of a compiled model that are in blocks, and ``note`` gets the bytes
    of each weight in a file that is packed.

    Raises:
        Refusal: weights with ``quantization`` need compiled kernels and a compiled decoder,
            and one of them is lacking.
    """
    name = model.architecture.name
    places, head = linear_places(model.module, recurrent), head_name(model.module)
    is_rounded = quantization != "none"
    if not isinstance(backend, NativeBackend):
        if is_rounded:
            raise Refusal(f"{quantization} weights need the compiled kernels, and {reason}")
        model = _expanded(model)
        why = f"{name} runs stock with {backend.label} attention{f': {reason}' if reason else ''}"
        stock = StockAdapters(model.module, model.dtype, model.device, places, head)
        return _logged(Execution(_with(model, model.module), backend, why, stock))
    library = backend.library
    kind = native.kind(library)
    try:
        if objection:
            raise NotRewritten(objection)
        parts = take_apart(model.module, calls)
    except NotRewritten as error:
        if is_rounded:
            why = f"{quantization} weights need the compiled decoder, and {error}"
            raise Refusal(why) from error
        model = _expanded(model)
        module = pack_linears(model.module, backend, model.dtype, note)
        what = f", {model.quantization} weights" if model.is_narrow else ""
        why = f"{name} runs stock with compiled attention and products ({kind}{what}): {error}"
        stock = StockAdapters(module, model.dtype, model.device, places, head)
        return _logged(Execution(_with(model, module), backend, why, stock))
    packed = packed_places(parts, model.module)
    places = linear_places(model.module)
    module = NativeDecoder(library, parts, cache, model.dtype, layers, note)
    what = str(model.dtype).removeprefix("torch.")
    if model.is_narrow:
        what += f", {model.quantization} weights"
    elif model.quantization:
        what = f"{model.quantization} weights by {native.integer_kind(library)}"
    compiled = CompiledAdapters(module, model.dtype, places, packed, head)
    why = f"{name} runs compiled ({kind}, {what})"
    if objection_to_skeleton := getattr(model.config, "objection_to_skeleton", ""):
        why += f", of transformers' module, because of its config.json: {objection_to_skeleton}"
    return _logged(Execution(_with(model, module), backend, why, compiled))


def _expanded(model: LoadedModel) -> LoadedModel:
    """Return ``model`` with its weights of 8 bits or fewer in its dtype."""
    expand_deferred(model.module, model.dtype, model.device)
    if model.is_narrow:
        return model
    form = model.quantization.removesuffix(" (experts expanded)")
    return replace(model, quantization=f"{form} (expanded)" if form else "")


def _with(model: LoadedModel, module: torch.nn.Module) -> LoadedModel:
    """Return ``model`` with another module, and ``num_bytes`` of that module."""
    num_bytes = sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*module.parameters(), *module.buffers())
    )
    return replace(model, module=module, num_bytes=num_bytes)


def _logged(execution: Execution) -> Execution:
    log.info("%s", execution.reason)
    return execution
