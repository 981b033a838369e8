"""How long steps usually take, which is what drawings cost their holders.

Rule: the price of a step is the median of the last times of steps of its shape, so that a step
which was slow by accident costs nobody more. A shape that was not measured yet costs as much for
each pixel as the measured shape of the same verb that is nearest in size.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from engine.core.image_generation.least_times import SHAPES_MAX

if TYPE_CHECKING:
    from engine.core.image_generation.least_times import Shape

KEPT = 9  # times of a shape; estimate, as for text (`engine.core.text.step_times`)
PIXEL_S = 1e-6  # seconds for each pixel of each latent, until a step is measured; a guess


class UsualTimes:
    """The usual time of each shape of step, of at most `SHAPES_MAX` shapes."""

    def __init__(self) -> None:
        self._last: dict[Shape, deque[float]] = {}

    def note(self, shape: Shape, seconds: float) -> None:
        """Count a step that took ``seconds``."""
        last = self._last.pop(shape, None) or deque(maxlen=KEPT)
        self._last[shape] = last
        last.append(seconds)
        if len(self._last) > SHAPES_MAX:
            del self._last[next(iter(self._last))]  # the shape measured longest ago

    def price(self, shape: Shape) -> float:
        """Return how many seconds a step of a shape usually takes."""
        near = shape if shape in self._last else self._nearest(shape)
        if near is None:
            return PIXEL_S * _size(shape)
        last = sorted(self._last[near])
        return last[(len(last) - 1) // 2] * _size(shape) / _size(near)

    def _nearest(self, shape: Shape) -> Shape | None:
        """Return the measured shape of the same verb that is nearest in size."""
        verb, has_pixels, size = shape.verb, bool(shape.pixels), math.log(_size(shape))
        known = [x for x in self._last if x.verb is verb and bool(x.pixels) is has_pixels]
        return min(known, key=lambda other: abs(math.log(_size(other)) - size), default=None)


def _size(shape: Shape) -> int:
    return max(1, shape.pixels) * shape.rows
