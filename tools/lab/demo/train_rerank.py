"""Trains the shipped cross-encoder with the searches of `tools/lab/demo/searches.py`.

    python -m tools.lab.train_demo rerank                        the shipped model
    python -m tools.lab.train_demo rerank --searches 2048 --out DIR   a quick one

The training begins with the layers and the tokenizer of the embedding model, which know what words
mean the same, and teaches them to compare. The loss is the sum of three. First, each document
alone: does it answer its query? So a single score is meaningful. Second: which of a query's
documents does? Third, a linear map, which is thrown away afterwards, must be able to read from a
pair's vector which parts of the query's wish the document fulfils.

Everything follows from `--seed` and the embedding model. A run is repeatable on one machine with
the same number of threads; elsewhere sums may be rounded differently.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # libgomp reads it when torch is imported

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import AutoTokenizer, BertForSequenceClassification

from tools.lab.demo.encoder_parts import (
    Progress,
    Schedule,
    begin_training,
    by_length,
    encode,
    padded,
    save_facts,
)
from tools.lab.demo.meaning_notation import lexicon
from tools.lab.demo.searches import TRAINING_DOCUMENTS, Search, first_search, training_search
from tools.lab.demo.train_embed import OUT as EMBED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OUT = Path(__file__).parents[3] / "engine" / "demo" / "rerank"

SEARCHES = 28_672
FIRST = 16_384
"""The number of searches with documents of one sentence, which teach to compare (guess)."""

CHUNK = 4096
"""Searches that are written and sorted by length at a time."""

SEARCHES_AT_ONCE, TOKENS_MAX = 48, 1600
"""Searches in a batch, and a fifth of its tokens at most; long searches make smaller batches
(guesses)."""

ALONE_WEIGHT, WISH_WEIGHT = 1.0, 1.0
"""The weights of the first and the third loss (guesses; without the third, a third of the searches
had taught the model to rank 4 of 10 held-out ones right)."""


class WishReader(torch.nn.Module):
    """Linear maps that read from a pair's vector whether the document has the frame, and each
    role's concept, that the query asks for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        roles = {role for frame in lexicon().frames.values() for role in frame.sources}
        self._roles = {role: index for index, role in enumerate(["frame", *sorted(roles)])}
        self.head = torch.nn.Linear(width, len(self._roles))

    def forward(self, vectors: torch.Tensor, fulfilled: list[dict[str, bool]]) -> torch.Tensor:
        """Return the mean loss of vectors [num_pairs, width] over the entries of ``fulfilled``."""
        known = [
            (row, self._roles[role], float(value))
            for row, roles in enumerate(fulfilled)
            for role, value in roles.items()
        ]
        rows, columns, values = zip(*known, strict=True)
        logits = self.head(vectors)[list(rows), list(columns)]
        return binary_cross_entropy_with_logits(logits, torch.tensor(values))


def pairs_of(search: Search) -> list[tuple[str, str]]:
    """Return the search's pairs: its query with each of its documents."""
    return [(search.query, document) for document in search.documents]


def pair_vectors(
    model: BertForSequenceClassification, rows: list[list[int]], pad: int, sep: int
) -> torch.Tensor:
    """Return the vectors that scores are computed from: [num_pairs, width] float32."""
    ids = padded(rows, pad)
    mask = (ids != pad).long()
    ends = (ids == sep).long()
    types = ((ends.cumsum(1) - ends) > 0).long() * mask  # 0 up to the first [SEP], then 1
    return model.bert(input_ids=ids, attention_mask=mask, token_type_ids=types).pooler_output


def ranking_loss(scores: torch.Tensor) -> torch.Tensor:
    """Return the loss of [num_searches, num_documents] scores, the right document first."""
    target = torch.zeros_like(scores)
    target[:, 0] = 1.0
    weight = torch.ones_like(scores)
    weight[:, 0] = scores.shape[1] - 1  # right and wrong documents contribute equally
    alone = binary_cross_entropy_with_logits(scores, target, weight)
    return cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long)) + ALONE_WEIGHT * alone


def train(
    model: BertForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    searches: int,
) -> dict[str, float]:
    """Train for one pass over the searches and return the facts of the run."""
    reader = WishReader(model.config.hidden_size)
    schedule = Schedule(model, reader)
    progress = Progress(searches)
    model.train()
    for first in range(0, searches, CHUNK):
        last = min(first + CHUNK, searches)
        write = first_search if first < FIRST else training_search
        chunk = [write(seed, i) for i in range(first, last)]
        rows = [encode(tokenizer, pairs_of(search)) for search in chunk]
        lengths = [max(map(len, documents)) for documents in rows]
        rng = random.Random(f"batches/{seed}/{first}")
        for batch in by_length(lengths, SEARCHES_AT_ONCE, TOKENS_MAX, rng):
            ids = [row for i in batch for row in rows[i]]
            vectors = pair_vectors(model, ids, tokenizer.pad_token_id, tokenizer.sep_token_id)
            fulfilled = [one for i in batch for one in chunk[i].fulfilled]
            scores = model.classifier(vectors).view(len(batch), TRAINING_DOCUMENTS)
            loss = ranking_loss(scores) + WISH_WEIGHT * reader(vectors, fulfilled)
            schedule.take_step(loss, progress.share)
            progress.add(len(batch), loss.item())
    return progress.facts()


def save(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Save weights and tokenizer for transformers, with a sigmoid for scores by default."""
    model.config.sentence_transformers = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors creates files of mode 0600
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Train and save a model. The facts of the run go to training.json beside the weights."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--searches", type=int, default=SEARCHES, help="searches to read")
    options.add_argument("--begin-with", type=Path, default=EMBED, help="the embedding model")
    given = begin_training(options, OUT)
    started = time.monotonic()

    tokenizer = AutoTokenizer.from_pretrained(given.begin_with)
    model = BertForSequenceClassification.from_pretrained(given.begin_with, num_labels=1)
    reached = train(model, tokenizer, given.seed, given.searches)
    save(model.eval(), tokenizer, given.out)
    facts = {
        "seed": given.seed,
        "searches": given.searches,
        "documents": TRAINING_DOCUMENTS,
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
