"""One version of an adapter: its name's content since it was loaded, and the requests that hold
it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from engine.replica.telemetry import AdapterCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.config import AdapterConfig


@dataclass(eq=False)
class AdapterVersion:
    """An adapter of the model ``base``. Which replicas have it, they say themselves
    (`Replica.adapters`). ``error`` is why the last load of a replica did not bring it."""

    base: str
    config: AdapterConfig
    error: Exception | None = None
    last_used: float = 0.0  # seconds since the epoch
    counts: AdapterCounts = field(default_factory=AdapterCounts)  # of all versions of the name
    _holders: dict[object, Callable[[], None]] = field(default_factory=dict)
    _went_free: trio.Event = field(default_factory=trio.Event)

    @property
    def name(self) -> str:
        """The name by which clients ask for it."""
        return f"{self.base}:{self.config.name}"

    @property
    def num_leases(self) -> int:
        """How many requests hold it."""
        return len(self._holders)

    @contextmanager
    def leased(self, cut: Callable[[], None], tokens: Callable[[], int]) -> Iterator[None]:
        """Hold the version while the block lasts. ``cut`` asks the holder to leave soon; ``tokens``
        returns how many it has got."""
        holder = object()
        self._holders[holder] = cut
        self.counts.running += 1
        self.counts.requests += 1
        self.last_used = time.time()
        try:
            yield
        finally:
            del self._holders[holder]
            self.counts.running -= 1
            self.counts.tokens += tokens()
            if not self._holders:
                self._went_free.set()

    def cut(self) -> None:
        """Ask every holder to leave."""
        for cut in list(self._holders.values()):
            cut()

    async def wait_free(self) -> None:
        """Wait until nobody holds the version.

        Cancellation: ends the wait.
        """
        while self._holders:
            self._went_free = trio.Event()
            await self._went_free.wait()
