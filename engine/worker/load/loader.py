"""Builds a model from a directory and gives it the checkpoint's weights.

Rule 1: a parameter that the checkpoint lacks, or a tensor that the model does not use, is a
`Refusal`. No parameter is ever initialised at random, and no tensor is dropped silently. Rule 2: no
global state changes (default dtype, init functions, progress bars), because other models run and
load in other threads. This is why `from_pretrained` is not used.

The model is transformers' module, or, if it will run compiled, a skeleton with the same parameters
(`engine.worker.skeleton`). Importing transformers takes several times as long as torch, so it is
imported only for its modules. Modules and skeletons are built on torch's meta device, which
allocates no memory. Then the weights are assigned one by one. Buffers such as rotary frequencies
are computed by the model's own `_init_weights`, as in `from_pretrained`.
"""

from __future__ import annotations

import importlib
import re
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from engine.worker.forward import attention
from engine.worker.import_lock import holds_import_lock
from engine.worker.interface import LoadProgress
from engine.worker.load.architectures import find
from engine.worker.load.checkpoint import FLOAT_SIZES, is_finite
from engine.worker.load.joined_experts import is_joined, joining_of
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import read_json
from engine.worker.quantized.weight import (
    ENDS,
    GROUP,
    ROUNDED,
    Form,
    NarrowLater,
    RoundedLater,
    defer,
)
from engine.worker.skeleton.config import SkeletonConfig, Unusual, read_skeleton
from engine.worker.skeleton.division_plans import is_one_expert
from engine.worker.skeleton.modules import Skeleton

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from engine.worker.load.architectures import Architecture
    from engine.worker.load.checkpoint import Checkpoint, StoredTensor
    from engine.worker.load.joined_experts import Joining
    from engine.worker.load.vision_architectures import VisionArchitecture
    from engine.worker.quantized.weight import QuantizedWeight

# Fields of a config that are not read: those that name code or files to load, and the form of the
# weights, which is for `engine.worker.quantized.packed_checkpoint`.
NOT_READ = {
    *("auto_map", "fusion_config", "transformers_weights", "kernel_config"),
    "quantization_config",
}
HEAD = "lm_head.weight"
NARROW = ("bfloat16", "float16")
GROUPED_BYTES = 16  # torch.nn.functional.grouped_mm takes rows of a multiple of so many bytes
# Tensors that current models do not read: rotary frequencies and causal masks of old checkpoints,
# and layers that only draft. Source: `_keys_to_ignore_on_load_unexpected` in transformers.
UNREAD = re.compile(r"^mtp\.|(rotary_emb\.inv_freq|\.(attn|attention)\.(bias|masked_bias))$")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run: in eval mode, without gradients, with paged attention."""

    module: Any  # transformers' PreTrainedModel, a Skeleton, or a compiled decoder
    config: Any  # transformers' PreTrainedConfig, or a SkeletonConfig
    architecture: Architecture
    dtype: torch.dtype
    device: torch.device
    num_bytes: int
    quantization: str = ""  # the form of the linear layers' weights; "": floats of the dtype

    @property
    def is_narrow(self) -> bool:
        """Whether the weights are floats of 16 bits, and the dtype is float32."""
        return self.quantization in NARROW


def read_config(directory: Path, *, is_stock: bool = False) -> tuple[Architecture, Any]:
    """Return the architecture and the config of a model's directory: a `SkeletonConfig` if
    possible, else transformers' config object, whose ``objection_to_skeleton`` says why. With
    ``is_stock`` it is always transformers'.

    Raises:
        Refusal: The file is missing or broken, or the architecture is not served.
    """
    raw = read_json(directory, "config.json")
    architecture = find(raw)
    why = ""
    if not is_stock:
        try:
            return architecture, read_skeleton(_plain(raw), architecture.name)
        except Unusual as unusual:
            why = str(unusual)
    config = stock_config(raw, architecture)
    config.objection_to_skeleton = why
    return architecture, config


def _plain(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in NOT_READ}


@holds_import_lock
def stock_config(raw: dict[str, Any], architecture: Architecture | VisionArchitecture) -> Any:
    """Return transformers' config object of a parsed config.json.

    Raises:
        Refusal: The config is not valid for the architecture.
    """
    config_class = stock_class(architecture.module, "configuration", architecture.config)
    with refusing(f"its config.json is not valid for {architecture.name}"):
        fields = config_class._decode_special_floats(_plain(raw))  # infinity, NaN
        return config_class.from_dict(fields)


def stock_class(module: str, kind: str, name: str) -> Any:
    """Return a class of transformers, from the file of this ``kind`` of a model's ``module``."""
    return getattr(importlib.import_module(f"transformers.models.{module}.{kind}_{module}"), name)


