"""The first steps of a fresh model, and what a step needs beside weights and KV pool.

Rule 1: warming up runs the runner's own steps, on blocks nobody owns yet, and leaves no
sequence behind; what fails here fails the load and not the first user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.core.plan import (
    SCORED_TOKENS_MAX,
    AdmittedSequence,
    BlockDelta,
    Logits,
    Row,
    StepPlan,
)
from engine.core.types import BlockId, PlanId, Sampling, SequenceId, Stops

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engine.core.plan import RunnerSpec, StepResult
    from engine.model.kv_cache import PoolSize

# Ids that no scheduler hands out: it counts from 0.
WARM_UP_SEQUENCE = SequenceId(-1)
WARM_UP_PLAN = PlanId(-1)
# Activations that are alive at once in a layer, in units of tokens × (hidden + MLP width):
# residual, normed input, QKV, attention output, gate, up, their product. A guess, rounded up.
LIVE_ACTIVATIONS = 4
# Logits are kept in the model's dtype, in float32, and once more while they are sampled.
LOGITS_COPIES = 3


def warm_up(execute: Callable[[StepPlan], StepResult], pool: PoolSize) -> None:
    """A prompt of two tokens and one decode, greedy: every kernel's first call, every weight's
    first read."""
    count = min(2, pool.max_model_len)
    new = AdmittedSequence(
        WARM_UP_SEQUENCE, (0,) * count, Sampling(temperature=0.0), Stops(max_tokens=2)
    )
    blocks = BlockDelta(0, tuple(BlockId(i) for i in range(min(2, pool.num_blocks))))
    execute(StepPlan(WARM_UP_PLAN, (Row(new.sequence, 0, count, blocks, Logits.LAST),),
                     admitted=(new,)))  # fmt: skip
    if len(blocks.append) * pool.block_size > count:
        kept = BlockDelta(len(blocks.append))
        execute(StepPlan(WARM_UP_PLAN, (Row(new.sequence, count, 1, kept, Logits.LAST),)))
    execute(StepPlan(WARM_UP_PLAN, (), released=(new.sequence,)))


def workspace_bytes(
    spec: RunnerSpec, config: Any, dtype: torch.dtype, activations: int | None = None
) -> int:
    """An upper estimate of a step's own memory: activations and logits of the largest plan.
    ``activations``: where they are known to the byte, as of a compiled decoder."""
    rows = spec.max_num_seqs + SCORED_TOKENS_MAX
    if activations is None:
        mlp = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
        width = LIVE_ACTIVATIONS * (int(config.hidden_size) + mlp)
        activations = spec.max_num_batched_tokens * width * dtype.itemsize
    return activations + rows * int(config.vocab_size) * 4 * LOGITS_COPIES
