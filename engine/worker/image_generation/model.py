"""A diffusion model and its verbs: encode, denoise and decode, over diffusers' modules.

The verbs do what diffusers' pipelines do between their progress callbacks, in the same order, so
that the same seed gives the same image. A drawing's noise comes from a generator of the CPU, so
that it is the same on every device.

Source: diffusers 0.42, `__call__` of the text-to-image and image-to-image pipelines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from engine.core.image_generation.types import RawImage
from engine.worker.image_generation import noise
from engine.worker.image_generation.state import DrawingState

if TYPE_CHECKING:
    from engine.core.image_generation.types import Drawing
    from engine.worker.image_generation.noise import NoiseSchedulers
    from engine.worker.image_generation.prompts import Embeddings, Prompts
    from engine.worker.image_generation.tiles import Tiles

PREVIEW_LATENTS = 16  # the latents on a preview's longer side; it costs a tenth of a step


class Parts(NamedTuple):
    """The components of a model. ``latent_scale`` is the width of a latent in pixels."""

    prompts: Prompts
    unet: Any
    vae: Any
    noise: NoiseSchedulers
    tiles: Tiles
    latent_scale: int


class DiffusionModel:
    """One loaded model. The state of a drawing is in its `DrawingState`, not here."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._dtype: torch.dtype = parts.unet.dtype
        self._device: torch.device = parts.unet.device
        self._guidance_width = parts.unet.config.time_cond_proj_dim  # None: not an input

    # ---- the verbs

    def encode(self, drawing: Drawing) -> DrawingState:
        """Encode the prompts, and draw the latents that the first step begins with."""
        scheduler = self.parts.noise.make(drawing.scheduler)
        times = noise.start(scheduler, drawing, self._device)
        generator = torch.Generator("cpu").manual_seed(drawing.seed)
        is_guided = drawing.guidance_scale > 1.0 and self._guidance_width is None
        embeddings = self.parts.prompts.encode(drawing, guided=is_guided)
        if drawing.source is None:
            latents = self._noise(drawing, generator) * scheduler.init_noise_sigma
        else:
            latents = self._from_source(drawing, scheduler, times, generator)
        return DrawingState(
            replace(drawing, source=None),  # the source may be large, and is encoded already
            scheduler,
            times,
            latents,
            self._conditions(drawing, embeddings),
            noise.step_arguments(scheduler, generator),
            is_guided,
        )

    def denoise(self, state: DrawingState, index: int) -> None:
        """Take one denoising step of all images."""
        time, scheduler, latents = state.times[index], state.scheduler, state.latents
        both = torch.cat([latents] * 2) if state.is_guided else latents
        noise = self.parts.unet(
            scheduler.scale_model_input(both, time), time, **state.conditions, return_dict=False
        )[0]
        if state.is_guided:
            unwanted, wanted = noise.chunk(2)
            noise = unwanted + state.drawing.guidance_scale * (wanted - unwanted)
        state.latents = scheduler.step(
            noise, time, latents, **state.step_arguments, return_dict=False
        )[0].to(self._dtype)

    def decode(self, state: DrawingState, image: int, tile: int) -> RawImage | None:
        """Decode one tile of one image. Return the image with its last tile, and None before."""
        latents = self._unscaled(state.latents[image : image + 1])
        if tile == 0:
            state.tiles = []
        state.tiles.append(self.parts.tiles.decode(latents, tile))
        if len(state.tiles) < len(self.parts.tiles.places(latents)):
            return None
        tiles, state.tiles = state.tiles, []
        return _raw(self.parts.tiles.joined(latents, tiles))

    def preview(self, state: DrawingState) -> RawImage:
        """Return a small image of the first image's latents; in early steps it is noisy."""
        latents = self._unscaled(state.latents[:1])
        sides = latents.shape[-2:]
        factor = min(1.0, PREVIEW_LATENTS / max(sides))
        size = [max(1, int(side * factor)) for side in sides]
        small = functional.interpolate(latents, size=size, mode="area")
        return _raw(self.parts.vae.decode(small, return_dict=False)[0])

    # ---- their parts

    def _shape(self, drawing: Drawing) -> tuple[int, int, int, int]:
        scale = self.parts.latent_scale
        channels = int(self.parts.unet.config.in_channels)
        return drawing.num_images, channels, drawing.height // scale, drawing.width // scale

    def _noise(self, drawing: Drawing, generator: torch.Generator) -> torch.Tensor:
        drawn = torch.randn(self._shape(drawing), generator=generator, dtype=self._dtype)
        return drawn.to(self._device)

    def _from_source(
        self, drawing: Drawing, scheduler: Any, times: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Return the latents of the image to start from, with the noise of the first step."""
        assert drawing.source is not None
        vae, shape = self.parts.vae, (drawing.height, drawing.width, 3)
        pixels = torch.frombuffer(bytearray(drawing.source), dtype=torch.uint8).view(shape)
        scaled = (pixels.permute(2, 0, 1).unsqueeze(0).float() / 255.0) * 2.0 - 1.0
        encoded = vae.encode(scaled.to(vae.device, vae.dtype)).latent_dist.sample(generator)
        latents = self._scaled(encoded.to(self._dtype)).repeat(drawing.num_images, 1, 1, 1)
        drawn = self._noise(drawing, generator)
        return scheduler.add_noise(latents, drawn, times[:1].repeat(drawing.num_images))

    def _conditions(self, drawing: Drawing, embeddings: Embeddings) -> dict[str, Any]:
        """Return the unet's arguments that are the same in every step of a drawing."""
        conditions: dict[str, Any] = {"encoder_hidden_states": embeddings.tokens.to(self._dtype)}
        if embeddings.pooled is not None:
            size = (drawing.height, drawing.width)
            times = torch.tensor([[*size, 0, 0, *size]], dtype=self._dtype, device=self._device)
            conditions["added_cond_kwargs"] = {
                "text_embeds": embeddings.pooled.to(self._dtype),
                "time_ids": times.repeat(len(embeddings.pooled), 1),
            }
        if self._guidance_width is not None:
            scale = torch.full((drawing.num_images,), drawing.guidance_scale - 1)
            conditions["timestep_cond"] = guidance_embedding(scale, self._guidance_width).to(
                self._device, self._dtype
            )
        return conditions

    def _scaled(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the autoencoder's latents in the unet's scale."""
        config = self.parts.vae.config
        if config.latents_mean is None or config.latents_std is None:
            return latents * config.scaling_factor
        mean, std = self._statistics(latents)
        return (latents - mean) * config.scaling_factor / std

    def _unscaled(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the unet's latents in the autoencoder's scale."""
        config = self.parts.vae.config
        latents = latents.to(self.parts.vae.dtype)
        if config.latents_mean is None or config.latents_std is None:
            return latents / config.scaling_factor
        mean, std = self._statistics(latents)
        return latents * std / config.scaling_factor + mean

    def _statistics(self, latents: torch.Tensor) -> list[torch.Tensor]:
        config = self.parts.vae.config
        both = (config.latents_mean, config.latents_std)
        return [latents.new_tensor(values).view(1, -1, 1, 1) for values in both]


def guidance_embedding(scales: torch.Tensor, width: int) -> torch.Tensor:
    """Return sines and cosines of guidance scales [images], as [images, width], for models that
    read the scale in place of a second forward.

    Source: Luo et al., Latent Consistency Models (arXiv 2310.04378).
    """
    half = width // 2
    rates = torch.exp(torch.arange(half) * -(torch.log(torch.tensor(10000.0)) / (half - 1)))
    angles = scales.float()[:, None] * 1000.0 * rates[None, :]
    embedding = torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)
    return functional.pad(embedding, (0, width % 2))


def _raw(image: torch.Tensor) -> RawImage:
    """Return an image [1, 3, height, width] of about -1 to 1 as bytes.

    Raises:
        FloatingPointError: A value is not finite.
    """
    if not image.isfinite().all():
        raise FloatingPointError("its values are not finite")
    pixels = (image[0].float() / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).mul(255).round()
    height, width, _ = pixels.shape
    return RawImage(width, height, pixels.to(torch.uint8).cpu().contiguous().numpy().tobytes())