@contextmanager
def refusing(sentence: str) -> Iterator[None]:
    """Turn any error of a library into a `Refusal` with this sentence and the error's last line,
    which says which field is wrong. The validators of configs raise several kinds."""
    try:
        yield
    except Exception as error:
        raise Refusal(f"{sentence} ({first_line(error)})", detail=str(error)) from error


def weight_bytes(
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    quantization: str,
    *,
    is_compiled: bool = True,
    narrow: Collection[str] = (),
) -> int:
    """Return the memory for a checkpoint's weights by the headers, without padding. Weights of 16
    bits stay so in a skeleton that is compiled, and those named in ``narrow``. Weights of 8 or 4
    bits are expanded in a model that does not run compiled, and in the joined experts of a stock
    module. A head that the config ties counts once, because such a copy is the embedding's in all
    but damaged files."""
    is_skeleton = isinstance(config, SkeletonConfig)
    total = 0
    for tensor in checkpoint.tensors.values():
        if UNREAD.search(tensor.name) or _is_tied_copy(tensor, checkpoint, config):
            continue
        is_kept = is_compiled and (is_skeleton or not is_one_expert(tensor.name))
        form = checkpoint.form(tensor.name) if is_kept else None
        if form is None and quantization != "none" and len(tensor.shape) == 2:
            is_end = tensor.shape[0] == config.vocab_size
            form = Form((ENDS if is_end else ROUNDED)[quantization], GROUP)
        may_stay = (is_compiled and is_skeleton) or tensor.name in narrow
        is_narrow = may_stay and stays_narrow(tensor, dtype)
        size = torch.float16.itemsize if is_narrow else dtype.itemsize
        total += form.num_bytes(tensor.shape) if form else prod(tensor.shape) * size
    return total


def stays_narrow(tensor: StoredTensor, dtype: torch.dtype) -> bool:
    """Return whether compiled products in ``dtype`` take a weight in its own 16 bits: kernels widen
    it to float32 exactly, in registers."""
    is_narrow = FLOAT_SIZES.get(tensor.dtype) == torch.float16.itemsize
    return is_narrow and len(tensor.shape) == 2 and dtype is torch.float32


def narrow_linears(architecture: Architecture, config: Any) -> frozenset[str]:
    """Return the names of a stock module's weights that compiled products take as they are stored:
    those of linear layers that share them with no other part. A name may lack the base model's
    prefix in a checkpoint, so that both forms are there.

    Raises:
        Refusal: The config does not describe such a model.
    """
    module = build_empty(architecture, config)
    tied = {name for pair in module.all_tied_weights_keys.items() for name in pair}
    names = {f"{n}.weight" for n, child in module.named_modules() if type(child) is torch.nn.Linear}
    prefix = f"{module.base_model_prefix}."
    return frozenset(own for n in names - tied for own in (n, n.removeprefix(prefix)))


def _is_tied_copy(tensor: StoredTensor, checkpoint: Checkpoint, config: Any) -> bool:
    """Return whether a tensor is a head that the config ties to a stored embedding."""
    if tensor.name != HEAD or not getattr(config, "tie_word_embeddings", False):
        return False
    same = (x for x in checkpoint.tensors.values() if x.shape == tensor.shape)
    return any(other.name != HEAD for other in same)


