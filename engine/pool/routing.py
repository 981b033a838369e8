"""Which replica of a model a request goes to.

Rule: pure; `Work` is all that is known of a replica.

There are three ways: the replica with the fewest tokens still to compute; each replica in turn; or
the replica that has most of the prompt cached, unless that replica is so much busier that another
would have computed the prompt sooner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.replica.replica import Work

# How many tokens of other requests a replica may have ahead for each cached token of the prompt
# and still be preferred. A guess: as tokens of a prompt cost less than tokens that are generated
# one by one, the true figure is below 1.
TOKENS_PER_CACHED_TOKEN = 1.0


def least_busy(works: Sequence[Work], turn: int) -> int:
    """Return the index of the replica with the least to do. ``turn`` decides between equals."""
    count = len(works)
    return min(((turn + shift) % count for shift in range(count)), key=lambda i: works[i])


def by_prefix(works: Sequence[Work], cached: Sequence[int], turn: int) -> int:
    """Return the index of the replica that will have done the request first: its tokens ahead less
    its ``cached`` tokens of the prompt are the fewest. ``turn`` decides between equals."""
    count = len(works)

    def cost(index: int) -> tuple[float, int]:
        own = works[index]
        return own.tokens - TOKENS_PER_CACHED_TOKEN * cached[index], own.requests

    return min(((turn + shift) % count for shift in range(count)), key=cost)
