"""Idefics 3 and SmolVLM: an image is cut into tiles, and a pixel shuffle joins patches to tokens.

Each tile is encoded alone: the tiles of one image together would take several times the memory, and
each tile's embeddings depend on nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.images.preprocessor import TiledPreprocessor
from engine.worker.image_reader import scaled
from engine.worker.load.refusal import Refusal
from engine.worker.text.vision.inputs import VisionInputs

if TYPE_CHECKING:
    from engine.images.fit import FittedImage
    from engine.images.preprocessor import Preprocessor, SeenImage


class Inputs(VisionInputs):
    """Computes an image's embeddings by the tower."""

    TEXT_MODULE = "text_model"

    def _preprocessor(self) -> Preprocessor:
        processor, config = self._processor, self._config
        common, vision = self._of_any_shape(), config.vision_config
        side = _edge(processor.max_image_size)
        longest = _edge(processor.size)
        if not side or not longest:
            raise Refusal("its image processor names no longest edge")
        if side % vision.patch_size or side > vision.image_size:
            raise Refusal(f"its image processor makes tiles of {side} pixels, and its model reads "
                          f"{vision.image_size} in patches of {vision.patch_size}")  # fmt: skip
        patches = (side // vision.patch_size) ** 2
        return TiledPreprocessor(
            **common,
            longest_edge=longest,
            side=side,
            tile_tokens=patches // config.scale_factor**2,
            tile_cost=patches,
            splits=bool(processor.do_image_splitting),
        )

    def features(self, base: Any, image: SeenImage) -> torch.Tensor:
        return torch.cat([self._tile(base, tile) for tile in image.tiles])[None]

    def _tile(self, base: Any, tile: FittedImage) -> torch.Tensor:
        values = scaled(tile, self._table)
        sent = torch.from_numpy(values).to(base.device, base.dtype)[None, None]
        if not bool(sent.count_nonzero()):  # the model drops a tile of zeros as padding
            sent[..., 0, 0] = torch.finfo(base.dtype).tiny
        [features] = base.get_image_features(pixel_values=sent, return_dict=True).pooler_output
        return features


def _edge(size: Any) -> int:
    edge = size.get("longest_edge") if isinstance(size, dict) else size.longest_edge
    return int(edge or 0)
