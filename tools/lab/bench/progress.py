"""Measures what a client hears before its first token: how many events, how long it hears nothing,
and how wrong the estimate of the first token is at half the prompt.

The prompt has `PROMPT` tokens of q05 in bfloat16, on two threads. A cold replica has measured no
step before, and computes the prompt's first half in one; a warm one has computed such prompts.
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.api._generated.blocking import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.common.prompts import PromptProgress
from engine.core.text.types import Tokens
from engine.requests.text.values import GenerateRequest, SamplingParams
from tools.lab.bench.checkpoints import checkpoint
from tools.lab.bench.frame import REPEATS, Row, row_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.api._generated.blocking import Engine

MEASURES = ("engine/requests/progress.py", "engine/core/text")

THREADS = 2
PROMPT = 4000  # tokens
EVENTS_BAR = 4
ERROR_BAR = 20.0  # percent
SILENCE_BAR_S = 1.5  # an event comes each second, and a look each quarter of one
COUNTS = ("prompt_tokens", "computed_tokens", "cached_tokens")


@dataclass(frozen=True)
class Wait:
    """What one client heard before its first token, which took ``seconds``. ``error`` is that of
    the estimate at half the prompt, in percent of the time that was left."""

    seconds: float
    num_events: int
    num_falls: int
    silence_s: float
    error: float


def wait(engine: Engine, seed: int) -> Wait:
    """Send a prompt of its own, and listen."""
    rng = random.Random(seed)
    request = GenerateRequest(
        token_ids=[rng.randrange(1000, 40_000) for _ in range(PROMPT)],
        sampling=SamplingParams(max_tokens=4),  # decodes show a replica how short a step can be
        output={"progress": True},
    )
    begun, heard = time.perf_counter(), list[tuple[float, PromptProgress]]()
    first = 0.0
    for event in engine.generate(request):
        if isinstance(event, PromptProgress):
            heard.append((time.perf_counter() - begun, event))
        elif isinstance(event, Tokens):
            first = first or time.perf_counter() - begun
    times = [0.0, *[at for at, _ in heard], first]
    pairs = list(itertools.pairwise(heard))
    falls = [getattr(b, name) < getattr(a, name) for (_, a), (_, b) in pairs for name in COUNTS]
    half = [(at, one) for at, one in heard if one.computed_tokens >= PROMPT / 2]
    at, told = half[0]
    left = first - at
    estimate = told.first_token_s
    error = 100.0 if estimate is None else 100 * abs(estimate - left) / left
    silences = [b - a for a, b in itertools.pairwise(times)]
    return Wait(first, len(heard), sum(falls), max(silences), error)


def rows_of(name: str, waits: Sequence[Wait]) -> list[Row]:
    """Return the rows of one kind of replica."""
    return [
        row_of(f"{name}: first token", [one.seconds for one in waits], "s"),
        row_of(
            f"{name}: events before it",
            [one.num_events for one in waits],
            "events",
            bar=EVENTS_BAR,
            better="higher",
        ),
        row_of(f"{name}: counts that fell", [one.num_falls for one in waits], "counts", bar=0),
        row_of(
            f"{name}: longest silence", [one.silence_s for one in waits], "s", bar=SILENCE_BAR_S
        ),
        row_of(
            f"{name}: error of the estimate at half the prompt",
            [one.error for one in waits],
            "%",
            bar=ERROR_BAR,
        ),
    ]


def run() -> list[Row]:
    """Return the bench's rows."""
    model = ModelConfig(str(checkpoint("q05")), threads=THREADS, speculation="off")
    config = EngineConfig(models=(model,), prefix_cache=False, check_level=0)
    cold, warm = [], []
    for turn in range(REPEATS):
        with open_engine(config) as engine:
            engine.wait_ready()
            cold.append(wait(engine, turn))
            warm.append(wait(engine, REPEATS + turn))
    return [*rows_of("cold replica", cold), *rows_of("warm replica", warm)]
