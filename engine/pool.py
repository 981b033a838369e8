"""The models: loading them once for all who wait, leasing their replicas, making room.

Rule 1: `ensure` is the only way to a load, and nothing is awaited between its look at the state
and its change (R101, R102). Rule 2: a load belongs to the pool: whoever asked first may leave
(R115). Rule 3: what a load will need is reserved before it begins, and given back by whoever
ends what was reserved for, once (R119); the room for it is the governor's to make.

Everything here belongs to the Trio thread; what a worker's thread made is seen there after its job
has ended, which is all the memory ordering that is needed (R138).
"""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from engine.core.encode_types import EncoderInfo, EncoderKind
from engine.core.events import Pause, Resume
from engine.core.plan import LoadProgress
from engine.core.restarts import Restarts
from engine.core.types import Request
from engine.entry import Entry, Load
from engine.errors import (
    EngineBug,
    InvalidRequest,
    MemoryExhausted,
    ModelNotFound,
    NoWorkers,
    ShuttingDown,
    SpawnFailed,
    SpawnTimeout,
    TrioletError,
    WorkerLost,
)
from engine.governor import Governor
from engine.load_watch import LoadWatch
from engine.loop import Deliveries
from engine.memory import MemoryBooks, default_limit
from engine.replica import AnyRunner, Mortal, Replica, ReplicaMaker
from engine.status import Capability, ModelState, ModelStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from engine.config import EngineConfig, ModelConfig
    from engine.core.encode_types import EncodeRequest
    from engine.core.events import InputEvent
    from engine.core.plan import MemoryEstimate, ModelInfo
    from engine.memory import Reservation
    from engine.replica import OnEvent
    from engine.threads import Threads
    from engine.watchdog import Watchdog

    FindCapability = Callable[[ModelConfig], Capability | None]
    Task = Callable[[], Awaitable[None]]

T = TypeVar("T")

log = logging.getLogger(__name__)

CAPABILITY_OF_KIND = {
    EncoderKind.EMBEDDING: Capability.TEXT_EMBEDDING,
    EncoderKind.RERANK: Capability.RERANK,
}
# what a model of a capability does, for the sentence that tells it from another
DOES = {
    Capability.TEXT_TO_TEXT: "generates text",
    Capability.TEXT_EMBEDDING: "makes embeddings",
    Capability.RERANK: "reranks",
    Capability.IMAGE_EMBEDDING: "embeds images",
    Capability.VISION: "reads images",
    Capability.TEXT_TO_IMAGE: "makes images",
}
ROOM_RETRY_S = 10.0  # guess: until a spare replica that died looks for room again
LOADS_AT_ONCE = 16  # guess: threads that loads may hold; a load's own work is mostly reading


class RunnerFactory(Protocol):
    """Makes the runner of a model's worker, unloaded; the simulator's makes fakes."""

    def __call__(self, model: ModelConfig, config: EngineConfig) -> AnyRunner: ...


