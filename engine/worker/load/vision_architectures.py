"""Decides from a config alone whether a model that sees is served, and how its classes are called.

Rule 1: an architecture is in `VISION` only if `tests/conformance/test_vision.py` compares it with
transformers. Rule 2: other models with a vision part are refused by name. This file imports neither
torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class VisionArchitecture:
    """A served class of transformers whose models read images: its name, its module, a name for
    people, its config class, the class of the model without its head, and the module of
    `engine.worker.vision` that knows it.

    A text model that has no class of its own is that of ``text``, a name in
    `engine.worker.load.architectures.SERVED`, with the rotary embedding ``rotary``, a class of the
    module, which reads three positions."""

    name: str
    module: str
    label: str
    config: str
    base: str
    family: str
    text: str = ""
    rotary: str = ""


VISION: dict[str, VisionArchitecture] = {
    entry.name: entry
    for entry in (
        VisionArchitecture(
            "LlavaForConditionalGeneration", "llava", "LLaVA", "LlavaConfig", "LlavaModel", "llava"
        ),
        VisionArchitecture(
            "Gemma3ForConditionalGeneration",
            "gemma3",
            "Gemma 3",
            "Gemma3Config",
            "Gemma3Model",
            "gemma",
        ),
        VisionArchitecture(
            "Idefics3ForConditionalGeneration",
            "idefics3",
            "Idefics 3",
            "Idefics3Config",
            "Idefics3Model",
            "idefics",
        ),
        VisionArchitecture(
            "SmolVLMForConditionalGeneration",
            "smolvlm",
            "SmolVLM",
            "SmolVLMConfig",
            "SmolVLMModel",
            "idefics",
        ),
        VisionArchitecture(
            "LlavaNextForConditionalGeneration",
            "llava_next",
            "LLaVA-Next",
            "LlavaNextConfig",
            "LlavaNextModel",
            "llava_next",
        ),
        VisionArchitecture(
            "Qwen2VLForConditionalGeneration",
            "qwen2_vl",
            "Qwen2-VL",
            "Qwen2VLConfig",
            "Qwen2VLModel",
            "qwen",
            text="Qwen2ForCausalLM",
            rotary="Qwen2VLRotaryEmbedding",
        ),
        VisionArchitecture(
            "Qwen2_5_VLForConditionalGeneration",
            "qwen2_5_vl",
            "Qwen2.5-VL",
            "Qwen2_5_VLConfig",
            "Qwen2_5_VLModel",
            "qwen",
            text="Qwen2ForCausalLM",
            rotary="Qwen2_5_VLRotaryEmbedding",
        ),
        VisionArchitecture(
            "Qwen3VLForConditionalGeneration",
            "qwen3_vl",
            "Qwen3-VL",
            "Qwen3VLConfig",
            "Qwen3VLModel",
            "qwen",
            text="Qwen3ForCausalLM",
            rotary="Qwen3VLTextRotaryEmbedding",
        ),
    )
}


# What keeps some of the others from being served here at all.
WHY_NOT = {
    "PaliGemmaForConditionalGeneration": "the tokens of its whole prompt see each other",
    "MllamaForConditionalGeneration": "it sees its images by cross-attention",
    "Florence2ForConditionalGeneration": "it is an encoder-decoder model",
}


def has_vision(config: Mapping[str, Any]) -> bool:
    """Return whether a parsed config.json describes a model that generates text and has a vision
    part, served or not. The first Qwen-VL models have the fields of the text model beside it."""
    names = config.get("architectures")
    generates = isinstance(names, list) and any("ConditionalGeneration" in str(n) for n in names)
    has_part = isinstance(config.get("vision_config"), dict)
    return has_part and ("text_config" in config or generates)


def find_vision(config: Mapping[str, Any]) -> VisionArchitecture:
    """Return the architecture of the parsed config.json of a model that sees.

    Raises:
        Refusal: The architecture is not served, or its weights are quantised.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else str(config.get("model_type"))
    if name not in VISION:
        why = f", because {WHY_NOT[name]}" if name in WHY_NOT else ""
        *labels, last = sorted(one.label for one in VISION.values())
        raise Refusal(f"{name} is not served{why}; of the models that read images, "
                      f"{', '.join(labels)} and {last} are")  # fmt: skip
    if config.get("quantization_config") is not None:
        raise Refusal(f"the weights of this {name} are quantised; it needs plain float weights")
    if config.get("audio_config") is not None:
        raise Refusal(f"this {name} reads sounds, too, which is not served")
    return VISION[name]
