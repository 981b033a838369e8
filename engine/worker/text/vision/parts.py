"""Divides the config and the checkpoint of a model that reads images into text model and tower.

Rule: the text model is then loaded like other text models, by the name of its own architecture;
each tensor of the checkpoint belongs to one of both parts, or is computed by the tower.

Checkpoints name their tensors in two ways, as in old versions of transformers or as in version 5.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.worker.import_lock import holds_import_lock
from engine.worker.load.architectures import SERVED, find
from engine.worker.load.checkpoint import Checkpoint
from engine.worker.load.division import Division
from engine.worker.load.loader import stock_class, stock_config
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import read_json
from engine.worker.load.vision_architectures import find_vision

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from engine.worker.load.architectures import Architecture
    from engine.worker.load.loader import LoadedModel
    from engine.worker.load.vision_architectures import VisionArchitecture
    from engine.worker.quantized.weight import Form, QuantizedWeight

HEAD = re.compile(r"(?:language_model\.)?lm_head\.(.*)")
TOWER = re.compile(
    r"(?:model\.)?((?:vision_tower|vision_model|visual|multi_modal_projector|connector)\..*"
    r"|image_newline)"
)
TEXT = re.compile(r"(?:model\.)?(?:language_model\.|text_model\.)?(?:model\.)?(.*)")
# Tensors of old checkpoints that models compute themselves.
COMPUTED = re.compile(r"\.(position_ids|inv_freq)$")


def read_parts(directory: Path) -> tuple[VisionArchitecture, Any]:
    """Return the architecture and transformers' config of a model that reads images.

    Raises:
        Refusal: The model is not served, or its config is broken.
    """
    raw = read_json(directory, "config.json")
    vision = find_vision(raw)
    return vision, stock_config(raw, vision)


@holds_import_lock
def text_part(vision: VisionArchitecture, config: Any) -> tuple[Architecture, Any]:
    """Return the architecture and the config of the text model.

    Raises:
        Refusal: The text model is not served.
    """
    text = config.get_text_config()
    if vision.text:
        text = _as_text(text, SERVED[vision.text])
    name = next((x.name for x in SERVED.values() if x.config == type(text).__name__), "")
    kind = str(getattr(text, "model_type", "unnamed"))
    if not name:
        raise Refusal(f"the text model of this {vision.name} is of type {kind!r}, not served here")
    find({**text.to_dict(), "architectures": [name]})
    text.tie_word_embeddings = bool(config.tie_word_embeddings or text.tie_word_embeddings)
    return SERVED[name], text


def _as_text(config: Any, architecture: Architecture) -> Any:
    """Return the config of a text model converted to that of another class, without the settings of
    rotary embeddings of three positions."""
    fields = config.to_dict()
    fields.pop("model_type")
    rope = fields["rope_parameters"]
    fields["rope_parameters"] = {name: rope[name] for name in rope if not name.startswith("mrope")}
    config_class = stock_class(architecture.module, "configuration", architecture.config)
    return config_class.from_dict(fields)


class PartOfCheckpoint(Checkpoint):
    """The tensors of an open checkpoint that belong to one part, by their names in that part.
    ``rename`` returns such a name, or "" for a tensor of another part."""

    def __init__(self, whole: Checkpoint, rename: Callable[[str], str]) -> None:
        self._whole = whole
        self._stored = {own: name for name in whole.tensors if (own := rename(name))}
        self.tensors = {
            own: replace(whole.tensors[name], name=own) for own, name in self._stored.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored."""
        return self._whole.read(self._stored[name])

    def form(self, name: str) -> Form | None:
        """Return the form of a tensor in 8 bits or fewer; None for a float tensor."""
        return self._whole.form(self._stored[name])

    def small(self, name: str) -> Callable[[], QuantizedWeight] | None:
        """Return a function that reads a tensor in 8 bits or fewer; None for a float tensor."""
        return self._whole.small(self._stored[name])


class TextPart(Division):
    """Makes a text runner load only the text model of a model that reads images."""

    def read_config(self, directory: Path, *, is_stock: bool = False) -> tuple[Architecture, Any]:
        """Return the architecture and the config of the text model.

        Raises:
            Refusal: The model or its text model is not served, or the config is broken.
        """
        return text_part(*read_parts(directory))

    def part_of(self, whole: Checkpoint, architecture: Architecture, config: Any) -> Checkpoint:
        """Return the tensors of the text model."""
        return PartOfCheckpoint(whole, text_name)

    @holds_import_lock
    def complete(self, model: LoadedModel, directory: Path) -> None:
        """Give the text model the rotary embedding of three positions, if its family has one."""
        vision, config = read_parts(directory)
        if vision.rotary:
            rotary = stock_class(vision.module, "modeling", vision.rotary)
            model.module.model.rotary_emb = rotary(config.get_text_config()).to(model.device)


def text_name(name: str) -> str:
    """Return the name that a stored tensor has in the text model; "" for a tensor of the tower."""
    if TOWER.fullmatch(name):
        return ""
    head = HEAD.fullmatch(name)
    if head is not None:
        return f"lm_head.{head[1]}"
    match = TEXT.fullmatch(name)
    assert match is not None, "the pattern takes any name"
    return f"model.{match[1]}"


def tower_name(name: str) -> str:
    """Return the name that a stored tensor has in the tower; "" for a tensor of the text model, and
    for a tensor that the tower computes."""
    match = TOWER.fullmatch(name)
    if match is None or COMPUTED.search(name):
        return ""
    return str(match[1]).replace("vision_tower.vision_model.", "vision_tower.", 1)
