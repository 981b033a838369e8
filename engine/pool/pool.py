"""The pool of models: its parts put together, the tasks that it owns, and the operator's commands.

| part | what it alone does |
|---|---|
| `Registry` | which models are configured, and whether they may be used |
| `Loads` | when a model loads: `Loads.ensure` |
| `ReplicaLoader` | how one load's replicas come to serve |
| `Serving` | loaded replicas: their loops and their ends |
| `Revival` | when replicas that died are restarted |
| `Leases` | which request holds which replica |
| `Adapters` | which adapters are loaded, and which request holds which |
| `Governor` | which load gets memory, and which replica leaves to make room |

Everything here belongs to the Trio thread. A worker thread's results are read here after the
thread's job has ended, which needs no other memory ordering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from engine.core.common.events import Pause, Resume
from engine.errors import ShuttingDown
from engine.limits.memory import default_limit
from engine.pool.adapters import Adapters
from engine.pool.governor import Governor
from engine.pool.leases import Leases
from engine.pool.load_watch import LoadWatch
from engine.pool.loader import ReplicaLoader
from engine.pool.loads import Loads
from engine.pool.memory import MemoryLedger
from engine.pool.registry import RETRY_AFTER_S, Registry
from engine.pool.revival import Revival
from engine.pool.runner_jobs import RunnerJobs
from engine.pool.serving import Serving
from engine.replica.replica import ReplicaMaker
from engine.status import Capability, ModelState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.config import EngineConfig
    from engine.core.common.events import InputEvent
    from engine.errors import TrioletError
    from engine.pool.entry import Entry
    from engine.pool.loader import RunnerFactory
    from engine.pool.registry import FindCapability
    from engine.pool.serving import Task
    from engine.replica.loop import OnEvent, WriteBatch
    from engine.replica.replica import ReplicaKind
    from engine.replica.threads import Threads
    from engine.replica.watchdog import Watchdog


class Pool:
    """Owns every model. ``on_change`` is called on the Trio thread whenever a model's state may
    have changed, ``on_event`` with everything that goes into and out of a scheduler. ``kinds`` and
    ``batch`` go to `ReplicaMaker`."""

    def __init__(
        self,
        config: EngineConfig,
        make_runner: RunnerFactory,
        threads: Threads,
        on_change: Callable[[], None],
        on_event: OnEvent | None = None,
        watchdog: Watchdog | None = None,
        find_capability: FindCapability | None = None,
        *,
        kinds: Mapping[Capability, ReplicaKind],
        batch: WriteBatch,
    ) -> None:
        self._config = config
        self._early_tasks: list[Task] = []  # tasks that `run` starts first
        self._nursery: trio.Nursery | None = None
        self._closed = trio.Event()
        self.registry = Registry(config, find_capability, on_change)
        self.memory = MemoryLedger(config.memory_limit or default_limit())
        self._governor = Governor(self.memory, self.registry)
        maker = ReplicaMaker(
            config, threads, kinds, batch, on_event, watchdog, self._governor.notify_idle
        )
        jobs = RunnerJobs(threads)
        serving = Serving(
            config.step_timeout_s,
            self.registry,
            maker,
            self._governor,
            jobs,
            self._start_task,
            self._replica_died,
        )
        loader = ReplicaLoader(config, make_runner, self.registry, self._governor, serving, jobs)
        self._revival = Revival(self.registry, config.max_worker_deaths)
        self._loads = Loads(self.registry, loader, self._revival, self._start_task)
        self.leases = Leases(config, self.registry, self._loads)
        self.adapters = Adapters(
            self.registry,
            self.leases,
            self._governor,
            jobs,
            self._start_task,
            config.drain_timeout_s,
        )

    # ---- the pool's own tasks

    async def run(self) -> None:
        """Load the models that are not lazy, and run every load and every replica until `close`.

        Cancellation: ends every task; runners are closed all the same.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                # a request may have begun a load before the pool ran
                for entry in self.registry.entries.values():
                    is_wanted = not entry.config.lazy and not self.registry.is_closed
                    if is_wanted and entry.state is ModelState.UNLOADED:
                        self._loads.ensure(entry.config.name, is_preload=True)
                if self._config.idle_ttl_s is not None:
                    nursery.start_soon(self._governor.evict_idle, self._config.idle_ttl_s)
                for task in self._early_tasks:
                    nursery.start_soon(task)
                await self._closed.wait()
            finally:
                self.registry.close()  # no load may start while the nursery closes

    def close(self) -> None:
        """Refuse new leases and end every replica once it is idle; then `run` returns.
        Idempotent."""
        if self.registry.is_closed:
            return
        self.registry.close()
        self._closed.set()
        self._governor.close()
        for entry in self.registry.entries.values():
            for replica in entry.replicas:
                replica.loop.close()
            if entry.load is not None:
                entry.load.give_up()

    def _start_task(self, task: Task) -> None:
        """Start a task in the pool's nursery. Even if the nursery is cancelled before the task
        begins, the task begins, and can release the resources that it was given."""
        if self._nursery is None:
            self._early_tasks.append(task)
        else:
            self._nursery.start_soon(task)

    def _replica_died(self, entry: Entry, replica_id: int, error: TrioletError) -> None:
        self._revival.record_death(entry, replica_id, error)
        self._loads.revive(entry)

    # ---- the operator's commands

    def post(self, event: InputEvent[Any, Any], name: str = "") -> None:
        """Send an event to the schedulers of one model or, without a name, of all. A pause holds
        for replicas that load later, too.

        Raises:
            ModelNotFound: no model has this name.
        """
        entries = [self.registry.find(name)] if name else list(self.registry.entries.values())
        for entry in entries:
            if isinstance(event, Pause | Resume):
                entry.pause = event if isinstance(event, Pause) else None
            for replica in entry.replicas:
                replica.loop.post(event)

    def watch_load(self, name: str, replicas: int | None = None) -> LoadWatch:
        """Have a model loaded with ``replicas`` replicas, or as many as are configured, and return
        a watch over the load. Only as many load as find memory; surplus replicas stay. Never waits.

        Raises:
            ModelNotFound, ShuttingDown, NoWorkers: the model cannot be loaded (`Loads.ensure`).
        """
        entry = self.registry.find(name)
        is_own = entry.load is None
        count = replicas or entry.config.num_replicas
        entry = self._loads.ensure(name, replicas=count)
        return LoadWatch(self._loads, entry, count, is_own=is_own)

    async def unload(self, name: str, drain_s: float) -> None:
        """Unload a model and wait until its memory is free. A load under way ends first. Requests
        that run have ``drain_s`` seconds to finish; then they are cancelled.

        Raises:
            ModelNotFound: no model has this name.
            ShuttingDown: the server is ending, which unloads everything.
        Cancellation: ends the wait; the unload goes on.
        """
        entry = self.registry.find(name)
        if self.registry.is_closed:
            raise ShuttingDown(
                "the server is ending and unloads every model", retry_after_s=RETRY_AFTER_S
            )
        done = trio.Event()
        entry.num_unloads += 1
        self._start_task(lambda: self._unload(entry, drain_s, done))
        self.registry.on_change()
        await done.wait()

    async def _unload(self, entry: Entry, drain_s: float, done: trio.Event) -> None:
        try:
            entry.missing.clear()
            if (load := entry.load) is not None:
                load.give_up()
                await load.done.wait()
            for replica in list(entry.replicas):
                replica.retire()
            with trio.move_on_after(drain_s):
                await self._wait_gone(entry)
            for replica in list(entry.replicas):
                replica.cut()
            await self._wait_gone(entry)
            entry.cause = None
            entry.breaker.reset()
            entry.deaths.clear()
            entry.restarts_of.clear()
        finally:
            entry.num_unloads -= 1
            done.set()
            self.registry.on_change()

    async def _wait_gone(self, entry: Entry) -> None:
        while entry.replicas:
            await self._governor.wait_freed()
