"""Fits images to models that read images in chats, and returns the images' text for the prompt.

Rule 1: the pixels are those of transformers' image processors before these scale them to floats, to
the last bit, as in `engine.images.fit`. Rule 2: the text is that with which transformers'
processors replace the template's marker of an image.

Each class here is for one family of models. All have the same attributes and methods
(`Preprocessor`).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.images.decode import decode
from engine.images.errors import BadImage
from engine.images.fit import FittedImage, ImageFit

if TYPE_CHECKING:
    from PIL import Image

DIGEST_BYTES = 32
# At most so many bytes of decoded images are cached for all models: four of the largest images that
# SmolVLM reads, or 190 of LLaVA 1.5. Not tuned.
KEPT_BYTES_MAX = 64 * 2**20
SIDE_MAX = 4096  # the most pixels of a resized image's side, as in transformers' Idefics 3


class SeenImage(NamedTuple):
    """A fitted image: its tiles, its text in the prompt, the number of that text's tokens that have
    embeddings of the image, and the cost of encoding it, in tokens. ``grid`` is its rows and
    columns of tokens, (0, 0) if positions do not depend on them. ``size`` is the height and width
    of the file, (0, 0) if embeddings do not depend on them. ``is_divisible``: its tiles have
    equally many tokens, and each can be encoded without the others."""

    tiles: tuple[FittedImage, ...]
    text: str
    num_tokens: int
    cost: int
    grid: tuple[int, int] = (0, 0)
    size: tuple[int, int] = (0, 0)
    is_divisible: bool = False

    @property
    def pieces(self) -> tuple[SeenImage, ...]:
        """The parts that are encoded separately, in the order of their tokens."""
        count = len(self.tiles)
        if not self.is_divisible or count == 1:
            return (self,)
        return tuple(
            SeenImage((tile,), "", self.num_tokens // count, self.cost // count)
            for tile in self.tiles
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of its pixels."""
        return sum([len(tile.pixels) for tile in self.tiles])


class Preprocessor(Protocol):
    """Fits images for one model."""

    @property
    def token(self) -> str:
        """The text of the special token that an image's embeddings replace."""

    @property
    def marker(self) -> str:
        """What the chat template writes for an image."""

    @property
    def token_id(self) -> int:
        """The id of ``token``."""

    @property
    def max_tokens(self) -> int:
        """The most tokens of one image."""

    @property
    def max_bytes(self) -> int:
        """The most bytes of one image's pixels, as they are kept."""

    def encoding_cost(self, max_tokens: int) -> int:
        """Return the most patches that are encoded at once, of images with at most
        ``max_tokens``."""

    @property
    def is_whole(self) -> bool:
        """Whether one step must compute all tokens of an image, because they see each other."""

    def read(self, data: bytes) -> SeenImage:
        """Decode an image file and fit it. Meant for threads.

        Raises:
            BadImage: The file cannot be decoded, or the model cannot read an image of its shape.
        """

    def blank(self) -> SeenImage:
        """Return a black image, to warm up with."""


def digest_of(data: bytes, owner: str = "") -> bytes:
    """Return the digest of an image file, which is another one for each ``owner``."""
    digest = blake2b(data, digest_size=DIGEST_BYTES).digest()
    return digest_of(digest + owner.encode("utf-8", "surrogatepass")) if owner else digest


def digest_of_piece(digest: bytes, number: int) -> bytes:
    """Return the digest of one of an image's pieces, by the digest of its file."""
    return digest_of(digest + number.to_bytes(4, "little"))


def squares_of(image: Image.Image, side: int) -> list[Image.Image]:
    """Return the squares of ``side`` pixels of an image, row by row."""
    return [
        image.crop((left, top, left + side, top + side))
        for top in range(0, image.height, side)
        for left in range(0, image.width, side)
    ]


@dataclass(frozen=True, slots=True)
class SquarePreprocessor:
    """Each image is one tile of a fixed size, with a fixed number of tokens: LLaVA 1.5, Gemma 3.
    ``before`` and ``after`` surround the image's tokens; ``cost`` counts its patches."""

    fit: ImageFit
    token: str
    marker: str
    token_id: int
    num_tokens: int
    cost: int
    before: str = ""
    after: str = ""
    is_whole: bool = False

    @property
    def max_tokens(self) -> int:
        """The most tokens of one image."""
        return self.num_tokens

    @property
    def max_bytes(self) -> int:
        """The most bytes of one image's pixels, as they are kept."""
        return self.fit.max_bytes

    def encoding_cost(self, max_tokens: int) -> int:
        """Return the most patches that are encoded at once: those of the whole image."""
        return self.cost

    def read(self, data: bytes) -> SeenImage:
        """Decode an image file and fit it, as `Preprocessor.read`."""
        return self._seen(self.fit.read(data))

    def blank(self) -> SeenImage:
        """Return a black image, to warm up with."""
        return self._seen(self.fit.blank())

    def _seen(self, tile: FittedImage) -> SeenImage:
        text = f"{self.before}{self.token * self.num_tokens}{self.after}"
        return SeenImage((tile,), text, self.num_tokens, self.cost)


