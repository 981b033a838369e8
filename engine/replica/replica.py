"""A replica: one loaded worker of a model, everything that serves it, and its leases.

Rule 1: a replica is made from a runner that has loaded and warmed up, never before.
Rule 2: every user of a replica holds a lease of it. A retired replica gives no new leases, and its
loop is closed when the last lease ends.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

import trio

from engine.replica.loop import EngineLoop, LoopSettings, WriteBatch
from engine.replica.telemetry import ReplicaTelemetry
from engine.status import Capability, ModelState, ReplicaStatus
from engine.worker.interface import WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from engine.config import EngineConfig, ModelConfig
    from engine.core.common.core import AnyCore
    from engine.errors import TrioletError
    from engine.replica.loop import OnEvent
    from engine.replica.threads import Threads
    from engine.replica.watchdog import Watchdog
    from engine.worker.interface import Runner, Tokenizer
    from engine.worker.text.interface import AdapterInfo


InfoT = TypeVar("InfoT", bound=WorkerInfo)
ToolsT = TypeVar("ToolsT")


AnyRunner: TypeAlias = "Runner[Any, Any, Any]"


@runtime_checkable
class ProcessWorker(Protocol):
    """A runner whose worker is a process of its own, which may die by itself and can be killed."""

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process has ended."""

    def lost(self) -> TrioletError:
        """Return why the process has ended. Waits a moment for its exit status."""

    def kill(self, why: str) -> None:
        """Kill the process without waiting for its end. ``why`` becomes part of `lost`'s error."""

    def rss_bytes(self) -> int:
        """Return how many bytes of memory the process has resident."""


class ReservedMemory(Protocol):
    """Bytes that are reserved for a replica, until the pool releases them."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all devices together."""

    def on(self, device: str) -> int:
        """Return how many bytes of a device are reserved."""

    def release(self) -> None:
        """Give the bytes back, once."""


class ReplicaKind(Protocol):
    """The parts of a replica that depend on its kind of work (`engine.kinds`)."""

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        """The capabilities of the models that do this kind of work."""

    @property
    def default_threads(self) -> int:
        """CPU threads of a step if neither the runner nor the configuration sets them; 0 means the
        library's default."""

    @property
    def token_event(self) -> type[Any] | None:
        """The class of the events that bring tokens, of which the time to the first and the
        intervals are measured; None for a kind without tokens. Such an event has a ``choice``."""

    def make_core(self, info: Any, config: EngineConfig, name: str) -> AnyCore:
        """Return the scheduler of a replica of the model ``name``. ``info`` describes the load."""

    def make_tools(self, runner: Any, threads: Threads) -> Any:
        """Return the parts of a loaded runner that prepare requests, except its tokenizer."""


class Work(NamedTuple):
    """How much a replica has to do."""

    tokens: int  # tokens that the replica's requests still need, at most
    requests: int  # requests that hold a lease of the replica


