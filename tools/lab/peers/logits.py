"""Writes llama.cpp's logits of drawn texts into a file of numpy.

    PYTHON -m tools.lab.peers.logits GGUF NAME TEXTS LENGTH VOCAB FILE

It runs in llama.cpp's environment. The texts are those of `tools.lab.peers.asked.prompts`. The file
has [texts, length, vocab] float32.
"""

from __future__ import annotations

import os
import sys

import llama_cpp
import numpy as np

from tools.lab.peers.asked import prompts
from tools.lab.peers.llama_api import LlamaEngine
from tools.lab.peers.llama_cpp import log_errors


def write(gguf: str, name: str, texts: int, length: int, vocab: int, file: str) -> None:
    """Compute the logits and write ``file``."""
    settings = {"gguf": gguf, "vocab": vocab, "threads": len(os.sched_getaffinity(0))}
    engine = LlamaEngine(llama_cpp, log_errors, settings)
    np.save(file, [engine.logits(text) for text in prompts(name, texts, length, vocab)])


if __name__ == "__main__":
    _, own_gguf, own_name, *sizes, own_file = sys.argv
    write(own_gguf, own_name, *map(int, sizes), own_file)
