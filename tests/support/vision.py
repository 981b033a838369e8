"""Tiny models that read images, loaded by us and by transformers, and prompts with images."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import PromptImage
from engine.images.preprocessor import digest_of
from engine.requests.text.chat_values import Chat
from engine.requests.text.image_prompts import ReadImage, hide, place, show
from engine.worker.factory import make_runner
from tests.checkpoints.vision import make
from tests.support.images import picture

FILES = {
    "wide": picture(64, 48, seed=1),
    "tall": picture(31, 90, seed=2),
    "small": picture(7, 5, seed=3),
    "square": picture(40, 40, "JPEG", seed=4),
}
# Chats with images before, between and after text: a name of `FILES` is an image.
CHATS = {
    "before": [("wide", "What is this?")],
    "after": [("Look here:", "tall")],
    "between": [("One", "small", "and", "square", "compared.")],
    "alone": [("wide",)],
    "side by side": [("wide", "tall", "Which is larger?")],
    "turns": [("wide", "Describe it."), ("It is green.",), ("tall", "And this?", "small")],
    "no image": [("Just words, more words, and some words again.",)],
}


@dataclass(slots=True)
class VisionModel:
    """A model, loaded by the engine and by transformers."""

    directory: Path
    runner: Any
    info: Any
    stock: Any
    processor: Any

    def parts(self, turns: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Return chat messages whose image parts hold the images' bytes."""
        return [
            {
                "role": "assistant" if number % 2 else "user",
                "content": [
                    {"type": "image", "image": FILES[one]}
                    if one in FILES
                    else {"type": "text", "text": one}
                    for one in turn
                ],
            }
            for number, turn in enumerate(turns)
        ]

    def prompt(
        self, turns: Sequence[Sequence[str]]
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """Return the tokens of a chat and where its images are, as the engine makes them."""
        preprocessor, tokenizer = self.info.images, self.runner.tokenizer
        messages = self.parts(turns)
        for message in messages:
            for part in message["content"]:
                if "image" in part:
                    data = part["image"]
                    part["image"] = ReadImage(preprocessor.read(data), digest_of(data))
        hidden = hide(Chat(tuple(messages)), preprocessor)
        shown = show(tokenizer.render_chat(hidden.chat.messages), hidden, preprocessor)
        ids = tokenizer.encode(shown.text, add_special_tokens=False)
        return place(ids, shown, hidden.images, preprocessor, tokenizer.plain_ids)

    def inputs(self, turns: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Return the same chat as transformers' own processor makes it."""
        names = [one for turn in turns for one in turn if one in FILES]
        images = [Image.open(io.BytesIO(FILES[one])).convert("RGB") for one in names]
        text = self.runner.tokenizer.render_chat(
            [
                {**message, "content": [_marked(part) for part in message["content"]]}
                for message in self.parts(turns)
            ]
        )
        fields: dict[str, Any] = {"images": images} if images else {}
        return dict(
            self.processor(text=text, return_tensors="pt", add_special_tokens=False, **fields)
        )

    def expected(self, turns: Sequence[Sequence[str]], num_new: int) -> list[int]:
        """Return transformers' greedy tokens."""
        inputs = self.inputs(turns)
        made = self.stock.generate(
            **inputs, max_new_tokens=num_new, eos_token_id=-1, do_sample=False
        )
        new: list[int] = made[0, inputs["input_ids"].shape[1] :].tolist()
        return new


def _marked(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image" else part


def runner_of(directory: Path, **fields: Any) -> tuple[Any, Any]:
    """Return a loaded runner and its info."""
    model = ModelConfig(str(directory), dtype="float32")
    runner = make_runner(model, EngineConfig(models=(model,), **fields))
    return runner, runner.load(lambda progress: None)


def load(root: Path, arch: str) -> VisionModel:
    """Make a model and load it twice."""
    import transformers

    from tests.checkpoints.vision import RECIPES

    directory = make(root / arch, arch)
    runner, info = runner_of(directory, kv_cache_memory=8 << 20)
    stock = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype="float32", attn_implementation="eager"
    ).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    processor = RECIPES[arch].processor(transformers, tokenizer)
    return VisionModel(directory, runner, info, stock, processor)
