"""The public values of image models: requests, and the events that answer them.

The rules of `engine.requests.text.values` hold: None means unset, `DrawRequest.validate` is the one
place for ranges that need no model, and a request is validated when it is made. Ranges that need
the model are checked by `engine.requests.image_generation.prepare`, before the first step.
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from engine.errors import FieldViolation
from engine.images.encode import FORMATS
from engine.requests.field_types import CheckedFields
from engine.requests.text.values import common_violations
from engine.status import Capability

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.core.common.types import Timings

# The proto documents these limits. All are guesses.
MAX_PROMPT_BYTES = 4096  # bytes; CLIP's 77 tokens have a tenth of that
SIDE = (8, 4096)  # range of width and height, in pixels
SIDE_MULTIPLE = 8
MAX_PIXELS = 2**23  # pixels of all images of a request: eight images of 1024 × 1024
MAX_IMAGES = 8
MAX_STEPS = 150
MAX_GUIDANCE = 30.0
MAX_SCHEDULER_CHARS = 64
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class DrawRequest(CheckedFields):
    """One GenerateImage call: ``n`` images of a prompt.

    ``width`` and ``height`` are pixels; unset, they are the model's own or, with a source, have the
    ratio of its sides and about the model's own number of pixels. ``guidance`` says how closely the
    images follow the prompt; at 1 and below, ``negative_prompt`` does not count. The same ``seed``
    and request give the same images. ``source`` has the bytes of an image file to start from, of
    which noise replaces the share ``strength``. ``scheduler`` names how noise is removed; empty: as
    the model's files say. ``format`` is png (if it is empty), jpeg or webp, and ``quality`` that of
    the last two. Every ``preview_every``-th step comes with a preview. ``check`` False skips the
    validation; ``timeout_s``, ``request_id`` and the errors are as in `GenerateRequest`.
    """

    capability = Capability.TEXT_TO_IMAGE
    model: str = ""
    prompt: str = ""
    negative_prompt: str = ""
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int | None = None
    n: int | None = None
    source: bytes | None = None
    strength: float | None = None
    scheduler: str = ""
    format: str = ""
    quality: int | None = None
    preview_every: int | None = None
    request_id: str = ""
    priority: int | None = None
    timeout_s: float | None = None
    check: InitVar[bool] = True

    @property
    def num_images(self) -> int:
        """How many images are drawn."""
        return 1 if self.n is None else self.n

    @property
    def image_bytes(self) -> int:
        """The bytes of the source's file."""
        return len(self.source or b"")

    def violations(self) -> Iterator[FieldViolation]:
        """Yield every broken field, by proto path."""
        yield from common_violations(self.priority, self.request_id, self.timeout_s)
        if not self.prompt:
            yield FieldViolation("prompt", "is empty")
        for name in ("prompt", "negative_prompt"):
            size = len(getattr(self, name).encode("utf-8", "surrogatepass"))
            if size > MAX_PROMPT_BYTES:
                yield FieldViolation(name, f"has {size} bytes, of at most {MAX_PROMPT_BYTES}")
        for name, low, high in (
            ("steps", 1, MAX_STEPS),
            ("seed", 0, MAX_SEED),
            ("n", 1, MAX_IMAGES),
            ("quality", 1, 100),
            ("preview_every", 0, MAX_STEPS),
            ("guidance", 0.0, MAX_GUIDANCE),
        ):
            yield from _range_violations(name, getattr(self, name), low, high)
        yield from self._size_violations()
        yield from self._source_violations()
        yield from self._file_violations()

    def _size_violations(self) -> Iterator[FieldViolation]:
        for name in ("width", "height"):
            side = getattr(self, name)
            yield from _range_violations(name, side, *SIDE)
            if side is not None and side % SIDE_MULTIPLE:
                yield FieldViolation(name, f"is {side}, which is no multiple of {SIDE_MULTIPLE}")
        if self.width is not None and self.height is not None:
            yield from pixel_violations(self.num_images, self.width, self.height)

    def _source_violations(self) -> Iterator[FieldViolation]:
        if self.source is not None and not self.source:
            yield FieldViolation("source.image", "is empty")
        if self.strength is None:
            return
        if self.source is None:
            yield FieldViolation("strength", "is set, and there is no source")
        if not 0 < self.strength <= 1:
            yield FieldViolation("strength", f"is {self.strength:g}, outside (0, 1]")

    def _file_violations(self) -> Iterator[FieldViolation]:
        if self.format and self.format not in FORMATS:
            yield FieldViolation("format", f"is not one of {', '.join(FORMATS)}")
        if self.quality is not None and self.format in ("", "png"):
            yield FieldViolation("quality", "is set, and a PNG has none")
        if len(self.scheduler) > MAX_SCHEDULER_CHARS or not self.scheduler.isprintable():
            what = f"must be at most {MAX_SCHEDULER_CHARS} printable characters"
            yield FieldViolation("scheduler", what)


def pixel_violations(
    count: int, width: int, height: int, most: int = MAX_PIXELS
) -> Iterator[FieldViolation]:
    """Yield a violation if the images of a request have too many pixels together: more than
    ``most``, a model's own limit, or `MAX_PIXELS`."""
    pixels, most = count * width * height, min(most, MAX_PIXELS)
    if pixels > most:
        what = f"of {width} × {height} have {pixels} pixels, of at most {most}"
        yield FieldViolation("n", f"is {count}, and so many images {what}")


def _range_violations(
    name: str, value: float | None, low: float, high: float
) -> Iterator[FieldViolation]:
    """Yield a violation for a number outside a range, or that is no number."""
    if value is None or low <= value <= high:
        return
    shown = value if isinstance(value, int) or not math.isfinite(value) else f"{value:g}"
    yield FieldViolation(name, f"is {shown}, outside [{low:g}, {high}]")


class DrawingStarted(NamedTuple):
    """The first event: the request is in the queue. The values are the request's, or the model's
    own where it left them unset; ``steps`` are the denoising steps that will run.
    """

    request_id: str
    model: str
    seed: int
    width: int
    height: int
    steps: int
    scheduler: str


class Progress(NamedTuple):
    """Denoising step ``step``, from 1, of ``steps`` is done. ``preview`` is the file of a small
    image of the drawing so far, in the request's format; None without one."""

    step: int
    steps: int
    preview: bytes | None = None


class GeneratedImage(NamedTuple):
    """Image ``index`` is done; ``data`` is its file."""

    index: int  # type: ignore[assignment]  # the proto's name; it hides tuple.index
    data: bytes
    format: str


class ImageUsage(NamedTuple):
    """The usage of a request: tokens of its prompt, denoising steps, and images."""

    prompt_tokens: int
    steps: int
    images: int


class DrawingFinished(NamedTuple):
    """The last event of a request that succeeded. ``timings`` are its seconds by phase: encoding
    the prompt counts as prefill, and denoising and decoding as decode."""

    request_id: str
    seed: int
    usage: ImageUsage
    timings: Timings


ImageGenerationEvent: TypeAlias = DrawingStarted | Progress | GeneratedImage | DrawingFinished
