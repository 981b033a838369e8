"""The questions of a bench to an engine, and the loop of the process that answers them. This file
needs only the standard library.

A process reads a question as a line of JSON from standard input and answers with a line on its
original standard output; libraries that print write to standard error instead. Prompts are drawn
from names, so that all engines get the same ids without sending them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Engine(Protocol):
    """An engine with a loaded model. Decoding is greedy."""

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Compute the prompts and one token for each, and then ``steps`` more tokens for each, all
        together. Only the latter are on the clock. The answer has ``seconds``, those of each step
        (``step_s``; not every engine says them), and the ``first`` and ``last`` token of each
        prompt."""

    def prefill(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Compute uncached prompts and one token for each. Return ``seconds`` and ``first``."""


def prompts(name: str, batch: int, length: int, vocab: int) -> list[list[int]]:
    """Return ``batch`` prompts of ``length`` ids, which depend only on the name."""
    found = []
    for row in range(batch):
        draw = random.Random(f"{name} {row}")
        found.append([draw.randrange(1, vocab) for _ in range(length)])
    return found


def answer(make: Callable[[dict[str, Any]], Engine]) -> None:
    """Run the process: make the engine from the settings in argv[1], then answer questions until
    the input ends.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    started = time.perf_counter()
    engine = make(settings)
    _send(answers, {"load_s": time.perf_counter() - started})
    for line in sys.stdin:
        question = json.loads(line)
        name, batch, length = question["name"], question["batch"], question["length"]
        asked = prompts(name, batch, length, settings["vocab"])
        if question["what"] == "decode":
            _send(answers, engine.decode(asked, question["steps"]))
        else:
            _send(answers, engine.prefill(asked))
    os._exit(0)  # some engines' threads never end


def _send(answers: Any, what: object) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()
