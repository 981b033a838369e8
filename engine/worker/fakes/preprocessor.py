"""A fake preprocessor and vision tower: images of 4 × 4 pixels, of which each has 1 to 7 tokens.

Rule: everything, the number of tokens too, follows from an image's pixels.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.images.fit import FittedImage, ImageFit
from engine.images.preprocessor import SeenImage
from engine.worker.fakes.tokenizer import IMAGE_ID, IMAGE_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from engine.core.text.plan import Row
    from engine.core.text.types import PromptImage

SIDE = 4  # an image's height and width in pixels
MAX_TOKENS = 7
KEPT_IMAGES = 8  # encodings that are kept after a step


@dataclass(frozen=True, slots=True)
class FakePreprocessor:
    """Implements `engine.images.preprocessor.Preprocessor`. Decoding an image takes the time of
    ``sleep(decode_s)``."""

    decode_s: float
    sleep: Callable[[float], None]
    is_whole: bool = False
    max_pixels: int = 2**20
    token: str = IMAGE_TOKEN
    marker: str = IMAGE_TOKEN
    token_id: int = IMAGE_ID
    max_tokens: int = MAX_TOKENS
    max_bytes: int = 3 * SIDE**2

    def encoding_cost(self, max_tokens: int) -> int:
        """Return the cost of encoding an image of ``max_tokens`` tokens (`seen`)."""
        return 2 * min(max_tokens, MAX_TOKENS)

    def read(self, data: bytes) -> SeenImage:
        """Decode an image file and fit it (`Preprocessor.read`)."""
        if self.decode_s:
            self.sleep(self.decode_s)
        fit = ImageFit(self.max_tokens, self.max_pixels, size=(SIDE, SIDE))
        return seen(fit.read(data))

    def blank(self) -> SeenImage:
        """Return a black image."""
        return seen(FittedImage(SIDE, SIDE, bytes(self.max_bytes)))


def num_tokens_of(pixels: bytes) -> int:
    """Return how many tokens an image of these pixels has."""
    return 1 + pixels[0] % MAX_TOKENS


def seen(image: FittedImage) -> SeenImage:
    """Return a fitted image as a `SeenImage`. Encoding it costs twice its tokens."""
    count = num_tokens_of(image.pixels)
    return SeenImage((image,), IMAGE_TOKEN * count, count, 2 * count)


class FakeTower:
    """Keeps the last used encodings, by the digests of images, like
    `engine.worker.text.vision.tower.Tower`. ``num_encoded`` counts the encoded images."""

    def __init__(self) -> None:
        self.num_encoded = 0
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    def encode(self, images: Iterable[PromptImage]) -> int:
        """Encode those images of a step whose encodings are not kept. Return their costs' sum."""
        cost, used = 0, set()
        for image in images:
            used.add(image.digest)
            if image.digest not in self._kept:
                self.num_encoded += 1
                cost += image.cost
            self._kept[image.digest] = None
            self._kept.move_to_end(image.digest)
        while len(self._kept) > max(KEPT_IMAGES, len(used)):
            self._kept.popitem(last=False)
        return cost


def met_by(rows: Iterable[tuple[Row, Sequence[PromptImage]]]) -> Iterator[PromptImage]:
    """Yield the images of which rows compute tokens. ``rows`` are pairs of a row and the images of
    its prompt."""
    for row, images in rows:
        for image in images:
            if image.start < row.start + row.count and row.start < image.end:
                yield image
