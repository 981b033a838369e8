"""The engine's configuration.

Rule 1: a configuration that exists is valid. Making an invalid one raises `ConfigError`, which
names the flag and what to change; a model that is neither a name nor a `ModelConfig` raises
TypeError. Rule 2: the defaults of what an operator can set stand here, and `serve --help` shows
each.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import ConfigError
from engine.status import Capability

DEMO_MODELS = ("demo-stories", "demo-embed", "demo-rerank")
IN_PROCESS_BUFFER = 4096  # unread messages of a stream in this process
STREAM_BUFFER = 256  # messages of a gRPC stream that are not written yet
RUNNERS = ("thread", "process")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "int4")
SPECULATIONS = ("off", "lookup", "model")
ROUTINGS = ("least-tokens", "round-robin", "prefix")
RANKS_MAX = 64  # guess: as for replicas
REPLICAS_MAX = 64  # guess: far more than the devices and cores of one machine can use
THREADS_MAX = 1024  # guess: more than a machine has cores; each thread has memory of its own


def _at_least(flag: str, value: float, minimum: float) -> None:
    if value < minimum:
        raise ConfigError(f"--{flag} is {value:g}, but must be at least {minimum:g}")


def _number_of_threads(value: int) -> None:
    _at_least("threads", value, 0)
    if value > THREADS_MAX:
        raise ConfigError(f"--threads is {value}, but may be at most {THREADS_MAX}")


def _require_room_for_prompts(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Check that a step has a token for each running sequence and one more for a prompt."""
    if max_num_batched_tokens <= max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({max_num_batched_tokens}) must be greater than "
            f"--max-num-seqs ({max_num_seqs}), so that every step has a token left for a prompt"
        )


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        *most, last = allowed
        raise ConfigError(f"--{flag} is {value!r}; use {', '.join(most)} or {last}")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Replicas of a model that are alike. An empty or 0 value stands for the model's own value."""

    device: str = ""
    count: int = 1  # replicas
    threads: int = 0
    runner: str = ""

    def __post_init__(self) -> None:
        _at_least("count", self.count, 1)
        _number_of_threads(self.threads)
        _one_of("runner", self.runner or RUNNERS[0], RUNNERS)


