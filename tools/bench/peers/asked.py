"""What a bench asks an engine, and the process that answers it; needs the standard library only.

A process takes a line of JSON on standard input for each question and answers with a line on what
was its standard output (libraries that print get standard error instead). Prompts are drawn from
names, so that all engines get the same ids without sending them around.
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
    """One engine with one model loaded; greedy decoding throughout."""

    def decode(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Compute the prompts, a token for each, and after that ``steps`` tokens more of each, all
        of them together; only the latter are on the clock. The answer holds ``seconds``, and
        ``first`` and ``last``, those tokens of each."""
        ...

    def prefill(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Compute prompts that no cache has, and one token of each; ``seconds``, ``first``."""
        ...


def prompts(name: str, batch: int, length: int, vocab: int) -> list[list[int]]:
    """``batch`` prompts of ``length`` ids; the same for the same name."""
    found = []
    for row in range(batch):
        draw = random.Random(f"{name} {row}")
        found.append([draw.randrange(1, vocab) for _ in range(length)])
    return found


def answer(make: Callable[[dict[str, Any]], Engine]) -> None:
    """Be the process: make the engine from the settings in argv[1], then answer until the input
    ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    started = time.perf_counter()
    engine = make(settings)
    _say(answers, {"load_s": time.perf_counter() - started})
    for line in sys.stdin:
        question = json.loads(line)
        name, batch, length = question["name"], question["batch"], question["length"]
        asked = prompts(name, batch, length, settings["vocab"])
        if question["what"] == "decode":
            _say(answers, engine.decode(asked, question["steps"]))
        else:
            _say(answers, engine.prefill(asked))
    os._exit(0)  # some engines' threads never end


def _say(answers: Any, what: object) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()
