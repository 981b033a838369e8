"""Frozen snapshots of the models and of the counters, for `statistics()` and ListModels.

Rule: values only. Taking a snapshot never waits and never touches a step in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Capability(Enum):
    """The kind of work that a model does."""

    TEXT_TO_TEXT = "text-to-text"  # Generate
    TEXT_EMBEDDING = "text-embedding"
    RERANK = "rerank"
    IMAGE_EMBEDDING = "image-embedding"
    VISION = "vision"
    TEXT_TO_IMAGE = "text-to-image"
    SPARSE_EMBEDDING = "sparse-embedding"
    MULTI_VECTOR_EMBEDDING = "multi-vector-embedding"
    TEXT_CLASSIFICATION = "text-classification"
    TOKEN_CLASSIFICATION = "token-classification"

    @property
    def generates_text(self) -> bool:
        """Whether a model with this capability serves Generate."""
        return self in (Capability.TEXT_TO_TEXT, Capability.VISION)

    @property
    def encodes(self) -> bool:
        """Whether a model with this capability serves Embed, Rerank or Classify."""
        return self.value.endswith(("embedding", "classification")) or self is Capability.RERANK


class ModelState(Enum):
    """The state of a model or of one of its replicas (D16)."""

    UNLOADED = "unloaded"  # configured, and not loaded
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # takes no new requests, and ends when the running ones have ended
    FAILED = "failed"  # its last load failed
    DEGRADED = "degraded"  # only of replicas: dead and about to restart, or its step hangs


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One request that has not ended. ``age_s`` is the time since its submission; ``model`` is
    empty until a model is leased. Nothing of its prompt or its answer is here."""

    request_id: str
    model: str
    phase: str
    tokens_done: int
    age_s: float


class AbortOutcome(Enum):
    """The outcome of aborting a request by its id."""

    ABORTED = "aborted"  # a live request was ended
    ALREADY_ENDED = "already_ended"
    REMEMBERED = "remembered"  # no such request yet; it is aborted if it arrives soon


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica of a model."""

    replica_id: int
    state: ModelState
    device: str
    threads: int  # CPU threads that a step uses
    restarts: int = 0  # restarts after deaths, since the model was loaded
    processed: int = 0  # requests that ended without an error
    failed: int = 0  # requests that failed because of the engine or the worker
    cancelled: int = 0  # requests that their clients cancelled
    busy_s: float = 0.0  # seconds spent in steps
    tp: int = 1  # processes that the model is divided among


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model, as ListModels shows it."""

    name: str
    state: ModelState
    capability: Capability = Capability.TEXT_TO_TEXT
    capabilities: tuple[Capability, ...] = ()  # all that it has, ``capability`` first
    aliases: tuple[str, ...] = ()
    error: str = ""  # why the model's last load failed; empty unless the state is FAILED
    memory_bytes: int = 0  # reserved for all replicas
    replicas: tuple[ReplicaStatus, ...] = ()
    leases: int = 0  # held by requests
    last_used: float = 0.0  # seconds since the epoch; 0: never
    dtype: str = ""
    device: str = ""
    architecture: str = ""
    max_model_len: int = 0  # tokens
    quantization: str = ""  # the form of the linear layers' weights; "": floats of dtype
    context_note: str = ""  # why max_model_len is less than the model's own length
    full_sequences: int = 0  # the sequences of max_model_len that the KV pools hold at once
    kv_bytes: int = 0  # bytes of the KV pools, part of memory_bytes
    is_demo: bool = False
    is_lazy: bool = False  # a request loads the model: it is configured so, or was loaded before
    is_hung: bool = False  # a step takes longer than the step timeout (D17)
    is_restarting: bool = False  # no replica serves, and those that died restart by themselves
    base: str = ""  # the name of an adapter's base model; "": not an adapter
    adapter_digest: str = ""  # the digest of an adapter's content, while it is loaded
    adapter_rank: int = 0  # the largest rank in an adapter's layers, while it is loaded

    @property
    def is_available(self) -> bool:
        """Whether a request would be served, by a ready replica or by a replica that it loads."""
        if self.is_restarting:
            return False
        if self.is_lazy:
            return self.state not in (ModelState.FAILED, ModelState.DRAINING)
        return self.state is ModelState.READY


@dataclass(frozen=True, slots=True)
class RequestsTotal:
    """How many requests have ended since the start, by the way they ended."""

    finished: int = 0
    cancelled: int = 0  # by the client
    deadline: int = 0
    aborted: int = 0  # by the operator
    stalled: int = 0
    failed: int = 0
    refused: int = 0


# The counters of `Counts` that can go down, except memory.
LEVELS = frozenset(
    {
        *("running", "waiting", "parked", "ending", "detached"),
        *("free_blocks", "total_blocks", "cached_blocks"),
        *("free_states", "total_states", "cached_states"),
    }
)


@dataclass(frozen=True, slots=True)
class Counts:
    """The counters of one replica, or their sums; the names are those of the proto's Totals.

    The first four are sequences of a text model, inputs of an encoder, or drawings.
    """

    running: int = 0
    waiting: int = 0
    parked: int = 0  # those that wait until their clients read
    ending: int = 0  # ended, but the step in flight still uses their blocks
    unread_calls: int = 0  # ended calls whose clients have not read everything
    free_blocks: int = 0  # this and the next two count blocks of the KV pool
    total_blocks: int = 0
    cached_blocks: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache, since the start
    prefix_hits: int = 0  # tokens found in the prefix cache, since the start
    step_count: int = 0
    step_rows_total: int = 0
    preemptions: int = 0
    prompt_tokens_total: int = 0
    completion_tokens_total: int = 0
    requests_total: RequestsTotal = field(default_factory=RequestsTotal)
    memory_reserved: int = 0  # bytes
    memory_limit: int = 0  # bytes
    peak_waiting: int = 0  # the highest value of waiting since the load
    detached: int = 0  # Generate streams that wait for clients which lost their connections
    free_states: int = 0  # state slots of models with recurrent layers, like the next two
    total_states: int = 0
    cached_states: int = 0  # state slots that have a snapshot


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """The counters of one replica."""

    model: str
    replica: int  # the replica's id
    state: ModelState
    counts: Counts
    pause: str = ""  # the mode of a pause: keep, wait or abort; empty: not paused


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The counters of the whole engine and of each replica."""

    totals: Counts
    replicas: tuple[ReplicaCounts, ...]
