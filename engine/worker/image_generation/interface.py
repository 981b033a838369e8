"""The protocol of workers that draw images, on top of `engine.worker.interface`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.core.image_generation.types import ImageGenerationPlan, ImageGenerationResult
from engine.settings import ImageLimits
from engine.status import Capability
from engine.worker.interface import Runner, WorkerInfo

if TYPE_CHECKING:
    from engine.core.image_generation.types import Drawing


@dataclass(frozen=True, slots=True)
class ImageGenerationInfo(WorkerInfo):
    """Describes an image model once it is loaded. ``max_model_len`` is the most tokens of a prompt,
    with its begin and end tokens.

    Widths and heights are pixels and multiples of ``multiple_of``; the images of a drawing have
    together at most ``max_pixels``. ``schedulers`` are the names that a drawing may choose from,
    and ``default_scheduler`` is the checkpoint's own. ``extra_steps`` has the schedulers that take
    more steps than requested, each with the number of additional steps; a drawing of one step has
    none. ``steps_max`` has the most steps of each scheduler. An image that is wider or higher than
    ``tile_size`` pixels is decoded in tiles of that size, which begin ``tile_stride`` pixels apart;
    with a ``tile_size`` of 0, each image is decoded at once. ``max_image_pixels`` is the most
    pixels of the file of a source, the image to start from.
    """

    default_width: int
    default_height: int
    max_pixels: int
    schedulers: tuple[str, ...]
    default_scheduler: str
    default_steps: int
    default_guidance: float = 7.5
    multiple_of: int = 8
    prediction_type: str = "epsilon"
    extra_steps: tuple[tuple[str, int], ...] = ()
    steps_max: tuple[tuple[str, int], ...] = ()
    tile_size: int = 0
    tile_stride: int = 0
    max_image_pixels: int = ImageLimits.max_image_pixels

    @property
    def capability(self) -> Capability:
        """Text to image."""
        return Capability.TEXT_TO_IMAGE

    def num_steps(self, drawing: Drawing) -> int:
        """Return how many denoising steps the worker takes for a drawing; 0 if its ``strength`` is
        too small for a step."""
        name = drawing.scheduler or self.default_scheduler
        extra = dict(self.extra_steps).get(name, 0) if drawing.steps > 1 else 0
        if drawing.source is None:
            return drawing.steps + extra
        kept = min(int(drawing.steps * drawing.strength), drawing.steps)
        return kept + extra if kept else 0

    def num_tiles(self, drawing: Drawing) -> int:
        """Return the number of tiles in which each image of a drawing is decoded."""
        if not self.tile_size or max(drawing.width, drawing.height) <= self.tile_size:
            return 1
        across = -(-drawing.width // self.tile_stride)
        return across * -(-drawing.height // self.tile_stride)


class ImageGenerationRunner(
    Runner[ImageGenerationPlan, ImageGenerationResult, ImageGenerationInfo], Protocol
):
    """A runner of a model that draws images. It keeps the state of the drawings that were encoded
    and have not ended. A drawing's images do not depend on other drawings."""
