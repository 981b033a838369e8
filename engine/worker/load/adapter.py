"""Reads the directory of a LoRA adapter that peft wrote: adapter_config.json and
adapter_model.safetensors.

Rule 1: every tensor has its place in the base model, and every layer that the config names has its
two tensors; otherwise the load is refused. So an adapter never gives the base model's answers
silently. Rule 2: the bytes that are hashed are those that are used: each file is read once, whole.
Rule 3: pickled files are never read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from engine.worker.load.adapter_config import read_form
from engine.worker.load.foreign import ADAPTER_NAME
from engine.worker.load.reading import check_readable, has_file, opened, reading
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from engine.worker.load.adapter_config import AdapterForm

WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
PREFIX = "base_model.model."  # peft's prefix of the names of the base model's layers
SHRINK, EXPAND = ".lora_A.weight", ".lora_B.weight"
BASE_COPY = ".base_layer."  # peft may store a copy of an adapted head's weight by such a name
DIGEST_BYTES = 16
PAD = 16  # Ranks and outputs are padded to a multiple of it; PANEL in engine/kernels/simd_amx.h.
CONFIG_BYTES_MAX = 1 << 20  # Far more than the few kilobytes of a config that peft writes.


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's part of one linear layer, whose output grows by ``scale`` · B · A · input.

    ``shrink`` is A, [rank, inputs], and ``expand`` is B, [outputs, rank], both as stored.
    """

    shrink: torch.Tensor
    expand: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """The rank as stored."""
        return self.shrink.shape[0]


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as it is in its files: its parts by the names of the base's layers. Adapters with
    the same ``digest`` give the same answers."""

    digest: str
    parts: Mapping[str, LowRank]


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """An adapter's size by its files: the bytes of the file of weights, an upper bound of its
    numbers once they are padded for the kernels, and its largest rank."""

    file_bytes: int
    num_values: int
    rank: int


def measure_adapter(directory: str) -> AdapterSize:
    """Return an adapter's size, from its config and the header of its weights. Torch is not
    imported.

    Raises:
        Refusal: The config or the header shows that it is no adapter that is served.
    """
    folder = _folder(directory)
    read_form(_read(folder))
    _check_weights(folder)
    path = folder / WEIGHTS_NAME
    check_readable(path)
    try:
        with safe_open(path, framework="numpy") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        values = sum(_placed_values(name, shape) for name, shape in shapes.items())
        ranks = [shape[0] for name, shape in shapes.items() if name.endswith(SHRINK)]
        return AdapterSize(path.stat().st_size, values, max(ranks, default=0))
    except (SafetensorError, OSError, ValueError, LookupError) as error:
        raise _damaged(error) from error


def _placed_values(name: str, shape: Sequence[int]) -> int:
    """Return an upper bound of a tensor's numbers after padding for the kernels: A with a float32
    factor for each of its rows, B perhaps as two halves, which are padded separately."""
    if len(shape) != 2:
        return prod(shape)
    first, second = shape
    if name.endswith(SHRINK):
        return padded_to(first, PAD) * (padded_to(second, 2 * PAD) + 2)
    return (padded_to(first, PAD) + PAD) * padded_to(second, 2)


def padded_to(number: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``number``."""
    return number + -number % multiple


def read_adapter(directory: str, places: Mapping[str, tuple[int, int]], head: str) -> StoredAdapter:
    """Return an adapter of a model whose linear layers have the given names, inputs and outputs.
    ``head`` is the name of the model's head.

    Raises:
        Refusal: The adapter is of a kind that is not served, or does not fit the model (rule 1).
    """
    from safetensors.torch import load

    folder = _folder(directory)
    config = _read(folder)
    form = read_form(config)
    _check_weights(folder)
    with opened(folder / WEIGHTS_NAME) as file:
        weights = file.read()
    try:
        tensors: dict[str, Any] = load(weights)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _damaged(error) from error
    wanted = [name for name in places if form.has(name, head)]
    if not wanted:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in places}))
        raise Refusal(
            "its target_modules name no linear layer of the base model that an adapter may change; "
            f"those are {names}"
        )
    parts = {name: _part(tensors, name, places[name], form) for name in wanted}
    if copies := [name for name in tensors if BASE_COPY in name]:
        raise Refusal(
            f"it stores a layer of the base model itself, {min(copies)}; save it by peft with "
            "save_embedding_layers=False"
        )
    if tensors:
        first, more = min(tensors), len(tensors) - 1
        raise Refusal(
            f"its tensor {first}{f' and {more} more' * bool(more)} has no place: the base model "
            "has no such linear layer, or the adapter's config does not name it"
        )
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for data in (config, weights):
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return StoredAdapter(digest.hexdigest(), parts)


def _part(tensors: dict[str, Any], name: str, size: tuple[int, int], form: AdapterForm) -> LowRank:
    """Take a layer's two tensors out of ``tensors``, after checking them."""
    from engine.worker.load.checkpoint import is_finite

    inputs, outputs = size
    rank = form.rank_of(name)
    pair = []
    for suffix, shape in ((SHRINK, (rank, inputs)), (EXPAND, (outputs, rank))):
        key = PREFIX + name + suffix
        tensor = tensors.pop(key, None)
        if tensor is None:
            raise Refusal(f"its config names the layer {name}, but its file lacks the tensor {key}")
        if tuple(tensor.shape) != shape:
            raise Refusal(
                f"its tensor {key} has the shape {list(tensor.shape)}, and the base model and the "
                f"adapter's config ask for {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise Refusal(f"its tensor {key} is stored as {tensor.dtype}, and floats are needed")
        if not is_finite(tensor):
            raise Refusal(f"its tensor {key} has numbers that are not finite")
        pair.append(tensor)
    return LowRank(pair[0], pair[1], form.scale_of(name))


def _folder(directory: str) -> Path:
    folder = Path(directory)
    if not has_file(folder):
        raise Refusal("its directory does not exist", detail=directory)
    with reading("directory"):
        folder.stat()
    return folder


def _read(folder: Path) -> bytes:
    """Return an adapter's configuration."""
    if not has_file(folder / ADAPTER_NAME):
        raise Refusal(
            f"its directory has no {ADAPTER_NAME}; name the directory that peft's save_pretrained "
            "wrote",
            detail=str(folder),
        )
    with opened(folder / ADAPTER_NAME) as file:
        data = file.read(CONFIG_BYTES_MAX + 1)
    if len(data) > CONFIG_BYTES_MAX:
        raise Refusal(f"its {ADAPTER_NAME} has more than {CONFIG_BYTES_MAX >> 20} MiB")
    return data


def _check_weights(folder: Path) -> None:
    if has_file(folder / WEIGHTS_NAME):
        return
    if has_file(folder / PICKLE_NAME):
        raise Refusal(
            f"its weights are pickled ({PICKLE_NAME}), and such a file is not read; save it by "
            "peft with safe_serialization=True"
        )
    raise Refusal(f"its directory has no {WEIGHTS_NAME}", detail=str(folder))


def _damaged(error: Exception) -> Refusal:
    return Refusal(
        f"its {WEIGHTS_NAME} is cut short or is not a safetensors file",
        detail=f"{type(error).__name__}: {error}",
    )