def load_model(
    checkpoint: Checkpoint,
    architecture: Architecture,
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[LoadProgress], None],
    quantization: str = "none",
    narrow: Collection[str] = (),
) -> LoadedModel:
    """Build the model and give it the open checkpoint's weights. With a `SkeletonConfig`, the
    module is a `Skeleton`, which must be compiled to run. With ``quantization``, the weights of
    linear layers and embeddings are left in their files, to be rounded when they are packed; so are
    those of 16 bits that ``narrow`` names (`narrow_linears`), to be packed as they are.

    Raises:
        Refusal: The checkpoint does not fit the model (Rule 1), or is quantised.
    """
    _refuse_quantised(checkpoint, quantization)
    config.dtype = dtype
    module = _build_empty(architecture, config)
    if _has_narrow_experts(module, dtype):
        module.set_experts_implementation("eager")
    fill(module, checkpoint, dtype, device, progress, quantization, narrow)
    num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    form = checkpoint.quantization if quantization == "none" else quantization
    has_small_experts = any(
        is_one_expert(name) and checkpoint.form(name) is not None for name in checkpoint.tensors
    )
    if has_small_experts and not isinstance(module, Skeleton):
        form += " (experts expanded)"
    later = [child.__dict__.get("stored") for child in module.modules()]
    kept = [p for p in module.parameters() if p.dtype is not dtype]
    kept += [stored() for stored in later if isinstance(stored, NarrowLater)]
    if kept and not form:
        form = _name_of(max(kept, key=torch.Tensor.numel).dtype)
    return LoadedModel(module, module.config, architecture, dtype, device, num_bytes, form)


def fill(
    module: Any,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[LoadProgress], None],
    quantization: str = "none",
    narrow: Collection[str] = (),
) -> None:
    """Give a module on the meta device its weights and buffers.

    Raises:
        Refusal: as `load_model`.
    """
    deferred = _assign_weights(module, checkpoint, dtype, device, progress, quantization, narrow)
    _compute_buffers(module, device)
    for name, stored in deferred.items():
        defer(_owner(module, name), stored, dtype)
    parameters = module.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *module.named_buffers()):
        if tensor.is_meta:
            raise Refusal(f"its tensor {name} could not be filled")
    module.eval()


def _refuse_quantised(checkpoint: Checkpoint, quantization: str) -> None:
    for tensor in checkpoint.tensors.values():
        is_small = checkpoint.form(tensor.name) is not None
        if is_small and quantization != "none":
            raise Refusal(f"its weights are quantised already ({checkpoint.quantization}); leave "
                          "--quantization out")  # fmt: skip
        if tensor.dtype in FLOAT_SIZES or is_small or UNREAD.search(tensor.name):
            continue
        raise Refusal(f"its tensor {tensor.name} is stored as {tensor.dtype}; plain float "
                      "weights are needed")  # fmt: skip


def build_empty(architecture: Architecture, config: Any) -> Any:
    """Return the model without weights, on the meta device but for its buffers.

    Raises:
        Refusal: The config does not describe such a model.
    """
    module = _build_empty(architecture, config)
    _compute_buffers(module, torch.device("cpu"))
    return module


@holds_import_lock
def _build_empty(architecture: Architecture, config: Any) -> Any:
    """Build the model on the meta device, where tensors have shapes and no memory."""
    is_skeleton = isinstance(config, SkeletonConfig)
    build = Skeleton if is_skeleton else _attending_class(architecture, config)
    sentence = f"its config.json does not describe a {architecture.name}"
    with refusing(sentence), nullcontext() if is_skeleton else torch.device("meta"):
        return build(config)


def _has_narrow_experts(module: Any, dtype: torch.dtype) -> bool:
    """Return whether a stock module joins experts that torch's grouped product does not take,
    because the bytes of their rows are not a multiple of 16."""
    return any(
        is_joined(name, parameter.shape)
        and any(size * dtype.itemsize % GROUPED_BYTES for size in parameter.shape[1:])
        for name, parameter in module.named_parameters()
    )


def _attending_class(architecture: Architecture, config: Any) -> Any:
    """Return transformers' class, and have its layers call our attention."""
    attention.register()
    config._attn_implementation = attention.NAME
    return stock_class(architecture.module, "modeling", architecture.name)


