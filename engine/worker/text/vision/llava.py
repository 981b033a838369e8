"""LLaVA 1.5: one square of a fixed size for each image, and a projector behind a CLIP or SigLIP
tower."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.images.preprocessor import SquarePreprocessor
from engine.worker.image_reader import ImageReader
from engine.worker.text.vision.inputs import VisionInputs

if TYPE_CHECKING:
    from engine.images.preprocessor import Preprocessor, SeenImage


class Inputs(VisionInputs):
    """Computes an image's embeddings by the tower."""

    PROCESSOR = "clip"

    def _preprocessor(self) -> Preprocessor:
        config = self._config
        token = self._token_of(int(config.image_token_id))
        self._reader = ImageReader(self._processor, config, self._max_pixels)
        patches = self._reader.fit.num_tokens
        is_default = config.vision_feature_select_strategy == "default"
        return SquarePreprocessor(
            fit=self._reader.fit,
            token=token,
            marker=token,
            token_id=int(config.image_token_id),
            num_tokens=patches - (1 if is_default else 0),
            cost=patches,
        )

    def features(self, base: Any, image: SeenImage) -> torch.Tensor:
        pixels = self._reader.features(image.tiles, base.device)["pixel_values"]
        features = base.get_image_features(
            pixel_values=pixels.to(base.dtype),
            vision_feature_layer=self._config.vision_feature_layer,
            vision_feature_select_strategy=self._config.vision_feature_select_strategy,
            return_dict=True,
        )
        return torch.cat(list(features.pooler_output))[None]
