"""Writes a random-weight checkpoint of a model that reads images, with its processor.

    python -m tests.checkpoints.vision --arch smolvlm --out DIR

Rule 1: the same arguments write the same weights. Rule 2: the libraries themselves write the files,
so that they are like those of real models. The weights are as those of `tests.checkpoints.text`.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoints.text import EOS, fill, write_tokenizer

VOCAB = 512
WORDS = 400  # the tokenizer's first ids are words; special tokens follow
TEXT = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
SIDE, PATCH = 32, 8
EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
TEMPLATE = (
    "{%% for m in messages %%}{{ m['role'] }}: {%% for part in m['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}"
    "\n{%% endfor %%}{%% if add_generation_prompt %%}assistant: {%% endif %%}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one architecture's checkpoint is made: its special tokens, its chat template's marker of
    an image, and functions that make the model and the processor. ``names`` are the processor's
    names for the first of these tokens."""

    tokens: tuple[str, ...]
    marker: str
    model: Callable[[Any, dict[str, int]], Any]
    processor: Callable[[Any, Any], Any]
    names: tuple[str, ...] = ("image_token",)


def _llava(transformers: Any, ids: dict[str, int]) -> Any:
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config={"model_type": "clip_vision_model", **EYES},
            text_config={"model_type": "llama", "tie_word_embeddings": False, **TEXT},
            image_token_id=ids["<image>"],
            image_seq_length=(SIDE // PATCH) ** 2,
            vision_feature_layer=-2,
            vision_feature_select_strategy="default",
        )
    )


def _llava_processor(transformers: Any, tokenizer: Any) -> Any:
    square = {"height": SIDE, "width": SIDE}
    return transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=square),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


# An image is one square and, beside that, two, three or four tiles.
ANYRES = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE], [3 * SIDE, SIDE]]


def _llava_next(transformers: Any, ids: dict[str, int]) -> Any:
    return transformers.LlavaNextForConditionalGeneration(
        transformers.LlavaNextConfig(
            vision_config={"model_type": "clip_vision_model", **EYES},
            text_config={"model_type": "mistral", "tie_word_embeddings": False, **TEXT},
            image_token_index=ids["<image>"],
            image_seq_length=(SIDE // PATCH) ** 2,
            vision_feature_layer=-2,
            vision_feature_select_strategy="default",
            image_grid_pinpoints=ANYRES,
        )
    )


def _llava_next_processor(transformers: Any, tokenizer: Any) -> Any:
    square = {"height": SIDE, "width": SIDE}
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size=square, image_grid_pinpoints=ANYRES
    )
    return transformers.LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _idefics(name: str) -> Callable[[Any, dict[str, int]], Any]:
    def make(transformers: Any, ids: dict[str, int]) -> Any:
        kind = {"Idefics3": "idefics3_vision", "SmolVLM": "smolvlm_vision"}[name]
        config = getattr(transformers, f"{name}Config")(
            vision_config={"model_type": kind, **EYES},
            text_config={"model_type": "llama", "tie_word_embeddings": False, **TEXT},
            image_token_id=ids["<image>"],
            scale_factor=2,
            tie_word_embeddings=False,
        )
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return make