def _assign_weights(
    module: Any,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[LoadProgress], None],
    quantization: str,
    narrow: Collection[str],
) -> dict[str, Callable[[], QuantizedWeight | torch.Tensor]]:
    """Assign the checkpoint's tensors to the parameters, after every check of Rule 1. Return the
    functions that read the weights that stay in their files, by the parameters' names.

    Raises:
        Refusal: A check of Rule 1 failed, or a tensor holds a number that is not finite.
    """
    expected = dict(module.named_parameters(remove_duplicate=False))
    tied: dict[str, str] = dict(module.all_tied_weights_keys)
    sources = _find_sources(expected, tied, checkpoint, module.base_model_prefix)
    bytes_total = sum(s.num_bytes for parts in sources.values() for s in parts)
    bytes_done = 0
    deferred: dict[str, Callable[[], QuantizedWeight | torch.Tensor]] = {}
    for index, (name, parts) in enumerate(sources.items()):
        progress(LoadProgress("weights", bytes_done, bytes_total, index, len(sources)))
        own_bytes = sum(part.num_bytes for part in parts)
        stored: Callable[[], QuantizedWeight | torch.Tensor] | None
        if quantization == "none" and _is_narrow(parts, narrow, dtype):
            checkpoint.check_finite(parts[0].name)
            stored = NarrowLater(checkpoint.read(parts[0].name))
        else:
            stored = _stored(module, name, parts, checkpoint, quantization)
        if stored is not None:
            deferred[name] = stored
            _owner(module, name).stored_bytes = own_bytes  # counted once it is packed
            expected[name]._is_hf_initialized = True
            continue
        bytes_done += own_bytes
        if len(parts) == 1:
            # Using the mapped file itself would save 0.3 s per gigabyte and was rejected. A file
            # changed in place would change or crash a running server. And its tensors begin 8 bytes
            # after a cache line, which slows products of 8 rows down by up to a quarter (4096 ×
            # 2048, both dtypes, measured).
            read = checkpoint.read(parts[0].name)
            own = dtype
            if isinstance(module, Skeleton) and stays_narrow(parts[0], dtype):
                own = read.dtype
            whole = read.to(device, own, copy=True)
        else:
            pieces = [checkpoint.read(part.name).to(dtype) for part in parts]
            whole = joining_of(expected).join(pieces, expected[name].shape).to(device)
        if not is_finite(whole):
            for part in parts:
                checkpoint.check_finite(part.name)
            raise Refusal(
                f"its tensor {parts[0].name} has numbers that {_name_of(dtype)} cannot hold; "
                "choose another --dtype"
            )
        _set_parameter(module, name, torch.nn.Parameter(whole, requires_grad=False))
    _tie(module, tied, sources, deferred)
    progress(LoadProgress("weights", bytes_done, bytes_total, len(sources), len(sources)))
    return deferred


def _is_narrow(
    parts: tuple[StoredTensor, ...], narrow: Collection[str], dtype: torch.dtype
) -> bool:
    return len(parts) == 1 and parts[0].name in narrow and stays_narrow(parts[0], dtype)


def _stored(
    module: Any,
    name: str,
    parts: tuple[StoredTensor, ...],
    checkpoint: Checkpoint,
    quantization: str,
) -> Callable[[], QuantizedWeight] | None:
    """Return a function that reads a parameter in 8 bits or fewer, or None if it stays a float
    tensor."""
    layer = _owner(module, name)
    is_end = isinstance(layer, torch.nn.Embedding) or layer is module.get_output_embeddings()
    is_matrix = name.endswith(".weight") and (is_end or isinstance(layer, torch.nn.Linear))
    if not is_matrix or len(parts) > 1:
        return None
    if quantization == "none":
        return checkpoint.small(parts[0].name)
    checkpoint.check_finite(parts[0].name)
    bits = (ENDS if is_end else ROUNDED)[quantization]
    return RoundedLater(checkpoint.read(parts[0].name), bits)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _find_sources(
    expected: dict[str, torch.nn.Parameter],
    tied: dict[str, str],
    checkpoint: Checkpoint,
    prefix: str,
) -> dict[str, tuple[StoredTensor, ...]]:
    """Find the stored tensors that make each parameter when joined along their first dimension.

    A tied parameter needs no tensor of its own if its partner has one.

    Raises:
        Refusal: A parameter has no tensor, or a tensor belongs to no parameter.
    """
    sources: dict[str, tuple[StoredTensor, ...]] = {}
    joining = joining_of(expected)
    for name, parameter in expected.items():
        shape = tuple(parameter.shape)
        parts = _stored_parts(name, shape, checkpoint, prefix, joining)
        if parts:
            _check_shapes(joining.shape(name, shape) if len(parts) > 1 else shape, parts)
            sources[name] = parts
    partners = {**tied, **{source: target for target, source in tied.items()}}
    missing = [n for n in expected if n not in sources and partners.get(n) not in sources]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise Refusal(f"its checkpoint lacks the tensor {missing[0]}{more}")
    used = {part.name for parts in sources.values() for part in parts}
    unused = [n for n in checkpoint.tensors if n not in used and not UNREAD.search(n)]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise Refusal(
            f"its checkpoint holds a tensor that the architecture does not use, {unused[0]}{more}"
        )
    return sources


