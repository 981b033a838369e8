"""The engine's configuration.

Rule 1: a configuration that exists is valid. Making an invalid one raises `ConfigError`, which
names the flag and what to change; a model that is neither a name nor a `ModelConfig` raises
TypeError. Rule 2: each setting of an operator is a field made by `setting`, here or in a group of
`engine.settings`.
"""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from engine.errors import ConfigError
from engine.settings import (
    RUNNERS,
    THREADS_MAX,
    ImageLimits,
    ModelChoices,
    ModelMemory,
    QueueLimits,
    StepLimits,
    TextSteps,
    check,
    require_one_of,
    setting,
)
from engine.status import Capability

DEMO_MODELS = ("demo-stories", "demo-embed", "demo-rerank")
ROUTINGS = ("least-tokens", "round-robin", "prefix")
REPLICAS_MAX = 64  # replicas of a model; far more than one machine's devices and cores can use


def _require_room_for_prompts(steps: StepLimits) -> None:
    """Check that a step has a token for each running sequence and one more for a prompt."""
    if steps.max_num_batched_tokens <= steps.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({steps.max_num_batched_tokens}) must be greater than "
            f"--max-num-seqs ({steps.max_num_seqs}), so that every step has a token left for a "
            "prompt"
        )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Replicas of a model with the same settings. An empty or 0 value means the model's own
    value."""

    device: str = ""
    count: int = setting(1, low=1)  # replicas
    threads: int = setting(0, low=0, high=THREADS_MAX)
    runner: str = setting("", choices=RUNNERS)

    def __post_init__(self) -> None:
        check(self)


# The files in an adapter's directory: its configuration, and its weights.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter (LoRA) of a text model, in a directory that peft wrote. Clients name it
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


@dataclass(frozen=True)
class ModelConfig(ModelChoices):
    """One model to serve."""

    model: str  # a directory, a GGUF file, a demo id or a Hugging Face id
    name: str = ""  # the model's name in requests; empty: the last part of `model`
    aliases: tuple[str, ...] = ()  # further names
    _: KW_ONLY
    runner: str = setting(
        RUNNERS[0],
        "thread: models compute in threads of the server; process: each in a process of its own",
        choices=RUNNERS,
        section="models",
    )
    lazy: bool = setting(False, "load a model when a request first asks for it")
    # None: the model's files determine it. A str must be one of Capability's values.
    capability: Capability | None = None
    workers: tuple[WorkerConfig, ...] = ()  # empty: one replica with the model's own values
    adapters: tuple[AdapterConfig, ...] = ()  # only of text models

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", os.fspath(self.model))
        if not self.model:
            raise ConfigError("--model is empty")
        if isinstance(self.capability, str):
            require_one_of("capability", self.capability, tuple(c.value for c in Capability))
            object.__setattr__(self, "capability", Capability(self.capability))
        check(self)
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
        """All names of the model and its adapters in requests."""
        taken = [self.name, *self.aliases]
        for adapter in self.adapters:
            taken += [f"{self.name}:{adapter.name}", *adapter.aliases]
        return tuple(taken)

    @property
    def num_replicas(self) -> int:
        """The number of replicas that are configured for the model."""
        return sum(worker.count for worker in self.workers) or 1

    def replica(self, index: int) -> ModelConfig:
        """Return the configuration of one replica, as a model with one worker. An ``index`` beyond
        the configured workers gives another replica of the last."""
        alike = [worker for worker in self.workers for _ in range(worker.count)]
        worker = alike[min(index, len(alike) - 1)] if alike else WorkerConfig()
        return replace(
            self,
            device=worker.device or self.device,
            threads=worker.threads or self.threads,
            runner=worker.runner or self.runner,
            workers=(),
        )


@dataclass(frozen=True)
class SchedulerConfig(QueueLimits, TextSteps):
    """The limits of a text model's scheduler, known once the model is loaded.

    The KV pool holds at least one sequence of full length, so that the oldest sequence can always
    go on (D6).
    """

    num_blocks: int  # the KV pool's size
    max_model_len: int = setting(2048, low=2)  # tokens of a sequence, prompt and output
    cache_namespace: str = ""  # keeps the prefixes of different models apart
    num_states: int = 0  # state slots; 0: the model has no recurrent layers

    def __post_init__(self) -> None:
        check(self)
        _require_room_for_prompts(self)
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


@dataclass(frozen=True)
class EncoderConfig(QueueLimits, StepLimits):
    """The limits of an encoder's scheduler, known once the encoder is loaded."""

    max_model_len: int  # tokens of an input

    def __post_init__(self) -> None:
        check(self)
        if self.max_model_len < 1:
            raise ConfigError(f"--max-model-len is {self.max_model_len}, but must be at least 1")


