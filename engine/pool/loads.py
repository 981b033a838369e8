"""When a model loads: once for all waiting requests, and after a backoff if a load has failed.

Rule 1: `Loads.ensure` is the only way to a load, beside `Loads.revive` for replicas that died.
Nothing is awaited between reading a model's state and changing it. Rule 2: a load runs in a task of
the pool, so it goes on if the request that began it ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from engine.errors import MemoryExhausted, NoWorkers, ShuttingDown, TrioletError
from engine.pool.entry import Load
from engine.pool.load_errors import error_for_request, log_failed_load
from engine.worker.interface import LoadProgress

if TYPE_CHECKING:
    from engine.pool.entry import Entry
    from engine.pool.loader import ReplicaLoader
    from engine.pool.registry import Registry
    from engine.pool.revival import Revival
    from engine.pool.serving import StartTask
    from engine.status import Capability

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Loads:
    """Begins the loads of all models and runs each in a task of the pool's."""

    _registry: Registry
    _loader: ReplicaLoader
    _revival: Revival
    _start_task: StartTask

    def ensure(
        self,
        name: str,
        capability: Capability | None = None,
        *,
        replicas: int | None = None,
        is_preload: bool = False,
    ) -> Entry:
        """Return the entry of a model, which is ready or has a load under way. Never waits.

        ``replicas`` is how many replicas the operator wants; their load begins now, however often
        loads have failed. ``is_preload``: the server's start asks for the load, which takes memory
        from another model only if a request asks for it as well.

        Raises:
            ModelNotFound, InvalidRequest: no model has this name and capability (`Registry.find`).
            ShuttingDown, NoWorkers: the pool is ending, or the model is being unloaded.
            SpawnFailed: the last load failed, and its backoff has not ended.
        """
        self._registry.require_open()
        entry = self._registry.find_base(name, capability)
        self._registry.require_open(entry)
        if entry.load is not None:
            entry.load.may_evict |= not (is_preload or entry.ready)
            if replicas is not None:
                entry.deaths.clear()
                entry.load.start_now.set()
            return entry
        missing = (replicas or 1) - len(entry.ready)
        if missing <= 0:
            return entry
        if replicas is not None:
            entry.breaker.reset()
            entry.deaths.clear()
        wait_s = entry.breaker.wait_s(trio.current_time())
        if wait_s:
            hint = f"the next attempt can begin in {wait_s:.0f} s"
            raise error_for_request(entry.config.name, entry.cause, hint)
        wanted = entry.config.num_replicas if replicas is None and not entry.ready else missing
        self._begin_load(entry, Load(wanted, is_preload, may_evict=not (is_preload or entry.ready)))
        return entry

    def revive(self, entry: Entry) -> None:
        """Begin the load of a replica that died, if one is due. `ensure` loaded that replica
        before, so this opens no second way to a first load."""
        load = self._revival.next_load(entry)
        if load is not None:
            self._begin_load(entry, load)

    def _begin_load(self, entry: Entry, load: Load) -> None:
        entry.load = load
        entry.progress = LoadProgress("reserve")
        self._start_task(lambda: self._run_load(entry, load))
        self._registry.on_change()

    async def _run_load(self, entry: Entry, load: Load) -> None:
        """Run one load to its end. A failure is recorded in the entry and does not end the pool."""
        failure: Exception | None = None
        try:
            with load.backoff:
                await load.start_now.wait()
            self._registry.require_open(entry)
            await self._loader.load_replicas(entry, load)
            if load.is_restart and not load.granted:
                self._revival.retry_without_room(entry)
        except Exception as error:
            failure = error
        finally:
            entry.load = None
            if failure is not None:
                self._record_failure(entry, load, failure)
                load.failure = failure
            entry.settled.set()
            load.settled.set()
            load.done.set()
            self.revive(entry)
            self._registry.on_change()

    def _record_failure(self, entry: Entry, load: Load, error: Exception) -> None:
        """Store why a load failed and schedule what follows. A load that found no memory may be
        tried again at once. A restart that failed counts as another death."""
        is_given_up = isinstance(error, ShuttingDown | NoWorkers)
        if not isinstance(error, TrioletError):
            log.error("model %s failed", entry.config.name, exc_info=error)
        elif load.failure is None and not is_given_up:  # else that replica's failure was logged
            log_failed_load(entry.config.name, error)
        if is_given_up:
            load.cause = error
        elif load.is_restart:
            self._revival.record_death(entry, entry.free_id(), error)
            load.cause = entry.cause
        else:
            load.cause = error
            if not entry.ready:
                entry.cause = error
                if not isinstance(error, MemoryExhausted):
                    entry.breaker.failed(trio.current_time())
