"""What a worker keeps of a drawing between its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from engine.core.image_generation.types import Drawing


@dataclass(slots=True)
class DrawingState:
    """The state of one drawing, which nothing else reads or changes. ``drawing`` has
    no source any more.

    ``latents`` are [images, channels, height, width] and become the images. ``times`` [steps] are
    those of the noise scheduler, and ``step_arguments`` what its step takes beside them.
    ``conditions`` are the arguments of the unet that stay the same: embeddings and sizes, of which
    a guided drawing has two rows for each image. ``tiles`` are the decoded ones of an image.
    """

    drawing: Drawing
    scheduler: Any
    times: torch.Tensor
    latents: torch.Tensor
    conditions: dict[str, Any]
    step_arguments: dict[str, Any]
    is_guided: bool
    tiles: list[torch.Tensor] = field(default_factory=list)
