"""A fake image model: its pixels are random by a digest of the drawing, its costs and faults come
from a script.

Like `engine.worker.fakes.text`, whose script and tokenizer it uses, it is part of the product. Rule
1: this file imports no torch. Rule 2: an image depends only on its drawing, its index and the
computed steps, so that a test sees when a step is left out, repeated, or computed for another
drawing.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from random import Random
from typing import TYPE_CHECKING
from zlib import crc32

from engine.core.common.steps import RowFailure, StepTimings
from engine.core.image_generation.types import (
    ImageGenerationResult,
    ImageGenerationRow,
    RawImage,
    Verb,
)
from engine.worker.fakes.digests import VOCAB_SIZE, digest_after
from engine.worker.fakes.scripted import ScriptedRunner
from engine.worker.fakes.text import FakeScript
from engine.worker.image_generation.interface import ImageGenerationInfo

if TYPE_CHECKING:
    from engine.core.common.types import SequenceId
    from engine.core.image_generation.types import Drawing, ImageGenerationPlan

PREVIEW_SHARE = 8  # a preview is an eighth of the image's width and height
SLOW_SCHEDULER = "pndm"  # takes one step more than requested

FAKE_INFO = ImageGenerationInfo(
    architecture="fake",
    dtype="none",
    device="cpu",
    vocab_size=VOCAB_SIZE,
    max_model_len=77,
    memory_bytes=VOCAB_SIZE,
    default_width=32,
    default_height=24,
    max_pixels=2**19,
    schedulers=("ddim", "euler", SLOW_SCHEDULER),
    default_scheduler="ddim",
    default_steps=4,
    default_guidance=7.5,
    extra_steps=((SLOW_SCHEDULER, 1),),
    tile_size=64,
    tile_stride=48,
)


def digest_of_drawing(drawing: Drawing) -> int:
    """Return a 32-bit digest of a drawing, which does not depend on its number of images."""
    return crc32(repr(astuple(replace(drawing, num_images=1))).encode())


def image_of(drawing: Drawing, num_steps: int, index: int) -> RawImage:
    """Return image ``index`` of a drawing after ``num_steps`` denoising steps."""
    digest = digest_of_drawing(drawing)
    for step in range(num_steps):
        digest = digest_after(digest, step)
    width, height = drawing.width, drawing.height
    noise = Random(digest_after(digest, index))  # random pixels, which no format compresses
    return RawImage(width, height, noise.randbytes(3 * width * height))


def preview_of(drawing: Drawing, num_steps: int) -> RawImage:
    """Return the preview of a drawing's first image after ``num_steps`` denoising steps."""
    whole = image_of(drawing, num_steps, 0)
    width, height = (max(1, side // PREVIEW_SHARE) for side in (drawing.width, drawing.height))
    return RawImage(width, height, whole.pixels[: 3 * width * height])


@dataclass(slots=True)
class _FakeDrawing:
    """The state of one drawing: how many of its steps and tiles have been computed."""

    drawing: Drawing
    num_steps: int
    steps: int = 0
    tiles: int = 0


class FakeImageGenerationRunner(ScriptedRunner["ImageGenerationPlan", "ImageGenerationResult"]):
    """Implements `engine.worker.image_generation.interface.ImageGenerationRunner` without a model.

    ``drawings`` has the state of each drawing that has not ended. `execute` also raises an
    AssertionError for a step that is not the drawing's next step.
    """

    def __init__(
        self, info: ImageGenerationInfo = FAKE_INFO, *, script: FakeScript | None = None
    ) -> None:
        super().__init__(script or FakeScript(), info)
        self.drawings: dict[SequenceId, _FakeDrawing] = {}

    def close(self) -> None:
        """Forget every drawing."""
        self.drawings.clear()

    def _execute(self, plan: ImageGenerationPlan) -> ImageGenerationResult:
        for sequence in plan.ended:
            self.drawings.pop(sequence, None)
        cost = self._spend(plan.num_tokens)
        self._fail(plan, self.script.image_fault)
        row: ImageGenerationRow | RowFailure | None = self._row_fault(plan.sequence)
        row = row or ImageGenerationRow(plan.sequence, self._draw(plan))
        return ImageGenerationResult(plan.plan_id, row, StepTimings(forward_s=cost))

    def _draw(self, plan: ImageGenerationPlan) -> RawImage | None:
        """Compute the step of one drawing, and return its image or preview, or None."""
        if plan.verb is Verb.ENCODE:
            drawing = plan.drawing
            if drawing is None or plan.sequence in self.drawings:
                raise AssertionError(f"{plan} cannot be a drawing's first step")
            num_steps = self.info.num_steps(drawing)
            self.drawings[plan.sequence] = _FakeDrawing(drawing, num_steps)
            return None
        state = self.drawings[plan.sequence]
        if plan.verb is Verb.DENOISE:
            return self._denoise(state, plan)
        return self._decode(state, plan)

    def _denoise(self, state: _FakeDrawing, plan: ImageGenerationPlan) -> RawImage | None:
        if plan.index != state.steps or state.steps >= state.num_steps:
            raise AssertionError(f"{plan} after {state.steps} of {state.num_steps} steps")
        state.steps += 1
        return preview_of(state.drawing, state.steps) if plan.preview else None

    def _decode(self, state: _FakeDrawing, plan: ImageGenerationPlan) -> RawImage | None:
        if plan.index != state.tiles or state.steps != state.num_steps:
            raise AssertionError(f"{plan} after {state.steps} steps and {state.tiles} tiles")
        state.tiles += 1
        num_tiles = self.info.num_tiles(state.drawing)
        if state.tiles % num_tiles:
            return None
        return image_of(state.drawing, state.steps, state.tiles // num_tiles - 1)
