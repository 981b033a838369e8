"""Makes the core's request from a GenerateImage request: its size and steps, its source decoded.

Rule 1: everything that can be wrong in a request is found here, before its first step, and every
violation names its proto path. Rule 2: one source is decoded at a time, and the memory of decoded
images is bounded (`engine.requests.image_memory`). One image at a time is encoded as a file, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from engine.core.common.phases import Phase
from engine.core.common.vocabulary import check_text
from engine.core.image_generation.types import Drawing, ImageGenerationRequest
from engine.errors import FieldViolation, InvalidRequest, RequestTooLarge
from engine.images.errors import BadImage
from engine.images.fit import read_as
from engine.images.headers import read_header
from engine.requests.image_generation.values import SIDE, pixel_violations
from engine.requests.image_memory import ImageMemory
from engine.requests.prepared import Prepared
from engine.requests.tokenizing import of_field

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterator

    from engine.replica.replica import Replica
    from engine.requests.image_generation.values import DrawRequest
    from engine.requests.prepared import Assignment
    from engine.requests.tokenizing import Tokenizing
    from engine.worker.image_generation.interface import ImageGenerationInfo

    ImageGenerationReplica = Replica[ImageGenerationInfo, None]
    ImageGenerationAssignment = Assignment[DrawRequest, ImageGenerationReplica]

DEFAULT_STRENGTH = 0.8  # as in diffusers


@dataclass(frozen=True, slots=True)
class PreparedDrawing(Prepared[ImageGenerationRequest]):
    """A drawing that is ready to run. ``scheduler`` is the name of its scheduler. ``in_thread``
    calls a function in a thread, where images become files, and returns its result."""

    scheduler: str = ""
    in_thread: Callable[[Callable[[], bytes]], Awaitable[bytes]] = field(kw_only=True)


class ImageGenerationPreparer:
    """Makes the core's requests from GenerateImage requests. Belongs to the Trio thread."""

    def __init__(self, tokenizing: Tokenizing) -> None:
        self._tokenizing = tokenizing.with_own_turns()
        self._encoding = tokenizing.with_own_turns()
        self.image_memory = ImageMemory()

    async def prepare(self, assignment: ImageGenerationAssignment) -> PreparedDrawing:
        """Return the core's request. The memory of the decoded source is held.

        Raises:
            InvalidRequest: Fields are wrong for this model; it lists every one of them. The prompt
                and the source are only read if all other fields are right.
            RequestTooLarge: The images have too many pixels, or a prompt has too many tokens.

        Cancellation: at once. A thread that tokenises or decodes goes on to its end, and its result
            is dropped.
        """
        request, replica = assignment.request, assignment.replica
        info = replica.info
        width, height = _size_of(request, info)
        violations = [*_violations(request, info, width, height)]
        if violations:
            raise InvalidRequest(violations)
        if too_large := [*pixel_violations(request.num_images, width, height, info.max_pixels)]:
            raise RequestTooLarge(too_large)
        prompt_tokens, _ = [
            await self._count_tokens(
                replica, field, getattr(request, field), assignment.origin.party
            )
            for field in ("prompt", "negative_prompt")
        ]
        source = await self._read_source(assignment, width, height)
        drawing = _drawing_of(request, info, assignment.seed, (width, height), source)
        core_request = ImageGenerationRequest(
            request_id=assignment.core_id,
            drawing=drawing,
            arrival=assignment.arrival,
            num_steps=info.num_steps(drawing),
            num_tiles=info.num_tiles(drawing),
            preview_every=request.preview_every or 0,
            prompt_tokens=prompt_tokens,
            priority=assignment.origin.priority_of(request.priority),
            deadline=assignment.deadline,
            holder=assignment.origin.holder,
            weight=assignment.origin.weight,
        )
        return PreparedDrawing(
            core_request,
            scheduler=request.scheduler or info.default_scheduler,
            in_thread=partial(self._encoding.run_in_thread, party=assignment.origin.party),
        )

    async def _count_tokens(
        self, replica: ImageGenerationReplica, field: str, text: str, party: Hashable
    ) -> int:
        """Return the number of a prompt's tokens.

        Raises:
            InvalidRequest: The prompt cannot be tokenised, or has a token that the model lacks.
            RequestTooLarge: The prompt is too long.
        """
        with of_field(field):
            ids = await self._tokenizing.tokenize(
                replica, text, add_special_tokens=True, party=party
            )
        most = replica.info.max_model_len
        if len(ids) > most:
            raise RequestTooLarge.of(field, f"has {len(ids)} tokens, of at most {most}")
        check_text(field, ids, replica.info.vocab_size, replica.tokenizer)
        return len(ids)

    async def _read_source(
        self, assignment: ImageGenerationAssignment, width: int, height: int
    ) -> bytes | None:
        """Return the pixels of the source in the drawing's size; None without a source.

        Raises:
            InvalidRequest: The file cannot be read.
        """
        data, info = assignment.request.source, assignment.replica.info
        if data is None:
            return None
        assignment.report(Phase.DECODE_IMAGE)
        await self.image_memory.take(3 * width * height, assignment.held, assignment.core_id)
        read = partial(read_as, size=(width, height), max_pixels=info.max_image_pixels)
        decode = partial(self._tokenizing.image_decoder, read)
        files = [("source.image", data)]
        [pixels] = await self._tokenizing.read_images(files, decode, assignment.origin.party)
        return pixels


