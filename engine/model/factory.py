"""From configuration to an unloaded runner: the spec's arithmetic.

Rule: imports torch only when the runner loads.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine.core.plan import RunnerSpec
from engine.memory import default_limit

if TYPE_CHECKING:
    from engine.config import EngineConfig, ModelConfig
    from engine.core.plan import Runner


def threads_for(model: ModelConfig, config: EngineConfig) -> int:
    """CPU threads of a text worker: the models share the cores evenly, one each at least."""
    return model.threads or max(1, len(os.sched_getaffinity(0)) // len(config.models))


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
    )


def make_runner(model: ModelConfig, config: EngineConfig) -> Runner:
    """A runner for a text model, unloaded."""
    from engine.model.runner import TorchRunner

    return TorchRunner(runner_spec(model, config))