@dataclass(frozen=True)
class ImageGenerationConfig(QueueLimits, ImageLimits):
    """The limits of an image model's scheduler."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class EngineConfig(ModelMemory, TextSteps, ImageLimits, QueueLimits):
    """All settings of the engine.

    A name or a path in ``models`` means that model's `ModelConfig`, and one model a tuple of it.
    Each replica has a scheduler with limits of its own.
    """

    models: tuple[ModelConfig, ...] = field(
        default_factory=lambda: tuple(ModelConfig(name) for name in DEMO_MODELS)
    )
    _: KW_ONLY
    kv_cache_memory: int | None = setting(
        None,
        "size of the KV pool, of which the states of recurrent layers take at most half",
        unset="as large as the model's weights or a 16th of the memory limit, up to 4 GiB, and at "
        "least one sequence of full length; at most what --max-num-seqs sequences need, and a "
        "quarter of the memory limit; 128 MiB for a shipped model",
        unit="BYTES",
        section="memory and steps",
    )
    memory_limit: int | None = setting(
        None,
        "most memory for models",
        unset="0.80 of the memory that the process may use",
        unit="BYTES",
    )
    default_deadline_s: float | None = setting(
        None,
        "deadline of requests that have none",
        unset="none",
        above=0,
        section="requests that wait",
    )
    stream_buffer: int = setting(  # messages of a gRPC stream that are not written yet
        256, "how many messages a stream may be ahead of its client", low=1
    )
    in_process_buffer: int = setting(4096, low=1)  # unread messages of a stream in this process
    routing: str = setting(
        ROUTINGS[0],
        "how the worker of a request is chosen: least-tokens, round-robin, or prefix (the worker "
        "that has cached most of the prompt, unless it has much more to do)",
        choices=ROUTINGS,
    )
    share_prefixes: bool = setting(
        False,
        "let the holders of different keys or certificates share cached prefixes; each may then "
        "learn from the times and counts of its answers what others have asked",
    )
    spawn_timeout_s: float = setting(
        30.0,
        "how long a request waits for its model to load",
        above=0,
        section="loads, failures and the end",
    )
    idle_ttl_s: float | None = setting(
        None,
        "unload a model that was not used for this long",
        unset="only if memory is needed",
        above=0,
    )
    max_worker_deaths: int = setting(
        5,
        "if a model's workers die this often within 10 minutes, they are not restarted any more",
        low=1,
    )
    step_timeout_s: float = setting(  # a guess: far longer than a step should take
        60.0,
        "how long a step may take before it counts as hung: it is then logged, health is "
        "NOT_SERVING, and a drain does not wait for it",
        above=0,
    )
    drain_timeout_s: float = setting(
        30.0, "how long requests may take to finish after a signal to end", low=0
    )
    telemetry: bool = True  # False: for measuring the cost of telemetry
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
        check(self)
        _require_room_for_prompts(self)


def _models_of(given: Any) -> tuple[ModelConfig, ...]:
    """Return the models of a value given for ``EngineConfig.models``.

    Raises:
        TypeError: A value is neither a model, a name nor a path.
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
    """Return the configuration for an argument of ``open_engine``: itself, one of a single model,
    or the default.

    Raises:
        TypeError: The argument is of another type.
    """
    if given is None:
        return EngineConfig()
    if isinstance(given, str | os.PathLike | ModelConfig):
        return EngineConfig(models=_models_of(given))
    if not isinstance(given, EngineConfig):
        kind = type(given).__name__
        raise TypeError(f"open_engine takes an EngineConfig or a model's name, not {kind}")
    return given
