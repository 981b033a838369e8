"""Makes unloaded runners from the configuration, which decides their kind, place and resources.

Rule: torch is imported only to make a runner that works in this process, and sentence-transformers
only when an encoder is loaded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine.memory_limit import default_limit
from engine.status import Capability
from engine.worker.interface import RunnerSpec
from engine.worker.load import capability
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import resolve, short_name
from engine.worker.pinned_runner import PinnedEncodeRunner, PinnedTextRunner
from engine.worker.process.runner import ProcessRunner

if TYPE_CHECKING:
    from engine.config import EngineConfig, ModelConfig
    from engine.worker.interface import EncodeRunner, TextRunner

RUNNER_OF = "engine.worker.factory:runner_of"  # the function that a worker process calls
ENCODERS = (Capability.TEXT_EMBEDDING, Capability.RERANK)


def threads_for(model: ModelConfig, config: EngineConfig) -> int:
    """Return how many CPU threads a worker uses. Workers of text models share the cores evenly and
    have at least one each; an encoder's worker has one."""
    if model.threads:
        return model.threads
    if _known_capability(model) in ENCODERS:
        return 1
    num_workers = sum(
        one.num_replicas for one in config.models if _known_capability(one) not in ENCODERS
    )
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def _known_capability(model: ModelConfig) -> Capability | None:
    return model.capability or capability.find(model.model, model.revision)


def runner_spec(model: ModelConfig, config: EngineConfig) -> RunnerSpec:
    """Return one model's share of the configuration, as its runner needs it."""
    limit = config.memory_limit or default_limit()
    return RunnerSpec(
        model=model.model,
        revision=model.revision,
        device=model.device,
        dtype=model.dtype,
        threads=threads_for(model, config),
        block_size=config.block_size,
        kv_bytes=config.kv_cache_memory or None,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        memory_limit=limit,
        seed=config.seed,
        quantization=model.quantization,
    )


def make_runner(model: ModelConfig, config: EngineConfig) -> TextRunner | EncodeRunner:
    """Return an unloaded runner that works where ``model.runner`` says: in any thread, on one
    thread, or in a process of its own.

    Raises:
        SpawnFailed: as `find_kind`, unless the runner is a process, which finds it out by itself.
    """
    if model.runner == "process":
        return make_process_runner(model, config)
    spec = runner_spec(model, config)
    if model.runner == "pinned":
        return pinned_runner_of(spec, model.capability, model.name)
    return runner_of(spec, model.capability)


def make_process_runner(model: ModelConfig, config: EngineConfig) -> ProcessRunner:
    """Return an unloaded runner that works in a process of its own."""
    return ProcessRunner(RUNNER_OF, runner_spec(model, config), model.capability)


def pinned_runner_of(
    spec: RunnerSpec, kind: Capability | None, name: str
) -> PinnedTextRunner | PinnedEncodeRunner:
    """Return an unloaded runner that works on one thread, whose name contains ``name``. Without a
    kind, `find_kind` decides.

    Raises:
        SpawnFailed: as `find_kind`.
    """
    kind = kind or find_kind(spec)
    if kind in ENCODERS:
        return PinnedEncodeRunner(_encode_runner(spec, kind), name)
    return PinnedTextRunner(_text_runner(spec), name)


def runner_of(spec: RunnerSpec, kind: Capability | None) -> TextRunner | EncodeRunner:
    """Return an unloaded runner that works in any thread. Without a kind, `find_kind` decides.

    Raises:
        SpawnFailed: as `find_kind`.
    """
    kind = kind or find_kind(spec)
    return _encode_runner(spec, kind) if kind in ENCODERS else _text_runner(spec)


def find_kind(spec: RunnerSpec) -> Capability:
    """Return a model's capability, as its files show. A Hugging Face model that is not cached is
    downloaded. A model whose files show none counts as a text model, whose runner will refuse to
    load it and say why.

    Raises:
        SpawnFailed: there are no such files. This is known before torch is imported, which takes
            seconds.
    """
    try:
        directory = resolve(spec.model, spec.revision).directory
    except Refusal as refusal:
        raise refusal.for_model(short_name(spec.model)) from refusal
    try:
        return capability.capability_of(directory)
    except Refusal:
        return Capability.TEXT_TO_TEXT


def _text_runner(spec: RunnerSpec) -> TextRunner:
    from engine.worker.text_runner import TorchRunner

    return TorchRunner(spec)


def _encode_runner(spec: RunnerSpec, kind: Capability) -> EncodeRunner:
    from engine.worker.encoders.runner import EncoderRunner

    return EncoderRunner(spec, kind)
