"""Loaded replicas while they serve: their loops, the watch over worker processes, and the end.

Rule: a replica's runner is closed and its memory released once, by the task that ran its loop, when
the loop has ended.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import trio

from engine.errors import EngineBug, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engine.config import ModelConfig
    from engine.errors import TrioletError
    from engine.pool.entry import Entry
    from engine.pool.governor import Governor
    from engine.pool.memory import Reservation
    from engine.pool.registry import Registry
    from engine.pool.runner_jobs import RunnerJobs
    from engine.replica.replica import AnyReplica, AnyRunner, ProcessWorker, ReplicaMaker
    from engine.worker.interface import WorkerInfo

    Task: TypeAlias = Callable[[], Awaitable[None]]
    StartTask: TypeAlias = Callable[[Task], None]
    OnReplicaDeath: TypeAlias = Callable[[Entry, int, TrioletError], None]

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Serving:
    """Runs each loaded replica in a task of the pool's.

    ``on_death`` is called with the entry, the replica's id and the error when a replica dies that
    was not retired, before any of its requests ends.
    """

    _step_timeout_s: float
    _registry: Registry
    _maker: ReplicaMaker
    _governor: Governor
    _jobs: RunnerJobs
    _start_task: StartTask
    _on_death: OnReplicaDeath

    def start(
        self,
        entry: Entry,
        config: ModelConfig,
        runner: AnyRunner,
        info: WorkerInfo,
        reservation: Reservation,
    ) -> AnyReplica:
        """Make a replica of a runner that has loaded, add it to its model and run it. From then on
        requests are routed to the replica, whose task closes the runner and releases the
        reservation at the end. Never waits."""
        replica: AnyReplica = self._maker.make(
            config,
            entry.free_id(),
            runner,
            info,
            reservation,
            on_death=lambda error: self._note_death(entry, replica, error),
            on_hung=lambda: self._look_at_hung(replica),
        )
        if entry.pause is not None:
            replica.loop.post(entry.pause)
        if self._registry.is_closed:
            replica.loop.close()
        replica.loop.core.shares.join(entry.shares)
        entry.replicas.append(replica)
        entry.replicas.sort(key=lambda replica: replica.replica_id)
        self._start_task(lambda: self._run(entry, replica, runner))
        log.info("model %s is ready: %s on %s", replica.model, info.architecture, info.device)
        return replica

    async def _run(self, entry: Entry, replica: AnyReplica, runner: AnyRunner) -> None:
        """Run a replica's loop to its end, then give back what the replica held."""
        try:
            async with trio.open_nursery() as nursery:
                if replica.process is not None:
                    nursery.start_soon(self._watch_process, replica, replica.process)
                try:
                    await replica.loop.run()
                except WorkerLost as error:
                    log.error("a worker of %s has died: %s", entry.config.name, error)
                except EngineBug as error:
                    log.error("a worker of %s has died", entry.config.name, exc_info=error)
                else:
                    _log_end(replica)
                nursery.cancel_scope.cancel(reason="the replica's loop has ended")
        finally:
            replica.loop.core.shares.part()
            await self._jobs.close(runner)
            replica.reservation.release()
            entry.replicas.remove(replica)
            self._governor.notify_freed()
            self._registry.on_change()

    async def _watch_process(self, replica: AnyReplica, process: ProcessWorker) -> None:
        """End the loop when the worker process dies between two steps. In a step, that fails."""
        await trio.lowlevel.wait_readable(process.sentinel)
        error = await self._jobs.cause_of_death(process)
        if isinstance(error, WorkerLost):
            replica.loop.lose(error)

    def _note_death(self, entry: Entry, replica: AnyReplica, error: TrioletError) -> None:
        """Take a replica whose loop ends by an error out of the routing before any request ends, so
        that a request which comes now waits for the replica's restart."""
        if replica.die():
            self._on_death(entry, replica.replica_id, error)
        self._registry.on_change()

    def _look_at_hung(self, replica: AnyReplica) -> None:
        """Kill a worker whose step hangs. Only a process can be killed."""
        if replica.loop.is_hung and replica.process is not None:
            replica.process.kill(f"took more than {self._step_timeout_s:g} s for a step")
        self._registry.on_change()


def _log_end(replica: AnyReplica) -> None:
    """Log the counts of a replica whose loop has ended without an error."""
    log.info(
        "replica %d of %s has ended: it finished %d requests, %d failed and %d were cancelled; "
        "its steps took %.1f s",
        replica.replica_id,
        replica.model,
        replica.processed,
        replica.failed,
        replica.cancelled,
        replica.loop.busy_s,
    )
