"""Fits images and computes a model's input numbers of them, by its own image processor's settings.

Rule 1: the settings are those of the model's own image processor, a class of transformers; Pillow
and a table of 256 numbers compute its results to the last bit. Rule 2: a model with a setting that
is not supported is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.images.fit import FittedImage, ImageFit
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    Floats = np.ndarray[Any, np.dtype[np.float32]]

PROCESSORS = (
    *("CLIPImageProcessor", "SiglipImageProcessor", "Siglip2ImageProcessor"),
    "Gemma3ImageProcessor",
)
# Model types that read a text's vector at the last position, padding included.
PADDED_TEXTS = ("siglip", "siglip2")
# The number in Pillow's ``Image.Resampling`` of each filter, by torchvision's name.
FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


class ImageReader:
    """Turns fitted images into a model's arguments.

    ``processor`` is the model's image processor, ``config`` its config. ``fit`` decodes and fits
    image files.

    Raises:
        Refusal: The image processor has settings that are not supported.
    """

    def __init__(self, processor: Any, config: Any, max_pixels: int) -> None:
        name = type(processor).__name__.removesuffix("Pil")
        if name not in PROCESSORS:
            raise Refusal(
                f"its image processor is {name[:200]!r}, which is not one of "
                f"{', '.join(PROCESSORS)}"
            )
        self._patch_size = int(config.vision_config.patch_size)
        resample = resample_of(processor)
        if name == "Siglip2ImageProcessor":
            self.fit = self._fit_patches(processor, resample, max_pixels)
        else:
            self.fit = self._fit_square(processor, resample, max_pixels, config.vision_config)
        self._table = table_of(processor)

    def _fit_patches(self, processor: Any, resample: int, max_pixels: int) -> ImageFit:
        if processor.patch_size != self._patch_size:
            raise Refusal("its image processor makes patches of another size than its model reads")
        patches = int(processor.max_num_patches)
        return ImageFit(
            num_tokens=patches,
            max_pixels=max_pixels,
            patch_size=self._patch_size,
            max_patches=patches,
            resample=resample,
        )

    def _fit_square(self, processor: Any, resample: int, max_pixels: int, vision: Any) -> ImageFit:
        size, crop = _pair(processor.size), None
        if getattr(processor, "do_center_crop", False):
            crop = _pair(processor.crop_size)
        shortest = _side(processor.size, "shortest_edge") if size is None else 0
        if size is None and not shortest:
            raise Refusal("its image processor names no size to resize to")
        if _side(processor.size, "longest_edge") or getattr(processor, "do_pad", False):
            raise Refusal("its image processor limits the longer side, or pads")
        side = int(vision.image_size)
        if (crop or size) != (side, side):
            raise Refusal(
                f"its image processor makes images of {crop or size} pixels, and its model reads "
                f"{side} × {side}"
            )
        has_class_token = getattr(vision, "model_type", "") == "clip_vision_model"
        return ImageFit(
            num_tokens=(side // self._patch_size) ** 2 + has_class_token,
            max_pixels=max_pixels,
            shortest_edge=shortest,
            size=size,
            crop=crop,
            resample=resample,
        )

    def features(self, images: Sequence[FittedImage], device: torch.device) -> dict[str, Any]:
        """Return the arguments of the model's forward for some images."""
        if self.fit.max_patches:
            arrays = self._patches(images)
        else:
            arrays = {"pixel_values": np.stack([self._scaled(image) for image in images])}
        features: dict[str, Any] = {
            name: torch.from_numpy(array).to(device) for name, array in arrays.items()
        }
        return features | {"modality": "image"}

    def _scaled(self, image: FittedImage) -> Floats:
        return scaled(image, self._table)

    def _patches(self, images: Sequence[FittedImage]) -> dict[str, np.ndarray[Any, Any]]:
        """Return images cut into patches, padded to the most patches of an image."""
        side, most = self._patch_size, self.fit.max_patches
        values = np.zeros((len(images), most, side * side * 3), np.float32)
        mask = np.zeros((len(images), most), np.int32)
        shapes = np.array([(x.height // side, x.width // side) for x in images], np.int64)
        for place, (image, (rows, columns)) in enumerate(zip(images, shapes, strict=True)):
            cut = self._scaled(image).reshape(3, rows, side, columns, side)
            values[place, : rows * columns] = cut.transpose(1, 3, 2, 4, 0).reshape(
                rows * columns, -1
            )
            mask[place, : rows * columns] = 1
        return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def scaled(image: FittedImage, table: Floats) -> Floats:
    """Return an image as a model reads it, [3, height, width] float32, by `table_of`'s table."""
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
    return np.stack([table[channel][pixels[..., channel]] for channel in range(3)])


def text_width(config: Any) -> int:
    """Return the tokens to which a model pads each text; 0 if it pads no text."""
    return (
        int(config.text_config.max_position_embeddings) if config.model_type in PADDED_TEXTS else 0
    )


def resample_of(processor: Any) -> int:
    """Return Pillow's number of the filter with which an image processor resizes.

    Raises:
        Refusal: The image processor does not resize, or does not convert to RGB.
    """
    if not (processor.do_resize and processor.do_convert_rgb is not False):
        raise Refusal("its image processor does not resize, or does not convert to RGB")
    return int(FILTERS.get(getattr(processor.resample, "value", ""), processor.resample))


def table_of(processor: Any) -> Floats:
    """Return the model's input for each value of a byte in each channel, [3, 256] float32: rescaled
    in float64 and normalised in float32, as in transformers."""
    numbers = np.arange(256)
    scaled = numbers * float(processor.rescale_factor) if processor.do_rescale else numbers
    table = np.tile(scaled.astype(np.float32), (3, 1))
    if processor.do_normalize:
        mean = np.array(processor.image_mean, np.float32).reshape(-1, 1)
        std = np.array(processor.image_std, np.float32).reshape(-1, 1)
        table = (table - mean) / std
    return table


def _side(size: Any, name: str) -> int:
    """Return one entry of a processor's size; 0 if it is not set."""
    side = size.get(name) if isinstance(size, dict) else getattr(size, name, None)
    return int(side or 0)


def _pair(size: Any) -> tuple[int, int] | None:
    """Return height and width of a processor's size; None if they are not set."""
    pair = _side(size, "height"), _side(size, "width")
    return pair if all(pair) else None
