"""Keeps decoded images, so that an image which comes again is not decoded again.

Rule 1: an image is found by the digest of its file and the model's image preprocessor, and by
requests of one owner alone (`Assignment.cache_owner`): otherwise the time of an answer would tell a
holder which images others have sent. Rule 2: the kept images have at most `KEPT_BYTES_MAX` bytes,
which each model that reads images includes in the memory that it reserves. The images that were
unused for the longest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

from engine.images.decoder import decode_here
from engine.images.preprocessor import KEPT_BYTES_MAX, digest_of
from engine.requests.text.image_prompts import ReadImage

if TYPE_CHECKING:
    from engine.images.decoder import DecodeImage
    from engine.images.preprocessor import Preprocessor


class KeptImages:
    """Reads images, each once while it is kept. Meant for threads."""

    def __init__(self, max_bytes: int = KEPT_BYTES_MAX, decode: DecodeImage = decode_here) -> None:
        """Keep up to ``max_bytes`` of pixels. ``decode`` has the image decoder decode a file."""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._decode = decode
        self._kept: OrderedDict[tuple[Preprocessor, bytes], ReadImage] = OrderedDict()
        self._lock = Lock()

    def read(self, preprocessor: Preprocessor, data: bytes, *, owner: str = "") -> ReadImage:
        """Return the image in a file as a model reads it. The image's digest is the ``owner``'s
        alone, so that the image's encoding is, too; "": all requests' without an owner.

        Raises:
            BadImage: `Preprocessor.read` cannot read the file.
        """
        key = (preprocessor, digest_of(data, owner))
        with self._lock:
            image = self._kept.get(key)
            if image is not None:
                self._kept.move_to_end(key)
                return image
        image = ReadImage(self._decode(preprocessor.read, data), key[1])
        with self._lock:
            self._keep(key, image)
        return image

    def _keep(self, key: tuple[Preprocessor, bytes], image: ReadImage) -> None:
        before = self._kept.pop(key, None)
        self.num_bytes += image.seen.num_bytes - (0 if before is None else before.seen.num_bytes)
        self._kept[key] = image
        while self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= oldest.seen.num_bytes
