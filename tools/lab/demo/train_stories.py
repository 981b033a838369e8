"""Trains the shipped story model with the grammar's text and saves it as a checkpoint folder.

    python -m tools.lab.train_demo --documents N --threads N   the shipped model, with the numbers
                                                               of its training.json
    python -m tools.lab.train_demo --documents 8000 --out DIR  a quick one

Everything follows from `--seed`: text, tokenizer, initial weights and the order of the batches. A
run is repeatable on one machine with the same number of threads; elsewhere sums may be rounded
differently.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # libgomp reads it when torch is imported

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tools.lab.demo.corpus import Document, document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

OUT = Path(__file__).parents[3] / "engine" / "demo" / "stories"

BOS, EOS, PAD, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>", END]
VOCAB_SIZE = 2048
TOKENIZER_DOCUMENTS = 6000

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('this model knows the roles system, user and assistant') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

MAX_POSITIONS = 2048
ROW_TOKENS, ROWS = 256, 8
"""Most steps read documents of at most `ROW_TOKENS` tokens, one per row, so that the model sees no
other story while it learns to repeat a name (a guess; a trial with packed rows had not begun to
learn this after 1.4 M tokens, but it also had another size and optimizer)."""

LONG_SHARE = 0.08
LONG_ROWS = 2
LONG_FROM = 0.35
"""The last `LONG_SHARE` of documents, and all that are too long for a row, are packed into rows of
the whole context, so that the model writes a second story in a chat as well as a first. These rows
are spread over the steps after the share `LONG_FROM`; with all of them at the end, the model forgot
part of what the others had taught."""

ECHO_STEPS, ECHO_ROWS, ECHO_TOKENS = 600, 32, 64
"""Before any text, the model learns to repeat random tokens, as it must repeat names in stories. It
is not proven that this helps: after 600 steps on stories, a trial with it had a loss of 0.83 and
one without it 1.07, but the second one also had harder names."""

PEAK_LR = 3e-3
PEAK_LR_MATRICES = 0.02
"""The peak rates for AdamW and for Muon, both guesses. Muon was chosen over AdamW alone because its
loss fell faster in one trial (0.99 against 1.03 after 250 steps)."""

WARMUP_STEPS = 60
IGNORED = -100


def render(messages: list[dict[str, str]] | tuple[dict[str, str], ...]) -> str:
    """Return a whole chat as the chat template renders it."""
    turns = (f"<|{m['role']}|>{m['content']}{END}" for m in messages)
    return BOS + "".join(turns)


def text_of(doc: Document) -> str:
    """Return the text of a document that the model learns to write, with special tokens."""
    return render(doc.messages) if doc.messages else f"{BOS}{doc.stories[0]}{EOS}"


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that puts <|bos|> before a text and nothing after it."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    docs = (document(seed, index) for index in range(TOKENIZER_DOCUMENTS))
    known = [doc for doc in docs if doc.strange is None]  # strange names get no tokens of their own
    chats = (message["content"] for doc in known for message in doc.messages)
    stories = (doc.stories[0] for doc in known if not doc.messages)
    raw.train_from_iterator(itertools.chain(chats, stories), trainer)
    raw.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, raw.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=SPECIAL_TOKENS[3:],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


Encoded = tuple[list[int], list[int]]
"""A document's token ids and its labels, which are the same except `IGNORED` for what is not
learnt."""


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, seed: int, documents: int
) -> list[Encoded]:
    """Return the tokens of each document, in order."""
    raw = tokenizer.backend_tokenizer
    encoded: list[Encoded] = []
    for first in range(0, documents, 1000):
        docs = [document(seed, i) for i in range(first, min(first + 1000, documents))]
        texts = [text_of(doc) for doc in docs]
        found = raw.encode_batch(texts, add_special_tokens=False)
        for doc, text, encoding in zip(docs, texts, found, strict=True):
            start = text.find(doc.strange) if doc.strange else 0
            end = start + len(doc.strange or "")
            spans = zip(encoding.ids, encoding.offsets, strict=True)
            # The label of the space before a strange name is ignored, too: otherwise the model
            # learns that names usually begin with a token of a space alone.
            labels = [IGNORED if a < end and b >= start > 0 else token for token, (a, b) in spans]
            encoded.append((encoding.ids, labels))
    return encoded


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama-architecture model with random weights, whose folder has less than 12 MB."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def batches(encoded: list[Encoded], pad: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and labels, [num_rows, row_tokens] int64: one document per row, or packed ones."""
    border = int(len(encoded) * (1 - LONG_SHARE))
    short = [pair for pair in encoded[:border] if len(pair[0]) <= ROW_TOKENS]
    rest = [pair for pair in encoded[:border] if len(pair[0]) > ROW_TOKENS] + encoded[border:]
    num_short = len(short) // ROWS
    long = list(_packed(rest))
    first_long = int(num_short * LONG_FROM)
    given = 0
    for step in range(num_short):
        rows = short[step * ROWS : (step + 1) * ROWS]
        yield _padded([ids for ids, _ in rows], pad), _padded([lab for _, lab in rows], IGNORED)
        due = len(long) * (step + 1 - first_long) // (num_short - first_long)
        yield from long[given : max(given, due)]
        given = max(given, due)


