"""Measures what a form costs behind a model's reasoning, against the form from the first token.

One engine answers both in turn, one stream at a time: a schema's answer alone, and `THOUGHT` tokens
of reasoning and then such an answer. The model is the story model with a template that opens the
reasoning; a budget ends it. The time of a token is that from the first token to the last, divided
by the tokens between; drafts are off, because a schema forces many.

Further rows have the reasoning alone, with and without a budget: what it costs to bound it.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.api._generated.blocking import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Constraint, Tokens
from engine.requests.text.chat_values import Chat
from engine.requests.text.values import GenerateRequest, ReasoningOptions, SamplingParams
from tests.support.thinkers import make_thinker
from tools.lab.bench.frame import REPEATS, Row, repeat_in_turn, row_of

if TYPE_CHECKING:
    from engine.api._generated.blocking import Engine

MEASURES = ("engine/worker/sampling", "engine/core/text/thought.py", "engine/worker/text")

THREADS = 2
THOUGHT = 300  # tokens
ROUNDS = 4  # rounds of `REPEATS`, as one answer takes a fifth of a second
BAR = 1.05  # times as long per token
FORM = json.dumps(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 8, "maxLength": 40},
                "colour": {"enum": ["red", "green", "blue"]},
                "age": {"type": "integer", "minimum": 1, "maximum": 99},
            },
            "required": ["name", "colour", "age"],
            "additionalProperties": False,
        },
        "minItems": 12,
        "maxItems": 12,
    }
)
CHAT = Chat([{"role": "user", "content": "Tell me a story."}])
SAMPLING = SamplingParams(temperature=0.8, seed=3, max_tokens=900)


def ask(engine: Engine, **fields: Any) -> float:
    """Return the microseconds for each token of an answer, from the first token on."""
    begun, count = 0.0, -1
    for event in engine.generate(GenerateRequest(chat=CHAT, **{"sampling": SAMPLING, **fields})):
        if isinstance(event, Tokens):
            begun = begun or time.perf_counter()
            count += len(event.token_ids)
    return 1e6 * (time.perf_counter() - begun) / count


def run() -> list[Row]:
    """Return the bench's rows."""
    with tempfile.TemporaryDirectory() as folder:
        model = ModelConfig(
            str(make_thinker(Path(folder), "tokens")), threads=THREADS, speculation="off"
        )
        config = EngineConfig(models=(model,), prefix_cache=False, check_level=0)
        form = Constraint("json_schema", FORM)
        budget = ReasoningOptions(budget_tokens=THOUGHT)
        thought = SamplingParams(temperature=0.8, seed=3, max_tokens=THOUGHT, ignore_eos=True)
        with open_engine(config) as engine:
            alone, behind, bounded, free = repeat_in_turn(
                [
                    partial(ask, engine, constraint=replace(form, reasoning=False)),
                    partial(ask, engine, constraint=form, reasoning=budget),
                    partial(ask, engine, sampling=thought, reasoning=budget),
                    partial(ask, engine, sampling=thought),
                ],
                ROUNDS * REPEATS,
            )
    ratios = [b / a for a, b in zip(alone, behind, strict=True)]
    beside = [b / a for a, b in zip(free, bounded, strict=True)]
    return [
        row_of("a schema from the first token", alone, "µs per token"),
        row_of(f"a schema behind {THOUGHT} tokens of reasoning", behind, "µs per token"),
        row_of("behind the reasoning against alone", ratios, "×", bar=BAR),
        row_of("reasoning without a budget", free, "µs per token"),
        row_of("reasoning with a budget against without", beside, "×", bar=BAR),
    ]
