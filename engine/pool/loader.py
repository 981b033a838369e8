"""How the replicas of one load come to serve: runners are made, memory is reserved, weights load.

Rule: the memory that a load will need is reserved before the load begins, and released once: by
this module if the load fails, otherwise when the replica has ended.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import trio

from engine.pool import first_adapters
from engine.pool.load_errors import log_failed_load

if TYPE_CHECKING:
    from engine.config import EngineConfig, ModelConfig
    from engine.pool.adapter_version import AdapterVersion
    from engine.pool.entry import Entry, Load
    from engine.pool.governor import Governor
    from engine.pool.memory import Reservation
    from engine.pool.registry import Registry
    from engine.pool.runner_jobs import RunnerJobs
    from engine.pool.serving import Serving
    from engine.replica.replica import AnyReplica, AnyRunner
    from engine.worker.interface import MemoryEstimate, WorkerInfo
    from engine.worker.text.interface import AdapterInfo

log = logging.getLogger(__name__)


class RunnerFactory(Protocol):
    """Makes the runner of one replica of a model; the runner is not loaded yet."""

    def __call__(self, model: ModelConfig, config: EngineConfig) -> AnyRunner:
        """Return the runner. ``model`` is the configuration of that replica."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A runner that is not loaded yet, and the memory that it will need."""

    config: ModelConfig
    runner: AnyRunner
    estimate: MemoryEstimate


@dataclass(eq=False)
class ReplicaLoader:
    """Loads replicas and hands each to `Serving`."""

    _config: EngineConfig
    _make_runner: RunnerFactory
    _registry: Registry
    _governor: Governor
    _serving: Serving
    _jobs: RunnerJobs

    async def load_replicas(self, entry: Entry, load: Load) -> None:
        """Load as many of the wanted replicas as find memory. Each serves as soon as it has loaded,
        and sets ``load.settled``. ``load.failure`` is set if one did not load.

        Raises:
            MemoryExhausted: no replica found memory, and none serves the model.
            ShuttingDown, NoWorkers: the model is not to be loaded any more.
            Exception: no replica loaded, and none serves the model. It is the first failure's
        error. Cancellation: runners that do not serve yet are closed, and their memory is released.
        """
        if load.is_preload and entry.traits.loads_last:
            await self._wait_for_other_preloads()
        candidates = await self._make_candidates(entry, load.wanted)
        granted: list[Reservation | None] = [None] * len(candidates)
        try:
            with load.room:
                needs = [candidate.estimate for candidate in candidates]
                granted = await self._governor.reserve(entry, load, needs)
        finally:
            pairs = zip(candidates, granted, strict=True)
            await self._jobs.close_all([part.runner for part, held in pairs if held is None])
        if load.room.cancelled_caught:
            self._registry.require_open(entry)
        load.granted = len(granted) - granted.count(None)
        failures: list[Exception] = []
        async with trio.open_nursery() as nursery:
            for candidate, held in zip(candidates, granted, strict=True):
                if held is not None:
                    nursery.start_soon(self._load_replica, entry, load, candidate, held, failures)
        if failures:
            load.failure = failures[0]
            if not entry.ready:
                raise failures[0]

    async def _wait_for_other_preloads(self) -> None:
        for other in self._registry.entries.values():
            is_first = not other.traits.loads_last and not other.config.lazy
            if is_first and other.load is not None:
                await other.settled.wait()

    async def _make_candidates(self, entry: Entry, count: int) -> list[_Candidate]:
        candidates: list[_Candidate] = []
        try:
            for index in range(count):
                config = entry.config.replica(len(entry.replicas) + index)
                candidates.append(await self._make_candidate(entry, config))
        except BaseException:
            await self._jobs.close_all(candidate.runner for candidate in candidates)
            raise
        return candidates

    async def _make_candidate(self, entry: Entry, config: ModelConfig) -> _Candidate:
        """Make a runner in a thread: importing torch takes seconds, and files may be fetched."""
        self._registry.require_open(entry)

        def make() -> _Candidate:
            runner = self._make_runner(config, self._config)
            try:
                estimate = runner.estimate()
                more = first_adapters.measure(entry, runner)
                estimate = replace(estimate, num_bytes=estimate.num_bytes + more)
                return _Candidate(config, runner, estimate)
            except BaseException:
                runner.close()
                raise

        return await self._jobs.run_for_load(make, is_alone=_loads_alone(entry, config))

    async def _load_replica(
        self,
        entry: Entry,
        load: Load,
        candidate: _Candidate,
        reservation: Reservation,
        failures: list[Exception],
    ) -> None:
        """Load one replica. Afterwards it serves, or its runner is closed, its memory released and
        its error appended to ``failures``."""
        runner = candidate.runner

        def load_it() -> WorkerInfo:
            self._registry.require_open(entry)  # waiting for a thread may have taken long
            info: WorkerInfo = runner.load(entry.note_progress)
            return info

        replica: AnyReplica | None = None
        try:
            is_alone = _loads_alone(entry, candidate.config)
            info = await self._jobs.run_for_load(load_it, is_alone=is_alone)
            adapters = await first_adapters.load_all(entry, runner, self._jobs)
            replica = self._register(entry, load, candidate, info, reservation, adapters)
        except Exception as error:
            log_failed_load(entry.config.name, error)
            failures.append(error)
        finally:
            if replica is None:
                await self._jobs.close(runner)
                reservation.release()
                self._governor.notify_freed()
        if replica is not None:
            load.settled.set()
            entry.settled.set()
            self._governor.notify_idle(replica)  # idle from now on, until a request comes
            log.debug("Workers ready for %s", entry.config.name)
            self._registry.on_change()

    def _register(
        self,
        entry: Entry,
        load: Load,
        candidate: _Candidate,
        info: WorkerInfo,
        reservation: Reservation,
        adapters: dict[AdapterVersion, AdapterInfo],
    ) -> AnyReplica:
        """Have a replica that has loaded serve, with its adapters, and count the success."""
        own = sum(adapter.num_bytes for adapter in adapters.values())
        reservation.measured(info.memory_bytes + own)
        if entry.capability is None:
            entry.capability = info.capability
        replica = self._serving.start(entry, candidate.config, candidate.runner, info, reservation)
        replica.adapters.update(adapters)
        entry.restarts_of[replica.replica_id] += load.is_restart
        replica.restarts = entry.restarts_of[replica.replica_id]
        entry.cause = None
        entry.was_loaded = True
        if not load.settled.is_set():  # the first replica of this load
            entry.breaker.succeeded()
        return replica


def _loads_alone(entry: Entry, config: ModelConfig) -> bool:
    """Return whether a replica must load while no other replica of this sort loads. A load in a
    worker process of its own changes nothing for other models' threads."""
    return entry.traits.loads_alone and config.runner != "process"