def _packed(pairs: list[Encoded]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.tensor([token for ids, _ in pairs for token in ids])
    labels = torch.tensor([label for _, labels in pairs for label in labels])
    size = LONG_ROWS * MAX_POSITIONS
    for first in range(0, len(ids) - size + 1, size):
        piece = slice(first, first + size)
        yield ids[piece].view(LONG_ROWS, -1), labels[piece].view(LONG_ROWS, -1)


def _padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def learning_rate(step: int, steps: int) -> float:
    """Return the share of the peak rate: a short rise, then a linear fall to zero."""
    return min((step + 1) / WARMUP_STEPS, (steps - step) / max(1, steps - WARMUP_STEPS))


def build_optimizers(model: LlamaForCausalLM) -> list[Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for the embedding and the norms."""
    named = list(model.named_parameters())
    inner = [p for name, p in named if p.dim() == 2 and "embed" not in name]
    outer = [p for name, p in named if p.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(inner, lr=PEAK_LR_MATRICES, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(outer, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def echo_batch(generator: torch.Generator, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of random tokens that repeat a piece. Only the repetitions have labels."""
    ids = torch.empty(ECHO_ROWS, ECHO_TOKENS, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for row in range(ECHO_ROWS):
        period = int(torch.randint(6, 29, (1,), generator=generator))
        piece = torch.randint(len(SPECIAL_TOKENS), vocab, (period,), generator=generator)
        ids[row] = piece.repeat(ECHO_TOKENS // period + 1)[:ECHO_TOKENS]
        labels[row, period + 1 :] = ids[row, period + 1 :]
    return ids, labels


def schedules_of(optimizers: list[Optimizer], steps: int) -> list[LambdaLR]:
    """Return the schedules of the optimizers' learning rates over so many steps."""
    return [LambdaLR(one, lambda step: learning_rate(step, steps)) for one in optimizers]


def update(model: LlamaForCausalLM, loss: torch.Tensor, optimizers: list[Optimizer]) -> None:
    """Update the weights once, by a loss that was just computed."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def take_step(
    model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor, optimizers: list[Optimizer]
) -> float:
    """Update the weights once, and return the loss before the update."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    update(model, loss, optimizers)
    return float(loss.item())


def learn_to_echo(model: LlamaForCausalLM, seed: int) -> None:
    """Run the first phase of the training, which teaches the model to repeat tokens."""
    generator = torch.Generator().manual_seed(seed)
    optimizers = build_optimizers(model)
    for step in range(1, ECHO_STEPS + 1):
        ids, labels = echo_batch(generator, model.config.vocab_size)
        loss = take_step(model, ids, labels, optimizers)
        if step % 50 == 0:
            print(f"echo {step}/{ECHO_STEPS}  loss {loss:.4f}", flush=True)


def train(
    model: LlamaForCausalLM,
    encoded: list[Encoded],
    save: Callable[[], None],
    save_every_s: float,
) -> dict[str, float]:
    """Train for one pass over the text, call `save` now and then and at the end, and return the
    facts of the run."""
    pad = model.config.pad_token_id
    steps = sum(1 for _ in batches(encoded, pad))
    optimizers = build_optimizers(model)
    schedules = schedules_of(optimizers, steps)
    model.train()
    started = saved = time.monotonic()
    recent: deque[float] = deque(maxlen=50)
    for step, (ids, labels) in enumerate(batches(encoded, pad), start=1):
        recent.append(take_step(model, ids, labels, optimizers))
        for schedule in schedules:
            schedule.step()
        now = time.monotonic()
        if step % 50 == 0 or step == steps:
            mean = sum(recent) / len(recent)
            print(f"step {step}/{steps}  loss {mean:.4f}  {now - started:.0f} s", flush=True)
        if now - saved > save_every_s:
            save()
            saved = now
    save()
    mean = sum(recent) / len(recent)
    return {"steps": steps, "loss": round(mean, 4), "seconds": round(time.monotonic() - started)}


def save_checkpoint(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Save float32 weights, the tokenizer with the chat template, and generation defaults."""
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)]
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        min_p=0.05,  # a third as many stories are wrong as with min_p 0 (`measure_demo`)
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors creates files of mode 0600
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def main() -> None:
    """Train and save a model. The facts of the run go to training.json beside the weights."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--documents", type=int, default=64_000, help="stories and chats to read")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--out", type=Path, default=OUT)
    options.add_argument("--save-every-s", type=float, default=600.0)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    torch.use_deterministic_algorithms(True)

    tokenizer = train_tokenizer(given.seed)
    encoded = encode_documents(tokenizer, given.seed, given.documents)
    tokens = sum(len(ids) for ids, _ in encoded)
    model = build_model(tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{given.documents} documents, {tokens} tokens, {parameters} parameters", flush=True)
    learn_to_echo(model, given.seed)
    reached = train(
        model, encoded, lambda: save_checkpoint(model, tokenizer, given.out), given.save_every_s
    )
    facts = {
        "seed": given.seed,
        "documents": given.documents,
        "tokens": tokens,
        "parameters": parameters,
        "threads": given.threads,
        **reached,
    }
    (given.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
