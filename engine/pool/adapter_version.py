"""An adapter's version: the files loaded under its name, and the requests that hold it."""

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
    """An adapter of the model ``base``. `Replica.adapters` has the versions that a replica has
    loaded. ``error`` is why the newest replica could not load this version, or None."""

    base: str
    config: AdapterConfig
    error: Exception | None = None
    last_used: float = 0.0  # seconds since the epoch
    counts: AdapterCounts = field(default_factory=AdapterCounts)  # over all versions of the name
    _holders: dict[object, Callable[[], None]] = field(default_factory=dict)
    _went_free: trio.Event = field(default_factory=trio.Event)

    @property
    def name(self) -> str:
        """The name by which clients ask for the adapter."""
        return f"{self.base}:{self.config.name}"

    @property
    def num_leases(self) -> int:
        """How many requests hold the version."""
        return len(self._holders)

    @contextmanager
    def leased(self, cut: Callable[[], None], tokens: Callable[[], int]) -> Iterator[None]:
        """Hold the version while the block lasts. ``cut`` cancels the holder's request; ``tokens``
        returns how many tokens the request has got."""
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
        """Cancel the requests of all holders."""
        for cut in list(self._holders.values()):
            cut()

    async def wait_free(self) -> None:
        """Wait until no request holds the version.

        Cancellation: ends the wait.
        """
        while self._holders:
            self._went_free = trio.Event()
            await self._went_free.wait()
