"""Clients that ask for progress, and what they check of each event.

They are drawn by a generator of its own, so that worlds without them stay the same.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import trio

from engine.core.common.prompts import PromptProgress
from engine.requests.progress import INTERVAL_S, LOOKS_PER_S, UNCHANGED_S
from engine.requests.text.values import GenerateRequest
from tests.simulator.clients import Client
from tests.simulator.oracle import prompt_of
from tests.simulator.watch import Violation

FAULT = "progress"
SHARE = 0.4  # of worlds
ASKING_MAX = 8  # clients of such a world: each wakes the engine four times a virtual second
SLACK_S = 0.1
COUNTS = ("loaded_bytes", "total_bytes", "prompt_tokens", "computed_tokens", "cached_tokens")


def is_drawn(seed: int) -> bool:
    """Return whether clients of the world of this seed ask for progress."""
    return _rng(seed).random() < SHARE


def _rng(seed: int) -> random.Random:
    return random.Random(f"progress {seed}")


def ask(seed: int, clients: Iterable[Client]) -> tuple[Client, ...]:
    """Return the clients, some of whose requests ask for progress."""
    rng, clients = _rng(seed), tuple(clients)
    asking = {rng.randrange(len(clients)) for _ in range(ASKING_MAX)}
    return tuple(
        _ask(rng, client) if index in asking else client for index, client in enumerate(clients)
    )


def _ask(rng: random.Random, client: Client) -> Client:
    """Return the client with progress. Some read nothing, and their streams are full at the end."""
    request = client.request
    is_silent = rng.random() < 0.3
    if not isinstance(request, GenerateRequest) or client.must_fail:
        return client
    output = replace(request.output, progress=True)
    request = replace(request, output=output, check=False)
    if not is_silent or client.over_wire or client.cuts is not None:
        return replace(client, request=request)
    sampling = replace(request.sampling, max_tokens=2, min_tokens=None)
    request = replace(request, sampling=sampling, n=None, check=False)
    return replace(client, request=request, buffer=2, stall_after=0)


def longest_silence_s(num_clients: int) -> float:
    """Return how long a client that reads hears nothing before its first token, at most."""
    return UNCHANGED_S + max(INTERVAL_S, 2 * num_clients / LOOKS_PER_S) + SLACK_S


@dataclass
class Seen:
    """The progress of one stream, as its reader gets it."""

    since: float = field(default_factory=trio.current_time)
    last: PromptProgress = field(default_factory=lambda: PromptProgress(""))
    num_events: int = 0

    def see(self, request: GenerateRequest, event: PromptProgress, *, has_token: bool) -> None:
        """Record an event, and check that it can come now."""
        name, before = request.request_id, self.last
        self.last = event
        self.num_events += 1
        if not request.output.progress or has_token:
            raise Violation(f"{name}: progress out of place")
        if self.num_events > 1 + (trio.current_time() - self.since) / INTERVAL_S + SLACK_S:
            raise Violation(f"{name}: {self.num_events} events of progress so soon")
        if any(getattr(event, count) < getattr(before, count) for count in COUNTS):
            raise Violation(f"{name}: {event} after {before}")
        if event.prompt_tokens not in (0, len(prompt_of(request))):
            raise Violation(f"{name}: {event} of {len(prompt_of(request))} tokens")
        if not event.cached_tokens <= event.computed_tokens <= event.prompt_tokens:
            raise Violation(f"{name}: {event} does not add up")
        if event.first_token_s is not None and event.first_token_s < 0:
            raise Violation(f"{name}: {event} is in the past")
