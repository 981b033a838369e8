"""Frozen snapshots of what is loaded and what is going on: `statistics()` and ListModels.

Rule 1: values only; taking one never waits and never touches a step in flight (R180).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Capability(Enum):
    """What a model is for (R124); text-to-text is Generate's."""

    TEXT_TO_TEXT = "text-to-text"
    TEXT_EMBEDDING = "text-embedding"
    RERANK = "rerank"
    IMAGE_EMBEDDING = "image-embedding"
    VISION = "vision"
    TEXT_TO_IMAGE = "text-to-image"


class ModelState(Enum):
    """A model's place in the pool (D16). UNLOADED: configured, and not loaded yet."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    DEGRADED = "degraded"  # of a replica in the statistics: dead and to come back, or hung


class AbortOutcome(Enum):
    """What an abort found: a live request, one that had ended, or none (yet)."""

    ABORTED = "aborted"
    ALREADY_ENDED = "already_ended"
    REMEMBERED = "remembered"


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One worker of a model. ``busy_s`` is the time spent inside steps."""

    replica_id: int
    state: ModelState
    device: str
    threads: int
    restarts: int = 0
    processed: int = 0
    failed: int = 0
    cancelled: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What ListModels says of one model. ``last_used`` is seconds since the epoch, 0 never.
    ``is_lazy``: a request loads it, as it is configured so or was loaded before. ``is_restarting``:
    its only replicas died, and come back by themselves.
    ``is_hung``: its step takes longer than any should (D17)."""

    name: str
    state: ModelState
    capability: Capability = Capability.TEXT_TO_TEXT
    aliases: tuple[str, ...] = ()
    error: str = ""
    memory_bytes: int = 0
    replicas: tuple[ReplicaStatus, ...] = ()
    leases: int = 0
    last_used: float = 0.0
    dtype: str = ""
    device: str = ""
    architecture: str = ""
    max_model_len: int = 0
    is_demo: bool = False
    is_lazy: bool = False
    is_hung: bool = False
    is_restarting: bool = False

    @property
    def can_be_asked(self) -> bool:
        """A request is served, or loads the model first."""
        if self.is_restarting:
            return False
        if self.is_lazy:
            return self.state not in (ModelState.FAILED, ModelState.DRAINING)
        return self.state is ModelState.READY


@dataclass(frozen=True, slots=True)
class RequestsTotal:
    """Requests ended since start, by how they ended."""

    finished: int = 0
    cancelled: int = 0
    deadline: int = 0
    aborted: int = 0
    stalled: int = 0
    failed: int = 0
    refused: int = 0


# the counters that go down again, but for memory
LEVELS = frozenset(
    {"running", "waiting", "parked", "ending", "free_blocks", "total_blocks", "cached_blocks"}
)


@dataclass(frozen=True, slots=True)
class Counts:
    """The counters of one replica, or their sums: names as in the proto's Totals."""

    running: int = 0
    waiting: int = 0
    parked: int = 0
    ending: int = 0
    zombies: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    cached_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    step_count: int = 0
    step_rows_total: int = 0
    preemptions: int = 0
    prompt_tokens_total: int = 0
    completion_tokens_total: int = 0
    requests_total: RequestsTotal = field(default_factory=RequestsTotal)
    memory_reserved: int = 0
    memory_limit: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """One replica's counters with its name. ``pause`` is how it is paused: keep, wait or abort;
    empty: it is not."""

    model: str
    replica: int
    state: ModelState
    counts: Counts
    pause: str = ""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The whole engine's counters, and each replica's."""

    totals: Counts
    replicas: tuple[ReplicaCounts, ...]
