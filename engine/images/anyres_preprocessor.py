"""Fits images to models that read them at one of several sizes: LLaVA-Next ("anyres").

Pixels and text equal those of transformers (rules 1 and 2 of `engine.images.preprocessor`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from engine.images.errors import BadImage
from engine.images.fit import FittedImage
from engine.images.preprocessor import ResizedSight, SeenImage, squares_of

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class AnyresPreprocessor(ResizedSight):
    """Reads an image twice: resized to one square of ``side`` pixels, which changes its shape, and
    as a larger copy in the middle of a black frame. The frame has that of ``sizes`` (height, width)
    which fits the image best, and is cut into squares of ``side`` pixels.

    A square has ``per_side`` rows of ``per_side`` tokens each, and costs ``tile_cost``. In the
    larger copy, the tokens of black rows or columns are left out, and each row ends with an
    additional token.
    """

    side: int
    sizes: tuple[tuple[int, int], ...]
    per_side: int
    tile_cost: int

    @property
    def max_tiles(self) -> int:
        """The most squares of one image."""
        return 1 + max(height * width for height, width in self.sizes) // self.side**2

    @property
    def max_tokens(self) -> int:
        """The most tokens of one image."""
        patch = self.side // self.per_side
        most = max(height // patch * (width // patch + 1) for height, width in self.sizes)
        return self.per_side**2 + most

    @property
    def max_bytes(self) -> int:
        """The most bytes of one fitted image's pixels."""
        return 3 * self.side**2 * self.max_tiles

    def encoding_cost(self, max_tokens: int) -> int:
        """Return the most patches that are encoded at once: those of all squares."""
        return self.tile_cost * self.max_tiles

    def blank(self) -> SeenImage:
        """Return a black image, for the model's warm-up."""
        from PIL import Image

        return self._fit(Image.new("RGB", (self.side, self.side)))

    def _fit(self, image: Image.Image) -> SeenImage:
        height, width = self._best_size(image.height, image.width)
        side = self.side
        whole = self._resize(image, side, side)
        tiles = [whole, *squares_of(self._framed(image, height, width), side)]
        count = self.per_side**2 + self._unpadded(image, height, width)
        fitted = tuple(FittedImage(side, side, tile.tobytes()) for tile in tiles)
        cost = len(fitted) * self.tile_cost
        size = image.height, image.width
        return SeenImage(fitted, self.token * count, count, cost, size=size)

    def _best_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size at which the image keeps most of its pixels, and of such sizes the one
        with the least black.

        Raises:
            BadImage: The image keeps no pixels at any size.
        """
        best, size = (0, 0), (0, 0)
        for own_height, own_width in self.sizes:
            scale = min(own_width / width, own_height / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            if (kept, kept - own_height * own_width) > best or not any(size):
                best, size = (kept, kept - own_height * own_width), (own_height, own_width)
        if not best[0]:
            raise BadImage("is too long and narrow for the model; send a part of it")
        return size

    def _framed(self, image: Image.Image, height: int, width: int) -> Image.Image:
        """Return the image in the middle of a black frame of this size, as large as it fits."""
        from PIL import Image

        across, down = width / image.width, height / image.height
        if across < down:
            own = min(ceil(image.height * across), height), width
        else:
            own = height, min(ceil(image.width * down), width)
        framed = Image.new("RGB", (width, height))
        resized = self._resize(image, *own)
        framed.paste(resized, ((width - own[1]) // 2, (height - own[0]) // 2))
        return framed

    def _unpadded(self, image: Image.Image, height: int, width: int) -> int:
        """Return the number of the larger copy's tokens, with those at the ends of rows."""
        patch = self.side // self.per_side
        rows, columns = height // patch, width // patch
        if image.width / image.height > columns / rows:
            own = int(round(image.height * (columns / image.width), 7))
            rows -= (rows - own) // 2 * 2
        else:
            own = int(round(image.width * (rows / image.height), 7))
            columns -= (columns - own) // 2 * 2
        return rows * (columns + 1)
