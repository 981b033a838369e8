"""Loads an image model from its files, and estimates its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

from engine.worker.image_generation.model import DiffusionModel, Parts
from engine.worker.image_generation.noise import NoiseSchedulers
from engine.worker.image_generation.prompts import Prompts
from engine.worker.image_generation.tiles import TILE_PIXELS, Tiles
from engine.worker.image_generation.weights import load_module
from engine.worker.import_lock import holds_import_lock
from engine.worker.interface import LoadProgress
from engine.worker.load.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.worker.image_generation.pipelines import Component, Pipeline

# The images of a drawing may have together as many pixels as this number of default-sized images.
DEFAULT_SIZES_MAX = 4
# The peak of a forward's activations, counted in numbers: in the unet for each latent and channel
# of its first block, with two rows for guidance; in the autoencoder for each pixel of a tile and
# channel of its second block. These are 1.5 times what small models of StableDiffusion and SDXL
# took (66 in StableDiffusion's unet).
UNET_ACTIVATIONS = 100
VAE_ACTIVATIONS = 8
# Bytes for each pixel of a drawing: its state between steps (source, decoded tiles, which overlap,
# and latents, with those that the scheduler keeps), and the memory that joining its tiles takes.
STATE_BYTES, JOIN_BYTES = 28, 24
# Freed memory that the allocator keeps, as a share of the memory in use: measured up to 0.25.
KEPT_SHARE = 0.3


def max_pixels(pipeline: Pipeline) -> int:
    """Return the most pixels that the images of one drawing may have together."""
    width, height = pipeline.default_size
    return DEFAULT_SIZES_MAX * width * height


def stored_dtype(pipeline: Pipeline) -> str:
    """Return safetensors' name of the type of the unet's weights."""
    component = pipeline.components["unet"]
    with Checkpoint(component.folder, component.files, component.index) as checkpoint:
        return checkpoint.main_dtype


def stored(pipeline: Pipeline) -> str:
    """Return the format and the types of the unet's weights, for people."""
    component = pipeline.components["unet"]
    with Checkpoint(component.folder, component.files, component.index) as checkpoint:
        return checkpoint.stored


def memory_bytes(pipeline: Pipeline, dtype: torch.dtype, max_drawings: int) -> int:
    """Return an estimate of a model's memory on its device, in bytes."""
    return weight_bytes(pipeline, dtype) + workspace_bytes(pipeline, dtype, max_drawings)


def weight_bytes(pipeline: Pipeline, dtype: torch.dtype) -> int:
    """Return the bytes of all components' weights in memory, by the headers of their files."""
    total = 0
    for name, component in pipeline.components.items():
        with Checkpoint(component.folder, component.files, component.index) as checkpoint:
            total += checkpoint.num_values * _dtype_of(name, component, dtype).itemsize
    return total


def file_bytes(pipeline: Pipeline) -> int:
    """Return the bytes of all components' weights in their files, by their headers."""
    total = 0
    for component in pipeline.components.values():
        with Checkpoint(component.folder, component.files, component.index) as checkpoint:
            total += sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    return total


def workspace_bytes(pipeline: Pipeline, dtype: torch.dtype, max_drawings: int) -> int:
    """Return an estimate of drawings' memory beside the weights, in bytes: the states of
    ``max_drawings`` drawings, and the largest step."""
    unet, vae = (pipeline.components[name].config for name in ("unet", "vae"))
    latents = max_pixels(pipeline) // pipeline.latent_scale**2
    channels = next(iter(unet.get("block_out_channels") or [320]))
    in_unet = UNET_ACTIVATIONS * latents * channels * dtype.itemsize
    widest = list(vae.get("block_out_channels") or [128])[:2][-1]
    tile = min(TILE_PIXELS, max(pipeline.default_size)) ** 2
    in_vae = VAE_ACTIVATIONS * tile * widest * 4
    each = STATE_BYTES * max_drawings + JOIN_BYTES
    alive = in_unet + in_vae + each * max_pixels(pipeline)
    return int(alive * (1 + KEPT_SHARE))


def load(
    pipeline: Pipeline,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[LoadProgress], None],
) -> DiffusionModel:
    """Load a model's components onto a device.

    Raises:
        Refusal: A file or a weight is damaged or missing, or a tensor is not the model's.
    """
    read, whole = 0, file_bytes(pipeline)

    def count(num_bytes: int) -> None:
        nonlocal read
        read += num_bytes
        progress(LoadProgress("weights", read, whole))

    modules = {
        name: load_module(name, component, device, _dtype_of(name, component, dtype), count)
        for name, component in pipeline.components.items()
    }
    encoders = [name for name in ("text_encoder", "text_encoder_2") if name in modules]
    tokenizers = [name.replace("text_encoder", "tokenizer") for name in encoders]
    # SDXL's base leaves this setting out; diffusers' default for it is True.
    zeros = bool(pipeline.is_xl and pipeline.index.get("force_zeros_for_empty_prompt", True))
    prompts = Prompts(
        tuple(_load_tokenizer(pipeline, name) for name in tokenizers),
        tuple(modules[name] for name in encoders),
        zeros,
    )
    scale = pipeline.latent_scale
    tiles = Tiles(modules["vae"], scale)
    noise = NoiseSchedulers(pipeline)
    return DiffusionModel(Parts(prompts, modules["unet"], modules["vae"], noise, tiles, scale))


def _dtype_of(name: str, component: Component, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a component: float32 for an autoencoder that by its config overflows in
    16 bits, else ``dtype``."""
    if name == "vae" and component.config.get("force_upcast", True):
        return torch.float32
    return dtype


@holds_import_lock
def _load_tokenizer(pipeline: Pipeline, name: str) -> Any:
    return transformers.CLIPTokenizer.from_pretrained(
        str(pipeline.directory / name), local_files_only=True
    )
