"""Which replica of a model a request goes to.

Rule: pure; `Work` is all that is known of a replica.

The least busy one, by the tokens it has still to compute; each in turn; or the one that has most of
the prompt cached, unless it is so much busier that computing the prompt again is sooner done.
Source: the issue "Replicas"; R39, R44.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# A cached token saves computing one: a replica with this many more tokens to compute than it has
# of the prompt cached is not worth waiting for. As tokens of a prompt cost less than those that
# are generated one by one, the true figure is below 1; a guess.
TOKENS_PER_CACHED_TOKEN = 1.0


class Work(NamedTuple):
    """A replica's: tokens it has still to compute, at most, and requests that hold it."""

    tokens: int
    requests: int


def least_busy(works: Sequence[Work], turn: int) -> int:
    """The place of the replica with the least to do; in turn among equals."""
    count = len(works)
    return min(((turn + shift) % count for shift in range(count)), key=lambda i: works[i])


def by_prefix(works: Sequence[Work], cached: Sequence[int], turn: int) -> int:
    """The place of the replica where the request is done first: what is ahead of it, less what
    it has ``cached`` of its prompt, in tokens."""
    count = len(works)

    def cost(place: int) -> tuple[float, int]:
        own = works[place]
        return own.tokens - TOKENS_PER_CACHED_TOKEN * cached[place], own.requests

    return min(((turn + shift) % count for shift in range(count)), key=cost)
