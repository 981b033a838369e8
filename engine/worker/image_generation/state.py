"""The state that a worker keeps of a drawing between its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from engine.core.image_generation.types import Drawing


@dataclass(slots=True)
class DrawingState:
    """The state of one drawing, which no other drawing reads or changes. In ``drawing`` the source
    is None: ``latents`` were made from it.

    ``latents`` are [images, channels, height, width] and become the images. ``times`` [steps] are
    the noise scheduler's, and ``step_arguments`` further arguments of its step. ``conditions`` are
    the unet's arguments that stay the same, embeddings and sizes: a guided drawing has two rows of
    them for each image. ``tiles`` are an image's decoded tiles.
    """

    drawing: Drawing
    scheduler: Any
    times: torch.Tensor
    latents: torch.Tensor
    conditions: dict[str, Any]
    step_arguments: dict[str, Any]
    is_guided: bool
    tiles: list[torch.Tensor] = field(default_factory=list)
