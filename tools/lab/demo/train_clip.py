"""Trains the shipped model that embeds drawings and texts, with `tools/lab/demo/drawings.py`.

    python -m tools.lab.train_demo clip                                  the shipped model
    python -m tools.lab.train_demo clip --kept FILE --minutes 4          four minutes of it; repeat
    python -m tools.lab.train_demo clip --steps 100 --out DIR            a quick one

The loss is the sum of three. First: which text of the batch is true of a drawing, and of which
drawing is a text true? Half of the drawings of a batch differ from the other half in one respect
only. Second, linear maps, which are thrown away afterwards, must be able to read from a drawing's
and from a text's vector what each thing is; third, from each patch's vector, what covers the patch.

Everything follows from `--seed`. A run is repeatable on one machine with the same number of
threads; elsewhere sums may be rounded differently.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # libgomp reads it when torch is imported

import numpy as np
import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch.nn.functional import cross_entropy, normalize
from transformers import CLIPConfig, CLIPModel, CLIPProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tools.lab.demo.drawing_words import describe
from tools.lab.demo.drawings import (
    COLOURS,
    KINDS,
    SIDE,
    SIZES,
    Drawing,
    paint,
    similar_drawing,
    training_drawing,
    which_thing,
)
from tools.lab.demo.encoder_parts import begin_training, padded, save_facts
from tools.lab.demo.pieces import Pieces, Unfinished, add_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.lab.demo.drawing_words import Facts
    from tools.lab.demo.drawings import Thing

OUT = Path(__file__).parents[3] / "engine" / "demo" / "clip"

PAD, START, UNK, END = SPECIAL_TOKENS = ["<|pad|>", "<|start|>", "<|unknown|>", "<|end|>"]
"""The end has the id 3: transformers takes the greatest id for a CLIP model's end if it is 2."""

VOCAB_SIZE = 400
TOKENIZER_TEXTS = 4000
MAX_POSITIONS = 64
PATCH = 8
STEPS = 450
PAIRS = 48
"""Drawings in a batch are twice as many: each has a similar one (guess)."""

TEMPERATURE = 0.07
READING_WEIGHT, PATCHES_WEIGHT = 0.3, 1.0
"""The weights of the second and the third loss (guesses)."""

COVERED = PATCH * PATCH // 6
"""A patch is taken for a thing's if the thing covers so many pixels of it; where it covers fewer,
the patch teaches nothing (guess)."""

IGNORED = -100
ATTRIBUTES = {"size": tuple(SIZES), "colour": tuple(COLOURS), "kind": KINDS}


class Readers(torch.nn.Module):
    """Linear maps that read sizes, colours and kinds from the vectors of scenes and of patches."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        classes = [3, *(len(values) for values in ATTRIBUTES.values())] + [
            len(values) for values in ATTRIBUTES.values()
        ]
        self.scenes = torch.nn.ModuleList(torch.nn.Linear(width, count) for count in classes)
        self.patches = torch.nn.ModuleList(
            torch.nn.Linear(hidden, len(values) + 1) for values in ATTRIBUTES.values()
        )


class Batch(NamedTuple):
    """The drawings and texts of a training step. ``pixels`` are [drawings, SIDE, SIDE, 3] uint8.
    Classes (`classes_of`, `patches_of`) are `IGNORED` where nothing is to be learnt: ``said`` and
    ``seen`` of texts and scenes, [drawings, 7], and ``patches``, [drawings, patches, 3].
    ``is_true`` [drawings, texts]: whether a text is true of a drawing."""

    pixels: torch.Tensor
    ids: torch.Tensor
    said: torch.Tensor
    seen: torch.Tensor
    patches: torch.Tensor
    is_true: torch.Tensor


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer of lower-case text. Its bytes make tokens of any Unicode text."""
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(f"descriptions/{seed}")
    drawings = (training_drawing(seed, index) for index in range(TOKENIZER_TEXTS))
    raw.train_from_iterator((describe(rng, one.scene)[0] for one in drawings), trainer)
    ids = [(token, raw.token_to_id(token)) for token in (START, END)]
    raw.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=ids
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNK,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> CLIPModel:
    """Return a CLIP model, so small that its folder has less than 4 MB."""
    tower: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "hidden_act": "gelu",
        "projection_dim": 128,
    }
    text = tower | {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = tower | {"image_size": SIDE, "patch_size": PATCH}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=128))


def build_images() -> CLIPImageProcessorPil:
    """Return the image processor, which turns an image into a model's input."""
    return CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE},
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip


def classes_of(things: Sequence[Thing], is_across: bool) -> list[int]:
    """Return the classes that `Readers.scenes` should find: the arrangement, and of each of two
    things the size, the colour and the kind."""
    arrangement = 0 if len(things) == 1 else 1 if is_across else 2
    found = [arrangement]
    for thing in things:
        for field, values in ATTRIBUTES.items():
            value = getattr(thing, field)
            found.append(values.index(value) if value else IGNORED)
    return found + [IGNORED] * (7 - len(found))


