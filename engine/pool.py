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

from engine.config import EncoderConfig, SchedulerConfig
from engine.constraints import Constraints
from engine.core.encode_scheduler import EncodeScheduler
from engine.core.encode_types import EncoderInfo, EncoderKind
from engine.core.events import Pause, Resume
from engine.core.plan import ModelInfo
from engine.core.scheduler import Scheduler
from engine.errors import (
    EngineBug,
    InvalidRequest,
    ModelNotFound,
    ShuttingDown,
    SpawnFailed,
    SpawnTimeout,
    TrioletError,
)
from engine.loop import Deliveries, EngineLoop
from engine.memory import default_limit
from engine.status import Capability, ModelState, ModelStatus, ReplicaStatus
from engine.telemetry import ReplicaTelemetry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from engine.config import EngineConfig, ModelConfig
    from engine.core.encode_types import EncodePlan, EncoderTokenizer, EncodeRunner
    from engine.core.events import InputEvent, OutputEvent
    from engine.core.plan import LoadProgress, Runner, StepPlan, Tokenizer
    from engine.threads import Threads
    from engine.watchdog import Watchdog

    AnyRunner = Runner | EncodeRunner
    OnEvent = Callable[[InputEvent | OutputEvent | StepPlan | EncodePlan], None]
    FindCapability = Callable[[ModelConfig], Capability | None]

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
REPLICA_ID = 0  # one static replica per model; more come with the issue "Replicas"


class RunnerFactory(Protocol):
    """Makes the runner of a model, unloaded; the simulator's makes fakes."""

    def __call__(self, model: ModelConfig, config: EngineConfig) -> AnyRunner: ...


