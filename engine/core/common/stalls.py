"""The stall timeout: when a parked request ends because its reader takes nothing.

Both functions compute ``parked_since + timeout_s``. If one of them computed a difference instead,
it would round differently: the loop would wake up when nothing is stalled yet, again and again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable


class Parkable(Protocol):
    """A request that may be parked."""

    @property
    def parked_since(self) -> float | None:
        """Since when it is parked, in seconds of the engine's clock; None if it is not parked."""
        ...


ParkableT = TypeVar("ParkableT", bound=Parkable)


def next_stall(parked: Iterable[Parkable], timeout_s: float, now: float) -> float | None:
    """Return when the first of the parked requests stalls, at least ``now``; None if no request is
    parked."""
    since = [one.parked_since for one in parked if one.parked_since is not None]
    return max(now, min(since) + timeout_s) if since else None


def stalled(parked: Iterable[ParkableT], timeout_s: float, now: float) -> list[ParkableT]:
    """Return the requests that have been parked for ``timeout_s``."""
    return [
        one
        for one in parked
        if one.parked_since is not None and now >= one.parked_since + timeout_s
    ]
