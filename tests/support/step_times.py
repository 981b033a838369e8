"""Makes a `StepTimes`, and feeds it measured steps."""

from types import SimpleNamespace

from engine.config import SchedulerConfig
from engine.core.common.types import PlanId, SequenceId
from engine.core.text.plan import Logits, Row, StepPlan
from engine.core.text.step_times import StepTimes


def step_times(budget=2048, *, step_s=0.0, beside_s=0.0):
    """Return the estimate of a scheduler with this step budget and these targets."""
    return StepTimes(
        SchedulerConfig(
            max_model_len=16,
            num_blocks=1,
            max_num_seqs=1,
            max_num_batched_tokens=budget,
            step_time_target_s=step_s,
            inter_token_target_s=beside_s,
        )
    )


def note(times, seconds, *, prompt=0, decodes=0, drafts=0, image_cost=0):
    """Note a step with so many prompt tokens, decodes, and draft tokens of the first decode."""
    counts = [1] * decodes + [prompt] * (prompt > 0)
    counts[0] += drafts
    rows = tuple(Row(SequenceId(i), 5, n, None, Logits.LAST) for i, n in enumerate(counts))
    plan = StepPlan(PlanId(1), rows)
    step = SimpleNamespace(rows=rows, plan=plan, num_drafts=drafts, image_cost=image_cost)
    times.note(step, prompt + decodes, seconds)
