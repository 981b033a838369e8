"""Runs the first steps of a loaded model, and estimates a step's own memory.

Rule: warming up runs the runner's own steps on blocks that no sequence has yet, and leaves no
sequence behind. An error here, or a row without a token, fails the load, and not the first user's
request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.core.common.steps import RowFailure, RowPhase
from engine.core.common.types import BlockId, PlanId, SequenceId
from engine.core.text.plan import (
    DRAFTING_STEP_MAX,
    SCORED_TOKENS_MAX,
    AdmittedSequence,
    BlockDelta,
    Logits,
    Row,
    StateDelta,
    StepPlan,
)
from engine.core.text.types import Sampling, Stops
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engine.core.text.plan import StepResult
    from engine.worker.forward.kv_cache import PoolSize
    from engine.worker.interface import RunnerSpec

# Ids that no scheduler uses: schedulers count from 0.
WARM_UP_SEQUENCE = SequenceId(-1)
WARM_UP_PLAN = PlanId(-1)
# A layer's activations that exist at once (residual, normed input, QKV, attention output, gates,
# ups, their product), in units of tokens × (hidden size + MLP width). Not measured.
LIVE_ACTIVATIONS = 4
# How many copies of the logits exist at once: in the model's dtype, in float32, and in sampling.
LOGITS_COPIES = 3


def warm_up(execute: Callable[[StepPlan], StepResult], pool: PoolSize, *, decodes: bool) -> None:
    """Compute a prompt of two tokens and sample one, which reads every weight for the first time.
    With ``decodes``, also compute that one, which reads them again: modules of a library may do
    more in a first decode, and layers with states compute otherwise.

    Raises:
        Refusal: A step gave no token, for example because its results overflow.
    """
    count = min(2, pool.max_model_len)
    new = AdmittedSequence(
        WARM_UP_SEQUENCE, (0,) * count, Sampling(temperature=0.0), Stops(max_tokens=2)
    )
    blocks = BlockDelta(0, tuple(BlockId(i) for i in range(min(2, pool.num_blocks))))
    state = StateDelta(BlockId(0)) if pool.num_states else None
    first = Row(new.sequence, 0, count, blocks, Logits.LAST, state=state)
    _check(execute(StepPlan(WARM_UP_PLAN, (first,), admitted=(new,))))
    if decodes and len(blocks.append) * pool.block_size > count:
        kept = BlockDelta(len(blocks.append))
        row = Row(new.sequence, count, 1, kept, Logits.LAST)
        _check(execute(StepPlan(WARM_UP_PLAN, (row,))))
    execute(StepPlan(WARM_UP_PLAN, (), released=(new.sequence,)))


def _check(result: StepResult) -> None:
    for row in result.rows:
        if isinstance(row, RowFailure):
            phase = row.phase
            what = "its results are not finite numbers" if phase is RowPhase.SAMPLE else phase
            raise Refusal(f"its first step gave no token ({what})", detail=row.detail)


def workspace_bytes(
    spec: RunnerSpec, config: Any, dtype: torch.dtype, activations: int | None = None
) -> int:
    """Return an upper estimate of a step's own memory: activations and logits of the largest plan.
    ``activations`` are their bytes if known, as for a compiled decoder."""
    rows = max(spec.max_num_seqs, DRAFTING_STEP_MAX) + SCORED_TOKENS_MAX
    if activations is None:
        mlp = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
        width = LIVE_ACTIVATIONS * (int(config.hidden_size) + mlp)
        activations = spec.max_num_batched_tokens * width * dtype.itemsize
    return activations + rows * int(config.vocab_size) * 4 * LOGITS_COPIES