@dataclass(eq=False)
class Replica(Generic[InfoT, ToolsT]):
    """A worker that serves. ``on_idle`` is called at the end of the last lease.

    ``tools`` are the runner's parts for preparing requests (`ReplicaKind.make_tools`). ``process``
    is set if the runner has a process of its own.
    """

    model: str
    replica_id: int
    info: InfoT
    tokenizer: Tokenizer
    tools: ToolsT
    loop: EngineLoop[Any, Any, Any]
    threads: int
    reservation: ReservedMemory
    on_idle: Callable[[Replica[Any, Any]], None]
    process: ProcessWorker | None = None
    adapters: dict[Any, AdapterInfo] = field(default_factory=dict)  # by `AdapterVersion`
    is_retired: bool = False
    idle_since: float = field(default_factory=trio.current_time)  # on Trio's clock
    outstanding_tokens: int = 0  # tokens to compute, at most; guests' do not count
    restarts: int = 0
    processed: int = 0
    failed: int = 0
    cancelled: int = 0
    _holders: dict[object, Callable[[], None]] = field(default_factory=dict)

    @property
    def work(self) -> Work:
        """How much the replica has to do."""
        return Work(self.outstanding_tokens, self.num_leases)

    @contextmanager
    def busy_with(self, num_tokens: int) -> Iterator[TokensAhead]:
        """Count ``num_tokens`` tokens as still to be computed while the block lasts, or until
        `TokensAhead.count` takes them out."""
        ahead = TokensAhead(self, num_tokens)
        ahead.count(True)
        try:
            yield ahead
        finally:
            ahead.end()

    def blocks_of(self, request: Any) -> int:
        """Return how many KV blocks a request may need, at most; 0 for a kind without blocks."""
        size = getattr(self.loop.core.config, "block_size", 0)
        return -(-request.num_tokens_ahead // size) if size else 0

    @property
    def num_leases(self) -> int:
        """How many holders the replica has."""
        return len(self._holders)

    @contextmanager
    def leased(self, cut: Callable[[], None]) -> Iterator[None]:
        """Hold the replica while the block lasts. ``cut`` cancels the holder's request."""
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
        """Give no more leases, and end when the last one has ended. Idempotent."""
        self.is_retired = True
        if not self._holders:
            self.loop.close()

    def die(self) -> bool:
        """Give no more leases, because the loop has ended by an error. Return whether the replica
        has to be replaced, that is, whether it was not retired before."""
        is_missed, self.is_retired = not self.is_retired, True
        return is_missed

    def cut(self) -> None:
        """Cancel the requests of all holders."""
        for cut in list(self._holders.values()):
            cut()

    @property
    def state(self) -> ModelState:
        """READY, or DRAINING once it is retired."""
        return ModelState.DRAINING if self.is_retired else ModelState.READY

    def status(self) -> ReplicaStatus:
        """Return a snapshot of the replica for ListModels."""
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
            tp=self.info.tp,
        )


AnyReplica: TypeAlias = Replica[Any, Any]


class TokensAhead:
    """The tokens of one request that ``replica`` has still to compute, at most."""

    __slots__ = ("_num_counted", "_num_tokens", "_replica")

    def __init__(self, replica: AnyReplica, num_tokens: int) -> None:
        self._replica = replica
        self._num_tokens = num_tokens
        self._num_counted = 0

    def count(self, is_counted: bool) -> None:
        """Count the tokens as the replica's work, or not. Idempotent; no effect after `end`."""
        num_tokens = self._num_tokens if is_counted else 0
        self._replica.outstanding_tokens += num_tokens - self._num_counted
        self._num_counted = num_tokens

    def end(self) -> None:
        """Count nothing any more, as the request has ended or joins another replica."""
        self.count(False)
        self._num_tokens = 0


@dataclass(frozen=True, slots=True)
class ReplicaMaker:
    """Makes replicas from runners that have loaded. All replicas share its attributes.

    ``kinds`` has the kind of work of each capability. ``batch`` holds back the writes of a delivery
    (`engine.replica.loop.WriteBatch`).
    """

    config: EngineConfig
    threads: Threads
    kinds: Mapping[Capability, ReplicaKind]
    batch: WriteBatch
    on_event: OnEvent | None
    watchdog: Watchdog | None
    on_idle: Callable[[AnyReplica], None]

    def make(
        self,
        worker: ModelConfig,
        replica_id: int,
        runner: AnyRunner,
        info: WorkerInfo,
        reservation: ReservedMemory,
        on_death: Callable[[TrioletError], None],
        on_hung: Callable[[], None],
    ) -> AnyReplica:
        """Return the replica of a runner whose `load` returned ``info``.

        ``on_death`` is called when the replica's loop ends by an error, before any of its requests
        gets that error. ``on_hung`` is called when a step hangs, and again when that step ends.
        """
        name, kind = worker.name, self.kinds[info.capability]
        loop = EngineLoop(
            name,
            kind.make_core(info, self.config, name),
            runner,
            self.threads,
            LoopSettings(
                check_level=self.config.check_level,
                on_event=self.on_event,
                watch=self.watchdog.watch(name, on_hung) if self.watchdog else None,
                telemetry=ReplicaTelemetry(kind.token_event) if self.config.telemetry else None,
                on_death=on_death,
                batch=self.batch,
            ),
        )
        return Replica(
            name,
            replica_id,
            info,
            runner.tokenizer,
            kind.make_tools(runner, self.threads),
            loop,
            info.threads or worker.threads or kind.default_threads,
            reservation,
            self.on_idle,
            process=runner if isinstance(runner, ProcessWorker) else None,
        )