# The files in an adapter's directory: its configuration, and its weights.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter (LoRA) of a text model, in a directory that peft wrote. Clients ask for it by
    ``BASE:NAME``, the name of its base model before its own."""

    name: str
    directory: str
    aliases: tuple[str, ...] = ()  # further names, without the base's

    def __post_init__(self) -> None:
        directory = os.path.expanduser(os.fspath(self.directory))
        object.__setattr__(self, "directory", directory)
        if not self.name or ":" in self.name:
            raise ConfigError(f"the adapter's name {self.name!r} is empty or has a colon")
        if not self.directory:
            raise ConfigError(f"the adapter {self.name} has no directory")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model to serve."""

    model: str  # a directory, a GGUF file, a demo id or a Hugging Face id
    name: str = ""  # by which clients ask for it; empty: the last part of `model`
    aliases: tuple[str, ...] = ()  # further names
    revision: str = ""  # a branch, tag or commit of a Hugging Face id
    lazy: bool = False  # the first request loads the model, not the server's start
    device: str = "auto"  # auto: the first of cuda, mps and cpu that is available
    dtype: str = "auto"  # auto: depends on the checkpoint and the device
    # CPU threads of a step, always so many. 0: the models share what `engine.limits.cpu` says, and
    # use fewer while other programs take the cores; an encoder has one.
    threads: int = 0
    # None: the model's files determine it. A text is one of Capability's values.
    capability: Capability | None = None
    runner: str = RUNNERS[0]  # thread: a thread of the server; process: its own
    workers: tuple[WorkerConfig, ...] = ()  # empty: one replica with the values above
    quantization: str = "none"  # of a text model's weights; encoders ignore it
    adapters: tuple[AdapterConfig, ...] = ()  # only text models have some
    tp: int = 1  # processes that a text model is divided among; encoders ignore it
    speculation: str = SPECULATIONS[1]  # how a text model's next tokens are drafted
    draft_model: str = ""  # of the same tokenizer; it drafts, too, unless the speculation is off

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", os.fspath(self.model))
        if not self.model:
            raise ConfigError("--model is empty")
        if isinstance(self.capability, str):
            _one_of("capability", self.capability, tuple(one.value for one in Capability))
            object.__setattr__(self, "capability", Capability(self.capability))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("runner", self.runner, RUNNERS)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("speculation", self.speculation, SPECULATIONS)
        object.__setattr__(self, "draft_model", os.fspath(self.draft_model))
        if self.speculation == "model" and not self.draft_model:
            raise ConfigError("--speculation is 'model', but --draft-model is not given")
        if self.draft_model and self.speculation == "lookup":
            object.__setattr__(self, "speculation", "model")
        if self.draft_model and self.tp > 1:
            raise ConfigError(
                f"{self.model} has --tensor-parallel-size {self.tp} and --draft-model, but a "
                "divided model drafts nothing; leave one of them out"
            )
        _number_of_threads(self.threads)
        _at_least("tensor-parallel-size", self.tp, 1)
        if self.tp > RANKS_MAX:
            raise ConfigError(
                f"--tensor-parallel-size is {self.tp}, but may be at most {RANKS_MAX}"
            )
        if self.tp > 1 and self.adapters:
            raise ConfigError(
                f"{self.model} has --tensor-parallel-size {self.tp} and adapters, but a divided "
                "model takes none; leave one of them out"
            )
        if self.num_replicas > REPLICAS_MAX:
            raise ConfigError(
                f"{self.model} has {self.num_replicas} workers, but may have at most {REPLICAS_MAX}"
            )
        if not self.name:
            object.__setattr__(self, "name", self.model.rstrip("/").rsplit("/", 1)[-1])

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that the model and its adapters are asked for by."""
        found = [self.name, *self.aliases]
        for adapter in self.adapters:
            found += [f"{self.name}:{adapter.name}", *adapter.aliases]
        return tuple(found)

    @property
    def num_replicas(self) -> int:
        """How many replicas are configured for the model."""
        return sum(worker.count for worker in self.workers) or 1

    def replica(self, index: int) -> ModelConfig:
        """Return the configuration of one replica, as a model with one worker. An ``index`` beyond
        the configured workers stands for one more of the last."""
        alike = [worker for worker in self.workers for _ in range(worker.count)]
        worker = alike[min(index, len(alike) - 1)] if alike else WorkerConfig()
        return replace(
            self,
            device=worker.device or self.device,
            threads=worker.threads or self.threads,
            runner=worker.runner or self.runner,
            workers=(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """The limits that a scheduler has whatever it schedules."""

    max_queued_requests: int = 2048  # that wait for their start
    max_queued_tokens: int = 1_000_000  # of the queued requests' prompts; denoising steps of images
    stall_timeout_s: float = 30.0  # how long a full stream may go unread
    aging_s: float = 10.0  # a request that waits so long gains one level of priority

    def __post_init__(self) -> None:
        _at_least("max-queued-requests", self.max_queued_requests, 1)
        _at_least("max-queued-tokens", self.max_queued_tokens, 1)


@dataclass(frozen=True, slots=True)
class SchedulerConfig(CoreLimits):
    """The limits of a text model's scheduler, known once the model is loaded.

    The KV pool holds at least one sequence of full length, so that the oldest sequence can always
    go on (D6).
    """

    num_blocks: int  # of the KV pool
    block_size: int = 16  # tokens
    max_model_len: int = 2048  # tokens of a sequence, prompt and output
    max_num_seqs: int = 256  # sequences that run at once
    max_num_batched_tokens: int = 2048  # of one step
    step_time_target_s: float = 0.0  # of a step with prompts in it; 0: no target
    inter_token_target_s: float = 0.0  # of such a step beside decodes; 0: no target of its own
    prefix_cache: bool = True  # blocks of equal prefixes are shared
    prepared_plans: bool = True  # the next step is planned while one runs
    cache_namespace: str = ""  # keeps the prefixes of different models apart
    num_states: int = 0  # state slots of a model with recurrent layers; 0: it has none

    def __post_init__(self) -> None:
        _at_least("block-size", self.block_size, 1)
        _at_least("max-model-len", self.max_model_len, 2)
        _at_least("max-num-seqs", self.max_num_seqs, 1)
        CoreLimits.__post_init__(self)
        _require_room_for_prompts(self.max_num_batched_tokens, self.max_num_seqs)
        if 0 < self.num_states < self.max_num_seqs:
            raise ConfigError(
                f"the model's states have {self.num_states} slots, but --max-num-seqs is "
                f"{self.max_num_seqs}, and each sequence that runs needs one"
            )
        needed = -(-self.max_model_len // self.block_size)
        if self.num_blocks < needed:
            raise ConfigError(
                f"the KV pool has {self.num_blocks} blocks of {self.block_size} tokens, but one "
                f"sequence of --max-model-len {self.max_model_len} needs {needed}"
            )


@dataclass(frozen=True, slots=True)
class EncoderConfig(CoreLimits):
    """The limits of an encoder's scheduler, known once the encoder is loaded.

    An input that is longer than ``max_num_batched_tokens`` has a step of its own.
    """

    max_model_len: int  # tokens of an input
    max_num_seqs: int = 256  # inputs of one step
    max_num_batched_tokens: int = 2048  # of one step, with padding

    def __post_init__(self) -> None:
        _at_least("max-model-len", self.max_model_len, 1)
        _at_least("max-num-seqs", self.max_num_seqs, 1)
        _at_least("max-num-batched-tokens", self.max_num_batched_tokens, 1)
        CoreLimits.__post_init__(self)


@dataclass(frozen=True, slots=True)
class ImageConfig(CoreLimits):
    """The limits of an image model's scheduler."""

    max_drawings: int = 4  # that have begun and take turns

    def __post_init__(self) -> None:
        _at_least("max-drawings", self.max_drawings, 1)
        CoreLimits.__post_init__(self)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything of the engine that an operator can set.

    A name or a path in ``models`` stands for the `ModelConfig` of that model, and one model for a
    tuple of one. The limits of schedulers are explained at `SchedulerConfig`; each replica has a
    scheduler.
    """

    models: tuple[ModelConfig, ...] = field(
        default_factory=lambda: tuple(ModelConfig(name) for name in DEMO_MODELS)
    )
    block_size: int = 16
    max_model_len: int | None = None  # None: the model's own, or what its KV pool holds if less
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    # Drawings of an image model that take turns. A guess: with more, each would wait longer and
    # none would end sooner.
    max_drawings: int = 4
    max_queued_requests: int = 2048
    max_queued_tokens: int = 1_000_000
    # Of an image's file. A picture of 8K has 33.2 million, and a phone's mostly 12 or 24; decoding
    # takes up to 20 bytes for each, one image at a time.
    max_image_pixels: int = 2**25
    step_time_target_s: float = 0.15
    inter_token_target_s: float = 0.02
    kv_cache_memory: int | None = None  # bytes of each replica's KV pool; None: the runner decides
    prefault_kv_cache: bool = False  # write to a CPU's whole KV pool at the load
    memory_limit: int | None = None  # bytes of all models; None: 0.80 of what the process may use
    stall_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0  # for running requests, when the server or a model ends
    spawn_timeout_s: float = 30.0  # how long a request waits for its model to load
    step_timeout_s: float = 60.0  # a longer step counts as hung; guess: far longer than any should
    default_deadline_s: float | None = None  # of requests that have no deadline
    routing: str = ROUTINGS[0]  # how the replica of a request is chosen
    max_worker_deaths: int = 5  # of a replica within 10 minutes; it then does not restart
    idle_ttl_s: float | None = None  # an idle replica is unloaded then; None: only to make room
    stream_buffer: int = STREAM_BUFFER
    in_process_buffer: int = IN_PROCESS_BUFFER
    prefix_cache: bool = True
    prepared_plans: bool = True
    seed: int = 0  # of random choices for which no request has a seed
    telemetry: bool = True  # False: for measuring what telemetry costs
    check_level: int = 1  # ENGINE_CHECK: 0 asserts, 1 also invariants when idle, 2 after each step

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", _models_of(self.models))
        if not self.models:
            raise ConfigError("no --model is given")
        names = [name for model in self.models for name in model.names]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"two models are served as {name!r}; rename one with "
                    "--served-model-name, or an adapter"
                )
        for flag, value, minimum in (
            ("block-size", self.block_size, 1),
            ("max-num-seqs", self.max_num_seqs, 1),
            ("max-drawings", self.max_drawings, 1),
            ("max-queued-requests", self.max_queued_requests, 1),
            ("max-queued-tokens", self.max_queued_tokens, 1),
            ("stream-buffer", self.stream_buffer, 1),
            ("in-process-buffer", self.in_process_buffer, 1),
            ("max-worker-deaths", self.max_worker_deaths, 1),
            ("max-image-pixels", self.max_image_pixels, 1),
            ("drain-timeout", self.drain_timeout_s, 0),
            ("step-time-target", self.step_time_target_s, 0),
            ("inter-token-target", self.inter_token_target_s, 0),
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


def _models_of(given: Any) -> tuple[ModelConfig, ...]:
    """Return the models that ``EngineConfig.models`` stands for.

    Raises:
        TypeError: there is something else than models, names and paths.
    """
    models = (given,) if isinstance(given, str | os.PathLike | ModelConfig) else tuple(given)
    for model in models:
        if not isinstance(model, str | os.PathLike | ModelConfig):
            raise TypeError(
                f"EngineConfig.models takes names, paths and ModelConfigs, not {model!r}"
            )
    return tuple(
        model if isinstance(model, ModelConfig) else ModelConfig(os.fspath(model))
        for model in models
    )


def engine_config(given: EngineConfig | ModelConfig | str | None) -> EngineConfig:
    """Return the configuration that ``open_engine`` was given: as it is, of one model, or the
    default.

    Raises:
        TypeError: it is something else.
    """
    if given is None:
        return EngineConfig()
    if isinstance(given, str | os.PathLike | ModelConfig):
        return EngineConfig(models=_models_of(given))
    if not isinstance(given, EngineConfig):
        kind = type(given).__name__
        raise TypeError(f"open_engine takes an EngineConfig or a model's name, not {kind}")
    return given
