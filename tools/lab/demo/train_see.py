"""Trains the shipped model that answers questions about drawings, with
`tools/lab/demo/drawings.py`.

    python -m tools.lab.train_demo see                                   the shipped model
    python -m tools.lab.train_demo see --kept FILE --minutes 4           four minutes of it; repeat
    python -m tools.lab.train_demo see --steps 100 --out DIR             a quick one

The model has LLaVA's layout. Its tower is the one of the embedding model (`demo-clip`), and stays
as it is; a projector and a Llama-architecture text model learn from chats about one drawing or two.

Everything follows from `--seed` and the embedding model. A run is repeatable on one machine with
the same number of threads; elsewhere sums may be rounded differently.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # libgomp reads it when torch is imported

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPModel,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from tools.lab.demo.drawing_words import ASKING, NO_PICTURE, questions
from tools.lab.demo.drawings import Drawing, training_drawing
from tools.lab.demo.encoder_parts import begin_training, padded, save_facts
from tools.lab.demo.pieces import Pieces, Unfinished, add_options
from tools.lab.demo.train_clip import OUT as CLIP
from tools.lab.demo.train_clip import PATCH, build_images, pixels_of, scaled
from tools.lab.demo.train_stories import BOS, END, EOS, IGNORED, PAD, SPECIAL_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    Encode = Callable[[str], list[int]]

OUT = Path(__file__).parents[3] / "engine" / "demo" / "see"

IMAGE = "<image>"
VOCAB_SIZE = 640
TOKENIZER_CHATS = 4000
MAX_POSITIONS = 1024
ROUNDS = (1000, 800)
"""Steps with all kinds of questions alike, and steps that ask each of `HARD` twice: after the first
round, 0.63 of the answers to "beside" were right, 0.64 of those to "place", and 0.87 and 0.89 of
those to "relation" and "size"."""

HARD = ("beside", "place", "relation", "size")
ROWS = 32
CHATS_EVERY, TWO_EVERY = 4, 16
"""One of so many steps has chats, and one of so many has chats about one drawing and then another
one. In the other steps all questions about a drawing are asked apart: none sees the others, whose
answers would tell what it asks (guesses)."""

QUESTIONS_MAX = 5  # in a chat about a drawing (guess)

NONE_SHARE, AFTER_SHARE, CASUAL_SHARE = 0.03, 0.25, 0.15
"""The shares of chats with no drawing, of drawings that follow their question, and of questions
that are written carelessly (guesses)."""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('this model knows the roles system, user and assistant') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] | trim -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<image>' -}}
{%- else -%}{{- part['text'] | trim -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


class Turn(NamedTuple):
    """A question with its answer. If it comes with a new drawing, ``image`` is the placeholder in
    the text, before the question or after it; otherwise it is ""."""

    question: str
    answer: str
    image: str = ""
    is_image_first: bool = True


class Conversation(NamedTuple):
    """A chat to learn from, and its drawings in their order."""

    turns: tuple[Turn, ...]
    drawings: tuple[Drawing, ...]


def conversation(
    seed: int, index: int, num_drawings: int, kinds: Sequence[str], num_questions: int
) -> Conversation:
    """Return the training chat number ``index``, with at most ``num_questions`` of these ``kinds``
    about each drawing."""
    rng = random.Random(f"see/{seed}/{index}")
    drawings = tuple(training_drawing(seed, 2 * index + at) for at in range(num_drawings))
    if rng.random() < NONE_SHARE:
        asked = questions(rng, drawings[0].scene)[0]
        return Conversation((Turn(_casual(rng, asked.text), NO_PICTURE),), ())
    turns = [turn for one in drawings for turn in _turns(rng, one, kinds, num_questions)]
    return Conversation(tuple(turns), drawings)


def conversations(seed: int, step: int) -> list[Conversation]:
    """Return the chats of a step, which are of about the same length."""
    num_drawings = 2 if step % TWO_EVERY == TWO_EVERY - 1 else 1
    kinds = (*ASKING, *HARD) if step >= ROUNDS[0] else tuple(ASKING)
    limit = 1 + step // CHATS_EVERY % QUESTIONS_MAX if is_chatting(step) else len(kinds)
    return [conversation(seed, step * ROWS + at, num_drawings, kinds, limit) for at in range(ROWS)]


def is_chatting(step: int) -> bool:
    """Return whether in this step a question attends to the questions before it in its chat."""
    return step % CHATS_EVERY == CHATS_EVERY - 1


def _turns(rng: Random, drawing: Drawing, kinds: Sequence[str], num_questions: int) -> list[Turn]:
    asked = questions(rng, drawing.scene, kinds)[:num_questions]
    turns = [Turn(_casual(rng, one.text), one.answer) for one in asked]
    is_first = num_questions == len(kinds) or rng.random() >= AFTER_SHARE
    turns[0] = turns[0]._replace(image=IMAGE, is_image_first=is_first)
    return turns


def _casual(rng: Random, question: str) -> str:
    """Return a question, sometimes without its capital or its last character."""
    if rng.random() < CASUAL_SHARE:
        question = question[0].lower() + question[1:]
    return question[:-1] if rng.random() < CASUAL_SHARE else question


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that puts <|bos|> before a text and nothing after it."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL_TOKENS, IMAGE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    chats = (
        conversation(seed, at, 1, tuple(ASKING), QUESTIONS_MAX) for at in range(TOKENIZER_CHATS)
    )
    turns = (turn for chat in chats for turn in chat.turns)
    raw.train_from_iterator((text for turn in turns for text in turn[:2]), trainer)
    raw.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, raw.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=SPECIAL_TOKENS[3:],
        extra_special_tokens={"image_token": IMAGE},
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, clip: CLIPModel
) -> LlavaForConditionalGeneration:
    """Return a LLaVA with the embedding model's tower, so small that its folder has under 4 MB."""
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    tower = clip.config.vision_config
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=tower.to_dict(),
            text_config=text,
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            image_seq_length=(tower.image_size // PATCH) ** 2,
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
            tie_word_embeddings=True,
        )
    )
    model.model.vision_tower.load_state_dict(clip.vision_model.state_dict())
    model.model.vision_tower.requires_grad_(False)
    return model


