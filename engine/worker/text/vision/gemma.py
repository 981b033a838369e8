"""Gemma 3: one square of a fixed size for each image, and a projector behind a SigLIP tower that
averages its patches to a fixed number of tokens.

An image's tokens see each other, and one step computes all of them. Crops of long images ("pan and
scan") are not made, as in transformers' processor by default.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Any

from engine.images.preprocessor import SquarePreprocessor
from engine.worker.image_reader import ImageReader
from engine.worker.load.refusal import Refusal
from engine.worker.text.vision.inputs import VisionInputs

if TYPE_CHECKING:
    import torch

    from engine.images.preprocessor import Preprocessor, SeenImage


class Inputs(VisionInputs):
    """Computes an image's embeddings by the tower."""

    PROCESSOR = "gemma3"

    def _preprocessor(self) -> Preprocessor:
        config = self._config
        self._reader = ImageReader(self._processor, config, self._max_pixels)
        patches, tokens = self._reader.fit.num_tokens, int(config.mm_tokens_per_image or 0)
        if tokens < 1 or isqrt(tokens) ** 2 != tokens or isqrt(patches) % isqrt(tokens):
            raise Refusal(f"its config makes {tokens} tokens of the {patches} patches of an image, "
                          "which do not divide into equal squares")  # fmt: skip
        ends = (config.boi_token_id, config.eoi_token_id)
        begin, end = (self._token_of(int(end)) for end in ends)
        return SquarePreprocessor(
            fit=self._reader.fit,
            token=self._token_of(int(config.image_token_id)),
            marker=begin,
            token_id=int(config.image_token_id),
            num_tokens=tokens,
            cost=patches,
            before=f"\n\n{begin}",
            after=f"{end}\n\n",
            is_whole=True,
        )

    def features(self, base: Any, image: SeenImage) -> torch.Tensor:
        pixels = self._reader.features(image.tiles, base.device)["pixel_values"]
        return base.get_image_features(
            pixel_values=pixels.to(base.dtype), return_dict=True
        ).pooler_output