@dataclass(frozen=True, slots=True)
class _Spawn:
    """A replica to be: its runner, not loaded yet, and what that will need."""

    worker: ModelConfig
    runner: AnyRunner
    estimate: MemoryEstimate


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
        find_capability: FindCapability = lambda model: None,
    ) -> None:
        self._config = config
        self._make_runner = make_runner
        self._threads = threads
        self._on_change = on_change
        self._load_limiter = trio.CapacityLimiter(LOADS_AT_ONCE)
        self._encoder_limiter = trio.CapacityLimiter(1)  # transformers' own loading is not for two
        self._close_limiter = trio.CapacityLimiter(LOADS_AT_ONCE)
        self._early: list[Task] = []  # what is to be started with the nursery
        self._nursery: trio.Nursery | None = None
        self._is_closing = False
        self._closed = trio.Event()
        self.deliveries = Deliveries()
        self.entries = {
            model.name: Entry(model, model.capability or find_capability(model))
            for model in config.models
        }
        self.memory = MemoryBooks(config.memory_limit or default_limit())
        self.governor = Governor(self.memory, tuple(self.entries.values()), on_change)
        self._maker = ReplicaMaker(
            config, threads, self.deliveries, on_event, watchdog, self.governor.tell_idle
        )
        self._names = {
            alias: model.name for model in config.models for alias in (model.name, *model.aliases)
        }

    # ---- the pool's own tasks

    async def run(self) -> None:
        """Load what is to be preloaded, then what is asked for, and run every loop."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                # some may be loading: asked for before this runs
                for entry in self.entries.values():
                    is_wanted = not entry.config.lazy and not self._is_closing
                    if is_wanted and entry.state is ModelState.UNLOADED:
                        self.ensure(entry.config.name, is_preload=True)
                if self._config.idle_ttl_s is not None:
                    nursery.start_soon(self.governor.evict_idle, self._config.idle_ttl_s)
                for task in self._early:
                    nursery.start_soon(task)
                await self._closed.wait()
        finally:
            self._is_closing = True

    def close(self) -> None:
        """Refuse new leases and end every idle loop; `run` returns when all have ended."""
        if self._is_closing:
            return
        self._is_closing = True
        self._closed.set()
        self.governor.close()
        for entry in self.entries.values():
            for replica in entry.replicas:
                replica.loop.close()
            if entry.load is not None:
                entry.load.give_up()

    # ---- ensure: the choke point

    def ensure(
        self,
        name: str,
        capability: Capability | None = None,
        *,
        replicas: int | None = None,
        is_preload: bool = False,
    ) -> Entry:
        """The entry of a model; if nothing serves it, its load has begun. Never waits.

        ``replicas``: the operator wants so many, and now, however often it has failed.
        ``is_preload``: the start's own load, which takes no other model's room before somebody else
        asks for it.

        Raises:
            ModelNotFound, InvalidRequest: as `entry`. ShuttingDown: the pool takes no more
                requests. NoWorkers: the operator is unloading it. SpawnFailed: its last load
                failed, and the next try comes later.
        """
        self._require_open()
        entry = self.entry(name, capability)
        self._require_open(entry)
        if entry.load is not None:
            entry.load.may_evict |= not (is_preload or entry.ready)
            if replicas is not None:
                entry.deaths.clear()
                entry.load.hurry.set()
            return entry
        missing = (replicas or 1) - len(entry.ready)
        if missing <= 0:
            return entry
        if replicas is not None:
            entry.breaker.reset()
            entry.deaths.clear()
        wait_s = entry.breaker.wait_s(trio.current_time())
        if wait_s:
            raise self.failure(entry, entry.cause, f"it is tried again in {wait_s:.0f} s or later")
        wanted = entry.config.num_replicas if replicas is None and not entry.ready else missing
        self._begin_load(entry, Load(wanted, is_preload, may_evict=not (is_preload or entry.ready)))
        return entry

    def _revive(self, entry: Entry) -> None:
        """Begin the load of a replica that died, which comes after its backoff. The one way to a
        load beside `ensure`: what comes back was loaded by that. One is as good as another: the
        first to come back is whose backoff ends first."""
        if not entry.missing or entry.num_unloads or self._is_closing:
            return
        entry.missing.sort()
        load = entry.load
        if load is None:
            load = Load(1, is_restart=True, may_evict=not entry.ready)
            load.backoff.deadline = entry.missing.pop(0)
            self._begin_load(entry, load)
        elif (
            load.is_restart and not load.hurry.is_set() and entry.missing[0] < load.backoff.deadline
        ):
            first, entry.missing[0] = entry.missing[0], load.backoff.deadline
            load.backoff.deadline = first

    def entry(self, name: str, capability: Capability | None = None) -> Entry:
        """The entry of a model by name or alias; for no name, the first configured one that has
        the capability (None: any).

        Raises:
            ModelNotFound: no such model, or none with the capability.
            InvalidRequest: the model named has another.
        """
        if not name:
            for entry in self.entries.values():
                if capability in (None, entry.capability or Capability.TEXT_TO_TEXT):
                    return entry
            assert capability is not None
            raise ModelNotFound(f"no model that {DOES[capability]} is configured")
        try:
            entry = self.entries[self._names[name]]
        except KeyError:
            known = ", ".join(self.entries)
            raise ModelNotFound(f"no model is called {name!r}; there are: {known}") from None
        self._require(entry, capability)
        return entry

    @staticmethod
    def _require(entry: Entry, capability: Capability | None) -> None:
        if capability is not None and entry.capability not in (None, capability):
            raise InvalidRequest.of(
                "model",
                f"{entry.config.name} {DOES[entry.capability]}; what is asked for is a model that "
                f"{DOES[capability]}",
            )

    def _require_open(self, entry: Entry | None = None) -> None:
        """Raise ShuttingDown or NoWorkers if nothing is to be loaded any more. For any thread."""
        if self._is_closing:
            raise ShuttingDown("the server takes no new requests", retry_after_s=5.0)
        if entry is not None and entry.num_unloads:
            raise NoWorkers(f"{entry.config.name} is being unloaded", retry_after_s=5.0)

    def _begin_load(self, entry: Entry, load: Load) -> None:
        log.debug("Acquired spawn lock for %s", entry.config.name)  # the state is the lock (R137)
        entry.load = load
        entry.progress = LoadProgress("reserve")
        self._start(lambda: self._run_load(entry, load))
        self._on_change()

    def _start(self, task: Task) -> None:
        """Run a task of the pool's own. One that is cancelled before it began still begins, and
        gives back what it was handed."""
        if self._nursery is None:
            self._early.append(task)
        else:
            self._nursery.start_soon(task)

    def notify(self) -> None:
        """Have `on_change` look at everything again."""
        self._on_change()

    def post(self, event: InputEvent, name: str = "") -> None:
        """Hand an event to a model's schedulers, or to every one's. A pause holds for replicas
        that are still to be loaded too.

        Raises:
            ModelNotFound: no such model.
        """
        entries = [self.entry(name)] if name else list(self.entries.values())
        for entry in entries:
            if isinstance(event, Pause | Resume):
                entry.pause = event if isinstance(event, Pause) else None
            for replica in entry.replicas:
                replica.loop.post(event)

    # ---- leases

    @asynccontextmanager
    async def lease(
        self,
        name: str,
        capability: Capability | None = None,
        cut: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Replica]:
        """Hold a model's replica for a request; a cold model is loaded, once for all. ``cut`` is
        called if the holder must leave: its model is being unloaded.

        Raises:
            ModelNotFound, InvalidRequest, ShuttingDown, NoWorkers: as `ensure`.
            SpawnFailed, MemoryExhausted: the load failed, or found no room; each waiter gets its
                own, chained to the cause.
            SpawnTimeout: the load took longer than the waiters' limit, and goes on.
        Cancellation: while waiting, the load goes on; inside the block, the lease ends.
        """
        replica = await self._acquire(name, capability)
        with replica.leased(cut):
            yield replica

    @contextmanager
    def routed(
        self, leased: Replica, request: Request | EncodeRequest, cut: Callable[[], None]
    ) -> Iterator[Replica]:
        """The replica that a request is to run on, of which the tokens are known now: the one it
        has leased, or by its prefix another, which is leased beside it."""
        entry, better = self.entries[leased.model], None
        if self._config.routing == "prefix" and isinstance(request, Request):
            better = entry.pick_by_prefix(request)
        if better is None or better is leased:
            yield leased
            return
        with better.leased(cut):
            yield better

    async def _acquire(self, name: str, capability: Capability | None) -> Replica:
        """A ready replica: without a wait if there is one (R134). Its lease is to be taken
        without one, too."""
        deadline = trio.current_time() + self._config.spawn_timeout_s
        while True:
            entry = self.ensure(name, capability)
            replica = entry.pick(self._config.routing)
            if replica is not None:
                self._require(entry, capability)  # only its files may have told
                entry.last_used = time.time()
                return replica
            assert entry.load is not None
            await self._wait_settled(entry, entry.load, deadline)

    async def _wait_settled(self, entry: Entry, load: Load, deadline: float) -> None:
        log.debug("Spawn lock busy for %s", entry.config.name)
        entry.num_waiting += 1
        try:
            with trio.move_on_at(deadline) as scope:
                await load.settled.wait()
        finally:
            entry.num_waiting -= 1
        if scope.cancelled_caught:
            raise SpawnTimeout(
                f"{entry.config.name} is still loading after {self._config.spawn_timeout_s:g} s; "
                "its load goes on",
                retry_after_s=5.0,
            )
        if load.cause is not None:
            raise self.failure(entry, load.cause)

    def failure(self, entry: Entry, cause: BaseException | None, more: str = "") -> TrioletError:
        """What one request is told of a load that failed: an error of its own (R110)."""
        if isinstance(cause, EngineBug):
            return EngineBug(cause.log_detail)
        kind: type[TrioletError] = SpawnFailed
        if isinstance(cause, MemoryExhausted | ShuttingDown | NoWorkers):
            kind = type(cause)
        text = str(cause).removeprefix(kind.prefix)
        if not isinstance(cause, TrioletError):
            text = "its loading failed; the reason was logged"
        if kind is SpawnFailed:
            text = f"{entry.config.name}: {text}" + (f"; {more}" if more else "")
        failure = kind(text, retry_after_s=getattr(cause, "retry_after_s", None))
        failure.__cause__ = cause
        return failure

    # ---- loading

    async def _run_load(self, entry: Entry, load: Load) -> None:
        """One load, whatever comes of it: what goes wrong is the entry's, not the pool's."""
        failure: Exception | None = None
        try:
            with load.backoff:
                await load.hurry.wait()
            self._require_open(entry)
            await self._spawn_all(entry, load)
        except Exception as error:
            failure = error
        finally:
            entry.load = None
            if failure is not None:
                self._note_failure(entry, failure, load)
                load.failure = failure
            entry.settled.set()
            load.settled.set()
            load.done.set()
            log.debug("Released spawn lock for %s", entry.config.name)
            self._revive(entry)
            self._on_change()

    def _note_failure(self, entry: Entry, error: Exception, load: Load) -> None:
        """A load failed. One that found no room may be tried again at once; one that was to bring
        dead replicas back is another death of theirs."""
        if not isinstance(error, TrioletError):
            log.error("model %s failed", entry.config.name, exc_info=error)
        elif load.failure is None and not isinstance(error, ShuttingDown | NoWorkers):
            _tell_failure(entry, error)  # no worker's, whose load told of it
        if isinstance(error, ShuttingDown | NoWorkers):
            load.cause = error
        elif load.is_restart:
            self._note_death(entry, error, entry.free_id())
            load.cause = entry.cause
        else:
            load.cause = error
            if not entry.ready:
                entry.cause = error
                if not isinstance(error, MemoryExhausted):
                    entry.breaker.failed(trio.current_time())

    def _note_death(self, entry: Entry, error: Exception, replica_id: int) -> None:
        """A replica died: it comes back after a backoff, unless that has been too often."""
        entry.num_deaths += 1
        if self._is_closing or entry.num_unloads:
            return
        now = trio.current_time()
        limit = self._config.max_worker_deaths
        delay_s = entry.deaths.setdefault(replica_id, Restarts(limit)).died(now)
        if delay_s is not None:
            log.warning("%s comes back in %g s", entry.config.name, delay_s)
            entry.missing.append(now + delay_s)
            return
        log.error("replica %d of %s died too often", replica_id, entry.config.name)
        if not entry.ready:
            entry.cause = error
            entry.breaker.failed(now)

    async def _spawn_all(self, entry: Entry, load: Load) -> None:
        if entry.is_encoder and load.is_preload:
            await self._wait_for_texts()
        spawns = await self._prepare_all(entry, load)
        granted: list[Reservation | None] = [None] * len(spawns)
        try:
            needs = [one.estimate for one in spawns]
            with load.room:
                granted = await self.governor.reserve(entry, load, needs)
        finally:
            await self._close_all(
                [one for one, held in zip(spawns, granted, strict=True) if held is None]
            )
        if load.room.cancelled_caught:
            self._require_open(entry)
        load.granted = len(granted) - granted.count(None)
        if load.is_restart and not load.granted:  # what serves keeps its room: later, then
            entry.missing.append(trio.current_time() + ROOM_RETRY_S)
        failures: list[Exception] = []
        async with trio.open_nursery() as nursery:
            for spawn, held in zip(spawns, granted, strict=True):
                if held is not None:
                    nursery.start_soon(self._load_replica, entry, load, spawn, held, failures)
        if failures:
            load.failure = failures[0]
            if not entry.ready:
                raise failures[0]

    async def _wait_for_texts(self) -> None:
        """Encoders load behind the preloaded text models: importing what they need takes seconds
        (D14)."""
        for other in self.entries.values():
            is_first = not other.is_encoder and not other.config.lazy
            if is_first and other.load is not None:
                await other.settled.wait()

    async def _prepare_all(self, entry: Entry, load: Load) -> list[_Spawn]:
        """A runner for each wanted replica, and what it will need."""
        spawns: list[_Spawn] = []
        try:
            for index in range(load.wanted):
                worker = entry.config.replica(len(entry.replicas) + index)
                spawns.append(await self._prepare(entry, worker))
        except BaseException:
            await self._close_all(spawns)
            raise
        return spawns

    async def _prepare(self, entry: Entry, worker: ModelConfig) -> _Spawn:
        """In a thread: making a runner may import torch, which takes seconds, and fetch files."""
        self._require_open(entry)

        def prepare() -> _Spawn:
            runner = self._make_runner(worker, self._config)
            try:
                return _Spawn(worker, runner, runner.estimate())
            except BaseException:
                runner.close()
                raise

        return await self._threads.run(_as_failure(prepare), self._limiter_of(entry))

    def _limiter_of(self, entry: Entry) -> trio.CapacityLimiter:
        return self._encoder_limiter if entry.is_encoder else self._load_limiter

    async def _load_replica(
        self,
        entry: Entry,
        load: Load,
        spawn: _Spawn,
        reservation: Reservation,
        failures: list[Exception],
    ) -> None:
        """Load one replica; it serves from then on, or has given everything back."""
        runner = spawn.runner

        def load_it() -> ModelInfo | EncoderInfo:
            self._require_open(entry)  # it may have waited for the thread
            return runner.load(entry.note_progress)

        replica: Replica | None = None
        try:
            info = await self._threads.run(_as_failure(load_it), self._limiter_of(entry))
            replica = self._register(entry, load, spawn, info, reservation)
        except Exception as error:
            _tell_failure(entry, error)
            failures.append(error)
        finally:
            if replica is None:
                await self._close_runner(runner)
                reservation.release()
                self.governor.tell_freed()
        if replica is not None:
            load.settled.set()
            entry.settled.set()
            self.governor.tell_idle(replica)  # if nobody comes, it goes after its time
            log.debug("Workers ready for %s", entry.config.name)
            self._on_change()

    def _register(
        self,
        entry: Entry,
        load: Load,
        spawn: _Spawn,
        info: ModelInfo | EncoderInfo,
        reservation: Reservation,
    ) -> Replica:
        """Make a replica of a runner that has loaded, and route requests to it."""
        reservation.measured(info.memory_bytes)
        if entry.capability is None:
            entry.capability = (
                CAPABILITY_OF_KIND[info.kind]
                if isinstance(info, EncoderInfo)
                else Capability.TEXT_TO_TEXT
            )
        replica = self._maker.make(
            spawn.worker,
            entry.free_id(),
            spawn.runner,
            info,
            reservation,
            on_death=lambda error: self._note_end(entry, replica, error),
            on_hung=lambda: self._look_at_hung(replica, spawn.runner),
        )
        entry.restarts_of[replica.replica_id] += load.is_restart
        replica.restarts = entry.restarts_of[replica.replica_id]
        if entry.pause is not None:
            replica.loop.post(entry.pause)
        if self._is_closing:
            replica.loop.close()
        entry.replicas.append(replica)
        entry.cause = None
        entry.was_loaded = True
        if not load.settled.is_set():  # its first
            entry.breaker.succeeded()
        self._start(lambda: self._serve(entry, replica, spawn.runner))
        log.info("model %s is ready: %s on %s", replica.model, info.architecture, info.device)
        return replica

    async def _serve(self, entry: Entry, replica: Replica, runner: AnyRunner) -> None:
        """Run a replica's loop to its end, and give back what it had."""
        try:
            async with trio.open_nursery() as nursery:
                if isinstance(runner, Mortal):
                    nursery.start_soon(self._watch_worker, replica, runner)
                try:
                    await replica.loop.run()
                except WorkerLost as error:
                    log.error("a worker of %s has died: %s", entry.config.name, error)
                except EngineBug as error:
                    log.error("a worker of %s has died", entry.config.name, exc_info=error)
                nursery.cancel_scope.cancel(reason="its loop has ended")
        finally:
            await self._close_runner(runner)
            replica.reservation.release()
            entry.replicas.remove(replica)
            self.governor.tell_freed()
            self._on_change()

    def _note_end(self, entry: Entry, replica: Replica, error: TrioletError) -> None:
        """A replica's loop ends by an error: before anybody hears of it, it takes no requests, and
        its return has begun, which whoever comes now waits for."""
        if replica.die():
            self._note_death(entry, error, replica.replica_id)
            self._revive(entry)
        self._on_change()

    async def _watch_worker(self, replica: Replica, runner: Mortal) -> None:
        """Hear of a worker's death between two steps; in a step, the step does."""
        await trio.lowlevel.wait_readable(runner.sentinel)
        error = await self._threads.run(runner.lost, self._close_limiter)
        if isinstance(error, WorkerLost):
            replica.loop.lose(error)

    def _look_at_hung(self, replica: Replica, runner: AnyRunner) -> None:
        """A worker whose step hangs is killed, where that is possible."""
        if replica.loop.is_hung and isinstance(runner, Mortal):
            runner.kill(f"took more than {self._config.step_timeout_s:g} s for a step")
        self._on_change()

    async def _close_runner(self, runner: AnyRunner) -> None:
        """In a thread, as it may take a while.

        Cancellation: it is closed all the same.
        """
        try:
            with trio.CancelScope(shield=True):
                await self._threads.run(_as_failure(runner.close), self._close_limiter)
        except Exception as error:
            log.error("a worker did not close", exc_info=error)

    async def _close_all(self, spawns: Sequence[_Spawn]) -> None:
        for spawn in spawns:
            await self._close_runner(spawn.runner)

    # ---- ends

    def watch_load(self, name: str, replicas: int | None = None) -> LoadWatch:
        """Have a model loaded as the operator wants it: with ``replicas`` replicas (None: as
        configured), as far as they fit; fewer than it has change nothing. Never waits.

        Raises:
            as `ensure`.
        """
        entry = self.entry(name)
        is_own = entry.load is None
        count = replicas or entry.config.num_replicas
        return LoadWatch(self, self.ensure(name, replicas=count), count, is_own=is_own)

    async def unload(self, name: str, drain_s: float) -> None:
        """Route nothing to a model any more, let what runs end for ``drain_s`` seconds, cut the
        rest, and wait until its memory is free. A load under way is waited for first.

        Raises:
            ModelNotFound: no such model. ShuttingDown: everything is being unloaded.
        Cancellation: ends only the waiting; the unload goes on.
        """
        entry = self.entry(name)
        if self._is_closing:
            raise ShuttingDown("the server is ending, and unloads everything", retry_after_s=5.0)
        done = trio.Event()
        entry.num_unloads += 1
        self._start(lambda: self._unload(entry, drain_s, done))
        self._on_change()
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
            self._on_change()

    async def _wait_gone(self, entry: Entry) -> None:
        while entry.replicas:
            await self.governor.wait_freed()

    # ---- views

    def status(self, entry: Entry) -> ModelStatus:
        """What ListModels says of a model."""
        has_failed = entry.state is ModelState.FAILED
        return entry.status(str(self.failure(entry, entry.cause)) if has_failed else "")


def _tell_failure(entry: Entry, error: Exception) -> None:
    """In the log, with what only the operator may see."""
    detail = " ".join(getattr(error, "log_detail", "").split())
    shown = f" [{detail}]" if detail else ""
    log.warning("a worker of %s did not load: %s%s", entry.config.name, error, shown)


def _as_failure(job: Callable[[], T]) -> Callable[[], T]:
    """``job``, with what would end the process made a failure: SystemExit of a library (R140)."""

    def run() -> T:
        try:
            return job()
        except Exception:
            raise
        except BaseException as error:
            raise SpawnFailed(f"its loading raised {type(error).__name__}") from error

    return run
