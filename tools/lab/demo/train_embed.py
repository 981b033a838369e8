"""Trains the shipped embedding model with the triples of `tools/lab/demo/triples.py`.

    python -m tools.lab.train_demo embed                       the shipped model
    python -m tools.lab.train_demo embed --triples 8192 --out DIR   a quick one

The loss is the sum of two. First, the second text of a triple must be the nearest to the first of
all second and third texts in the batch (Source: van den Oord et al., arXiv:1807.03748; in-batch and
hard negatives). Second, a linear map, which is thrown away afterwards, must be able to read from a
sentence's vector who does what to whom.

Everything follows from `--seed`: text, tokenizer, initial weights and the order of the batches. A
run is repeatable on one machine with the same number of threads; elsewhere sums may be rounded
differently.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # libgomp reads it when torch is imported

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.nn.functional import cross_entropy, normalize
from transformers import BertModel

from tools.lab.demo.encoder_parts import (
    Progress,
    Schedule,
    begin_training,
    build_config,
    by_length,
    encode,
    padded,
    place_positions,
    save_facts,
    train_tokenizer,
)
from tools.lab.demo.meaning_notation import lexicon
from tools.lab.demo.triples import swap_lesson, training_triple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tools.lab.demo.meanings import Meaning
    from tools.lab.demo.triples import Triple

OUT = Path(__file__).parents[3] / "engine" / "demo" / "embed"

TRIPLES = 131_072
SWAPS_FIRST = 32_768
"""The number of triples that teach only who does what to whom. With these alone, most of it was
learnt after 300 steps; mixed with others, hardly any of it after 700, when all else was learnt."""

CHUNK = 8192
"""Triples that are written and sorted by length at a time."""

ROWS, TOKENS_MAX = 128, 3072
"""Triples in a batch, and a third of its tokens at most; long triples make smaller batches
(guesses)."""

TEMPERATURE = 0.05
BACK_WEIGHT = 0.5
"""The weight of the loss from the second texts to the first (guess)."""

ROLES_WEIGHT = 1.0
"""A guess. Without this loss, 700 steps taught nothing about who does what to whom."""


class RoleReader(torch.nn.Module):
    """Linear maps that read a sentence's frame and the concepts in its roles from its vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        frames = lexicon().frames
        self._frames = {name: index for index, name in enumerate(frames)}
        sources: dict[str, set[str]] = {}
        for frame in frames.values():
            for role, listed in frame.sources.items():
                sources.setdefault(role, set()).update(listed)
        self._concepts = {
            role: {c.name: i for i, c in enumerate(lexicon().of(tuple(sorted(listed))))}
            for role, listed in sources.items()
        }
        sizes = {"frame": len(frames)} | {role: len(c) for role, c in self._concepts.items()}
        self.heads = torch.nn.ModuleDict({k: torch.nn.Linear(width, n) for k, n in sizes.items()})

    def targets(self, meaning: Meaning) -> dict[str, int]:
        """Return the index of the frame, and of the concept in each role, except unlisted names."""
        known = {
            role: self._concepts[role][concept.name]
            for role, concept in meaning.core
            if concept.name in self._concepts[role]
        }
        return {"frame": self._frames[meaning.frame]} | known

    def forward(self, vectors: torch.Tensor, meanings: list[Meaning | None]) -> torch.Tensor:
        """Return the mean loss over all roles of vectors [num_texts, width] that have a meaning."""
        rows: dict[str, tuple[list[int], list[int]]] = {key: ([], []) for key in self.heads}
        for index, meaning in enumerate(meanings):
            for role, target in self.targets(meaning).items() if meaning else ():
                rows[role][0].append(index)
                rows[role][1].append(target)
        losses = [
            cross_entropy(self.heads[key](vectors[at]), torch.tensor(target), reduction="sum")
            for key, (at, target) in rows.items()
            if at
        ]
        number = sum(len(at) for at, _ in rows.values())
        return torch.stack(losses).sum() / number if losses else vectors.new_zeros(())


def mean_vectors(model: BertModel, rows: list[list[int]], pad: int) -> torch.Tensor:
    """Return the mean vector [num_texts, width] of each text's tokens, special ones included."""
    ids = padded(rows, pad)
    mask = (ids != pad).long()
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def contrast(vectors: torch.Tensor) -> torch.Tensor:
    """Return the contrastive loss of vectors [3 * num_triples, width]: first the triples' first
    texts, then the second and the third ones."""
    anchors, same, other = normalize(vectors, dim=-1).chunk(3)
    labels = torch.arange(len(anchors))
    there = cross_entropy(anchors @ torch.cat([same, other]).T / TEMPERATURE, labels)
    back = cross_entropy(same @ torch.cat([anchors, other]).T / TEMPERATURE, labels)
    return there + BACK_WEIGHT * back


def readable(triples: list[Triple]) -> list[Meaning | None]:
    """Return the meaning of each text in `contrast`'s order; None for a text with several."""
    first = [t.meanings[0] if t.kind == "sentence" else None for t in triples]
    third = [t.meanings[1] if t.kind == "sentence" else None for t in triples]
    return first + first + third


def train(
    model: BertModel, tokenizer: PreTrainedTokenizerFast, seed: int, triples: int
) -> dict[str, float]:
    """Train for one pass over the triples and return the facts of the run."""
    reader = RoleReader(model.config.hidden_size)
    schedule = Schedule(model, reader)
    progress = Progress(triples)
    model.train()
    for first in range(0, triples, CHUNK):
        write = swap_lesson if first < SWAPS_FIRST else training_triple
        chunk = [write(seed, i) for i in range(first, min(first + CHUNK, triples))]
        columns = zip(*(t.texts for t in chunk), strict=True)
        rows = [encode(tokenizer, list(column)) for column in columns]
        lengths = [max(map(len, three)) for three in zip(*rows, strict=True)]
        rng = random.Random(f"batches/{seed}/{first}")
        for batch in by_length(lengths, ROWS, TOKENS_MAX, rng):
            ids = [column[i] for column in rows for i in batch]
            vectors = mean_vectors(model, ids, tokenizer.pad_token_id)
            read = reader(vectors, readable([chunk[i] for i in batch]))
            loss = contrast(vectors) + ROLES_WEIGHT * read
            schedule.take_step(loss, progress.share)
            progress.add(len(batch), loss.item())
    return progress.facts()


def save(model: BertModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save weights, tokenizer and modules in the format of sentence-transformers, in float32."""
    with tempfile.TemporaryDirectory() as base:
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
        transformer = Transformer(base, max_seq_length=tokenizer.model_max_length)
    pooling = Pooling(model.config.hidden_size, pooling_mode="mean")
    whole = SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")
    whole.save(str(folder), create_model_card=False)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors creates files of mode 0600


def main() -> None:
    """Train and save a model. The facts of the run go to training.json beside the weights."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--triples", type=int, default=TRIPLES, help="triples to read")
    given = begin_training(options, OUT)
    started = time.monotonic()

    tokenizer = train_tokenizer(given.seed)
    model = BertModel(build_config(tokenizer))
    place_positions(model)
    reached = train(model, tokenizer, given.seed, given.triples)
    save(model.eval(), tokenizer, given.out)
    facts = {
        "seed": given.seed,
        "triples": given.triples,
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": given.threads,
        **reached,
        "cpu_seconds": round(time.process_time()),
        "seconds": round(time.monotonic() - started),
    }
    save_facts(given.out, facts)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
