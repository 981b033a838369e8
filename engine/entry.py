"""A configured model: its replicas, the load that is under way, and what went wrong last.

Rule 1: a model's state is derived from these and stored nowhere, so that it cannot disagree with
them. Rule 2: at most one load of a model is under way (R102); many may wait for it.

    UNLOADED ── ensure ──▶ LOADING ── first replica ──▶ READY ── unload, eviction ──▶ DRAINING
       ▲                      │                            │                             │
       │                      └── none loads ─▶ FAILED ◀── the last one dies             │
       └─────────────────────────────────────────────────────────────────────────────────┘

A replica that dies is loaded again after a backoff: while no other serves, the model is LOADING.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import trio

from engine.core.breaker import Breaker
from engine.core.routing import by_prefix, least_busy
from engine.status import Capability, ModelState, ModelStatus

if TYPE_CHECKING:
    from engine.config import ModelConfig
    from engine.core.events import Pause
    from engine.core.plan import LoadProgress
    from engine.core.restarts import Restarts
    from engine.core.types import Request
    from engine.replica import Replica


@dataclass(eq=False)
class Load:
    """One load of ``wanted`` replicas. ``settled``: one of them serves, or none will; then
    ``cause`` says why, unless they are tried again by themselves. ``done``: no more of them will
    come; ``failure`` is why one of them did not."""

    wanted: int
    is_preload: bool = False
    may_evict: bool = True
    is_restart: bool = False
    # a restart comes after its backoff, the deadline of this; others at once
    backoff: trio.CancelScope = field(default_factory=lambda: trio.CancelScope(deadline=-math.inf))
    settled: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)
    hurry: trio.Event = field(default_factory=trio.Event)  # do not wait for the backoff
    room: trio.CancelScope = field(default_factory=trio.CancelScope)  # of the wait for that
    cause: BaseException | None = None
    failure: Exception | None = None
    granted: int = 0

    def give_up(self) -> None:
        """Wait neither for the backoff nor for room any more: nothing is to be loaded."""
        self.hurry.set()
        self.room.cancel(reason="nothing is to be loaded")


@dataclass(eq=False)
class Entry:
    """A configured model. ``settled`` is set when its first load has ended, for whoever starts
    the server. ``capability`` is None as long as only its files, which are not here yet, can
    tell."""

    config: ModelConfig
    capability: Capability | None = None
    settled: trio.Event = field(default_factory=trio.Event)
    replicas: list[Replica] = field(default_factory=list)
    load: Load | None = None
    cause: BaseException | None = None  # of the failure that no load has made good since
    breaker: Breaker = field(default_factory=Breaker)
    deaths: dict[int, Restarts] = field(default_factory=dict)  # by replica
    missing: list[float] = field(default_factory=list)  # when replicas that died come back
    restarts_of: Counter[int] = field(default_factory=Counter)  # by replica, since it was loaded
    num_waiting: int = 0  # requests that wait for its load
    num_unloads: int = 0  # the operator's, under way
    num_deaths: int = 0  # of its replicas, ever
    was_loaded: bool = False
    last_used: float = 0.0  # seconds since the epoch
    progress: LoadProgress | None = None
    pause: Pause | None = None
    _turn: int = 0

    @property
    def is_encoder(self) -> bool:
        return self.capability in (Capability.TEXT_EMBEDDING, Capability.RERANK)

    @property
    def ready(self) -> list[Replica]:
        """The replicas that take requests."""
        return [replica for replica in self.replicas if not replica.is_retired]

    @property
    def state(self) -> ModelState:
        """Where the model stands (rule 1)."""
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
        """The numbers of the replicas that died and are to come back."""
        count = len(self.missing) + (self.load is not None and self.load.is_restart)
        return self._free_ids(count)

    @property
    def num_degraded(self) -> int:
        """Replicas that died and are to come back, or whose step hangs."""
        return len(self.degraded_ids) + sum(one.loop.is_hung for one in self.replicas)

    def note_progress(self, progress: LoadProgress) -> None:
        """A stage of its load, on the loading thread. One that knows no totals leaves those of
        the stage before."""
        before = self.progress
        if before is not None and before.bytes_total and not progress.bytes_total:
            progress = replace(before, phase=progress.phase)
        self.progress = progress

    def pick(self, routing: str) -> Replica | None:
        """The ready replica for a request whose prompt is not known yet; None: there is none."""
        ready = self.ready
        if len(ready) <= 1:
            return ready[0] if ready else None
        self._turn += 1
        if routing == "round-robin":
            return ready[self._turn % len(ready)]
        return ready[least_busy([replica.work for replica in ready], self._turn)]

    def pick_by_prefix(self, request: Request) -> Replica | None:
        """As `pick`, for a request whose tokens are known, by what of them is cached where."""
        ready = self.ready
        if len(ready) <= 1:
            return ready[0] if ready else None
        keys = ready[0].prefix_keys(request)  # alike in all: they have one name and one block size
        cached = [one.cached_tokens(keys) for one in ready]
        return ready[by_prefix([replica.work for replica in ready], cached, self._turn)]

    def free_id(self) -> int:
        """The lowest number that no replica of it has."""
        return self._free_ids(1)[0]

    def _free_ids(self, count: int) -> list[int]:
        taken = {replica.replica_id for replica in self.replicas}
        numbers = (number for number in itertools.count() if number not in taken)
        return list(itertools.islice(numbers, count))

    def status(self, error: str) -> ModelStatus:
        """What ListModels says of it."""
        info = self.replicas[0].info if self.replicas else None
        return ModelStatus(
            name=self.config.name,
            state=self.state,
            capability=self.capability or Capability.TEXT_TO_TEXT,
            aliases=self.config.aliases,
            error=error,
            memory_bytes=sum(replica.reservation.num_bytes for replica in self.replicas),
            replicas=tuple(replica.status() for replica in self.replicas),
            leases=sum(replica.num_leases for replica in self.replicas),
            last_used=self.last_used,
            dtype=info.dtype if info else "",
            device=", ".join(dict.fromkeys(one.info.device for one in self.replicas)),
            architecture=info.architecture if info else "",
            max_model_len=info.max_model_len if info else 0,
            is_demo=info.is_demo if info else False,
            is_lazy=self.config.lazy or self.was_loaded,
            is_restarting=bool(self.degraded_ids) and not self.ready,
            is_hung=any(replica.loop.is_hung for replica in self.replicas),
        )
