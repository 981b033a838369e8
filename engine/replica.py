"""One loaded worker of a model with everything that serves it, and who holds it.

Rule 1: a replica is made from a runner that has loaded and warmed up, never before (R112).
Rule 2: whoever uses one holds a lease of it; one that is retired takes no new leases, and its loop
is closed as the last one ends.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import trio

from engine.config import EncoderConfig, SchedulerConfig
from engine.constraints import Constraints
from engine.core.encode_scheduler import EncodeScheduler
from engine.core.encode_types import EncoderInfo
from engine.core.plan import ModelInfo
from engine.core.routing import Work
from engine.core.scheduler import Scheduler
from engine.loop import Deliveries, EngineLoop
from engine.status import ModelState, ReplicaStatus
from engine.telemetry import ReplicaTelemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.config import EngineConfig, ModelConfig
    from engine.core.encode_types import EncodePlan, EncoderTokenizer, EncodeRunner
    from engine.core.events import InputEvent, OutputEvent
    from engine.core.plan import Runner, StepPlan, Tokenizer
    from engine.core.types import Request
    from engine.errors import TrioletError
    from engine.memory import Reservation
    from engine.threads import Threads
    from engine.watchdog import Watchdog

    OnEvent = Callable[[InputEvent | OutputEvent | StepPlan | EncodePlan], None]

AnyRunner: TypeAlias = "Runner | EncodeRunner"


@runtime_checkable
class Mortal(Protocol):
    """A runner whose worker may die by itself, and can be killed."""

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when it is dead."""
        ...

    def lost(self) -> TrioletError:
        """Why; waits a moment for it."""
        ...

    def kill(self, why: str) -> None:
        """End it, without waiting."""
        ...

    def rss_bytes(self) -> int:
        """What it has in memory."""
        ...


@dataclass(eq=False)
class Replica:
    """A worker that serves. ``on_idle`` hears of the end of the last lease."""

    model: str
    replica_id: int
    info: ModelInfo | EncoderInfo
    tokenizer: Tokenizer
    loop: EngineLoop
    threads: int
    reservation: Reservation
    on_idle: Callable[[Replica], None]
    encoder_tokenizer: EncoderTokenizer | None = None  # an encoder's
    constraints: Constraints | None = None  # a text model's
    process: Mortal | None = None  # where its runner has one of its own
    is_retired: bool = False
    idle_since: float = field(default_factory=trio.current_time)  # of Trio's clock
    outstanding_tokens: int = 0  # of requests that run or wait here, prompt and output, at most
    restarts: int = 0
    processed: int = 0
    failed: int = 0
    cancelled: int = 0
    _holders: dict[object, Callable[[], None]] = field(default_factory=dict)

    @property
    def text_info(self) -> ModelInfo:
        """What there is to know of a text model."""
        assert isinstance(self.info, ModelInfo)
        return self.info

    @property
    def work(self) -> Work:
        """How much it has to do."""
        return Work(self.outstanding_tokens, self.num_leases)

    @contextmanager
    def busy_with(self, num_tokens: int) -> Iterator[None]:
        """So many tokens are to be computed while the block lasts."""
        self.outstanding_tokens += num_tokens
        try:
            yield
        finally:
            self.outstanding_tokens -= num_tokens

    @property
    def num_leases(self) -> int:
        return len(self._holders)

    @contextmanager
    def leased(self, cut: Callable[[], None]) -> Iterator[None]:
        """Hold the replica while the block lasts. ``cut`` asks the holder to leave soon."""
        holder = object()
        self._holders[holder] = cut
        try:
            yield
        finally:
            del self._holders[holder]
            if not self._holders:
                self.idle_since = trio.current_time()
                if self.is_retired:
                    self.loop.close()
                self.on_idle(self)

    def retire(self) -> None:
        """Take no more leases, and end when the last one has. Idempotent."""
        self.is_retired = True
        if not self._holders:
            self.loop.close()

    def die(self) -> bool:
        """Its loop has ended by an error. Whether it is missed: not one that was to go anyway."""
        is_missed, self.is_retired = not self.is_retired, True
        return is_missed

    def cut(self) -> None:
        """Ask every holder to leave."""
        for cut in list(self._holders.values()):
            cut()

    def prefix_keys(self, request: Request) -> list[bytes]:
        """A text model's: the keys of a prompt's blocks, for `cached_tokens`."""
        return self._text_scheduler.prefix_keys(request)

    def cached_tokens(self, keys: list[bytes]) -> int:
        """Tokens of the prefix with these keys that it need not compute."""
        return self._text_scheduler.cached_tokens(keys)

    @property
    def _text_scheduler(self) -> Scheduler:
        assert isinstance(self.loop.scheduler, Scheduler)
        return self.loop.scheduler

    @property
    def state(self) -> ModelState:
        return ModelState.DRAINING if self.is_retired else ModelState.READY

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(
            replica_id=self.replica_id,
            state=self.state,
            device=self.info.device,
            threads=self.threads,
            restarts=self.restarts,
            processed=self.processed,
            failed=self.failed,
            cancelled=self.cancelled,
            busy_s=self.loop.busy_s,
        )


