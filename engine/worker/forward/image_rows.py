"""The rows that the images of a step put into its forward, in the place of embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

IMAGES = "image_rows"  # the compiled forward's keyword for them


class ImageRows(NamedTuple):
    """``tokens`` [count] int64 are the places, among the step's tokens, of the images' tokens;
    ``rows`` [1 + num_deep, count, hidden] float32, contiguous, are their embeddings, and what is
    added behind each of the first layers."""

    tokens: torch.Tensor
    rows: torch.Tensor


def embed_with(module: Any, input_ids: torch.Tensor, images: ImageRows) -> torch.Tensor:
    """Return the embeddings that a stock module computes with, [1, num_tokens, hidden], those of
    images in place."""
    embedded: torch.Tensor = module.get_input_embeddings()(input_ids)
    embedded[0, images.tokens] = images.rows[0].to(embedded.dtype)
    return embedded
