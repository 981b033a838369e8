"""What the trainings of both demo encoders share: tokenizer, architecture, batches, steps."""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from transformers import BertConfig, PreTrainedTokenizerFast

from tools.lab.demo.grammar import story_from_seed
from tools.lab.demo.triples import training_triple

if TYPE_CHECKING:
    import argparse
    import random
    from collections.abc import Iterator

    from torch.nn import Module
    from torch.optim import Optimizer
    from transformers import BertModel

CLS, SEP, PAD, UNK, MASK = SPECIAL_TOKENS = ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"]
VOCAB_SIZE = 2560
TOKENIZER_TRIPLES, TOKENIZER_STORIES = 20_000, 500
"""Numbers of triples, and of stories of the other grammar, whose words users will type, too."""

MAX_POSITIONS = 256
POSITION_SIZE = 0.03
WARMUP_STEPS = 60
PEAK_LR, PEAK_LR_MATRICES = 2e-3, 0.01
LAYERS = re.compile(r"\.layers?\.")  # in the name of a weight inside a layer


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
    raw.train_from_iterator(_tokenizer_texts(seed), trainer)
    ids = [(token, raw.token_to_id(token)) for token in (CLS, SEP)]
    raw.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=ids
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        cls_token=CLS,
        sep_token=SEP,
        pad_token=PAD,
        unk_token=UNK,
        mask_token=MASK,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _tokenizer_texts(seed: int) -> Iterator[str]:
    for index in range(TOKENIZER_TRIPLES):
        triple = training_triple(seed, index)
        yield from (triple.anchor, triple.paraphrase)
    for index in range(TOKENIZER_STORIES):
        yield story_from_seed(f"encoder/{seed}/{index}").text


def build_config(tokenizer: PreTrainedTokenizerFast) -> BertConfig:
    """Return a BERT's config, so small that the model's folder has less than 4 MB."""
    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=MAX_POSITIONS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
    )


def place_positions(model: BertModel) -> None:
    """Set the position embeddings to sines of many wavelengths, as a start for the training.

    Neighbouring positions then have similar embeddings, including late positions that training
    texts seldom reach (Source: Vaswani et al., arXiv:1706.03762). The embeddings are about as large
    as those that BERT begins with, which are random.
    """
    weight = model.embeddings.position_embeddings.weight
    places, width = weight.shape
    rates = torch.exp(-math.log(1000.0) * torch.arange(0, width, 2) / width)
    angles = torch.arange(places).unsqueeze(1) * rates
    with torch.no_grad():
        weight[:, 0::2] = POSITION_SIZE * torch.sin(angles)
        weight[:, 1::2] = POSITION_SIZE * torch.cos(angles)


class Schedule:
    """The optimizers of a training: Muon for the matrices inside the layers, AdamW for the rest.

    The learning rates rise to their peaks and then fall linearly to zero at the end of the text.
    """

    def __init__(self, model: Module, *others: Module) -> None:
        named = list(model.named_parameters())
        is_inner = {name: bool(LAYERS.search(name)) and p.dim() == 2 for name, p in named}
        inner = [p for name, p in named if is_inner[name] and p.requires_grad]
        outer = [p for name, p in named if not is_inner[name] and p.requires_grad]
        outer += [p for other in others for p in other.parameters()]
        self._model = model
        self._step = 0
        self._optimizers: list[tuple[Optimizer, float]] = [
            (torch.optim.AdamW(outer, betas=(0.9, 0.98), weight_decay=0.0), PEAK_LR),
        ]
        if inner:
            muon = torch.optim.Muon(inner, weight_decay=0.05, momentum=0.95)
            self._optimizers.insert(0, (muon, PEAK_LR_MATRICES))

    def take_step(self, loss: torch.Tensor, share: float) -> None:
        """Update the weights once, after `share` of the texts has been read."""
        self._step += 1
        rate = min(self._step / WARMUP_STEPS, 1.0 - share)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer, peak in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> list[dict[str, Any]]:
        """Return the step's number and the optimizers' states, which `go_on` takes."""
        return [{"step": self._step}, *(one.state_dict() for one, _ in self._optimizers)]

    def go_on(self, state: list[dict[str, Any]]) -> None:
        """Continue from the ``state`` of a schedule of the same model."""
        counts, *states = state
        self._step = counts["step"]
        for (optimizer, _), kept in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(kept)


class Progress:
    """Counts what a training has read, and prints the counts every 50 steps."""

    def __init__(self, total: int) -> None:
        self._total, self._read, self._steps = total, 0, 0
        self._recent: deque[float] = deque(maxlen=200)
        self._started = time.monotonic()

    @property
    def share(self) -> float:
        """The share of the total that has been read."""
        return self._read / self._total

    def add(self, read: int, loss: float) -> None:
        """Count a step that read `read` texts."""
        self._read += read
        self._steps += 1
        self._recent.append(loss)
        if self._steps % 50 == 0:
            seconds = time.monotonic() - self._started
            print(
                f"step {self._steps}  {self.share:.0%}  loss {self._mean():.4f}  {seconds:.0f} s",
                flush=True,
            )

    def facts(self) -> dict[str, float]:
        """Return the number of steps, and the mean loss of the last 200."""
        return {"steps": self._steps, "loss": round(self._mean(), 4)}

    def _mean(self) -> float:
        return sum(self._recent) / max(1, len(self._recent))


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[Any]) -> list[list[int]]:
    """Return the token ids of texts or of pairs of texts, with special tokens, cut to
    `MAX_POSITIONS`."""
    found = tokenizer.backend_tokenizer.encode_batch(texts)
    return [encoding.ids[:MAX_POSITIONS] for encoding in found]


def begin_training(options: argparse.ArgumentParser, out: Path) -> argparse.Namespace:
    """Parse the command line with the options that all trainings have, and make torch follow its
    seed alone. ``out`` is the default of the folder that the model is written to."""
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--out", type=Path, default=out)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    torch.use_deterministic_algorithms(True)
    return given


def save_facts(folder: Path, facts: dict[str, float]) -> None:
    """Write the facts of a training into the model's folder."""
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    """Return the rows as [num_rows, longest row] int64, filled up with `filler`."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def by_length(
    lengths: list[int], size: int, tokens_max: int, rng: random.Random
) -> list[list[int]]:
    """Return indices in batches of at most `size` of similar length, the batches in random order.

    A batch is smaller if `size` rows of its longest length would exceed `tokens_max`.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], rng.random()))
    batches: list[list[int]] = []
    while order:
        rows = max(1, min(size, tokens_max // lengths[order[-1]]))
        batches.append(order[-rows:])
        del order[-rows:]
    rng.shuffle(batches)
    return batches