def _stored_parts(
    name: str, shape: tuple[int, ...], checkpoint: Checkpoint, prefix: str, joining: Joining
) -> tuple[StoredTensor, ...]:
    """Return the stored tensors of one parameter: the tensor of its name, the tensor of its name
    without the base model's prefix (as in the first GPT-2 and OPT checkpoints), or the tensors of
    the experts that a stock mixture joins."""
    for candidate in (name, name.removeprefix(f"{prefix}.")):
        if candidate in checkpoint.tensors:
            return (checkpoint.tensors[candidate],)
    names = [piece.name for piece in joining.pieces(name, shape)] if is_joined(name, shape) else []
    is_whole = all(part in checkpoint.tensors for part in names)
    return tuple(checkpoint.tensors[part] for part in names) if is_whole else ()


def _check_shapes(want: tuple[int, ...], parts: tuple[StoredTensor, ...]) -> None:
    for part in parts:
        if part.shape != want:
            raise Refusal(
                f"its tensor {part.name} has the shape {list(part.shape)}, and the config asks "
                f"for {list(want)}"
            )


def _tie(
    module: Any,
    tied: dict[str, str],
    sources: dict[str, tuple[StoredTensor, ...]],
    deferred: dict[str, Callable[[], QuantizedWeight | torch.Tensor]],
) -> None:
    """Share the parameters that the config ties. If both of a pair are stored and differ, both
    stay, as in transformers."""
    for target, source in tied.items():
        have, other = (source, target) if source in sources else (target, source)
        if have in deferred:
            if other not in deferred or deferred[other] == deferred[have]:
                deferred[other] = deferred[have]
            continue
        if other in sources and not torch.equal(
            module.get_parameter(have), module.get_parameter(other)
        ):
            continue
        _set_parameter(module, other, module.get_parameter(have))


def _owner(module: Any, name: str) -> Any:
    """Return the submodule that a parameter belongs to."""
    return module.get_submodule(name.rpartition(".")[0])


def _set_parameter(module: Any, name: str, parameter: torch.nn.Parameter) -> None:
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # read by _init_weights
    setattr(_owner(module, name), name.rpartition(".")[2], parameter)


def _compute_buffers(module: Any, device: torch.device) -> None:
    """Allocate the buffers on the device and have the model compute them; a skeleton has them."""
    if not isinstance(module, Skeleton):
        _fill_buffers(module, module._init_weights, device)
        module._init_weights(module.base_model)  # Falcon-H1 computes buffers of layers in it


def _fill_buffers(module: Any, init: Callable[[Any], None], device: torch.device) -> None:
    """Allocate a module's empty buffers, and fill them by ``init``. A model of transformers inside
    the module fills its buffers by its own ``_init_weights``."""
    init = getattr(module, "_init_weights", init)
    for child in module.children():
        _fill_buffers(child, init, device)
    empty = [name for name, item in module.named_buffers(recurse=False) if item.is_meta]
    for name in empty:
        setattr(module, name, torch.empty_like(getattr(module, name), device=device))
    if empty:
        init(module)


def first_line(error: BaseException) -> str:
    """Return the last line of an error's text, shortened; a config's errors name the field
    there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:199]}…"
