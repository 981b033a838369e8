"""Fits images to a model's input size: resized and cropped as by transformers' image processors.

Rule: the pixels are those of the processors' Pillow backend before these scale them to floats, to
the last bit. The worker gets them as bytes, a quarter of the floats' size, and scales them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.images.decode import decode
from engine.images.errors import BadImage

if TYPE_CHECKING:
    from PIL import Image

LANCZOS = 1  # Pillow's number for this resampling filter


class FittedImage(NamedTuple):
    """An image in a model's input size. ``pixels`` are [height, width, 3] uint8, as RGB."""

    height: int
    width: int
    pixels: bytes


@dataclass(frozen=True, slots=True)
class ImageFit:
    """Fits the images of one model.

    An image is resized so that its shorter side has ``shortest_edge`` pixels, or to ``size``
    (height and width), or to as many patches of ``patch_size`` as possible, at most
    ``max_patches``; settings that are not used are 0 or None. Then its centre of the height and
    width ``crop`` is cut out. ``resample`` is a number of Pillow's ``Image.Resampling``.

    ``num_tokens`` is the cost of an image, in tokens of the model. ``max_pixels`` is the most
    pixels of a file.
    """

    num_tokens: int
    max_pixels: int
    shortest_edge: int = 0
    size: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    patch_size: int = 0
    max_patches: int = 0
    resample: int = 3

    @property
    def max_bytes(self) -> int:
        """The most bytes of a fitted image."""
        if self.max_patches:
            return 3 * self.patch_size**2 * self.max_patches
        fitted = self.crop or self.size
        assert fitted is not None, "a shorter side is given with a crop"
        return 3 * fitted[0] * fitted[1]

    def read(self, data: bytes) -> FittedImage:
        """Decode an image file and fit it. Meant for threads.

        Raises:
            BadImage: The file cannot be decoded (`decode`), or the image is too long and narrow.
        """
        image = decode(data, self.max_pixels)
        height, width = self._target(image.height, image.width)
        if height * width > self.max_pixels:
            raise BadImage(
                f"has {image.width} × {image.height} pixels, and the model would read it as "
                f"{width} × {height}; send a part of it that is less long"
            )
        if (width, height) != image.size:
            image = image.resize((width, height), resample=self.resample)
        if self.crop is not None:
            image = _crop(image, *self.crop)
        return FittedImage(image.height, image.width, image.tobytes())

    def blank(self) -> FittedImage:
        """Return a black image of the model's size, or of one patch."""
        height, width = self.crop or self.size or (self.patch_size, self.patch_size)
        return FittedImage(height, width, bytes(3 * height * width))

    def _target(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which an image is resized."""
        if self.max_patches:
            return _patched_size(height, width, self.patch_size, self.max_patches)
        if self.size is not None:
            return self.size
        shorter, longer = sorted((height, width))
        long_side = int(self.shortest_edge * longer / shorter)
        portrait = (long_side, self.shortest_edge)
        return portrait if width <= height else (self.shortest_edge, long_side)


def _crop(image: Image.Image, height: int, width: int) -> Image.Image:
    """Return the centre of an image, with black around it if it is too small."""
    top, left = (image.height - height) // 2, (image.width - width) // 2
    if top < 0:
        top = -ceil((height - image.height) / 2)
    if left < 0:
        left = -ceil((width - image.width) / 2)
    box: Any = (left, top, left + width, top + height)
    return image.crop(box)


def _patched_size(height: int, width: int, patch_size: int, max_patches: int) -> tuple[int, int]:
    """Return the largest size in whole patches that keeps the sides' ratio about, as transformers'
    SigLIP 2 finds it: by the same bisection, because its end decides which side is rounded."""

    def scaled(side: int, scale: float) -> int:
        return int(max(patch_size, ceil(side * scale / patch_size) * patch_size))

    low, high = 1e-5 / 10, 100.0
    while high - low >= 1e-5:
        middle = (low + high) / 2
        patches = (scaled(height, middle) / patch_size) * (scaled(width, middle) / patch_size)
        low, high = (middle, high) if patches <= max_patches else (low, middle)
    return scaled(height, low), scaled(width, low)


def read_as(data: bytes, size: tuple[int, int], max_pixels: int) -> bytes:
    """Decode an image file and return its pixels in the width and height ``size``, as RGB, one byte
    a value. The filter is that of diffusers' image processor. Meant for threads.

    Raises:
        BadImage: The file cannot be decoded (`decode`).
    """
    image = decode(data, max_pixels)
    return (image if image.size == size else image.resize(size, resample=LANCZOS)).tobytes()
