"""The shortest times that steps have taken. From them follows which drawings cannot be done by
their deadlines (D18).

Rule: an estimate never exceeds the time that the drawing will take, as far as that was measured;
without a measurement it is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine.core.image_generation.types import Verb

if TYPE_CHECKING:
    from engine.core.image_generation.types import ImageGenerationRequest

DISCOUNT = 1.1  # each refusal divides an estimate by this; a guess: eight refusals halve it
SHAPES_MAX = 64  # most shapes that are kept; a guess: far more than clients of one model ask for


class Shape(NamedTuple):
    """The properties of a step that decide its time. ``rows`` are the latents that it computes
    together: one for each image, or two with guidance."""

    verb: Verb
    pixels: int
    rows: int

    def covers(self, other: Shape) -> bool:
        """Return whether a step of this shape takes at least as long as a step of ``other``."""
        return self.verb is other.verb and self.pixels >= other.pixels and self.rows >= other.rows


def shape_of(request: ImageGenerationRequest, verb: Verb) -> Shape:
    """Return the shape of those steps of a drawing that do the work ``verb``."""
    drawing = request.drawing
    pixels = drawing.width * drawing.height
    if verb is Verb.ENCODE:
        return Shape(verb, pixels if drawing.source else 0, drawing.num_images)
    guided = 1 + (drawing.guidance_scale > 1.0)
    return Shape(verb, pixels, drawing.num_images * guided if verb is Verb.DENOISE else 1)


class LeastTimes:
    """The shortest time of each shape of step, of at most `SHAPES_MAX` shapes.

    A step takes at least as long as one of a smaller shape. So the estimate of a shape is the
    longest among the shortest times of the shapes that it covers. One measurement may have been
    slow by chance, and a refused drawing is not measured. So each refusal (`note_refusal`) lowers
    the estimates of this shape a little, until a step of this shape is measured.
    """

    def __init__(self) -> None:
        self._shortest: dict[Shape, float] = {}
        self._discounts: dict[Shape, float] = {}
        self._estimates: dict[Shape, float] = {}  # follow from the shortest times and the discounts

    def note(self, shape: Shape, seconds: float) -> None:
        """Count a step that took ``seconds``."""
        known = self._shortest.pop(shape, None)
        self._shortest[shape] = seconds if known is None else min(known, seconds)
        is_new = self._shortest[shape] != known or self._discounts.pop(shape, None) is not None
        if len(self._shortest) > SHAPES_MAX:
            del self._shortest[next(iter(self._shortest))]  # the shape measured longest ago
        if is_new:
            self._estimates.clear()

    def seconds_for(self, request: ImageGenerationRequest) -> float:
        """Return the least time that a drawing takes, from its first step to its last."""
        encode, denoise, decode = (self._estimate(shape_of(request, verb)) for verb in Verb)
        tiles = request.drawing.num_images * request.num_tiles
        return encode + request.num_steps * denoise + tiles * decode

    def note_refusal(self, request: ImageGenerationRequest) -> None:
        """Count a drawing that was refused because of `seconds_for`."""
        for verb in Verb:
            shape = shape_of(request, verb)
            if len(self._discounts) >= SHAPES_MAX and shape not in self._discounts:
                del self._discounts[next(iter(self._discounts))]
            self._discounts[shape] = self._discounts.get(shape, 1.0) * DISCOUNT
            self._estimates.pop(shape, None)

    def _estimate(self, shape: Shape) -> float:
        known = self._estimates.get(shape)
        if known is None:
            smaller = [other for other in self._shortest if shape.covers(other)]
            least = max((self._shortest[other] for other in smaller), default=0.0)
            if len(self._estimates) >= SHAPES_MAX:
                self._estimates.clear()
            known = self._estimates[shape] = least / self._discounts.get(shape, 1.0)
        return known
