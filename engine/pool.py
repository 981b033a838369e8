"""The models: loading them once for all who wait, and leasing their replicas.

Rule 1: `ensure` is the only way to a load, and nothing is awaited between its look at the state
and its change (R101, R102). Rule 2: a load belongs to the pool: whoever asked first may leave
(R115). Rule 3: a model is READY when its runner has loaded and warmed up, not before (R112).

States of a model: UNLOADED → LOADING → READY, or FAILED with its cause; FAILED stays so until
the server is restarted (retry with backoff comes with the issue "The model pool").
"""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import trio

from engine.config import SchedulerConfig
from engine.core.events import Pause, Resume
from engine.core.scheduler import Scheduler
from engine.errors import (
    EngineBug,
    ModelNotFound,
    ShuttingDown,
    SpawnFailed,
    SpawnTimeout,
    TrioletError,
)
from engine.loop import Deliveries, EngineLoop
from engine.memory import default_limit
from engine.status import ModelState, ModelStatus, ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from engine.config import EngineConfig, ModelConfig
    from engine.core.events import InputEvent, OutputEvent
    from engine.core.plan import LoadProgress, ModelInfo, Runner, StepPlan, Tokenizer
    from engine.threads import Threads
    from engine.watchdog import Watchdog

    OnEvent = Callable[[InputEvent | OutputEvent | StepPlan], None]

log = logging.getLogger(__name__)

REPLICA_ID = 0  # one static replica per model; more come with the issue "Replicas"


class RunnerFactory(Protocol):
    """Makes the runner of a model, unloaded; the simulator's makes fakes."""

    def __call__(self, model: ModelConfig, config: EngineConfig) -> Runner: ...


@dataclass(eq=False)
class Replica:
    """One worker of a model with everything that serves it."""

    model: str
    info: ModelInfo
    tokenizer: Tokenizer
    loop: EngineLoop
    threads: int
    processed: int = 0
    failed: int = 0
    cancelled: int = 0

    def status(self, state: ModelState) -> ReplicaStatus:
        return ReplicaStatus(
            replica_id=REPLICA_ID,
            state=state,
            device=self.info.device,
            threads=self.threads,
            processed=self.processed,
            failed=self.failed,
            cancelled=self.cancelled,
            busy_s=self.loop.busy_s,
        )


@dataclass(eq=False)
class Entry:
    """A configured model and where its load stands. ``settled`` is set when LOADING ends."""

    config: ModelConfig
    state: ModelState = ModelState.UNLOADED
    settled: trio.Event = field(default_factory=trio.Event)
    replica: Replica | None = None
    cause: BaseException | None = None
    leases: int = 0
    last_used: float = 0.0
    progress: LoadProgress | None = None
    pause: Pause | None = None


