"""Drafters for `FakeScript.draft`: right ones, wrong ones, and ones that are right at times."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from engine.worker.fakes.digests import digest_after, next_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Drafter = Callable[[Sequence[int], int | None, int], list[int]]


def right_draft(tokens: Sequence[int], seed: int | None, choice: int, count: int) -> list[int]:
    """Return the ``count`` tokens that the fake model generates next, unless the sequence ends."""
    digest = 0
    for token in tokens:
        digest = digest_after(digest, token)
    draft: list[int] = []
    for _ in range(count):
        draft.append(next_token(digest, seed, choice))
        digest = digest_after(digest, draft[-1])
    return draft


def drafter(acceptance: float, *, count: int = 15, seed: int = 0) -> Drafter:
    """Return a drafter of up to ``count`` tokens, each of which is right with the probability
    ``acceptance``. After a wrong token, the drafter goes on as if that had been right."""
    rng = random.Random(seed)

    def draft(tokens: Sequence[int], request_seed: int | None, choice: int) -> list[int]:
        right = right_draft(tokens, request_seed, choice, rng.randint(0, count))
        return [token if rng.random() < acceptance else 1 + token % 900 for token in right]

    return draft


def drafter_of_world(seed: int) -> Drafter | None:
    """Return the drafter of the simulator's world with this seed: none for every second world, and
    otherwise one that is right never, always, or at times. This changes no other draw."""
    rng = random.Random(seed ^ 0xD4AF)
    acceptance = rng.choice((0.0, 0.5, 0.8, 0.95, 1.0))
    return drafter(acceptance, seed=seed) if rng.random() < 0.5 else None


def model_of_world(seed: int) -> Drafter | None:
    """Return the draft model of the simulator's world with this seed: none for two worlds of three,
    and otherwise one like those of `drafter_of_world`, drawn apart."""
    rng = random.Random(seed ^ 0x30DE1)
    acceptance = rng.choice((0.0, 0.5, 0.8, 0.95, 1.0))
    return drafter(acceptance, count=8, seed=~seed) if rng.random() < 1 / 3 else None
