"""Sizes and pixels of images in whole squares, against transformers' Qwen2-VL processor."""

import io

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from engine.images.errors import BadImage
from engine.images.grid_preprocessor import RATIO_MAX, GridPreprocessor
from tests.support.images import picture

# Least and most pixels: the defaults of Qwen2-VL, small ones, equal ones, and less than a square.
LIMITS = ((3136, 1_003_520), (1024, 9216), (4096, 4096), (1, 100))
SIDES = st.integers(1, 5000)


def preprocessor_of(least, most, factor=28):
    """Return how a model reads images."""
    return GridPreprocessor(
        max_pixels=2**24,
        factor=factor,
        patches=4,
        least=least,
        most=most,
        resample=3,
        token="<image>",
        token_id=7,
    )


@settings(max_examples=300)
@given(height=SIDES, width=SIDES, limits=st.sampled_from(LIMITS), factor=st.sampled_from((16, 28)))
@example(height=1, width=200, limits=(3136, 3136), factor=28)
@example(height=25, width=5000, limits=(4096, 4096), factor=28)
def test_sizes_are_those_of_transformers_and_no_more_than_is_said(height, width, limits, factor):
    preprocessor = preprocessor_of(*limits, factor=factor)
    if max(height, width) / min(height, width) > RATIO_MAX:
        with pytest.raises(BadImage, match="longer than the other"):
            preprocessor._size(height, width)
        with pytest.raises(ValueError, match="aspect ratio"):
            smart_resize(height, width, factor, *limits)
        return
    rows, columns = (side // factor for side in preprocessor._size(height, width))
    assert (rows * factor, columns * factor) == smart_resize(height, width, factor, *limits)
    assert rows * columns <= preprocessor.max_tokens


@pytest.mark.parametrize("size", [(64, 48), (31, 90), (7, 5), (300, 400)])
def test_pixels_are_those_of_transformers(size):
    least, most = 1024, 9216
    data = picture(*size, seed=3)
    seen = preprocessor_of(least, most, factor=16).read(data)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": least, "longest_edge": most},
        patch_size=8,
        do_rescale=False,
        do_normalize=False,
    )
    image = Image.open(io.BytesIO(data)).convert("RGB")
    made = processor(image, return_tensors="np")
    (tile,), (rows, columns) = seen.tiles, seen.grid
    pixels = np.frombuffer(tile.pixels, np.uint8).reshape(tile.height, tile.width, 3)
    cut = pixels.reshape(rows, 2, 8, columns, 2, 8, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    frames = made["pixel_values"].reshape(rows, columns, 2, 2, 3, 2, 8, 8)
    assert (frames == cut[:, :, :, :, :, None]).all()
    assert made["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
    assert seen.num_tokens == rows * columns == seen.text.count("<image>")
    assert seen.cost == 4 * seen.num_tokens
