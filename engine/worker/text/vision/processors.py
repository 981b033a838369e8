"""Makes a model's image processor, of transformers' own class, by the settings in its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.worker.import_lock import holds_import_lock
from engine.worker.load.loader import stock_class
from engine.worker.load.reading import has_file
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import read_json

if TYPE_CHECKING:
    from pathlib import Path

# The supported image processors, without "Fast" or "Pil", and transformers' module of each.
MODULES = {
    "CLIPImageProcessor": "clip",
    "SiglipImageProcessor": "siglip",
    "Gemma3ImageProcessor": "gemma3",
    "Idefics3ImageProcessor": "idefics3",
    "SmolVLMImageProcessor": "smolvlm",
    "Qwen2VLImageProcessor": "qwen2_vl",
    "LlavaNextImageProcessor": "llava_next",
}


@holds_import_lock
def read_processor(directory: Path, default: str) -> Any:
    """Return the image processor of a model's directory, of the class that uses Pillow. ``default``
    is the image processor's module for a model whose files name no processor.

    Raises:
        Refusal: The files have no image processor, or it is not supported.
    """
    settings = _settings(directory)
    named = str(settings.get("image_processor_type") or settings.get("feature_extractor_type", ""))
    name = (
        named.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    )
    if not name:
        name = next(one for one, module in MODULES.items() if module == default)
    if name not in MODULES:
        raise Refusal(
            f"its image processor is {name[:200]!r}, which is not one of {', '.join(MODULES)}"
        )
    module = MODULES[name]
    for own in ("auto_map", "processor_class", "image_processor_type", "feature_extractor_type"):
        settings.pop(own, None)
    return stock_class(module, "image_processing_pil", f"{name}Pil")(**settings)


def _settings(directory: Path) -> dict[str, Any]:
    """Return the settings of the image processor, from one of two files."""
    for name, key in (
        ("processor_config.json", "image_processor"),
        ("preprocessor_config.json", ""),
    ):
        if not has_file(directory / name):
            continue
        read = read_json(directory, name)
        found = read.get(key) if key else read
        if isinstance(found, dict):
            return dict(found)
    raise Refusal("it has neither preprocessor_config.json nor an image processor in "
                  "processor_config.json")  # fmt: skip
