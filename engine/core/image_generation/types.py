"""The values of image models: drawings, the plan that goes to a worker, and the result.

Rule 1: every class here is a value that pickles without torch (D8). Rule 2: a drawing is the work
of one request, ``num_images`` images of one prompt. A step computes one part of one drawing: its
prompt (`Verb.ENCODE`), one denoising step of all its images, or one tile of one image. Rule 3:
the worker keeps a drawing's state under its sequence id, from the ENCODE step on until a plan names
the id in `ImageGenerationPlan.ended`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from engine.core.common.steps import RowFailure, StepTimings

if TYPE_CHECKING:
    from engine.core.common.types import PlanId, RequestId, SequenceId


class Verb(Enum):
    """What a step does with its drawing."""

    ENCODE = "encode"  # the prompts become embeddings, the latents are drawn
    DENOISE = "denoise"  # one denoising step of all images
    DECODE = "decode"  # one tile of one image


@dataclass(frozen=True, slots=True)
class Drawing:
    """A request as its worker gets it.

    ``width`` and ``height`` are pixels. ``steps`` are the denoising steps that the client asked
    for. An empty ``scheduler`` stands for the checkpoint's own. ``source`` is the image to start
    from, as ``width * height`` pixels of RGB in row order, one byte a value; None draws from noise
    alone. ``strength``, above 0 and at most 1, is how much of the source is replaced by noise; it
    counts only with a source.
    """

    prompt: str
    negative_prompt: str
    width: int
    height: int
    steps: int
    guidance_scale: float
    seed: int
    num_images: int = 1
    scheduler: str = ""
    source: bytes | None = field(default=None, repr=False)
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class ImageGenerationRequest:
    """A request as an image model's core schedules it.

    ``num_steps`` are the denoising steps that the worker takes, and ``num_tiles`` the tiles that
    each image is decoded in; both are at least 1 and follow from the drawing and the
    `ImageGenerationInfo`. Every ``preview_every``-th denoising step gives a preview, with 0 none
    does. ``prompt_tokens`` are the prompt's tokens, for the usage. ``arrival`` and ``deadline`` are
    seconds of the engine's one clock. The request with the lowest ``priority`` goes first.
    """

    request_id: RequestId
    drawing: Drawing
    arrival: float
    num_steps: int
    num_tiles: int = 1
    preview_every: int = 0
    prompt_tokens: int = 0
    priority: int = 0
    deadline: float | None = None
    holder: str = ""  # as in `engine.core.text.types.Request`
    weight: int = 1

    @property
    def num_choices(self) -> int:
        """One: all images end together."""
        return 1

    @property
    def num_tokens(self) -> int:
        """The denoising steps, which are the queue's unit of work."""
        return self.num_steps

    @property
    def num_tokens_ahead(self) -> int:
        """The denoising steps."""
        return self.num_steps

    def journal_line(self) -> str:
        """Return the request in one stable line, without its prompt."""
        drawing = self.drawing
        return (
            f"{self.request_id} images={drawing.num_images} size={drawing.width}x{drawing.height} "
            f"steps={self.num_steps} tiles={self.num_tiles} priority={self.priority}"
        )


@dataclass(frozen=True, slots=True)
class ImageGenerationPlan:
    """One step of one drawing.

    ``index`` counts the denoising steps from 0; in a DECODE step it is
    ``image * num_tiles + tile``. ``drawing`` is set with ENCODE alone. ``preview``: the result is
    to have a preview of the first image. The worker drops the state of the sequences in ``ended``
    before it computes; it ignores those that it does not know.
    """

    plan_id: PlanId
    sequence: SequenceId
    verb: Verb
    index: int = 0
    drawing: Drawing | None = None
    preview: bool = False
    ended: tuple[SequenceId, ...] = ()

    @property
    def rows(self) -> tuple[ImageGenerationPlan]:
        """The plan itself, as its only row."""
        return (self,)

    @property
    def num_tokens(self) -> int:
        """1 for a denoising step, 0 for any other step."""
        return int(self.verb is Verb.DENOISE)

    def journal_line(self) -> str:
        """Return the plan in one stable line."""
        ended = "".join(f" -{sequence}" for sequence in self.ended)
        preview = " preview" * self.preview
        return (
            f"plan {self.plan_id}: {self.sequence} {self.verb.value} {self.index}{preview}{ended}"
        )


class RawImage(NamedTuple):
    """An image: ``width * height`` pixels of RGB in row order, one byte a value."""

    width: int
    height: int
    pixels: bytes

    def __repr__(self) -> str:
        return f"RawImage({self.width}x{self.height})"


class ImageGenerationRow(NamedTuple):
    """The result of a drawing's step. ``image`` is the finished image, with its last tile; or the
    preview that the plan asked for, which may be smaller than the image; or None."""

    sequence: SequenceId
    image: RawImage | None = None


@dataclass(frozen=True, slots=True)
class ImageGenerationResult:
    """The result of a step."""

    plan_id: PlanId
    row: ImageGenerationRow | RowFailure
    timings: StepTimings = field(default_factory=StepTimings)

    @property
    def rows(self) -> tuple[ImageGenerationRow | RowFailure]:
        """The one drawing's result."""
        return (self.row,)


class Stepped(NamedTuple):
    """An output event: denoising step ``step``, counted from 1, of ``steps`` is done. ``preview``
    is the first image as it stands, with the steps that were to have one."""

    request_id: RequestId
    step: int
    steps: int
    preview: RawImage | None = None

    def journal_line(self) -> str:
        """Return the event in one stable line."""
        preview = "" if self.preview is None else " preview"
        return f"  stepped {self.request_id} {self.step}/{self.steps}{preview}"


class Drawn(NamedTuple):
    """An output event: image ``index`` of the request is finished."""

    request_id: RequestId
    index: int  # type: ignore[assignment]  # the proto's word, over tuple.index
    image: RawImage

    def journal_line(self) -> str:
        """Return the event in one stable line."""
        return f"  drawn {self.request_id}/{self.index} {self.image.width}x{self.image.height}"
