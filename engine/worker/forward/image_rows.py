"""The embeddings of a step's images, which replace the embeddings of their tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

IMAGES = "image_rows"  # the compiled forward's keyword for an `ImageRows`


class ImageRows(NamedTuple):
    """``tokens`` [count] int64 are the places, among the step's tokens, of the images' tokens;
    ``rows`` [1 + num_deep, count, hidden] float32, contiguous, are their embeddings, then the rows
    that are added to the output of each of the first layers."""

    tokens: torch.Tensor
    rows: torch.Tensor


class LaterRows:
    """Adds image rows to the outputs of a stock module's first layers. ``images`` are the running
    step's; None for a step without images."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.images: ImageRows | None = None
        for behind, layer in enumerate(layers, start=1):
            layer.register_forward_hook(partial(self._add, behind))

    def _add(self, behind: int, _layer: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if self.images is not None:
            rows = self.images.rows[behind].to(output.dtype)
            output = output.index_add(1, self.images.tokens, rows[None])
        return output


def embed_with(module: Any, input_ids: torch.Tensor, images: ImageRows) -> torch.Tensor:
    """Return a stock module's input embeddings, [1, num_tokens, hidden], with the images' rows in
    place of their tokens' embeddings."""
    embedded: torch.Tensor = module.get_input_embeddings()(input_ids)
    embedded[0, images.tokens] = images.rows[0].to(embedded.dtype)
    return embedded
