"""Watching a model load, as the operator asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from engine.core.plan import LoadProgress

if TYPE_CHECKING:
    from engine.entry import Entry, Load
    from engine.errors import TrioletError
    from engine.status import ModelState

# How often a watcher looks at the progress, which a worker's thread writes down: the end of the
# load is heard of at once.
LOOK_INTERVAL_S = 0.1


class Ensures(Protocol):
    """What a watch needs of the pool."""

    def ensure(self, name: str, *, replicas: int) -> Entry: ...
    def failure(self, entry: Entry, cause: BaseException | None) -> TrioletError: ...


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """A stage of a load, and where the model stands."""

    progress: LoadProgress
    state: ModelState


class LoadWatch:
    """One watcher of a load that has begun, by `Pool.watch_load`. Leaving it leaves the load
    alone."""

    def __init__(self, pool: Ensures, entry: Entry, count: int, *, is_own: bool) -> None:
        """``is_own``: the load under way was begun for this watch."""
        self._pool = pool
        self._is_own = is_own
        self._entry = entry
        self._count = count
        self._load: Load | None = entry.load
        self._seen: LoadProgress | None = None
        self._is_limited = False  # the load that was begun for it brought what it could
        self._is_over = False

    async def next(self) -> LoadStatus | None:
        """The next stage. The last one has state READY, and None comes after it. What comes and
        goes between two looks is not told.

        Raises:
            SpawnFailed, MemoryExhausted, ShuttingDown, NoWorkers: the load failed, or could not
                begin again.
        Cancellation: the load goes on, and can be watched on.
        """
        if self._is_over:
            return None
        while True:
            self._look_at_end()
            load = self._entry.load
            if load is None or load is not self._load:
                if self._has_enough() and (load is None or self._entry.ready):
                    break
                self._is_own = load is None  # of another, it need not wait for the backoff
                self._pool.ensure(self._entry.config.name, replicas=self._count)
                self._load = self._entry.load
                continue
            progress = self._entry.progress
            if progress is not None and progress is not self._seen:
                self._seen = progress
                return LoadStatus(progress, self._entry.state)
            with trio.move_on_after(LOOK_INTERVAL_S):
                await load.done.wait()
        self._is_over = True
        last = self._seen or LoadProgress("")
        done = LoadProgress(
            "ready", last.bytes_total, last.bytes_total, last.tensors_total, last.tensors_total
        )
        return LoadStatus(done, self._entry.state)

    def _look_at_end(self) -> None:
        """Of the load watched last. One that failed is told of, and not tried again: the operator
        decides."""
        load = self._load
        if load is None or not load.done.is_set():
            return
        self._is_limited = False
        if load.failure is not None and not self._has_enough():
            raise self._pool.failure(self._entry, load.failure)
        # what it brought may have gone again, as idle or to make room: it is not fetched twice
        self._is_limited = self._is_own or load.granted < load.wanted

    def _has_enough(self) -> bool:
        return self._is_limited or len(self._entry.ready) >= self._count