@dataclass(frozen=True, slots=True)
class ResizedSight:
    """The base of the preprocessors for images of any shape. A file may have ``max_pixels``, and is
    resized by Pillow's filter ``resample``. The chat template writes ``token`` for it."""

    max_pixels: int
    resample: int
    token: str
    token_id: int

    is_whole = False

    @property
    def marker(self) -> str:
        """What the chat template writes for an image."""
        return self.token

    def read(self, data: bytes) -> SeenImage:
        """Decode an image file and fit it, as `Preprocessor.read`."""
        return self._fit(decode(data, self.max_pixels))

    def _fit(self, image: Image.Image) -> SeenImage:
        raise NotImplementedError

    def _resize(self, image: Image.Image, height: int, width: int) -> Image.Image:
        return image.resize((width, height), resample=self.resample)


@dataclass(frozen=True, slots=True)
class TiledPreprocessor(ResizedSight):
    """An image becomes square tiles and a small copy of the whole image: Idefics 3 and SmolVLM. Its
    longer side is first resized to ``longest_edge`` pixels. Without ``splits``, it is one tile."""

    longest_edge: int
    side: int  # a tile's width and height, in pixels
    tile_tokens: int
    tile_cost: int
    splits: bool
    fence: str = "<fake_token_around_image>"
    whole_tag: str = "<global-img>"

    @property
    def max_tiles(self) -> int:
        """The most tiles of one image, with the copy of the whole image."""
        return ceil(min(self.longest_edge, SIDE_MAX) / self.side) ** 2 + 1 if self.splits else 1

    @property
    def max_tokens(self) -> int:
        """The most tokens of one image, with the tokens between its tiles."""
        return self.max_tiles * (self.tile_tokens + 3)

    @property
    def max_bytes(self) -> int:
        """The most bytes of one image's pixels, as they are kept."""
        return 3 * self.side**2 * self.max_tiles

    def encoding_cost(self, max_tokens: int) -> int:
        """Return the most patches that are encoded at once: those of one tile."""
        return self.tile_cost

    def _fit(self, image: Image.Image) -> SeenImage:
        image = self._resize(image, *self._first_size(image.height, image.width))
        if not self.splits:
            return self._seen([self._resize(image, self.side, self.side)], 0, 0)
        height, width = self._whole_tiles(image.height, image.width)
        image = self._resize(image, height, width)
        rows, columns = height // self.side, width // self.side
        if rows * columns == 1:
            return self._seen([image], 0, 0)
        tiles = squares_of(image, self.side)
        return self._seen([*tiles, self._resize(image, self.side, self.side)], rows, columns)

    def blank(self) -> SeenImage:
        """Return a black image, to warm up with."""
        tile = FittedImage(self.side, self.side, bytes(3 * self.side**2))
        return SeenImage((tile,), self._text(0, 0), self.tile_tokens, self.tile_cost)

    def _first_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size whose longer side is `longest_edge`, and at most `SIDE_MAX`."""
        ratio = width / height
        if width >= height:
            width = self.longest_edge
            height = int(width / ratio)
            height += height % 2
        else:
            height = self.longest_edge
            width = int(height * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > SIDE_MAX:
            height, width = int(SIDE_MAX / ratio), SIDE_MAX
        elif height > width and height > SIDE_MAX:
            height, width = SIDE_MAX, int(SIDE_MAX * ratio)
        return max(height, 1), max(width, 1)

    def _whole_tiles(self, height: int, width: int) -> tuple[int, int]:
        """Return the size in whole tiles, rounded up: first the longer side, then the shorter side
        by the ratio."""
        side, ratio = self.side, width / height
        if width >= height:
            width = ceil(width / side) * side
            height = ceil(int(width / ratio) / side) * side
        else:
            height = ceil(height / side) * side
            width = ceil(int(height * ratio) / side) * side
        if not height or not width:
            raise BadImage("is too long and narrow for the model; send a part of it")
        return height, width

    def _seen(self, tiles: list[Image.Image], rows: int, columns: int) -> SeenImage:
        fitted = tuple(FittedImage(tile.height, tile.width, tile.tobytes()) for tile in tiles)
        count = len(fitted)
        text = self._text(rows, columns)
        tokens, cost = count * self.tile_tokens, count * self.tile_cost
        return SeenImage(fitted, text, tokens, cost, is_divisible=True)

    def _text(self, rows: int, columns: int) -> str:
        tokens = self.token * self.tile_tokens
        whole = f"{self.fence}{self.whole_tag}{tokens}{self.fence}"
        if not rows:
            return whole
        lines = (
            "".join(
                f"{self.fence}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)
            )
            for row in range(rows)
        )
        return "\n".join(lines) + f"\n\n{whole}"
