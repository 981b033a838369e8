"""Measures how far a GGUF file's products are from those of its weights in float32.

    python -m tools.lab.measure_gguf FILE NAME TEXTS LENGTH VOCAB [LOGITS]

The texts are those of `tools.lab.peers.asked.prompts`. LOGITS is a file of llama.cpp's logits of
the same texts (`tools.lab.peers.logits`). The last line that is printed is an object of JSON: for
each engine the mean Kullback-Leibler divergence of the next token's distribution, in nats, from
that of the stock model in float32.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import torch

from tools.lab.measure_quantization import Model, compare
from tools.lab.peers.asked import prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

OURS, LLAMA = "triolet", "llama.cpp"


def logits_of(file: str, texts: Sequence[Sequence[int]], *, is_stock: bool) -> list[torch.Tensor]:
    """Return the logits of each text, [length, vocab] float32: of the stock model in float32, or of
    the compiled one as it is served."""
    model = Model(file, "float32" if is_stock else "auto", "none", is_stock=is_stock)
    try:
        return [model.logits(text) for text in texts]
    finally:
        model.close()


def measure(file: str, texts: Sequence[Sequence[int]], theirs: str) -> dict[str, float]:
    """Return the divergences. ``theirs`` is the file of llama.cpp's logits, or ""."""
    engines = {OURS: logits_of(file, texts, is_stock=False)}
    if theirs:
        engines[LLAMA] = list(torch.from_numpy(np.load(theirs)))
    exact = logits_of(file, texts, is_stock=True)
    return {name: compare(found, exact, texts)["mean_kl_nats"] for name, found in engines.items()}


def main() -> None:
    """Run the command line."""
    file, name, *sizes = sys.argv[1:6]
    texts, length, vocab = map(int, sizes)
    theirs = "".join(sys.argv[6:])
    print(json.dumps(measure(file, prompts(name, texts, length, vocab), theirs)))


if __name__ == "__main__":
    main()
