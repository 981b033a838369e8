"""The base of the families' `Inputs`; and a model's image processor, of transformers' own class,
with the settings in the model's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.worker.image_reader import resample_of, table_of
from engine.worker.import_lock import holds_import_lock
from engine.worker.load.loader import stock_class
from engine.worker.load.reading import has_file
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import read_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from engine.images.preprocessor import Preprocessor, SeenImage

# The supported image processors, by their names without "Fast" or "Pil": transformers' modules.
MODULES = {
    "CLIPImageProcessor": "clip",
    "SiglipImageProcessor": "siglip",
    "Gemma3ImageProcessor": "gemma3",
    "Idefics3ImageProcessor": "idefics3",
    "SmolVLMImageProcessor": "smolvlm",
    "Qwen2VLImageProcessor": "qwen2_vl",
    "LlavaNextImageProcessor": "llava_next",
}


class VisionInputs:
    """Computes an image's embeddings by the tower. Each family of models has a subclass, called
    `Inputs`. ``preprocessor`` decodes and fits image files.

    Raises:
        Refusal: The image processor has settings that are not supported.
    """

    PROCESSOR = ""  # The image processor (in `MODULES`) of models whose files name none.
    TEXT_MODULE = "language_model"  # The attribute of transformers' model that is the text model.

    def __init__(
        self, directory: Path, config: Any, token_of: Callable[[int], str], max_pixels: int
    ) -> None:
        self._config = config
        self._processor = read_processor(directory, self.PROCESSOR or config.model_type)
        self._max_pixels = max_pixels
        self._token_of = token_of
        self.preprocessor: Preprocessor = self._preprocessor()

    def _preprocessor(self) -> Preprocessor:
        raise NotImplementedError

    def _of_any_shape(self) -> dict[str, Any]:
        """Return the fields that a `engine.images.preprocessor.ResizedSight` of any family has."""
        token_id = int(self._config.image_token_id)
        self._table = table_of(self._processor)
        return {
            "max_pixels": self._max_pixels,
            "resample": resample_of(self._processor),
            "token": self._token_of(token_id),
            "token_id": token_id,
        }

    def features(self, base: Any, image: SeenImage) -> torch.Tensor:
        """Return an image's embeddings, [1 + num_deep, num_tokens, hidden]."""
        raise NotImplementedError


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
        name = next(item for item, module in MODULES.items() if module == default)
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
        result = read.get(key) if key else read
        if isinstance(result, dict):
            return dict(result)
    raise Refusal("it has neither preprocessor_config.json nor an image processor in "
                  "processor_config.json")  # fmt: skip
