"""The progress of a load that the operator asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from engine.pool.load_errors import error_for_request
from engine.worker.interface import LoadProgress

if TYPE_CHECKING:
    from engine.pool.entry import Entry, Load
    from engine.pool.loads import Loads
    from engine.status import ModelState

# Seconds between two reads of the progress, which the loading thread stores. The end of a load
# wakes the watch at once.
LOOK_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """A stage of a load, and the model's state."""

    progress: LoadProgress
    state: ModelState


class LoadWatch:
    """Watches a load that has begun (`Pool.watch_load`). The load goes on if the watch is dropped.

    ``count`` is how many replicas the operator wants. ``is_own``: the load under way was begun by
    this watch's `Pool.watch_load`.
    """

    def __init__(self, loads: Loads, entry: Entry, count: int, *, is_own: bool) -> None:
        self._loads = loads
        self._is_own = is_own
        self._entry = entry
        self._count = count
        self._load: Load | None = entry.load
        self._seen: LoadProgress | None = None
        self._is_limited = False  # whether to load no further replicas (`_look_at_end`)
        self._is_over = False

    async def next(self) -> LoadStatus | None:
        """Wait for the next stage and return it. The last stage has the state READY; after it,
        return None. A stage that begins and ends between two reads is left out.

        Raises:
            SpawnFailed, MemoryExhausted, ShuttingDown, NoWorkers: the load failed, or cannot begin
                again.
        Cancellation: ends the wait; the load goes on, and `next` may be called again.
        """
        if self._is_over:
            return None
        while True:
            self._look_at_end()
            load = self._entry.load
            if load is None or load is not self._load:
                if self._has_enough() and (load is None or self._entry.ready):
                    break
                self._is_own = load is None  # a load that others began may wait
                self._loads.ensure(self._entry.config.name, replicas=self._count)
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
        """Take note of how the watched load ended, if it has ended.

        Raises:
            TrioletError: the load failed. The watch begins no new load; the operator decides.
        """
        load = self._load
        if load is None or not load.done.is_set():
            return
        self._is_limited = False
        if load.failure is not None and not self._has_enough():
            raise error_for_request(self._entry.config.name, load.failure)
        # The load's replicas may have left again, because they were idle or another model needed
        # their memory. They are not loaded a second time.
        self._is_limited = self._is_own or load.granted < load.wanted

    def _has_enough(self) -> bool:
        return self._is_limited or len(self._entry.ready) >= self._count
