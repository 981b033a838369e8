"""The adapters (LoRA) of the pool's models: loading and unloading them while their bases serve.

Rule 1: an adapter's name stands for one version of it. A reload makes a new version, which gets the
name once every replica has loaded it; running requests keep the old version
(`AdapterVersion.leased`), which is unloaded when the last of them has ended. Rule 2: a version gets
its names once all replicas have loaded it and the names are free. Nothing is awaited between these
checks and the change of the names. Rule 3: the reservation of each replica that has an adapter
includes its bytes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from engine.errors import InvalidRequest, NoWorkers, SpawnFailed
from engine.pool.adapter_version import AdapterVersion
from engine.pool.first_adapters import NO_TEXT_MODEL
from engine.pool.load_errors import error_for_request, log_failed_adapter
from engine.status import Capability, ModelStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.pool.entry import Entry
    from engine.pool.governor import Governor
    from engine.pool.leases import Leases
    from engine.pool.registry import Registry
    from engine.pool.runner_jobs import RunnerJobs
    from engine.pool.serving import StartTask
    from engine.replica.replica import AnyReplica

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0  # retry-after of NoWorkers; a guess: by then the base's unload has ended


@dataclass(eq=False)
class Adapters:
    """Loads and unloads adapters. Belongs to the Trio thread."""

    _registry: Registry
    _leases: Leases
    _governor: Governor
    _jobs: RunnerJobs
    _start_task: StartTask
    _drain_timeout_s: float

    # ---- the operator's commands

    async def load(
        self, name: str, directory: str | os.PathLike[str], aliases: tuple[str, ...] = ()
    ) -> ModelStatus:
        """Load the adapter ``BASE:NAME`` from a directory, on every replica of its base. The base
        is loaded first if it is not loaded. An adapter with this name is replaced: running requests
        keep the old version. Returns the adapter's status.

        Raises:
            InvalidRequest: the adapter cannot have the name or an alias.
            ModelNotFound, ShuttingDown, NoWorkers, SpawnTimeout: its base cannot be leased.
            SpawnFailed, MemoryExhausted: the load failed. The old version stays.
            WorkerLost: a replica died meanwhile. The others keep the old version.
        Cancellation: the new version is unloaded again; the old version stays.
        """
        entry, config = self._registry.adapter_config(name, os.fspath(directory), aliases)
        base = entry.config.name
        async with (
            self._leases.acquire(base, Capability.TEXT_TO_TEXT),
            entry.adapters_lock,
        ):
            version = AdapterVersion(base, config)
            try:
                while missing := [r for r in entry.ready if version not in r.adapters]:
                    await self._load_onto(entry, version, missing[0])
                self._require_same_content(entry, version)
                self._registry.require_names(entry, config)
            except BaseException:
                self._start(partial(self._drop, entry, version))
                raise
            old = entry.adapters.get(version.name)
            if old is not None:
                version.counts = old.counts
            self._registry.set_adapter(entry, version)
        log.info("the adapter %s is loaded", version.name)
        if old is not None:
            self._start(partial(self._retire, entry, old))
        self._registry.on_change()
        return entry.adapter_status(version)

    async def unload(self, name: str, drain_s: float | None = None) -> None:
        """Forget an adapter, and wait until its memory is free. Requests that run on it have
        ``drain_s`` seconds to finish (None: the configured drain timeout); then they are cancelled.
        A replica that is loading drops the adapter before it serves, which this does not wait for.

        Raises:
            ModelNotFound: no model has this name. InvalidRequest: it is not an adapter.
            ShuttingDown: the server is ending, which unloads everything.
        Cancellation: ends the wait; the unload goes on.
        """
        self._registry.require_open()
        entry, version = self._registry.require_adapter(name)
        self._registry.forget_adapter(entry, version)
        limit_s = self._drain_timeout_s if drain_s is None else drain_s
        done = trio.Event()
        self._start_task(partial(self._retire, entry, version, limit_s, done))
        self._registry.on_change()
        await done.wait()

    def _start(self, task: Callable[[], Any]) -> None:
        """Start a task that unloads a version. While the pool ends, no task can be started any
        more, and the end of each replica frees its adapters."""
        if not self._registry.is_closed:
            self._start_task(task)

    # ---- one version

    async def _load_onto(self, entry: Entry, version: AdapterVersion, replica: AnyReplica) -> None:
        """Load a version with a replica that serves.

        Raises:
            SpawnFailed, MemoryExhausted: the load failed, or found no memory.
            WorkerLost, ShuttingDown: the replica ends.
        """
        store, directory = getattr(replica.tools, "adapters", None), version.config.directory
        if store is None:
            raise InvalidRequest.of("model", f"{entry.config.name}: {NO_TEXT_MODEL}")
        reservation: Any = replica.reservation
        need = await self._run(entry, version, partial(store.measure, directory))
        self._governor.grow(version.name, reservation, need)
        try:
            info = await self._run(entry, version, partial(store.load, directory))
        except BaseException:
            reservation.change(-need)
            raise
        reservation.change(info.num_bytes - need)
        replica.adapters[version] = info
        if info.num_bytes > need:  # the governor has not granted the extra bytes
            raise SpawnFailed(
                f"{version.name}: it takes more memory than its files showed before; they changed "
                "while it was loaded"
            )

    async def _run(self, entry: Entry, version: AdapterVersion, job: Callable[[], Any]) -> Any:
        """Run one job of an adapter's load. Its error is logged, and gets the adapter's name."""
        try:
            return await self._jobs.run_for_load(job)
        except Exception as error:
            log_failed_adapter(version.name, error)
            raise error_for_request(version.name, error) from error

    def _require_same_content(self, entry: Entry, version: AdapterVersion) -> None:
        """Check that a replica has loaded a version, and that all have loaded the same content.

        Raises:
            ShuttingDown, NoWorkers: no replica is left to serve. SpawnFailed: the contents differ.
        """
        self._registry.require_open(entry)
        digests = {replica.adapters[version].digest for replica in entry.ready}
        if not digests:
            raise NoWorkers(
                f"{version.name} was not loaded, because its base has left the memory meanwhile",
                retry_after_s=RETRY_AFTER_S,
            )
        if len(digests) > 1:
            raise SpawnFailed(f"{version.name}: its files changed while it was loaded")

    async def _retire(
        self,
        entry: Entry,
        version: AdapterVersion,
        drain_s: float | None = None,
        done: trio.Event | None = None,
    ) -> None:
        """Drop a version once no request holds it. Cancel its requests after ``drain_s``."""
        try:
            if drain_s is not None:
                with trio.move_on_after(drain_s):
                    await version.wait_free()
                version.cut()
            await version.wait_free()
            await self._drop(entry, version)
        finally:
            if done is not None:
                done.set()
            self._registry.on_change()

    async def _drop(self, entry: Entry, version: AdapterVersion) -> None:
        """Unload a version from each replica, and give its memory back."""
        for replica in list(entry.replicas):
            info = replica.adapters.pop(version, None)
            store = getattr(replica.tools, "adapters", None)
            if info is None or store is None:
                continue
            reservation: Any = replica.reservation
            try:
                await self._jobs.run_for_load(partial(store.unload, info.digest))
            except Exception as error:  # the worker died, and its memory is free
                log.debug("%s was not unloaded: %r", version.name, error)
            reservation.change(-info.num_bytes)
            self._governor.notify_freed()
