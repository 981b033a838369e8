"""Trains the draft model of the shipped story model and saves it as a checkpoint folder.

    python -m tools.lab.train_demo draft                        the shipped model
    python -m tools.lab.train_demo draft --documents 8000 --out DIR

The draft model has a quarter of the story model's parameters, the same tokenizer, and the same
training text. Half of the loss is the divergence from the story model's distribution of each token,
because a draft is of use where the two models agree, right or wrong.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.lab.demo.train_stories import (
    IGNORED,
    MAX_POSITIONS,
    batches,
    build_optimizers,
    encode_documents,
    learn_to_echo,
    save_checkpoint,
    schedules_of,
    update,
)
from tools.lab.demo.train_stories import OUT as STORIES

if TYPE_CHECKING:
    from torch.optim import Optimizer

OUT = STORIES.parent / "draft"
TAUGHT = 0.5


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama-architecture model with random weights. It has few layers, because drafted
    tokens are computed one after another; with less than two, no model can repeat what it read."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def take_step(
    model: LlamaForCausalLM,
    teacher: LlamaForCausalLM,
    ids: torch.Tensor,
    labels: torch.Tensor,
    optimizers: list[Optimizer],
) -> tuple[float, float]:
    """Update the weights once. Return, from before the update, the loss over the text alone, and
    the share of places where both models find the same token likeliest."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            taught = teacher(input_ids=ids, use_cache=False).logits[:, :-1]
        said = model(input_ids=ids, use_cache=False).logits[:, :-1]
    kept = labels[:, 1:] != IGNORED
    said, taught, wanted = said[kept].float(), taught[kept].float(), labels[:, 1:][kept]
    known = torch.nn.functional.cross_entropy(said, wanted)
    apart = torch.nn.functional.kl_div(
        said.log_softmax(-1), taught.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    loss = (1 - TAUGHT) * known + TAUGHT * apart
    update(model, loss, optimizers)
    alike = (said.argmax(-1) == taught.argmax(-1)).float().mean()
    return float(known.item()), float(alike.item())


def main() -> None:
    """Train and save a model. The facts of the run go to training.json beside the weights."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--documents", type=int, default=32_000, help="stories and chats to read")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--teacher", type=Path, default=STORIES)
    options.add_argument("--out", type=Path, default=OUT)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)

    tokenizer = PreTrainedTokenizerFast.from_pretrained(given.teacher)
    teacher = LlamaForCausalLM.from_pretrained(given.teacher).eval()
    encoded = encode_documents(tokenizer, given.seed, given.documents)
    model = build_model(tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{given.documents} documents, {parameters} parameters", flush=True)
    learn_to_echo(model, given.seed)
    pad = model.config.pad_token_id
    steps = sum(1 for _ in batches(encoded, pad))
    optimizers = build_optimizers(model)
    schedules = schedules_of(optimizers, steps)
    started = time.monotonic()
    recent: deque[tuple[float, float]] = deque(maxlen=100)
    loss = alike = 0.0
    for step, (ids, labels) in enumerate(batches(encoded, pad), start=1):
        recent.append(take_step(model, teacher, ids, labels, optimizers))
        for schedule in schedules:
            schedule.step()
        if step % 100 == 0 or step == steps:
            loss, alike = (sum(part) / len(recent) for part in zip(*recent, strict=True))
            said = f"step {step}/{steps}  loss {loss:.4f}  alike {alike:.3f}"
            print(f"{said}  {time.monotonic() - started:.0f} s", flush=True)
    save_checkpoint(model, tokenizer, given.out)
    facts = {
        "seed": given.seed,
        "documents": given.documents,
        "tokens": sum(len(ids) for ids, _ in encoded),
        "parameters": parameters,
        "threads": given.threads,
        "steps": steps,
        "loss": round(loss, 4),
        "alike": round(alike, 3),
        "seconds": round(time.monotonic() - started),
    }
    (given.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
