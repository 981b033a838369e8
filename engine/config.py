"""Configuration: frozen, validated once, each bound with its origin.

Rule 1: a config object that exists is valid; `ConfigError` names the flag and what to change.
Rule 2: defaults of what an operator can set stand here, and each is told by `serve --help`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.status import Capability

DEMO_MODELS = ("demo-stories", "demo-embed", "demo-rerank")
IN_PROCESS_BUFFER = 4096  # R7: the source design's token channel
STREAM_BUFFER = 256  # R7: a gRPC stream's messages in flight


def _at_least(flag: str, value: float, minimum: float) -> None:
    if value < minimum:
        raise ConfigError(f"--{flag} is {value:g}, but must be at least {minimum:g}")


def _require_room_for_prompts(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """A step has one token for each running sequence, and at least one for a prompt chunk."""
    if max_num_batched_tokens <= max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({max_num_batched_tokens}) must be greater than "
            f"--max-num-seqs ({max_num_seqs}), or prompts would starve beside decodes"
        )


RUNNERS = ("thread", "process")
ROUTINGS = ("least-tokens", "round-robin", "prefix")
REPLICAS_MAX = 64  # guess: far more than one machine's devices and cores have use for


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        *most, last = allowed
        raise ConfigError(f"--{flag} is {value!r}; use {', '.join(most)} or {last}")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """``count`` replicas of a model that are alike. What is empty or 0 is the model's own."""

    device: str = ""
    count: int = 1
    threads: int = 0
    runner: str = ""

    def __post_init__(self) -> None:
        _at_least("count", self.count, 1)
        _at_least("threads", self.threads, 0)
        _one_of("runner", self.runner or RUNNERS[0], RUNNERS)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model to serve. ``name`` is what clients ask for (default: the last part of
    ``model``); ``lazy`` loads at the first request. ``threads`` 0: text models share the cores
    evenly, encoders have one. ``capability`` None: found from the model's files. ``runner``: a
    worker is a thread of this process, or a process of its own. ``workers`` are its replicas
    where it has more than one, or they differ.
    ``quantization`` is a text model's; encoders keep their floats."""

    model: str
    name: str = ""
    aliases: tuple[str, ...] = ()
    revision: str = ""
    lazy: bool = False
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    capability: Capability | None = None
    runner: str = RUNNERS[0]
    workers: tuple[WorkerConfig, ...] = ()
    quantization: str = "none"

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model is empty")
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("runner", self.runner, RUNNERS)
        _one_of("quantization", self.quantization, ("none", "int8"))
        _at_least("threads", self.threads, 0)
        if self.num_replicas > REPLICAS_MAX:
            raise ConfigError(f"{self.model} has {self.num_replicas} workers, of {REPLICAS_MAX}")
        if not self.name:
            object.__setattr__(self, "name", self.model.rstrip("/").rsplit("/", 1)[-1])

    @property
    def num_replicas(self) -> int:
        """How many replicas are wanted of it."""
        return sum(worker.count for worker in self.workers) or 1

    def replica(self, index: int) -> ModelConfig:
        """What the replica of this number is to be, as a model of one worker. Beyond those
        configured: as the last of them."""
        alike = [worker for worker in self.workers for _ in range(worker.count)]
        worker = alike[min(index, len(alike) - 1)] if alike else WorkerConfig()
        return replace(
            self,
            device=worker.device or self.device,
            threads=worker.threads or self.threads,
            runner=worker.runner or self.runner,
            workers=(),
        )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The core's bounds, once the model is known.

    ``num_blocks * block_size`` holds at least one sequence of ``max_model_len`` (checked here,
    with the arithmetic), so the oldest sequence can always go on (D6).
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_queued_requests: int = 2048
    max_queued_tokens: int = 1_000_000
    step_time_target_s: float = 0.0  # 0: a step's prompts are bounded by its tokens alone
    stall_timeout_s: float = 30.0
    aging_s: float = 10.0
    prefix_cache: bool = True
    prepared_plans: bool = True
    cache_namespace: str = ""

    def __post_init__(self) -> None:
        _at_least("block-size", self.block_size, 1)
        _at_least("max-model-len", self.max_model_len, 2)
        _at_least("max-num-seqs", self.max_num_seqs, 1)
        _at_least("max-queued-requests", self.max_queued_requests, 1)
        _at_least("max-queued-tokens", self.max_queued_tokens, 1)
        _require_room_for_prompts(self.max_num_batched_tokens, self.max_num_seqs)
        needed = -(-self.max_model_len // self.block_size)
        if self.num_blocks < needed:
            raise ConfigError(
                f"the KV pool has {self.num_blocks} blocks of {self.block_size} tokens, but one "
                f"sequence of --max-model-len {self.max_model_len} needs {needed}"
            )


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The bounds of an encoder's core, once the encoder is known. A step takes at most
    ``max_num_seqs`` inputs and ``max_num_batched_tokens`` tokens, padding counted; an input longer
    than that has a step of its own."""

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_queued_requests: int = 2048
    max_queued_tokens: int = 1_000_000
    stall_timeout_s: float = 30.0
    aging_s: float = 10.0

    def __post_init__(self) -> None:
        _at_least("max-model-len", self.max_model_len, 1)
        _at_least("max-num-seqs", self.max_num_seqs, 1)
        _at_least("max-num-batched-tokens", self.max_num_batched_tokens, 1)
        _at_least("max-queued-requests", self.max_queued_requests, 1)
        _at_least("max-queued-tokens", self.max_queued_tokens, 1)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine is told at start. Seconds, bytes and counts as the names say."""

    models: tuple[ModelConfig, ...] = field(
        default_factory=lambda: tuple(ModelConfig(name) for name in DEMO_MODELS)
    )
    block_size: int = 16
    max_model_len: int | None = None  # None: the model's, at most what the KV pool holds
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_queued_requests: int = 2048
    max_queued_tokens: int = 1_000_000
    step_time_target_s: float = 0.15  # 0: none; of text models' steps with prompts in them
    kv_cache_memory: int | None = None
    memory_limit: int | None = None  # None: 0.80 of what the process may use
    stall_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    spawn_timeout_s: float = 30.0
    step_timeout_s: float = 60.0  # guess: far above any step that a client would wait for
    default_deadline_s: float | None = None
    routing: str = ROUTINGS[0]  # which replica of a model a request goes to
    max_worker_deaths: int = 5  # of a model within 10 minutes, until it is given up
    idle_ttl_s: float | None = None  # None: a model is evicted for want of room only
    stream_buffer: int = STREAM_BUFFER
    in_process_buffer: int = IN_PROCESS_BUFFER
    prefix_cache: bool = True
    prepared_plans: bool = True
    seed: int = 0
    telemetry: bool = True  # off: for measuring what it costs
    check_level: int = 1  # ENGINE_CHECK: 0 asserts, 1 checks when idle and at exit, 2 each step

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("no --model is given")
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two models are served as {name!r}; use --served-model-name")
        for flag, value, minimum in (
            ("block-size", self.block_size, 1),
            ("max-num-seqs", self.max_num_seqs, 1),
            ("max-queued-requests", self.max_queued_requests, 1),
            ("max-queued-tokens", self.max_queued_tokens, 1),
            ("stream-buffer", self.stream_buffer, 1),
            ("in-process-buffer", self.in_process_buffer, 1),
            ("max-worker-deaths", self.max_worker_deaths, 1),
            ("drain-timeout", self.drain_timeout_s, 0),
            ("step-time-target", self.step_time_target_s, 0),
        ):
            _at_least(flag, value, minimum)
        for flag, seconds in (
            ("stall-timeout", self.stall_timeout_s),
            ("spawn-timeout", self.spawn_timeout_s),
            ("step-timeout", self.step_timeout_s),
            ("default-deadline", self.default_deadline_s),
            ("idle-ttl", self.idle_ttl_s),
        ):
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"--{flag} is {seconds:g} s, but must be more than 0")
        _one_of("routing", self.routing, ROUTINGS)
        if self.max_model_len is not None:
            _at_least("max-model-len", self.max_model_len, 2)
        _require_room_for_prompts(self.max_num_batched_tokens, self.max_num_seqs)
