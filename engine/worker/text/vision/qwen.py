"""The Qwen-VL models: an image keeps about its own size, in whole patches; four patches become one
token.

Qwen3-VL's tower returns further embeddings of each token, which are added to the outputs of the
text model's first layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.images.grid_preprocessor import GridPreprocessor
from engine.worker.image_reader import scaled
from engine.worker.load.refusal import Refusal
from engine.worker.text.vision.inputs import VisionInputs

if TYPE_CHECKING:
    from engine.images.fit import FittedImage
    from engine.images.preprocessor import Preprocessor, SeenImage


class Inputs(VisionInputs):
    """Computes an image's embeddings by the tower."""

    PROCESSOR = "qwen2_vl"

    def _preprocessor(self) -> Preprocessor:
        processor, common = self._processor, self._of_any_shape()
        vision = self._config.vision_config
        for own, field in (
            ("patch_size", "patch_size"),
            ("temporal_patch_size", "temporal_patch_size"),
            ("merge_size", "spatial_merge_size"),
        ):
            made, read = getattr(processor, own), getattr(vision, field)
            if made != read:
                raise Refusal(f"its image processor has {own} {made}, and its model {read}")
        least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
        if not least or not most:
            raise Refusal("its image processor names no least and most pixels")
        self._patch, self._merge = int(vision.patch_size), int(vision.spatial_merge_size)
        self._frames = int(vision.temporal_patch_size)
        return GridPreprocessor(
            **common,
            factor=self._patch * self._merge,
            patches=self._merge**2,
            least=int(least),
            most=int(most),
        )

    def features(self, base: Any, image: SeenImage) -> torch.Tensor:
        (tile,), (rows, columns) = image.tiles, image.grid
        grid = torch.tensor([[1, rows * self._merge, columns * self._merge]], device=base.device)
        features = base.get_image_features(
            pixel_values=torch.from_numpy(self._patches(tile)).to(base.device, base.dtype),
            image_grid_thw=grid,
            return_dict=True,
        )
        deep = getattr(features, "deepstack_features", None) or ()
        return torch.stack([features.pooler_output[0], *(own[0] for own in deep)])

    def _patches(self, tile: FittedImage) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return an image's patches, [patches, numbers] float32; the patches of one token follow
        one another. The model reads an image as a video of equal frames."""
        side, merge = self._patch, self._merge
        rows, columns = tile.height // side // merge, tile.width // side // merge
        cut = scaled(tile, self._table).reshape(3, rows, merge, side, columns, merge, side)
        cut = cut.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        cut = np.repeat(cut, self._frames, axis=5)
        return np.ascontiguousarray(cut).reshape(rows * columns * merge**2, -1)
