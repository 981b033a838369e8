"""When replicas that died are restarted: after which backoff, and whether at all.

Rule: nothing here loads. `Revival.next_load` says which load is due, `Loads.revive` begins it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from engine.pool.backoff import RestartBackoff
from engine.pool.entry import Load

if TYPE_CHECKING:
    from engine.pool.entry import Entry
    from engine.pool.registry import Registry

log = logging.getLogger(__name__)

ROOM_RETRY_S = 10.0  # seconds until a restart that found no memory is tried again; a guess


class Revival:
    """Counts the deaths of every model's replicas and schedules their restarts. ``deaths_max``
    deaths of a replica within `engine.pool.backoff.WINDOW_S` end its restarts."""

    def __init__(self, registry: Registry, deaths_max: int) -> None:
        self._registry = registry
        self._deaths_max = deaths_max

    def record_death(self, entry: Entry, replica_id: int, error: Exception) -> None:
        """Count a replica's death, or a restart that failed, and schedule the next restart."""
        entry.num_deaths += 1
        if self._registry.is_closed or entry.num_unloads:
            return
        now = trio.current_time()
        backoff = entry.deaths.setdefault(replica_id, RestartBackoff(self._deaths_max))
        delay_s = backoff.died(now)
        if delay_s is not None:
            log.warning("a replica of %s will be restarted in %g s", entry.config.name, delay_s)
            entry.missing.append(now + delay_s)
            return
        log.error("replica %d of %s died too often", replica_id, entry.config.name)
        if not entry.ready:
            entry.cause = error
            entry.breaker.failed(now)

    def retry_without_room(self, entry: Entry) -> None:
        """Schedule another restart for a replica that found no memory. A model that other replicas
        serve evicts no other model for a restart."""
        entry.missing.append(trio.current_time() + ROOM_RETRY_S)

    def next_load(self, entry: Entry) -> Load | None:
        """Return a restart's load, whose task is to wait for the backoff; None if none is to begin.

        It does not matter which replica restarts first. So if a load is waiting for a later time
        than the earliest in ``entry.missing``, the two times are swapped.
        """
        if not entry.missing or entry.num_unloads or self._registry.is_closed:
            return None
        entry.missing.sort()
        load = entry.load
        if load is None:
            load = Load(1, is_restart=True, may_evict=not entry.ready)
            load.backoff.deadline = entry.missing.pop(0)
            return load
        is_waiting = load.is_restart and not load.start_now.is_set()
        if is_waiting and entry.missing[0] < load.backoff.deadline:
            first, entry.missing[0] = entry.missing[0], load.backoff.deadline
            load.backoff.deadline = first
        return None
