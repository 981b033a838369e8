"""Reads an image model's small files, and returns its components.

A pipeline of diffusers is a directory with a model_index.json, which names the class of each
component, and with a folder for each component. Rule 1: only the classes in the tables below are
accepted, and only safetensors. Rule 2: this file imports neither torch nor diffusers, so that a
model is refused before they are. A safety checker is not loaded: the operator decides what may be
drawn, as with text.

Source: diffusers 0.42, `pipelines/stable_diffusion` and `pipelines/stable_diffusion_xl`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import install_command
from engine.worker.image_generation.noise_names import NAMES_OF_CLASSES
from engine.worker.load.reading import has_file
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import PIPELINE_INDEX, read_json, weight_index

if TYPE_CHECKING:
    from pathlib import Path

# The classes of each component, by the pipeline's class. model_index.json also names each class's
# library, which is ignored.
STABLE_DIFFUSION = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
    "text_encoder": ("CLIPTextModel",),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
    "scheduler": tuple(NAMES_OF_CLASSES),
}
PIPELINES = {
    "StableDiffusionPipeline": STABLE_DIFFUSION,
    "StableDiffusionXLPipeline": STABLE_DIFFUSION
    | {
        "text_encoder_2": ("CLIPTextModelWithProjection",),
        "tokenizer_2": ("CLIPTokenizer", "CLIPTokenizerFast"),
    },
    "LatentConsistencyModelPipeline": STABLE_DIFFUSION,
}
# Components that are not loaded, because drawing an image does not need them.
UNUSED = ("safety_checker", "feature_extractor", "image_encoder")
# The names of weight files, without variant and suffix, by component.
WEIGHTS = {
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
    "text_encoder_2": "model",
}
VARIANTS = ("", "fp16")
NEEDED = "diffusers"  # a library that the extra triolet[images] installs


@dataclass(frozen=True, slots=True)
class Component:
    """A component with weights: its folder, its config, and the names of its files. ``variant`` is
    diffusers' variant in these names, such as fp16; empty if they have none."""

    folder: Path
    config: dict[str, Any]
    files: tuple[str, ...]
    variant: str
    index: dict[str, str]  # the file of each tensor, if there are several files


@dataclass(frozen=True, slots=True)
class Pipeline:
    """An image model's files. ``components`` are the components with weights, by name, and
    ``scheduler`` is the config of the checkpoint's own noise scheduler."""

    directory: Path
    architecture: str
    index: dict[str, Any]
    components: dict[str, Component]
    scheduler: dict[str, Any]

    @property
    def is_xl(self) -> bool:
        """Whether the model has two text encoders, and reads the size of its images."""
        return "text_encoder_2" in self.components

    @property
    def latent_scale(self) -> int:
        """The width of a latent in pixels."""
        blocks = self.components["vae"].config.get("block_out_channels")
        return int(2 ** (len(blocks) - 1)) if isinstance(blocks, list) and blocks else 8

    @property
    def default_size(self) -> tuple[int, int]:
        """The width and the height that the model was trained for, in pixels."""
        size = self.components["unet"].config.get("sample_size") or 64
        height, width = size if isinstance(size, list) else (size, size)
        return int(width) * self.latent_scale, int(height) * self.latent_scale


def read(directory: Path) -> Pipeline:
    """Read a pipeline's configs and check everything that they show.

    Raises:
        Refusal: The pipeline is not served, or a file is missing or broken.
    """
    index = read_json(directory, PIPELINE_INDEX)
    architecture = str(index.get("_class_name"))[:200]
    classes = PIPELINES.get(architecture)
    if classes is None:
        served = ", ".join(PIPELINES)
        raise Refusal(f"{architecture} is not served; the pipelines that are served: {served}")
    if importlib.util.find_spec(NEEDED) is None:
        raise Refusal(
            f"image models need {NEEDED}, which is not installed: {install_command('images')}"
        )
    for name, entry in index.items():
        if not name.startswith("_") and isinstance(entry, list):
            _check_class(name, entry, classes)
    components = {name: _component(directory, name) for name in WEIGHTS if name in classes}
    scheduler = read_json(_folder(directory, "scheduler"), "scheduler_config.json")
    pipeline = Pipeline(directory, architecture, index, components, scheduler)
    _check(pipeline)
    return pipeline


def _check_class(name: str, entry: list[Any], classes: dict[str, tuple[str, ...]]) -> None:
    class_name = None if not entry or entry[-1] is None else str(entry[-1])[:200]
    if name in UNUSED or (class_name is None and name not in classes):
        return
    accepted = classes.get(name)
    if accepted is None:
        raise Refusal(f"its component {name[:200]} ({class_name}) is not supported")
    if class_name not in accepted:
        raise Refusal(f"its {name} is {class_name}, of which only {', '.join(accepted)} are served")


def _folder(directory: Path, name: str) -> Path:
    folder = directory / name
    if not folder.is_dir():
        raise Refusal(f"it has no folder {name}")
    return folder


def _component(directory: Path, name: str) -> Component:
    folder = _folder(directory, name)
    variant, files, index = _weight_files(folder, name)
    return Component(folder, read_json(folder, "config.json"), files, variant, index)


def _weight_files(folder: Path, name: str) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Return the variant of a component's weights, its files and their index."""
    for variant in VARIANTS:
        part = f".{variant}" if variant else ""
        whole = f"{WEIGHTS[name]}{part}.safetensors"
        shards = f"{WEIGHTS[name]}.safetensors.index{part}.json"
        if index := weight_index(folder, shards):
            return variant, tuple(sorted(set(index.values()))), index
        if has_file(folder / whole):
            return variant, (whole,), {}
    raise Refusal(
        f"its {name} has no {WEIGHTS[name]}.safetensors; pickled weights (.bin) are not read, "
        "because they can run code: save the pipeline with safe_serialization"
    )


def _check(pipeline: Pipeline) -> None:
    """Refuse a pipeline whose configs need computations that our image generation lacks."""
    unet, vae = pipeline.components["unet"].config, pipeline.components["vae"].config
    inputs, latents = unet.get("in_channels", 4), vae.get("latent_channels", 4)
    if inputs != latents:
        raise Refusal(
            f"its unet reads {inputs} channels and its vae makes {latents}: a model that fills in "
            "or edits images is not served"
        )
    if unet.get("encoder_hid_dim_type") is not None or unet.get("class_embed_type") is not None:
        raise Refusal("its unet needs inputs other than prompts (IP-Adapter, classes)")
    wanted = "text_time" if pipeline.is_xl else None
    if unet.get("addition_embed_type") != wanted:
        embedding_type = unet.get("addition_embed_type")
        raise Refusal(
            f"its unet's addition_embed_type is {embedding_type}, of which only {wanted} is served"
        )
    if pipeline.index.get("requires_aesthetics_score"):
        raise Refusal("it is a refiner, which only reworks another model's images")
    scheduler = str(pipeline.scheduler.get("_class_name"))[:200]
    if scheduler not in NAMES_OF_CLASSES:
        raise Refusal(
            f"its noise scheduler {scheduler} is not served; put the config of one of "
            f"{', '.join(NAMES_OF_CLASSES)} into scheduler/scheduler_config.json"
        )
