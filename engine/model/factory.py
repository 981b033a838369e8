"""From configuration to an unloaded runner: which kind, and the spec's arithmetic.

Rule: imports torch only for a text model's runner, sentence-transformers only when an encoder
loads.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine.core.plan import RunnerSpec
from engine.memory import default_limit
from engine.model import capability
from engine.model.child import ChildRunner
from engine.model.refusal import Refusal
from engine.model.resolve import resolve
from engine.status import Capability

if TYPE_CHECKING:
    from engine.config import EngineConfig, ModelConfig
    from engine.core.encode_types import EncodeRunner
    from engine.core.plan import Runner

RUNNER_OF = "engine.model.factory:runner_of"  # as a worker process finds it
ENCODERS = (Capability.TEXT_EMBEDDING, Capability.RERANK)


def threads_for(model: ModelConfig, config: EngineConfig) -> int:
    """CPU threads of a worker: the text models' workers share the cores evenly, one each at least,
    and an encoder's has one."""
    if model.threads:
        return model.threads
    if _capability(model) in ENCODERS:
        return 1
    num_workers = sum(one.num_replicas for one in config.models if _capability(one) not in ENCODERS)
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def _capability(model: ModelConfig) -> Capability | None:
    return model.capability or capability.find(model.model, model.revision)


def runner_spec(model: ModelConfig, config: EngineConfig) -> RunnerSpec:
    """What the runner is told: one model's share of the configuration."""
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


def make_runner(model: ModelConfig, config: EngineConfig) -> Runner | EncodeRunner:
    """A runner for a text model or an encoder, unloaded: of this process, or of its own."""
    if model.runner == "process":
        return make_child(model, config)
    return runner_of(runner_spec(model, config), model.capability)


def make_child(model: ModelConfig, config: EngineConfig) -> ChildRunner:
    """The same in a process of its own, which `load` starts."""
    return ChildRunner(RUNNER_OF, runner_spec(model, config), model.capability)


def runner_of(spec: RunnerSpec, kind: Capability | None) -> Runner | EncodeRunner:
    """An unloaded runner. Without a kind, fetches a Hugging Face id that is not cached: only its
    files tell what it is for."""
    if kind is None:
        try:
            kind = capability.capability_of(resolve(spec.model, spec.revision).directory)
        except Refusal:
            kind = Capability.TEXT_TO_TEXT  # its runner will meet the same, and tell of it
    if kind in ENCODERS:
        from engine.model.encoders import EncoderRunner

        return EncoderRunner(spec, kind)
    from engine.model.runner import TorchRunner

    return TorchRunner(spec)
