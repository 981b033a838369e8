"""A configured model: its replicas, the load under way, and its last error.

Rule 1: a model's state is computed from its replicas, load and error, and stored nowhere, so that
it cannot contradict them. Rule 2: at most one load of a model is under way; any number of requests
wait for it.

    UNLOADED ── ensure ──▶ LOADING ── first replica ──▶ READY ── unload, eviction ──▶ DRAINING
       ▲                      │                            │                             │
       │                      └── none loads ─▶ FAILED ◀── the last one dies             │
       └─────────────────────────────────────────────────────────────────────────────────┘

A replica that dies is loaded again after a backoff. While no other replica serves, the model is
LOADING.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import trio

from engine.pool.backoff import CircuitBreaker
from engine.pool.capabilities import TRAITS, all_of
from engine.pool.load_errors import reason
from engine.pool.routing import by_prefix, least_busy
from engine.status import Capability, ModelState, ModelStatus

if TYPE_CHECKING:
    from engine.config import ModelConfig
    from engine.core.common.events import Pause
    from engine.core.common.shares import Shares
    from engine.pool.adapter_version import AdapterVersion
    from engine.pool.backoff import RestartBackoff
    from engine.pool.capabilities import ModelTraits
    from engine.replica.replica import AnyReplica
    from engine.worker.interface import LoadProgress

# Fields of `WorkerInfo` that a model's status shows.
OF_INFO = ("dtype", "quantization", "architecture", "max_model_len", "context_note", "is_demo")


@dataclass(eq=False)
class Load:
    """One load of ``wanted`` replicas of a model.

    ``settled`` is set when one replica serves or none will; ``cause`` is then the error for the
    waiting requests, or None if a replica serves or a restart follows by itself. ``done`` is set
    when the load is over; ``failure`` is then the first error of a replica that did not load.
    ``granted`` is how many replicas found memory. ``may_evict``: the load may take memory from
    other models. ``is_preload``: the server's start asked for it. ``is_restart``: the load replaces
    a replica that died; it begins at the deadline of ``backoff``, on Trio's clock, or as soon as
    ``start_now`` is set. ``room`` is the scope of the wait for memory.
    """

    wanted: int
    is_preload: bool = False
    may_evict: bool = True
    is_restart: bool = False
    backoff: trio.CancelScope = field(default_factory=lambda: trio.CancelScope(deadline=-math.inf))
    start_now: trio.Event = field(default_factory=trio.Event)
    room: trio.CancelScope = field(default_factory=trio.CancelScope)
    settled: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)
    cause: BaseException | None = None
    failure: Exception | None = None
    granted: int = 0

    def give_up(self) -> None:
        """End the waits for the backoff and for memory, because the model must not load any
        more."""
        self.start_now.set()
        self.room.cancel(reason="nothing is to be loaded")


@dataclass(eq=False)
class Entry:
    """A configured model. ``capability`` is None while it is unknown, because the model's files are
    not on this machine yet. ``settled``: a replica has loaded, or the first load has ended."""

    config: ModelConfig
    capability: Capability | None = None
    settled: trio.Event = field(default_factory=trio.Event)
    replicas: list[AnyReplica] = field(default_factory=list)
    shares: list[Shares] = field(default_factory=list)  # of the replicas' schedulers
    load: Load | None = None
    cause: BaseException | None = None  # the last failed load's error, until a replica has loaded
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    deaths: dict[int, RestartBackoff] = field(default_factory=dict)  # by replica id
    missing: list[float] = field(default_factory=list)  # restarts due, on Trio's clock
    restarts_of: Counter[int] = field(default_factory=Counter)  # by replica id, until an unload
    num_waiting: int = 0  # requests waiting for the model's load
    num_unloads: int = 0  # unloads by the operator that are under way
    num_deaths: int = 0  # deaths of replicas, since the start
    was_loaded: bool = False
    last_used: float = 0.0  # seconds since the epoch
    progress: LoadProgress | None = None
    pause: Pause | None = None
    adapters: dict[str, AdapterVersion] = field(default_factory=dict)  # by BASE:NAME
    adapters_lock: trio.Lock = field(default_factory=trio.Lock)  # held while an adapter loads
    _turn: int = 0

    @property
    def traits(self) -> ModelTraits:
        """How the model is loaded and described. A model of unknown capability counts as text."""
        return TRAITS[self.likely_capability]

    @property
    def likely_capability(self) -> Capability:
        """The model's capability; text while it is unknown."""
        return self.capability or Capability.TEXT_TO_TEXT

    @property
    def ready(self) -> list[AnyReplica]:
        """The replicas that take requests."""
        return [replica for replica in self.replicas if not replica.is_retired]

    @property
    def state(self) -> ModelState:
        """The model's state (rule 1)."""
        if self.num_unloads and self.replicas:
            return ModelState.DRAINING
        if self.ready:
            return ModelState.READY
        if self.load is not None:
            return ModelState.LOADING
        if self.replicas:
            return ModelState.DRAINING
        return ModelState.UNLOADED if self.cause is None else ModelState.FAILED

    @property
    def degraded_ids(self) -> list[int]:
        """The ids of the replicas that died and will be restarted."""
        count = len(self.missing) + (self.load is not None and self.load.is_restart)
        return self._free_ids(count)

    @property
    def num_degraded(self) -> int:
        """How many replicas died and will be restarted, or have a step that hangs."""
        return len(self.degraded_ids) + sum(replica.loop.is_hung for replica in self.replicas)

    def note_progress(self, progress: LoadProgress) -> None:
        """Store a stage of the load. The loading thread calls this. A stage whose totals are
        unknown keeps the totals of the stage before."""
        before = self.progress
        if before is not None and before.bytes_total and not progress.bytes_total:
            progress = replace(before, phase=progress.phase)
        self.progress = progress

    def ready_with(self, version: AdapterVersion | None) -> list[AnyReplica]:
        """Return the ready replicas that have an adapter; with None, all of them."""
        return [replica for replica in self.ready if version is None or version in replica.adapters]

    def pick(self, routing: str, version: AdapterVersion | None = None) -> AnyReplica | None:
        """Return the ready replica for a request whose prompt is not known yet; None if no ready
        replica has the request's adapter."""
        ready = self.ready_with(version)
        if len(ready) <= 1:
            return ready[0] if ready else None
        self._turn += 1
        if routing == "round-robin":
            return ready[self._turn % len(ready)]
        return ready[least_busy([replica.work for replica in ready], self._turn)]

    def pick_by_prefix(
        self, request: Any, version: AdapterVersion | None = None
    ) -> AnyReplica | None:
        """Return the ready replica for a request whose tokens are known, by how many of the tokens
        each replica has cached; None if no ready replica has the request's adapter. ``request`` is
        a `CoreRequest`. ``version`` is the adapter that it holds: a replica that has the same
        content under another name may drop that content at any time."""
        ready = self.ready_with(version)
        if len(ready) <= 1:
            return ready[0] if ready else None
        caches = [replica.loop.core.prefixes for replica in ready]
        # The keys are equal for all replicas, which have one model name and one block size.
        keys = [] if caches[0] is None else caches[0].keys_of(request)
        cached = [0 if cache is None else cache.cached_tokens(keys) for cache in caches]
        return ready[by_prefix([replica.work for replica in ready], cached, self._turn)]

    def free_id(self) -> int:
        """Return the lowest replica id that is not in use."""
        return self._free_ids(1)[0]

    def _free_ids(self, count: int) -> list[int]:
        taken = {replica.replica_id for replica in self.replicas}
        numbers = (number for number in itertools.count() if number not in taken)
        return list(itertools.islice(numbers, count))

    def adapter_status(self, version: AdapterVersion) -> ModelStatus:
        """Return the snapshot of one of the model's adapters. An adapter has the state of the
        model, or FAILED if it did not load."""
        infos = [r.adapters[version] for r in self.replicas if version in r.adapters]
        own = self.status()
        has_failed = version.error is not None and not infos
        return replace(
            own,
            name=version.name,
            state=ModelState.FAILED if has_failed else own.state,
            aliases=version.config.aliases,
            error=reason(version.error) if has_failed else own.error,
            memory_bytes=sum(info.num_bytes for info in infos),
            replicas=(),
            leases=version.num_leases,
            last_used=version.last_used,
            base=self.config.name,
            adapter_digest=infos[0].digest if infos else "",
            adapter_rank=infos[0].rank if infos else 0,
        )

    def statuses(self) -> tuple[ModelStatus, ...]:
        """Return the snapshots of the model and of its adapters."""
        return (self.status(), *map(self.adapter_status, self.adapters.values()))

    def status(self) -> ModelStatus:
        """Return the snapshot that ListModels shows."""
        info = self.replicas[0].info if self.replicas else None
        state = self.state
        has_failed = state is ModelState.FAILED
        return ModelStatus(
            name=self.config.name,
            state=state,
            capability=self.likely_capability,
            capabilities=all_of(self.likely_capability),
            aliases=self.config.aliases,
            error=reason(self.cause) if has_failed else "",
            memory_bytes=sum(replica.reservation.num_bytes for replica in self.replicas),
            replicas=tuple(replica.status() for replica in self.replicas),
            leases=sum(replica.num_leases for replica in self.replicas),
            last_used=self.last_used,
            device=", ".join(dict.fromkeys(replica.info.device for replica in self.replicas)),
            full_sequences=sum(replica.info.full_sequences for replica in self.replicas),
            kv_bytes=sum(replica.info.kv_bytes for replica in self.replicas),
            **{name: getattr(info, name) for name in OF_INFO if info is not None},
            is_lazy=self.config.lazy or self.was_loaded,
            is_restarting=bool(self.degraded_ids) and not self.ready,
            is_hung=any(replica.loop.is_hung for replica in self.replicas),
        )
