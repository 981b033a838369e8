"""Turns prompts into the embeddings that a denoising step reads.

Source: diffusers 0.42, encode_prompt of both pipelines, without their clip_skip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.core.common.vocabulary import check_text

if TYPE_CHECKING:
    from engine.core.image_generation.types import Drawing


class Embeddings(NamedTuple):
    """The embeddings of a text, [1, tokens, width], and in a model with two text encoders also the
    pooled embedding, [1, width]."""

    tokens: torch.Tensor
    pooled: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Prompts:
    """The text encoders of one model with their tokenizers. One encoder gives the output of its
    last layer; two give those of their last layers but one, and the second its pooled output. With
    ``zeros_for_none``, a missing negative prompt is embedded as zeros, and not as an empty text."""

    tokenizers: tuple[Any, ...]
    encoders: tuple[Any, ...]
    zeros_for_none: bool

    @property
    def num_tokens(self) -> int:
        """The most tokens of a prompt, with its begin and end tokens.
        `engine.requests.image_generation.prepare` refuses longer prompts."""
        return int(self.tokenizers[0].model_max_length)

    @property
    def vocab_size(self) -> int:
        """The number of ids that all encoders have an embedding for."""
        return min(map(_vocab_size, self.encoders))

    def encode(self, drawing: Drawing, *, guided: bool) -> Embeddings:
        """Return a row of embeddings for each of a drawing's images. With guidance, the rows of the
        negative prompt come first, as many.

        Raises:
            InvalidRequest: A prompt has a token that an encoder lacks.
        """
        wanted = _repeated(self._of_text("prompt", drawing.prompt), drawing.num_images)
        if not guided:
            return wanted
        if not drawing.negative_prompt and self.zeros_for_none:
            unwanted = _zeros_like(wanted)
        else:
            of_negative = self._of_text("negative_prompt", drawing.negative_prompt)
            unwanted = _repeated(of_negative, drawing.num_images)
        return _joined(unwanted, wanted)

    def _of_text(self, field: str, text: str) -> Embeddings:
        if len(self.encoders) == 1:
            return Embeddings(_run(self.tokenizers[0], self.encoders[0], field, text)[0])
        outputs = [
            _run(tokenizer, encoder, field, text, output_hidden_states=True)
            for tokenizer, encoder in zip(self.tokenizers, self.encoders, strict=True)
        ]
        tokens = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        return Embeddings(tokens, outputs[-1].text_embeds)


def _vocab_size(encoder: Any) -> int:
    return int(encoder.get_input_embeddings().num_embeddings)


def _run(tokenizer: Any, encoder: Any, field: str, text: str, **options: Any) -> Any:
    read = tokenizer(
        [text],
        padding="max_length",
        max_length=tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    ).to(encoder.device)
    check_text(field, read.input_ids[0].tolist(), _vocab_size(encoder), tokenizer)
    if getattr(encoder.config, "use_attention_mask", False):
        options["attention_mask"] = read.attention_mask
    return encoder(read.input_ids, **options)


def _repeated(embeddings: Embeddings, count: int) -> Embeddings:
    pooled = None if embeddings.pooled is None else embeddings.pooled.repeat(count, 1)
    return Embeddings(embeddings.tokens.repeat(count, 1, 1), pooled)


def _zeros_like(embeddings: Embeddings) -> Embeddings:
    pooled = None if embeddings.pooled is None else torch.zeros_like(embeddings.pooled)
    return Embeddings(torch.zeros_like(embeddings.tokens), pooled)


def _joined(first: Embeddings, second: Embeddings) -> Embeddings:
    pooled = None
    if first.pooled is not None and second.pooled is not None:
        pooled = torch.cat([first.pooled, second.pooled])
    return Embeddings(torch.cat([first.tokens, second.tokens]), pooled)
