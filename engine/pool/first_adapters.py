"""The adapters that a replica loads with its model, before it serves."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.errors import SpawnFailed
from engine.pool.load_errors import log_failed_adapter

if TYPE_CHECKING:
    from engine.pool.adapter_version import AdapterVersion
    from engine.pool.entry import Entry
    from engine.pool.runner_jobs import RunnerJobs
    from engine.replica.replica import AnyRunner
    from engine.worker.text.interface import AdapterInfo

log = logging.getLogger(__name__)

NO_TEXT_MODEL = "only models that generate text take adapters"


def measure(entry: Entry, runner: AnyRunner) -> int:
    """Return how many bytes the model's adapters will take on a replica. Called in a thread. An
    adapter that cannot be measured counts as 0 bytes; its load will fail."""
    total = 0
    for version in list(entry.adapters.values()):
        try:
            total += _store_of(runner).measure(version.config.directory)
        except Exception as error:
            log.debug("%s cannot be measured: %r", version.name, error)
    return total


async def load_all(
    entry: Entry, runner: AnyRunner, jobs: RunnerJobs
) -> dict[AdapterVersion, AdapterInfo]:
    """Load the model's adapters. If an adapter does not load, its error is logged and shown by
    ListModels, and the others load. An adapter that the operator unloads meanwhile is unloaded
    here, too. Nothing is awaited between the last check of the model's adapters and the return.

    Cancellation: before and between adapters; the replica is closed then.
    """
    loaded: dict[AdapterVersion, AdapterInfo] = {}
    failed: set[AdapterVersion] = set()
    while True:
        wanted = list(entry.adapters.values())
        if stale := [v for v in loaded if v not in wanted]:
            await jobs.run_for_load(partial(_unload, runner, loaded.pop(stale[0])))
        elif missing := [v for v in wanted if v not in loaded and v not in failed]:
            version = missing[0]
            try:
                loaded[version] = await _load(entry, version, runner, jobs)
                version.error = None
            except Exception as error:
                failed.add(version)
                version.error = error
                log_failed_adapter(version.name, error)
        else:
            return loaded


async def _load(
    entry: Entry, version: AdapterVersion, runner: AnyRunner, jobs: RunnerJobs
) -> AdapterInfo:
    """Load a version of an adapter.

    Raises:
        SpawnFailed: other replicas have loaded other contents under its name.
    """

    def load() -> AdapterInfo:
        info: AdapterInfo = _store_of(runner).load(version.config.directory)
        return info

    info = await jobs.run_for_load(load)
    others = {r.adapters[version].digest for r in entry.ready if version in r.adapters}
    if others - {info.digest}:
        await jobs.run_for_load(partial(_unload, runner, info))
        raise SpawnFailed(
            "its files have changed since other replicas loaded it; load it again by LoadAdapter"
        )
    return info


def _unload(runner: AnyRunner, info: AdapterInfo) -> None:
    _store_of(runner).unload(info.digest)


def _store_of(runner: AnyRunner) -> Any:
    store = getattr(runner, "adapters", None)
    if store is None:
        raise SpawnFailed(NO_TEXT_MODEL)
    return store
