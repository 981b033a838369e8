"""Clients whose requests end within reasoning, and bound it.

They are drawn by a generator of their own, so that worlds without them stay the same.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from engine.requests.text.values import GenerateRequest, ReasoningOptions
from tests.simulator.clients import Client
from tests.simulator.oracle import MAX_MODEL_LEN, prompt_of

FAULT = "thinks"
SHARE = 0.15  # of worlds
ASK_SHARE = 0.6  # share of the clients with token ids, in worlds with reasoning
OPENING, CLOSING = 901, 902
# The texts of some ids, in worlds with reasoning: some end it, and some end a sentence.
MARKERS = {
    CLOSING: "</think>",
    **dict.fromkeys(range(7, 900, 29), "</think>"),
    **dict.fromkeys(range(12, 900, 9), "so. "),
    OPENING: "<think>",
}


def is_drawn(seed: int) -> bool:
    """Return whether clients of the world of this seed bound the reasoning of their answers."""
    return random.Random(f"thinks {seed}").random() < SHARE


def bound(seed: int, clients: Sequence[Client]) -> tuple[Client, ...]:
    """Let some clients send prompts that end within reasoning, with a budget."""
    rng = random.Random(f"budgets {seed}")
    return tuple(_bounded(rng, client) for client in clients)


def _bounded(rng: random.Random, client: Client) -> Client:
    request, budget = client.request, rng.choice([0, 1, 4, 8, 12, 40])
    if not isinstance(request, GenerateRequest) or client.must_fail or request.model:
        return client
    if request.token_ids is None or request.prompt.truncate_to is not None:
        return client
    if rng.random() >= ASK_SHARE:
        return client
    own = replace(
        request,
        token_ids=(*request.token_ids, OPENING),
        reasoning=ReasoningOptions(budget_tokens=budget),
    )
    return client if len(prompt_of(own)) >= MAX_MODEL_LEN else replace(client, request=own)