def _idefics_processor(name: str) -> Callable[[Any, Any], Any]:
    def make(transformers: Any, tokenizer: Any) -> Any:
        images = getattr(transformers, f"{name}ImageProcessorPil")(
            size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
        )
        # SmolVLM's processor class also makes a video processor, which needs more packages.
        return transformers.Idefics3Processor(
            images, tokenizer, image_seq_len=(SIDE // PATCH // 2) ** 2
        )

    return make


GRID = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
GRID_MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
# The processors' least and most pixels of an image: 4 to 36 tokens.
GRID_SIZE = {"shortest_edge": 4 * (2 * PATCH) ** 2, "longest_edge": 36 * (2 * PATCH) ** 2}
GRID_EYES = {"depth": 3, "num_heads": 2, "patch_size": PATCH}


def _grid_fields(ids: dict[str, int]) -> dict[str, Any]:
    names = ("image_token", "vision_start_token", "vision_end_token", "video_token")
    return {f"{name}_id": ids[token] for name, token in zip(names, GRID, strict=True)}


def _grid(
    name: str, eyes: dict[str, Any], rope: dict[str, Any], *, has_head_dim: bool = False
) -> Callable[[Any, dict[str, int]], Any]:
    def make(transformers: Any, ids: dict[str, int]) -> Any:
        text = {key: one for key, one in TEXT.items() if has_head_dim or key != "head_dim"}
        settings = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        config = getattr(transformers, f"{name}Config")(
            vision_config=GRID_EYES | eyes,
            text_config={"rope_parameters": settings | rope, **text},
            **_grid_fields(ids),
        )
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return make


_qwen2_vl = _grid(
    "Qwen2VL", {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": TEXT["hidden_size"]}, {}
)
# The vision encoder attends in windows of two by two tokens.
_qwen2_5_vl = _grid(
    "Qwen2_5_VL",
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": TEXT["hidden_size"],
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1],
    },
    {},
)
_qwen3_vl = _grid(
    "Qwen3VL",
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": TEXT["hidden_size"],
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
    {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
    has_head_dim=True,
)


def _grid_processor(transformers: Any, tokenizer: Any) -> Any:
    class Qwen2VLProcessor(transformers.Qwen2VLProcessor):  # type: ignore[misc]
        """Qwen 2 VL's processor without a video processor, which would need more packages."""

        def __init__(self, image_processor: Any, tokenizer: Any) -> None:
            super().__init__(image_processor, tokenizer)

    images = transformers.Qwen2VLImageProcessorPil(size=GRID_SIZE, patch_size=PATCH)
    return Qwen2VLProcessor(images, tokenizer)


# Most of an image's tokens are outside the sliding window.
GEMMA_TEXT = TEXT | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                     "sliding_window": 8, "query_pre_attn_scalar": 16}  # fmt: skip
GEMMA_EYES = EYES | {"image_size": 96, "vision_use_head": False}
GEMMA_TOKENS = 36
GEMMA = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")


def _gemma3(transformers: Any, ids: dict[str, int]) -> Any:
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            vision_config={"model_type": "siglip_vision_model", **GEMMA_EYES},
            text_config={"model_type": "gemma3_text", **GEMMA_TEXT},
            mm_tokens_per_image=GEMMA_TOKENS,
            image_token_index=ids[GEMMA[0]],
            boi_token_index=ids[GEMMA[1]],
            eoi_token_index=ids[GEMMA[2]],
        )
    )


def _gemma3_processor(transformers: Any, tokenizer: Any) -> Any:
    side = GEMMA_EYES["image_size"]
    images = transformers.Gemma3ImageProcessorPil(size={"height": side, "width": side})
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=GEMMA_TOKENS)


_TILES = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)
RECIPES = {
    "gemma3": Recipe(
        GEMMA,
        GEMMA[1],
        _gemma3,
        _gemma3_processor,
        ("image_token", "boi_token", "eoi_token"),
    ),
    "llava": Recipe(("<image>",), "<image>", _llava, _llava_processor),
    "idefics3": Recipe(_TILES, "<image>", _idefics("Idefics3"), _idefics_processor("Idefics3")),
    "llava_next": Recipe(("<image>",), "<image>", _llava_next, _llava_next_processor),
    "qwen2_vl": Recipe(GRID, GRID_MARKER, _qwen2_vl, _grid_processor),
    "qwen2_5_vl": Recipe(GRID, GRID_MARKER, _qwen2_5_vl, _grid_processor),
    "qwen3_vl": Recipe(GRID, GRID_MARKER, _qwen3_vl, _grid_processor),
    "smolvlm": Recipe(_TILES, "<image>", _idefics("SmolVLM"), _idefics_processor("SmolVLM")),
}


def make(out: Path | str, arch: str = "smolvlm", *, seed: int = 0) -> Path:
    """Write a checkpoint with its tokenizer and processor into ``out``, and return the path."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory, recipe = Path(out), RECIPES[arch]
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, WORDS)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(
        [AddedToken(one, normalized=False, special=True) for one in recipe.tokens]
    )
    ids = {one: int(backend.token_to_id(one)) for one in recipe.tokens}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        extra_special_tokens=dict(zip(recipe.names, recipe.tokens, strict=False)),
    )
    processor = recipe.processor(transformers, tokenizer)
    processor.chat_template = TEMPLATE % recipe.marker
    processor.save_pretrained(directory)
    model = recipe.model(transformers, ids)
    fields = {"vocab_size": VOCAB, "hidden_size": TEXT["hidden_size"]}
    for name, value in fields.items():
        setattr(model.config, name, value)  # for `fill`, which reads them here
    fill(model, torch.Generator().manual_seed(seed))
    for name in fields:
        delattr(model.config, name)
    model.save_pretrained(directory)
    return directory


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.checkpoints.vision", description="Write a random model."
    )
    parser.add_argument("--arch", default="smolvlm", choices=sorted(RECIPES))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    make(given.out, given.arch, seed=given.seed)
    print(f"wrote {given.arch} to {given.out}")


if __name__ == "__main__":
    main()
