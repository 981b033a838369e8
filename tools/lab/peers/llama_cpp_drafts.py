"""llama.cpp's drafts by look-up, by llama-cpp-python's `LlamaPromptLookupDecoding`, against none.

    PYTHON -m tools.lab.peers.llama_cpp_drafts FILE THREADS STEPS     (in llama.cpp's environment)

reads a JSON list of prompts, each a list of ids, from standard input. It writes a JSON list with
an object for each prompt: the tokens per second ``without`` and ``with`` drafts, of each turn, and
whether the ``tokens`` of both were the same. The sampling is greedy; the first token is not on the
clock.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

TURNS = 6  # the first one warms up


def generate(model: Any, prompt: list[int], steps: int) -> tuple[float, list[int]]:
    """Return the tokens per second, and the tokens."""
    found: list[int] = []
    begun = 0.0
    for token in model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
        begun = begun or time.perf_counter()
        found.append(token)
        if len(found) == steps:
            break
    return (steps - 1) / (time.perf_counter() - begun), found


def run(file: str, threads: int, steps: int, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Return the answer."""
    common = {"n_ctx": 2048, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    models = [Llama(file, **common), Llama(file, draft_model=LlamaPromptLookupDecoding(), **common)]
    answers = []
    for prompt in prompts:
        turns = [[generate(model, prompt, steps) for model in models] for _ in range(TURNS)][1:]
        answers.append(
            {
                "without": [plain[0] for plain, _ in turns],
                "with": [drafting[0] for _, drafting in turns],
                "tokens": all(plain[1] == drafting[1] for plain, drafting in turns),
            }
        )
    return answers


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.load(sys.stdin))))