@dataclass(eq=False)
class Replica:
    """One worker of a model with everything that serves it."""

    model: str
    info: ModelInfo | EncoderInfo
    tokenizer: Tokenizer
    loop: EngineLoop
    threads: int
    encoder_tokenizer: EncoderTokenizer | None = None  # an encoder's
    constraints: Constraints | None = None  # a text model's
    processed: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def text_info(self) -> ModelInfo:
        """What there is to know of a text model."""
        assert isinstance(self.info, ModelInfo)
        return self.info

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
    """A configured model and where its load stands. ``settled`` is set when LOADING ends.
    ``capability`` is None as long as only its files, which are not here yet, can tell."""

    config: ModelConfig
    capability: Capability | None = None
    state: ModelState = ModelState.UNLOADED
    settled: trio.Event = field(default_factory=trio.Event)
    replica: Replica | None = None
    cause: BaseException | None = None
    leases: int = 0
    last_used: float = 0.0
    progress: LoadProgress | None = None
    pause: Pause | None = None

    @property
    def is_encoder(self) -> bool:
        return self.capability in (Capability.TEXT_EMBEDDING, Capability.RERANK)


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
        self._on_event = on_event
        self._watchdog = watchdog
        self._config = config
        self._make_runner = make_runner
        self._threads = threads
        self._on_change = on_change
        self._load_limiter = trio.CapacityLimiter(max(1, len(config.models)))
        self._encoder_limiter = trio.CapacityLimiter(1)  # transformers' own loading is not for two
        self._to_load, self._loads = trio.open_memory_channel[Entry](len(config.models))
        self._is_closing = False
        self.deliveries = Deliveries()
        self.memory_limit = config.memory_limit or default_limit()
        self.entries = {
            model.name: Entry(model, model.capability or find_capability(model))
            for model in config.models
        }
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

    def ensure(self, name: str, capability: Capability | None = None) -> Entry:
        """The entry of a model, its load begun if it was not. Never waits.

        Raises:
            ModelNotFound, InvalidRequest: as `entry`. ShuttingDown: the pool takes no more
                requests.
        """
        if self._is_closing:
            raise ShuttingDown("the server takes no new requests", retry_after_s=5.0)
        entry = self.entry(name, capability)
        if entry.state is ModelState.UNLOADED:
            self._begin_load(entry)
        return entry

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

    def _begin_load(self, entry: Entry) -> None:
        log.debug("Acquired spawn lock for %s", entry.config.name)  # the state is the lock (R137)
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
    async def lease(
        self, name: str, capability: Capability | None = None
    ) -> AsyncIterator[Replica]:
        """Hold a model's replica for a request; a cold model is loaded, once for all.

        Raises:
            ModelNotFound, InvalidRequest, ShuttingDown: as `ensure`.
            SpawnFailed: the load failed; each waiter gets its own, chained to the cause.
            SpawnTimeout: the load took longer than the waiters' limit, and goes on.
        Cancellation: while waiting, the load goes on; inside the block, the lease ends.
        """
        entry = self.ensure(name, capability)
        if entry.state is ModelState.LOADING:
            log.debug("Spawn lock busy for %s", entry.config.name)
            await self._wait_settled(entry)
        if entry.replica is None:
            raise self._failure(entry)
        self._require(entry, capability)  # only its files may have told
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
            if entry.is_encoder:
                await self._wait_for_texts()
                if self._is_closing:
                    self._set_state(entry, ModelState.UNLOADED)
                    return
            # in the thread: making one may import torch, which takes seconds
            runner = await self._threads.run(
                lambda: self._make_runner(entry.config, self._config), self._limiter_of(entry)
            )
            try:
                await self._load(entry, runner)
                await self._run_loop(entry)
            finally:
                runner.close()
        except Exception as error:
            if not isinstance(error, SpawnFailed):
                log.exception("model %s failed", entry.config.name)
            if not entry.settled.is_set():
                log.debug("Released spawn lock for %s", entry.config.name)
            entry.cause = error
            entry.replica = None
            self._set_state(entry, ModelState.FAILED)
        finally:
            entry.settled.set()

    def _limiter_of(self, entry: Entry) -> trio.CapacityLimiter:
        return self._encoder_limiter if entry.is_encoder else self._load_limiter

    async def _wait_for_texts(self) -> None:
        """Encoders load behind the preloaded text models: importing what they need takes seconds
        (D14)."""
        for other in self.entries.values():
            is_first = not other.is_encoder and not other.config.lazy
            if is_first and other.state is ModelState.LOADING:
                await other.settled.wait()

    async def _load(self, entry: Entry, runner: AnyRunner) -> None:
        def load() -> ModelInfo | EncoderInfo:
            try:
                return runner.load(lambda progress: setattr(entry, "progress", progress))
            except Exception:
                raise
            except BaseException as error:  # SystemExit of a library (R140)
                raise SpawnFailed(f"its loading raised {type(error).__name__}") from error

        info = await self._threads.run(load, self._limiter_of(entry))
        name = entry.config.name
        tokenizer: EncoderTokenizer | None = None
        constraints: Constraints | None = None
        scheduler: Scheduler | EncodeScheduler
        if isinstance(info, EncoderInfo):
            entry.capability = CAPABILITY_OF_KIND[info.kind]
            scheduler = EncodeScheduler(self._encoder_config(info))
            tokenizer = runner.encoder_tokenizer  # type: ignore[union-attr]  # its info says so
        else:
            entry.capability = Capability.TEXT_TO_TEXT
            scheduler = Scheduler(self._scheduler_config(info, name))
            constraints = Constraints(runner, self._threads)  # type: ignore[arg-type]  # as above
        loop = EngineLoop(
            name,
            scheduler,
            runner,
            self._threads,
            check_level=self._config.check_level,
            on_event=self._on_event,
            watch=self._watchdog.watch(name, self._on_change) if self._watchdog else None,
            deliveries=self.deliveries,
            telemetry=ReplicaTelemetry() if self._config.telemetry else None,
        )
        threads = entry.config.threads or int(entry.is_encoder)
        entry.replica = Replica(name, info, runner.tokenizer, loop, threads, tokenizer, constraints)
        if entry.pause is not None:
            loop.post(entry.pause)
        if self._is_closing:
            loop.close()
        log.info("model %s is ready: %s on %s", entry.config.name, info.architecture, info.device)
        self._set_state(entry, ModelState.READY)
        entry.settled.set()
        log.debug("Workers ready for %s", entry.config.name)
        log.debug("Released spawn lock for %s", entry.config.name)

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

    def _encoder_config(self, info: EncoderInfo) -> EncoderConfig:
        config = self._config
        return EncoderConfig(
            max_model_len=info.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            stall_timeout_s=config.stall_timeout_s,
        )

    # ---- views

    def status(self, entry: Entry) -> ModelStatus:
        """What ListModels says of a model."""
        info = entry.replica.info if entry.replica is not None else None
        return ModelStatus(
            name=entry.config.name,
            state=entry.state,
            capability=entry.capability or Capability.TEXT_TO_TEXT,
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