class Row(NamedTuple):
    """A chat's token ids, its labels (the answers' tokens), and the number of each token's turn,
    from 1. Tokens that all turns share have the number 0."""

    ids: list[int]
    labels: list[int]
    turns: list[int]


def encode_chat(encode: Encode, chat: Conversation, image_tokens: int) -> Row:
    """Return a chat as the chat template renders it."""
    row = Row([*encode(BOS)], [IGNORED], [0])
    for turn in chat.turns:
        image = turn.image * image_tokens
        asked = (image, turn.question) if turn.is_image_first else (turn.question, image)
        _add(row, encode(f"<|user|>{''.join(asked)}{END}<|assistant|>"), 0)
        _add(row, encode(f"{turn.answer}{END}"), 0, is_learnt=True)
    return row


def encode_apart(encode: Encode, chat: Conversation, image_tokens: int) -> Row:
    """Return a chat's turns after the beginning that they share, which ends with the drawing."""
    row = Row([*encode(BOS)], [IGNORED], [0])
    _add(row, encode(f"<|user|>{chat.turns[0].image * image_tokens}"), 0)
    for number, turn in enumerate(chat.turns, start=1):
        _add(row, encode(f"{turn.question}{END}<|assistant|>"), number)
        _add(row, encode(f"{turn.answer}{END}"), number, is_learnt=True)
    return row


def _add(row: Row, ids: list[int], turn: int, *, is_learnt: bool = False) -> None:
    row.ids.extend(ids)
    row.labels.extend(ids if is_learnt else [IGNORED] * len(ids))
    row.turns.extend([turn] * len(ids))


def apart(turns: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the mask and the positions with which each turn attends to turn 0 and itself alone, as
    if it were the first one. ``turns`` are [num_rows, num_tokens] int64."""
    is_shared = turns == 0
    same = turns.unsqueeze(2) == turns.unsqueeze(1)
    sees = (same | is_shared.unsqueeze(1)).tril().unsqueeze(1)
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    begins = is_shared.sum(1, keepdim=True)
    before = (same.tril().sum(2) - 1) + torch.where(is_shared, 0, begins)
    return {"attention_mask": mask, "position_ids": before}


def loss_of(
    model: LlavaForConditionalGeneration, encode: Encode, seed: int, step: int
) -> torch.Tensor:
    """Return the loss of a step's batch."""
    chats, chatting = conversations(seed, step), is_chatting(step)
    encoded = encode_chat if chatting else encode_apart
    rows = [encoded(encode, chat, model.config.image_seq_length) for chat in chats]
    drawings = [drawing for chat in chats for drawing in chat.drawings]
    found = model(
        input_ids=padded([row.ids for row in rows], model.config.text_config.pad_token_id),
        labels=padded([row.labels for row in rows], IGNORED),
        pixel_values=scaled(pixels_of(drawings)),
        use_cache=False,
        **({} if chatting else apart(padded([row.turns for row in rows], -1))),
    )
    return found.loss


def save(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Save float32 weights, the processor with the chat template, and generation defaults."""
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)]
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors creates files of mode 0600
    processor = LlavaProcessor(
        build_images(),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)


def main() -> int:
    """Train and save a model. The facts of the run go to training.json beside the weights."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--steps", type=int, nargs="+", default=ROUNDS, help="of each round")
    options.add_argument("--begin-with", type=Path, default=CLIP, help="the embedding model")
    add_options(options)
    given = begin_training(options, OUT)

    tokenizer = train_tokenizer(given.seed)
    model = build_model(tokenizer, CLIPModel.from_pretrained(given.begin_with))
    encode = cache(partial(tokenizer.encode, add_special_tokens=False))
    pieces = Pieces(model, torch.nn.Module(), given.kept, given.minutes)
    try:
        for step in pieces.steps(*given.steps):
            pieces.learn(loss_of(model, encode, given.seed, step))
    except Unfinished as error:
        print(error)
        return 3
    save(model.eval(), tokenizer, given.out)
    parameters = sum(p.numel() for p in model.parameters())
    facts = {"seed": given.seed, "chats_at_once": ROWS, "parameters": parameters,
             "threads": given.threads, **pieces.facts()}  # fmt: skip
    save_facts(given.out, facts)
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
