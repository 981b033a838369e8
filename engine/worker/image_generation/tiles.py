"""Decodes latents into pixels tile by tile, so that no step of the worker is long.

The tiles overlap by a quarter and are blended there, as in the autoencoder of diffusers (0.42), but
each tile is a step of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

TILE_PIXELS = 256  # a tile takes as long as half a denoising step of StableDiffusion at 512 x 512
OVERLAP = 0.25


class Tiles:
    """Decodes by one autoencoder in tiles. The autoencoder's own tiling, which encodes the source
    of a drawing, is set to the same size."""

    def __init__(self, vae: Any, latent_scale: int) -> None:
        self._vae = vae
        self.size = min(TILE_PIXELS, int(vae.config.sample_size) or TILE_PIXELS)
        self._latents = self.size // latent_scale
        self._stride = int(self._latents * (1 - OVERLAP))
        vae.tile_sample_min_size, vae.tile_latent_min_size = self.size, self._latents
        vae.tile_overlap_factor, vae.use_tiling = OVERLAP, True
        self.stride = self._stride * latent_scale

    def places(self, latents: torch.Tensor) -> list[tuple[int, int]]:
        """Return the top left corners of the tiles of latents [1, channels, height, width], row by
        row. Latents that fit one tile are decoded at once."""
        height, width = latents.shape[-2:]
        if max(height, width) <= self._latents:
            return [(0, 0)]
        across = range(0, width, self._stride)
        return [(top, left) for top in range(0, height, self._stride) for left in across]

    def decode(self, latents: torch.Tensor, tile: int) -> torch.Tensor:
        """Return the pixels of one tile, [1, 3, height, width], about -1 to 1."""
        top, left = self.places(latents)[tile]
        part = latents[..., top : top + self._latents, left : left + self._latents]
        if self._vae.post_quant_conv is not None:
            part = self._vae.post_quant_conv(part)
        return self._vae.decoder(part)

    def joined(self, latents: torch.Tensor, tiles: list[torch.Tensor]) -> torch.Tensor:
        """Join an image's decoded tiles to [1, 3, height, width]. The tiles may be changed."""
        if len(tiles) == 1:
            return tiles[0]
        across = len(range(0, latents.shape[-1], self._stride))
        rows = [tiles[start : start + across] for start in range(0, len(tiles), across)]
        return torch.cat([torch.cat(list(row), dim=3) for row in self._blended(rows)], dim=2)

    def _blended(self, rows: list[list[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
        """Yield the rows of tiles. Each tile is blended with the tiles above and left of it, and
        cut to the part that the next tiles do not cover."""
        extent = int(self.size * OVERLAP)
        kept = self.size - extent
        for place, row in enumerate(rows):
            cut = []
            for column, tile in enumerate(row):
                if place > 0:
                    tile = self._vae.blend_v(rows[place - 1][column], tile, extent)
                if column > 0:
                    tile = self._vae.blend_h(row[column - 1], tile, extent)
                cut.append(tile[:, :, :kept, :kept])
            yield cut
