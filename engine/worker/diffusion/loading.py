"""Loads the components of an image model, and estimates its memory.

Rule: every class comes from the tables in `engine.worker.diffusion.pipelines`. No weight is
initialised at random: a checkpoint that lacks one is refused.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import diffusers
import torch
import transformers
from safetensors import safe_open

from engine.worker.diffusion.model import DiffusionModel, Parts
from engine.worker.diffusion.noise import NoiseSchedulers
from engine.worker.diffusion.prompts import Prompts
from engine.worker.diffusion.tiles import TILE_PIXELS, Tiles
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from engine.worker.diffusion.pipelines import Component, Pipeline

MODULES: dict[str, Any] = {
    "unet": diffusers.UNet2DConditionModel,
    "vae": diffusers.AutoencoderKL,
    "text_encoder": transformers.CLIPTextModel,
    "text_encoder_2": transformers.CLIPTextModelWithProjection,
}
# How many images of the default size a drawing may have in pixels, all its images together.
DEFAULT_SIZES_MAX = 4
# The widest activations of a forward that are alive at once, in numbers: of the unet for each
# latent and channel of its first block, with the guidance's second row; of the autoencoder for each
# pixel of a tile and channel of its second block. Estimates, checked by a test.
UNET_ACTIVATIONS = 40
VAE_ACTIVATIONS = 8


def max_pixels(pipeline: Pipeline) -> int:
    """Return how many pixels the images of one drawing may have together."""
    width, height = pipeline.default_size
    return DEFAULT_SIZES_MAX * width * height


def stored_dtype(pipeline: Pipeline) -> str:
    """Return safetensors' name of the type of the unet's weights."""
    component = pipeline.components["unet"]
    with safe_open(component.folder / component.files[0], "pt") as file:
        return str(file.get_slice(next(iter(file.keys()))).get_dtype())


def weight_bytes(pipeline: Pipeline, dtype: torch.dtype) -> int:
    """Return the bytes of all components' weights in memory, by the headers of their files."""
    return sum(
        _num_values(component) * _dtype_of(name, component, dtype).itemsize
        for name, component in pipeline.components.items()
    )


def workspace_bytes(pipeline: Pipeline, dtype: torch.dtype) -> int:
    """Return an estimate of what the largest step takes beside the weights, in bytes."""
    unet, vae = (pipeline.components[name].config for name in ("unet", "vae"))
    latents = max_pixels(pipeline) // pipeline.latent_scale**2
    channels = next(iter(unet.get("block_out_channels") or [320]))
    in_unet = UNET_ACTIVATIONS * latents * channels * dtype.itemsize
    widest = list(vae.get("block_out_channels") or [128])[:2][-1]
    tile = min(TILE_PIXELS, max(pipeline.default_size)) ** 2
    return in_unet + VAE_ACTIVATIONS * tile * widest * 4 + 4 * 3 * max_pixels(pipeline)


def load(pipeline: Pipeline, device: torch.device, dtype: torch.dtype) -> DiffusionModel:
    """Load a model's components onto a device.

    Raises:
        Refusal: a weight is missing or is not finite.
        Exception: a file cannot be read.
    """
    for library in (transformers, diffusers):
        library.utils.logging.disable_progress_bar()  # for the whole process
    modules = {
        name: _load_module(name, component, device, dtype)
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


def _num_values(component: Component) -> int:
    total = 0
    for name in component.files:
        with safe_open(component.folder / name, "pt") as file:
            total += sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    return total


def _dtype_of(name: str, component: Component, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a component: an autoencoder that overflows in 16 bits, as its config
    says, stays in 32."""
    if name == "vae" and component.config.get("force_upcast", True):
        return torch.float32
    return dtype


def _load_module(name: str, component: Component, device: torch.device, dtype: torch.dtype) -> Any:
    wanted = _dtype_of(name, component, dtype)
    names = "dtype" if name.startswith("text_encoder") else "torch_dtype"
    module, info = MODULES[name].from_pretrained(
        str(component.folder),
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        **{names: wanted},
        **({"variant": component.variant} if component.variant else {}),
    )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise Refusal(f"its {name} lacks weights, such as {missing[0]}")
    if not all(bool(one.isfinite().all()) for one in module.parameters()):
        raise Refusal(f"its {name} has weights that are not finite numbers")
    return module.to(device).eval().requires_grad_(False)


def _load_tokenizer(pipeline: Pipeline, name: str) -> Any:
    return transformers.CLIPTokenizer.from_pretrained(
        str(pipeline.directory / name), local_files_only=True
    )