@dataclass(frozen=True, slots=True)
class ReplicaMaker:
    """Makes replicas from runners that have loaded: what they all share."""

    config: EngineConfig
    threads: Threads
    deliveries: Deliveries
    on_event: OnEvent | None
    watchdog: Watchdog | None
    on_idle: Callable[[Replica], None]

    def make(
        self,
        worker: ModelConfig,
        replica_id: int,
        runner: AnyRunner,
        info: ModelInfo | EncoderInfo,
        reservation: Reservation,
        on_death: Callable[[TrioletError], None],
        on_hung: Callable[[], None],
    ) -> Replica:
        """The replica of a runner that has told its ``info``. ``on_death`` is called before any
        of its requests hears of its end, ``on_hung`` when a step hangs, and when it ends."""
        name = worker.name
        scheduler: Scheduler | EncodeScheduler
        tokenizer: EncoderTokenizer | None = None
        constraints: Constraints | None = None
        if isinstance(info, EncoderInfo):
            scheduler = EncodeScheduler(self._encoder_config(info))
            tokenizer = runner.encoder_tokenizer  # type: ignore[union-attr]  # its info says so
        else:
            scheduler = Scheduler(self._scheduler_config(info, name))
            constraints = Constraints(runner, self.threads)  # type: ignore[arg-type]  # as above
        loop = EngineLoop(
            name,
            scheduler,
            runner,
            self.threads,
            check_level=self.config.check_level,
            on_event=self.on_event,
            watch=self.watchdog.watch(name, on_hung) if self.watchdog else None,
            deliveries=self.deliveries,
            telemetry=ReplicaTelemetry() if self.config.telemetry else None,
            on_death=on_death,
        )
        return Replica(
            name,
            replica_id,
            info,
            runner.tokenizer,
            loop,
            info.threads or worker.threads or int(isinstance(info, EncoderInfo)),
            reservation,
            self.on_idle,
            encoder_tokenizer=tokenizer,
            constraints=constraints,
            process=runner if isinstance(runner, Mortal) else None,
        )

    def _scheduler_config(self, info: ModelInfo, name: str) -> SchedulerConfig:
        config = self.config
        return SchedulerConfig(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            step_time_target_s=config.step_time_target_s,
            stall_timeout_s=config.stall_timeout_s,
            prefix_cache=config.prefix_cache,
            prepared_plans=config.prepared_plans,
            cache_namespace=name,
        )

    def _encoder_config(self, info: EncoderInfo) -> EncoderConfig:
        config = self.config
        return EncoderConfig(
            max_model_len=info.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            stall_timeout_s=config.stall_timeout_s,
        )
