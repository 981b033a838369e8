"""Fits images to models that read them at about their own size, in whole patches: Qwen's.

Pixels and text equal those of transformers (rules 1 and 2 of `engine.images.preprocessor`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import TYPE_CHECKING

from engine.images.errors import BadImage
from engine.images.fit import FittedImage
from engine.images.preprocessor import ResizedSight, SeenImage

if TYPE_CHECKING:
    from PIL import Image

RATIO_MAX = 200  # the most that longer side / shorter side may be, as in transformers' Qwen2-VL


@dataclass(frozen=True, slots=True)
class GridPreprocessor(ResizedSight):
    """Reads an image as one tile of about its own size, in whole squares of ``factor`` pixels. Each
    square is one token and costs ``patches``. The tile has from ``least`` to ``most`` pixels, as
    far as whole squares allow."""

    factor: int
    patches: int
    least: int
    most: int

    @property
    def max_tokens(self) -> int:
        """The most tokens of one image. Long images may have more than ``most`` pixels: their
        shorter side is rounded up to one square."""
        # ``longest`` is the sum of both sides of an image of ``most`` pixels and the ratio
        # `RATIO_MAX`, rounded up: a bound of the longer side.
        side, longest = self.factor, sqrt((RATIO_MAX + 3) * max(self.least, self.most))
        return ceil(max(self.most, self.least + side * (longest + side)) / side**2)

    @property
    def max_bytes(self) -> int:
        """The most bytes of one fitted image's pixels."""
        return 3 * self.factor**2 * self.max_tokens

    def encoding_cost(self, max_tokens: int) -> int:
        """Return the most patches that are encoded at once, of images with that many tokens."""
        return self.patches * min(max_tokens, self.max_tokens)

    def _fit(self, image: Image.Image) -> SeenImage:
        return self._seen(self._resize(image, *self._size(image.height, image.width)))

    def blank(self) -> SeenImage:
        """Return a black image, for the model's warm-up."""
        from PIL import Image

        height, width = self._size(self.factor, self.factor)
        return self._seen(Image.new("RGB", (width, height)))

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size in whole squares that an image is resized to.

        Raises:
            BadImage: One side is much longer than the other.
        """
        if max(height, width) > RATIO_MAX * min(height, width):
            raise BadImage(
                f"has {width} × {height} pixels, and the model reads no image of which one side is "
                f"more than {RATIO_MAX} times longer than the other; send a part of it"
            )
        side = self.factor
        sizes = round(height / side) * side, round(width / side) * side
        if sizes[0] * sizes[1] > self.most:
            scale = sqrt((height * width) / self.most)
            sizes = (
                max(side, floor(height / scale / side) * side),
                max(side, floor(width / scale / side) * side),
            )
        elif sizes[0] * sizes[1] < self.least:
            scale = sqrt(self.least / (height * width))
            sizes = ceil(height * scale / side) * side, ceil(width * scale / side) * side
        return sizes

    def _seen(self, image: Image.Image) -> SeenImage:
        rows, columns = image.height // self.factor, image.width // self.factor
        count = rows * columns
        tile = FittedImage(image.height, image.width, image.tobytes())
        return SeenImage((tile,), self.token * count, count, self.patches * count, (rows, columns))