class Pool:
    """Owns every model. ``on_change`` hears, on the Trio thread, of every change of a state."""

    def __init__(
        self,
        config: EngineConfig,
        make_runner: RunnerFactory,
        threads: Threads,
        on_change: Callable[[], None],
        on_event: OnEvent | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._on_event = on_event
        self._watchdog = watchdog
        self._config = config
        self._make_runner = make_runner
        self._threads = threads
        self._on_change = on_change
        self._load_limiter = trio.CapacityLimiter(max(1, len(config.models)))
        self._to_load, self._loads = trio.open_memory_channel[Entry](len(config.models))
        self._is_closing = False
        self.deliveries = Deliveries()
        self.memory_limit = config.memory_limit or default_limit()
        self.entries = {model.name: Entry(model) for model in config.models}
        self._names = {
            alias: model.name for model in config.models for alias in (model.name, *model.aliases)
        }

    # ---- the pool's own tasks

    async def run(self) -> None:
        """Load what is to be preloaded, then what is asked for, and run every loop."""
        async with trio.open_nursery() as nursery:
            for entry in self.entries.values():  # some may be loading: asked for before this runs
                is_wanted = not entry.config.lazy and not self._is_closing
                if is_wanted and entry.state is ModelState.UNLOADED:
                    self._begin_load(entry)
            async for entry in self._loads:
                nursery.start_soon(self._serve, entry)

    def close(self) -> None:
        """Refuse new leases and end every idle loop; `run` returns when all have ended."""
        if self._is_closing:
            return
        self._is_closing = True
        self._to_load.close()
        for entry in self.entries.values():
            if entry.replica is not None:
                entry.replica.loop.close()

    # ---- ensure: the choke point

    def ensure(self, name: str) -> Entry:
        """The entry of a model, its load begun if it was not. Never waits.

        Raises:
            ModelNotFound: no such model. ShuttingDown: the pool takes no more requests.
        """
        if self._is_closing:
            raise ShuttingDown("the server takes no new requests", retry_after_s=5.0)
        entry = self.entry(name)
        if entry.state is ModelState.UNLOADED:
            self._begin_load(entry)
        return entry

    def entry(self, name: str) -> Entry:
        """The entry of a model by name or alias; of the first configured one for no name.

        Raises:
            ModelNotFound: no such model.
        """
        if not name:
            return next(iter(self.entries.values()))
        try:
            return self.entries[self._names[name]]
        except KeyError:
            known = ", ".join(self.entries)
            raise ModelNotFound(f"no model is called {name!r}; there are: {known}") from None

    def _begin_load(self, entry: Entry) -> None:
        self._set_state(entry, ModelState.LOADING)
        self._to_load.send_nowait(entry)

    def notify(self) -> None:
        """Have `on_change` look at everything again."""
        self._on_change()

    def _set_state(self, entry: Entry, state: ModelState) -> None:
        entry.state = state
        self._on_change()

    def post(self, event: InputEvent, name: str = "") -> None:
        """Hand an event to a model's scheduler, or to every one's. A pause holds for models
        that are still to be loaded too.

        Raises:
            ModelNotFound: no such model.
        """
        entries = [self.entry(name)] if name else list(self.entries.values())
        for entry in entries:
            if isinstance(event, Pause | Resume):
                entry.pause = event if isinstance(event, Pause) else None
            if entry.replica is not None:
                entry.replica.loop.post(event)

    # ---- leases

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[Replica]:
        """Hold a model's replica for a request; a cold model is loaded, once for all.

        Raises:
            ModelNotFound, ShuttingDown: as `ensure`.
            SpawnFailed: the load failed; each waiter gets its own, chained to the cause.
            SpawnTimeout: the load took longer than the waiters' limit, and goes on.
        Cancellation: while waiting, the load goes on; inside the block, the lease ends.
        """
        entry = self.ensure(name)
        if entry.state is ModelState.LOADING:
            await self._wait_settled(entry)
        if entry.replica is None:
            raise self._failure(entry)
        entry.leases += 1
        entry.last_used = time.time()
        try:
            yield entry.replica
        finally:
            entry.leases -= 1

    async def _wait_settled(self, entry: Entry) -> None:
        limit = self._config.spawn_timeout_s
        with trio.move_on_after(limit) as scope:
            await entry.settled.wait()
        if scope.cancelled_caught:
            raise SpawnTimeout(
                f"{entry.config.name} is still loading after {limit:g} s; its load goes on",
                retry_after_s=5.0,
            )

    def _failure(self, entry: Entry) -> TrioletError:
        cause = entry.cause
        if isinstance(cause, EngineBug):
            return EngineBug(cause.log_detail)
        text = str(cause).removeprefix(SpawnFailed.prefix)
        if not isinstance(cause, TrioletError):
            text = "its loading failed; the reason was logged"
        failure = SpawnFailed(f"{entry.config.name}: {text}")
        failure.__cause__ = cause
        return failure

    # ---- loading and serving one model

    async def _serve(self, entry: Entry) -> None:
        """Load a model and run its loop; whatever goes wrong is the entry's, not the pool's."""
        try:
            # in the thread: making one may import torch, which takes seconds
            runner = await self._threads.run(
                lambda: self._make_runner(entry.config, self._config), self._load_limiter
            )
            try:
                await self._load(entry, runner)
                await self._run_loop(entry)
            finally:
                runner.close()
        except Exception as error:
            if not isinstance(error, SpawnFailed):
                log.exception("model %s failed", entry.config.name)
            entry.cause = error
            entry.replica = None
            self._set_state(entry, ModelState.FAILED)
        finally:
            entry.settled.set()

    async def _load(self, entry: Entry, runner: Runner) -> None:
        def load() -> ModelInfo:
            try:
                return runner.load(lambda progress: setattr(entry, "progress", progress))
            except Exception:
                raise
            except BaseException as error:  # SystemExit of a library (R140)
                raise SpawnFailed(f"its loading raised {type(error).__name__}") from error

        info = await self._threads.run(load, self._load_limiter)
        scheduler = Scheduler(self._scheduler_config(info, entry.config.name))
        name = entry.config.name
        loop = EngineLoop(
            name,
            scheduler,
            runner,
            self._threads,
            check_level=self._config.check_level,
            on_event=self._on_event,
            watch=self._watchdog.watch(name, self._on_change) if self._watchdog else None,
            deliveries=self.deliveries,
        )
        entry.replica = Replica(
            entry.config.name, info, runner.tokenizer, loop, entry.config.threads
        )
        if entry.pause is not None:
            loop.post(entry.pause)
        if self._is_closing:
            loop.close()
        log.info("model %s is ready: %s on %s", entry.config.name, info.architecture, info.device)
        self._set_state(entry, ModelState.READY)
        entry.settled.set()

    async def _run_loop(self, entry: Entry) -> None:
        assert entry.replica is not None
        await entry.replica.loop.run()

    def _scheduler_config(self, info: ModelInfo, name: str) -> SchedulerConfig:
        config = self._config
        return SchedulerConfig(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            stall_timeout_s=config.stall_timeout_s,
            prefix_cache=config.prefix_cache,
            prepared_plans=config.prepared_plans,
            cache_namespace=name,
        )

    # ---- views

    def status(self, entry: Entry) -> ModelStatus:
        """What ListModels says of a model."""
        info = entry.replica.info if entry.replica is not None else None
        return ModelStatus(
            name=entry.config.name,
            state=entry.state,
            aliases=entry.config.aliases,
            error="" if entry.cause is None else str(self._failure(entry)),
            memory_bytes=info.memory_bytes if info else 0,
            replicas=(entry.replica.status(entry.state),) if entry.replica else (),
            leases=entry.leases,
            last_used=entry.last_used,
            dtype=info.dtype if info else "",
            device=info.device if info else "",
            architecture=info.architecture if info else "",
            max_model_len=info.max_model_len if info else 0,
            is_demo=info.is_demo if info else False,
            is_lazy=entry.config.lazy,
            is_hung=entry.replica.loop.is_hung if entry.replica else False,
        )
