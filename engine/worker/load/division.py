"""Divides a model among the ranks of a group (D29): which rank holds which part of each tensor.

Rule 1: a rank's model is an ordinary model of a divided config, with fewer heads and narrower MLPs,
so that only the sums over the ranks depend on the division (`engine.worker.forward.collectives`).
Rule 2: a size that cannot be divided equally is refused, and the message names its field. Rule 3:
of each stored tensor, a rank copies only its own part.

A joined tensor has sections, one after another (queries, keys and values; gates and ups). Each
section is divided separately.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from engine.worker.load.checkpoint import Checkpoint
from engine.worker.load.devices import pick_device
from engine.worker.load.loader import read_config
from engine.worker.load.refusal import Refusal
from engine.worker.skeleton.division_plans import PLANS, Style, is_one_expert, style_of
from engine.worker.skeleton.families import LISTED

if TYPE_CHECKING:
    from pathlib import Path

    from engine.worker.load.architectures import Architecture
    from engine.worker.load.checkpoint import StoredTensor
    from engine.worker.load.loader import LoadedModel


# The fields of a config that are divided, and what messages call the things that they count.
FIELDS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "columns of an MLP",
    "moe_intermediate_size": "columns of an expert",
}


@dataclass(frozen=True, slots=True)
class Division:
    """Makes the part of rank ``rank`` of ``size`` ranks. With a size of 1, nothing is divided."""

    rank: int = 0
    size: int = 1

    def read_config(self, directory: Path, *, is_stock: bool = False) -> tuple[Architecture, Any]:
        """Return a model's architecture, and the config of this rank's part of it.

        Raises:
            Refusal: The config cannot be read (`read_config`) or divided (`divide`).
        """
        architecture, config = read_config(directory, is_stock=is_stock)
        self.divide(config, architecture)
        return architecture, config

    def divide(self, config: Any, architecture: Architecture) -> None:
        """Change a model's config to that of a rank's model.

        Raises:
            Refusal: The architecture has no division plan, or a size cannot be divided equally.
        """
        if self.size == 1:
            return
        name = architecture.name
        if name not in PLANS:
            raise Refusal(
                f"{name} has no plan for tensor parallelism, so it cannot be divided among "
                f"{self.size} processes; leave tensor_parallel_size out"
            )
        # Phi's module computes the width of normed heads from the number of heads, which would be
        # a rank's smaller number.
        if getattr(config, "qk_layernorm", False):
            raise Refusal(
                f"the normed heads (qk_layernorm) of {name} cannot be divided among {self.size} "
                "processes; leave tensor_parallel_size out"
            )
        heads = int(config.num_attention_heads)
        config.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        if getattr(config, "num_key_value_heads", None) is None:
            config.num_key_value_heads = heads
        for field, what in FIELDS.items():
            count = getattr(config, field, None)
            if count is None:
                continue
            if count % self.size:
                raise Refusal(
                    f"its {count} {what} ({field}) cannot be divided among {self.size} "
                    f"processes; choose a tensor_parallel_size that divides {count}"
                )
            setattr(config, field, count // self.size)

    def part_of(self, whole: Checkpoint, architecture: Architecture, config: Any) -> Checkpoint:
        """Return this rank's view of an open checkpoint. ``config`` is the rank's (`divide`).

        Raises:
            Refusal: The weights are of 8 bits or fewer, or a tensor cannot be divided equally.
        """
        return whole if self.size == 1 else DividedCheckpoint(whole, self, architecture, config)

    def complete(self, model: LoadedModel, directory: Path) -> None:
        """Add the parts that a loaded model has beside its text model: none here, but in the
        subclass for models that read images (`engine.worker.text.vision.parts`)."""

    def objection_to_decoder(self, architecture: Architecture) -> str:
        """Return why a rank's part of an architecture cannot run compiled; empty if it can."""
        family = LISTED.get(architecture.name)
        if self.size > 1 and family is not None and family.has_shared_expert:
            return "each rank computes its shared expert whole, and compiled ranks add up all"
        has_norm = Style.NORM in PLANS.get(architecture.name, {}).values()
        if self.size > 1 and has_norm:
            return "the ranks add up the squares of its norms, and compiled norms are whole"
        return ""


class DividedCheckpoint(Checkpoint):
    """One rank's view of an open checkpoint: each tensor has the shape of the rank's part, and only
    that part is read. ``config`` is the rank's, as `Division.divide` made it.

    Raises:
        Refusal: From its constructor: the weights are of 8 bits or fewer, which are not divided.
    """

    def __init__(
        self, whole: Checkpoint, division: Division, architecture: Architecture, config: Any
    ) -> None:
        self._whole = whole
        self._division = division
        self._architecture = architecture.name
        self._heads = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        if whole.quantization:
            raise Refusal(
                f"its weights are quantised already ({whole.quantization}), and such weights are "
                "not divided among processes; leave tensor_parallel_size out"
            )
        self.tensors = {
            name: replace(tensor, shape=self._own_shape(tensor))
            for name, tensor in whole.tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Return this rank's part of a tensor: a view of the mapped file, if the part is one piece
        of it."""
        tensor = self._whole.read(name)
        style, shape = style_of(name, self._architecture), tuple(tensor.shape)
        if style is Style.ROWS and len(shape) == 1:
            return tensor if self._division.rank == 0 else torch.zeros_like(tensor)
        cut = self._cut(style, shape, name)
        if cut is None:
            return tensor
        dim, sections = cut
        rank, size = self._division.rank, self._division.size
        pieces, first = [], 0
        for own in sections:
            pieces.append(tensor.narrow(dim, first + rank * own, own))
            first += own * size
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def _own_shape(self, tensor: StoredTensor) -> tuple[int, ...]:
        cut = self._cut(style_of(tensor.name, self._architecture), tensor.shape, tensor.name)
        if cut is None:
            return tensor.shape
        dim, sections = cut
        return (*tensor.shape[:dim], sum(sections), *tensor.shape[dim + 1 :])

    def _cut(
        self, style: Style | None, shape: tuple[int, ...], name: str
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return the dimension along which a tensor of this ``shape`` is divided, and the sizes of
        this rank's parts of its sections; None if each rank has the whole tensor. The tensor's
        sections follow one another, and each is divided equally."""
        is_bias = len(shape) == 1
        if style is None or style is Style.SUM or (style is Style.ROWS and is_bias):
            return None
        dim = 0 if is_bias else len(shape) - (1 if style is Style.ROWS else 2)
        width, left = divmod(shape[dim], self._division.size)
        if left:
            raise Refusal(
                f"its tensor {name} has the shape {list(shape)}, and {shape[dim]} cannot be "
                f"divided among {self._division.size} processes"
            )
        if style is Style.PAIR and not is_one_expert(name):
            return dim, (width // 2, width // 2)
        if style is Style.QKV and width == sum(self._heads):
            return dim, self._heads
        return dim, (width,)


def pick_rank_device(name: str, division: Division) -> torch.device:
    """Return the device of one rank for a value of ``--device``: the ranks share the CPUs, or have
    one CUDA device each, from the named device on.

    Raises:
        Refusal: This machine has no such device, or fewer devices than ranks.
    """
    device = pick_device(name)
    if division.size == 1 or device.type == "cpu":
        return device
    if device.type != "cuda":
        raise Refusal(
            f"{device.type} is one device, and tensor_parallel_size is {division.size}; use "
            "--device cpu or cuda"
        )
    return pick_device(f"cuda:{(device.index or 0) + division.rank}")