def _size_of(request: DrawRequest, info: ImageGenerationInfo) -> tuple[int, int]:
    """Return the width and height of a request's images.

    Raises:
        InvalidRequest: The size follows from the source, which is no image, or too long and narrow.
    """
    if request.source is None or request.width is not None or request.height is not None:
        width = info.default_width if request.width is None else request.width
        return width, info.default_height if request.height is None else request.height
    try:
        header = read_header(request.source)
    except BadImage as error:
        raise InvalidRequest.of("source.image", str(error)) from None
    sides = (header.width or 1, header.height or 1)
    if header.orientation >= 5:  # EXIF: the sides are swapped
        sides = sides[::-1]
    width, height = _scaled(sides, info)
    if max(width, height) > SIDE[1]:
        what = f"has sides in a ratio that gives {width} × {height} pixels, of at most {SIDE[1]}"
        raise InvalidRequest.of("source.image", f"{what} a side; set width and height")
    return width, height


def _scaled(sides: tuple[int, int], info: ImageGenerationInfo) -> tuple[int, int]:
    """Return a size in the ratio of ``sides``, with about the pixels of the model's own size."""
    scale = math.sqrt(info.default_width * info.default_height / (sides[0] * sides[1]))
    multiple = info.multiple_of
    width, height = (max(multiple, round(side * scale / multiple) * multiple) for side in sides)
    return width, height


def _violations(
    request: DrawRequest, info: ImageGenerationInfo, width: int, height: int
) -> Iterator[FieldViolation]:
    """Yield the fields that are wrong for this model."""
    for name, side in (("width", width), ("height", height)):
        if side % info.multiple_of:
            what = f"is {side}, which is no multiple of {info.multiple_of}, the model's"
            yield FieldViolation(name, what)
    name = request.scheduler or info.default_scheduler
    steps, most = request.steps or info.default_steps, dict(info.steps_max).get(name)
    if request.scheduler and request.scheduler not in info.schedulers:
        what = f"is not one of the model's: {', '.join(info.schedulers)}"
        yield FieldViolation("scheduler", what)
    elif most is not None and steps > most:
        yield FieldViolation("steps", f"is {steps}, and the scheduler {name} takes at most {most}")
    elif not info.num_steps(_drawing_of(request, info, 0, (width, height), request.source)):
        yield FieldViolation("strength", "leaves no denoising step; ask for more steps")


def _drawing_of(
    request: DrawRequest,
    info: ImageGenerationInfo,
    seed: int,
    size: tuple[int, int],
    source: bytes | None,
) -> Drawing:
    """Return the drawing for the worker, with the model's own values for unset fields."""
    strength = DEFAULT_STRENGTH if request.strength is None else request.strength
    return Drawing(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        width=size[0],
        height=size[1],
        steps=info.default_steps if request.steps is None else request.steps,
        guidance_scale=info.default_guidance if request.guidance is None else request.guidance,
        seed=seed,
        num_images=request.num_images,
        scheduler=request.scheduler,
        source=source,
        strength=1.0 if source is None else strength,
    )
