"""The stall timeout: when a parked request ends because its reader takes nothing.

Both functions compare with `_stalls_at`. If one of them computed a difference instead, it would
round differently: the loop would wake up when nothing is stalled yet, again and again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.core.common.credit import Credit


class Parkable(Protocol):
    """A request that may be parked."""

    @property
    def parked_since(self) -> float | None:
        """Since when it is parked, in seconds of the engine's clock; None if it is not parked."""
        ...

    @property
    def credit(self) -> Credit:
        """The credit of its stream, which says how long its reader may be away."""
        ...


ParkableT = TypeVar("ParkableT", bound=Parkable)


def next_stall(parked: Iterable[Parkable], timeout_s: float, now: float) -> float | None:
    """Return when the first of the parked requests stalls, at least ``now``; None if no request is
    parked."""
    stalls = [_stalls_at(one, timeout_s) for one in parked]
    first = min(stalls, default=math.inf)
    return None if first == math.inf else max(now, first)


def stalled(parked: Iterable[ParkableT], timeout_s: float, now: float) -> list[ParkableT]:
    """Return the requests that have been parked for ``timeout_s``."""
    return [one for one in parked if now >= _stalls_at(one, timeout_s)]


def _stalls_at(one: Parkable, timeout_s: float) -> float:
    """Return when a request stalls; infinity if it is not parked, or if its reader has taken
    something since, whose report is on its way."""
    if one.parked_since is None or not one.credit.starved:
        return math.inf
    return max(one.parked_since, one.credit.waits_until) + timeout_s
