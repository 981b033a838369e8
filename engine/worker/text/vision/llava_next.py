"""LLaVA-Next: a CLIP or SigLIP tower reads an image as one square, and as several squares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.images.anyres_preprocessor import AnyresPreprocessor
from engine.worker.image_reader import scaled
from engine.worker.load.refusal import Refusal
from engine.worker.text.vision.inputs import VisionInputs

if TYPE_CHECKING:
    from engine.images.preprocessor import Preprocessor, SeenImage


class Inputs(VisionInputs):
    """Computes an image's embeddings by the tower."""

    PROCESSOR = "llava_next"

    def _preprocessor(self) -> Preprocessor:
        processor, config = self._processor, self._config
        common, vision = self._of_any_shape(), config.vision_config
        side, patch = int(vision.image_size), int(vision.patch_size)
        sizes = tuple((int(height), int(width)) for height, width in config.image_grid_pinpoints)
        _check(processor, config, side, sizes)
        has_class_token = vision.model_type == "clip_vision_model"
        if has_class_token != (config.vision_feature_select_strategy == "default"):
            raise Refusal("its vision_feature_select_strategy does not leave one feature of each "
                          "patch")  # fmt: skip
        return AnyresPreprocessor(
            **common,
            side=side,
            sizes=sizes,
            per_side=side // patch,
            tile_cost=(side // patch) ** 2 + has_class_token,
        )

    def features(self, base: Any, image: SeenImage) -> torch.Tensor:
        tiles = np.stack([scaled(tile, self._table) for tile in image.tiles])
        features = base.get_image_features(
            pixel_values=torch.from_numpy(tiles)[None].to(base.device, base.dtype),
            image_sizes=[image.size],
            vision_feature_layer=self._config.vision_feature_layer,
            vision_feature_select_strategy=self._config.vision_feature_select_strategy,
            return_dict=True,
        )
        return torch.stack(list(features.pooler_output))


def _check(processor: Any, config: Any, side: int, sizes: tuple[tuple[int, int], ...]) -> None:
    """Refuse an image processor whose squares or sizes differ from the model's."""
    size, crop = processor.size, processor.crop_size if processor.do_center_crop else None
    made = [size["shortest_edge"]] if size["shortest_edge"] else [size["height"], size["width"]]
    made += [crop["height"], crop["width"]] if crop is not None else []
    if set(made) != {side}:
        raise Refusal(f"its image processor makes squares of {made} pixels, and its model reads "
                      f"{side} × {side}")  # fmt: skip
    if [list(pair) for pair in processor.image_grid_pinpoints] != [list(pair) for pair in sizes]:
        raise Refusal("its image processor has other image_grid_pinpoints than its config")
    if not sizes or any(edge <= 0 or edge % side for size in sizes for edge in size):
        raise Refusal(f"its image_grid_pinpoints are not in whole squares of {side} pixels")