def patches_of(drawing: Drawing) -> list[list[int]]:
    """Return the classes that `Readers.patches` should find for each patch; 0 is the ground."""
    count = SIDE // PATCH
    cut = which_thing(drawing).reshape(count, PATCH, count, PATCH)
    covered = [(cut == at + 1).sum((1, 3)).ravel() for at in range(len(drawing.radii))]
    most, least = np.max(covered, 0), np.argmax(covered, 0)
    classes = [[values.index(getattr(thing, field)) + 1 for field, values in ATTRIBUTES.items()]
               for thing in drawing.scene.things]  # fmt: skip
    unsure = [IGNORED] * len(ATTRIBUTES)
    return [
        classes[at] if pixels >= COVERED else unsure if pixels else [0] * len(ATTRIBUTES)
        for pixels, at in zip(most, least, strict=True)
    ]


def pixels_of(drawings: Sequence[Drawing]) -> torch.Tensor:
    """Return the drawings as [count, SIDE, SIDE, 3] uint8."""
    return torch.from_numpy(np.stack([np.asarray(paint(one)) for one in drawings]))


def scaled(pixels: torch.Tensor) -> torch.Tensor:
    """Return pixels as the processor does: [count, 3, SIDE, SIDE] float32 from -1 to 1."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def make_batch(tokenizer: PreTrainedTokenizerFast, seed: int, step: int) -> Batch:
    """Return the batch of a step."""
    rng = random.Random(f"clip/{seed}/{step}")
    first = [training_drawing(seed, step * PAIRS + at) for at in range(PAIRS)]
    drawings = first + [similar_drawing(rng, one.scene) for one in first]
    texts: list[str] = []
    facts: list[Facts] = []
    for drawing in drawings:
        text, said = describe(rng, drawing.scene)
        texts.append(text)
        facts.append(said)
    found = tokenizer.backend_tokenizer.encode_batch(texts)
    is_true = [[said.is_true_of(drawing.scene) for said in facts] for drawing in drawings]
    return Batch(
        pixels_of(drawings),
        padded([one.ids for one in found], tokenizer.pad_token_id),
        torch.tensor([classes_of(said.things, said.is_across) for said in facts]),
        torch.tensor([classes_of(one.scene.things, one.scene.is_across) for one in drawings]),
        torch.tensor([patches_of(one) for one in drawings]),
        torch.tensor(is_true),
    )


def loss_of(model: CLIPModel, readers: Readers, batch: Batch) -> torch.Tensor:
    """Return the loss of a batch."""
    seen = model.vision_model(pixel_values=scaled(batch.pixels))
    mask = (batch.ids != model.config.text_config.pad_token_id).long()
    read = model.text_model(input_ids=batch.ids, attention_mask=mask)
    images = model.visual_projection(seen.pooler_output)
    texts = model.text_projection(read.pooler_output)
    reading = _read(readers.scenes, images, batch.seen) + _read(readers.scenes, texts, batch.said)
    patches = seen.last_hidden_state[:, 1:].flatten(0, 1)
    covering = _read(readers.patches, patches, batch.patches.flatten(0, 1))
    contrast = contrast_of(images, texts, batch.is_true)
    return contrast + READING_WEIGHT * reading + PATCHES_WEIGHT * covering


def _read(readers: torch.nn.ModuleList, vectors: torch.Tensor, classes: torch.Tensor) -> Any:
    return sum(
        cross_entropy(reader(vectors), classes[:, at], ignore_index=IGNORED)
        for at, reader in enumerate(readers)
    )


def contrast_of(images: torch.Tensor, texts: torch.Tensor, is_true: torch.Tensor) -> torch.Tensor:
    """Return the contrastive loss of vectors [count, width]; text i belongs to image i. Other texts
    that are also true of an image are left out."""
    alike = normalize(images, dim=-1) @ normalize(texts, dim=-1).T / TEMPERATURE
    others = is_true & ~torch.eye(len(images), dtype=torch.bool)
    alike = alike.masked_fill(others, float("-inf"))
    places = torch.arange(len(images))
    return cross_entropy(alike, places) + cross_entropy(alike.T, places)


def save(model: CLIPModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save weights, tokenizer and image processor in the format of transformers, in float32."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors creates files of mode 0600
    CLIPProcessor(image_processor=build_images(), tokenizer=tokenizer).save_pretrained(folder)


def main() -> int:
    """Train and save a model. The facts of the run go to training.json beside the weights."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--steps", type=int, default=STEPS)
    add_options(options)
    given = begin_training(options, OUT)

    tokenizer = train_tokenizer(given.seed)
    model = build_model(tokenizer)
    model.logit_scale.data.fill_(-float(np.log(TEMPERATURE)))
    model.logit_scale.requires_grad_(False)
    readers = Readers(model.config.projection_dim, model.config.vision_config.hidden_size)
    pieces = Pieces(model, readers, given.kept, given.minutes)
    try:
        for step in pieces.steps(given.steps):
            batch = make_batch(tokenizer, given.seed, step)
            pieces.learn(loss_of(model, readers, batch))
    except Unfinished as error:
        print(error)
        return 3
    save(model.eval(), tokenizer, given.out)
    parameters = sum(p.numel() for p in model.parameters())
    facts = {"seed": given.seed, "drawings": 2 * PAIRS * given.steps, "parameters": parameters,
             "threads": given.threads, **pieces.facts()}  # fmt: skip
    save_facts(given.out, facts)
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
