"""A model's tower: transformers' own modules without the text model, which encode images.

Rule: images are encoded one at a time, so that an image's embeddings do not depend on other images.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from engine.worker.import_lock import holds_import_lock
from engine.worker.load.loader import refusing, stock_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.core.text.types import PromptImage
    from engine.images.preprocessor import Preprocessor, SeenImage
    from engine.worker.load.vision_architectures import VisionArchitecture
    from engine.worker.text.vision.inputs import VisionInputs

# How many embeddings are kept, or more if two images have more. Not tuned: four steps of the
# default token budget compute about as many embeddings.
KEPT_EMBEDDINGS = 8192
# The activations of a tower, in numbers per patch and unit of width. Same as in
# `engine.worker.encode.runner`.
ACTIVATIONS_PER_WIDTH = 16
# How many float32 copies of a patch's numbers exist at once: scaled, cut out, and contiguous.
INPUT_COPIES = 3


@holds_import_lock
def build_base(vision: VisionArchitecture, config: Any, text_module: str) -> Any:
    """Return transformers' model without its text model, on the meta device.

    Raises:
        Refusal: The config does not describe such a model.
    """
    with refusing(f"its config.json does not describe a {vision.name}"), torch.device("meta"):
        base = stock_class(vision.module, "modeling", vision.base)(config)
    setattr(base, text_module, None)
    return base


class Tower:
    """A loaded tower with a cache of images' embeddings, by the images' digests.

    ``max_bytes`` of embeddings are kept. ``num_encoded`` counts the images that were encoded. The
    least recently used embeddings are dropped first, but never those of the step that is being
    prepared, so that a running step may keep more than ``max_bytes``.
    """

    def __init__(self, base: Any, inputs: VisionInputs, max_bytes: int) -> None:
        self.base = base
        self.inputs = inputs
        self.num_encoded = 0
        self.max_bytes = max_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of the tower's weights."""
        return sum(p.numel() * p.element_size() for p in self.base.parameters())

    def embeddings(self, images: Iterable[PromptImage]) -> list[torch.Tensor]:
        """Return the embeddings of images, [1 + num_deep, num_tokens, hidden] each, in the dtype of
        the tower.

        Raises:
            ValueError: The tower made another number of embeddings than an image has tokens.
        """
        wanted = list(images)
        embeddings = [self._embedding(image) for image in wanted]
        self._make_room({image.digest for image in wanted})
        return embeddings

    def encode(self, image: SeenImage) -> torch.Tensor:
        """Compute an image's embeddings, even if they are kept."""
        features = self.inputs.features(self.base, image)
        if features.shape[1] != image.num_tokens:
            raise ValueError(f"{features.shape[1]} embeddings for {image.num_tokens} image tokens")
        return features

    def _embedding(self, image: PromptImage) -> torch.Tensor:
        kept = self._kept.get(image.digest)
        if kept is None:
            content: Any = image.content
            kept = self._kept[image.digest] = self.encode(content)
            self.num_encoded += 1
            self._num_bytes += _bytes_of(kept)
        self._kept.move_to_end(image.digest)
        return kept

    def _make_room(self, used: set[bytes]) -> None:
        for digest in list(self._kept):
            if self._num_bytes <= self.max_bytes:
                return
            if digest not in used:
                self._num_bytes -= _bytes_of(self._kept.pop(digest))


def cache_bytes(config: Any, preprocessor: Preprocessor, limit: int, dtype: torch.dtype) -> int:
    """Return how many bytes of embeddings a tower may keep (`Tower.max_bytes`). A prompt has at
    most ``limit`` tokens."""
    num_deep = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
    width = (1 + num_deep) * int(config.get_text_config().hidden_size)
    return max(KEPT_EMBEDDINGS, 2 * min(preprocessor.max_tokens, limit)) * width * dtype.itemsize


def activation_bytes(config: Any, cost: int, dtype: torch.dtype) -> int:
    """Return an upper estimate of the memory that encoding ``cost`` patches takes."""
    vision = config.vision_config
    width = int(getattr(vision, "embed_dim", None) or vision.hidden_size)
    numbers = 3 * int(vision.patch_size) ** 2 * int(getattr(vision, "temporal_patch_size", 1))
    of_patch = ACTIVATIONS_PER_WIDTH * width * dtype.itemsize
    return cost * (of_patch + INPUT_COPIES * numbers * 4)


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return embeddings joined along their tokens, float32 and contiguous."""
    return torch.cat(list(parts), dim=1).to(torch.float32).contiguous()
