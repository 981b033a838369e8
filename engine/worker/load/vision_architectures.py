"""Decides from a config alone whether a model that reads images is served, and names its classes.

Rule 1: an architecture is in `VISION` only if `tests/conformance/test_vision.py` compares it with
transformers. Rule 2: a message that refuses another model with a vision part names its class. This
file imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class VisionArchitecture:
    """The served classes of one family of transformers' models that read images: the stem of their
    names, their module, a name for people, and the family's module in `engine.worker.text.vision`.

    If transformers has no class for the text model, it is a ``text``, a name in
    `engine.worker.load.architectures.SERVED`, with a rotary embedding of the class ``rotary``,
    which reads three positions for each token."""

    stem: str
    module: str
    label: str
    family: str
    text: str = ""
    rotary: str = ""

    @property
    def name(self) -> str:
        """The name of the model's class."""
        return f"{self.stem}ForConditionalGeneration"

    @property
    def config(self) -> str:
        """The name of the class of the model's config."""
        return f"{self.stem}Config"

    @property
    def base(self) -> str:
        """The name of the class of the model without its head."""
        return f"{self.stem}Model"


VISION: dict[str, VisionArchitecture] = {
    entry.name: entry
    for entry in (
        VisionArchitecture("Llava", "llava", "LLaVA", "llava"),
        VisionArchitecture("Gemma3", "gemma3", "Gemma 3", "gemma"),
        VisionArchitecture("Idefics3", "idefics3", "Idefics 3", "idefics"),
        VisionArchitecture("SmolVLM", "smolvlm", "SmolVLM", "idefics"),
        VisionArchitecture("LlavaNext", "llava_next", "LLaVA-Next", "llava_next"),
        VisionArchitecture(
            *("Qwen2VL", "qwen2_vl", "Qwen2-VL", "qwen"),
            *("Qwen2ForCausalLM", "Qwen2VLRotaryEmbedding"),
        ),
        VisionArchitecture(
            *("Qwen2_5_VL", "qwen2_5_vl", "Qwen2.5-VL", "qwen"),
            *("Qwen2ForCausalLM", "Qwen2_5_VLRotaryEmbedding"),
        ),
        VisionArchitecture(
            *("Qwen3VL", "qwen3_vl", "Qwen3-VL", "qwen"),
            *("Qwen3ForCausalLM", "Qwen3VLTextRotaryEmbedding"),
        ),
    )
}


# Reasons why some other models with a vision part cannot be served.
WHY_NOT = {
    "PaliGemmaForConditionalGeneration": "the tokens of its whole prompt see each other",
    "MllamaForConditionalGeneration": "it sees its images by cross-attention",
    "Florence2ForConditionalGeneration": "it is an encoder-decoder model",
}


def has_vision(config: Mapping[str, Any]) -> bool:
    """Return whether a parsed config.json describes a model that generates text and has a vision
    part, served or not. The first Qwen-VL models have the text model's fields beside
    vision_config."""
    names = config.get("architectures")
    generates = isinstance(names, list) and any("ConditionalGeneration" in str(n) for n in names)
    has_part = isinstance(config.get("vision_config"), dict)
    return has_part and ("text_config" in config or generates)


def find_vision(config: Mapping[str, Any]) -> VisionArchitecture:
    """Return the architecture of the parsed config.json of a model that reads images.

    Raises:
        Refusal: The architecture is not served, or its weights are quantised.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else str(config.get("model_type"))
    if name not in VISION:
        why = f", because {WHY_NOT[name]}" if name in WHY_NOT else ""
        *labels, last = sorted(architecture.label for architecture in VISION.values())
        raise Refusal(f"{name} is not served{why}; of the models that read images, "
                      f"{', '.join(labels)} and {last} are")  # fmt: skip
    if config.get("quantization_config") is not None:
        raise Refusal(f"the weights of this {name} are quantised; it needs plain float weights")
    if config.get("audio_config") is not None:
        raise Refusal(f"this {name} reads sounds, too, which is not served")
    return VISION[name]
