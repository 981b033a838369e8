"""The estimates of a scheduler against ones that are told of every step at once."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from engine.config import SchedulerConfig
from engine.core.common.rate import RecentRate
from engine.core.common.types import PlanId, SequenceId
from engine.core.text.drafting.draft_lengths import DraftBudget, StepCosts
from engine.core.text.pace.best_rate import BestRate
from engine.core.text.pace.decode_pace import DecodePace
from engine.core.text.pace.speeds import UNREAD_MAX, Speeds
from engine.core.text.plan import Logits, Row, StepPlan

CONFIG = SchedulerConfig(
    max_num_batched_tokens=256,
    max_num_seqs=16,
    num_blocks=128,
    step_time_target_s=0.2,
    inter_token_target_s=0.02,
)
NAMES = ("recent_rate", "best_rate", "pace", "costs", "budget")

COUNTS = st.lists(st.integers(1, 20), min_size=1, max_size=16)
SECONDS = st.sampled_from([0.0, 0.001, 0.002, 0.02, 0.3, 4.0])
DRAFT_S = st.sampled_from([0.0, 0.0, 0.0005])
STEPS = st.tuples(
    COUNTS | st.integers(1, 16).map(lambda count: [1] * count),
    st.integers(0, 3),  # drafts
    st.sampled_from([0, 0, 0, 40]),  # tokens' worth of images
    SECONDS,
    DRAFT_S,
)
RUNS = st.tuples(STEPS, st.integers(1, 2 * UNREAD_MAX))


def step_of(counts, num_drafts, image_cost):
    """Return a planned step, as far as it is read; drafts widen its first row."""
    if max(counts) > 1:
        num_drafts = 0  # a step with prompts has no drafts
    rows = [
        Row(SequenceId(index), 5, count + (num_drafts if not index else 0), None, Logits.LAST)
        for index, count in enumerate(counts)
    ]
    plan = StepPlan(PlanId(1), tuple(rows))
    return SimpleNamespace(rows=rows, plan=plan, num_drafts=num_drafts, image_cost=image_cost)


class Told:
    """The same estimates, each told of a step as soon as it is over."""

    def __init__(self):
        self.recent_rate, self.budget, self.costs = RecentRate(), DraftBudget(), StepCosts()
        self.best_rate = BestRate(CONFIG.max_num_batched_tokens, CONFIG.step_time_target_s)
        self.pace = DecodePace(CONFIG.max_num_batched_tokens, CONFIG.inter_token_target_s)

    def note(self, counts, step, whole_s, draft_s):
        """Count a step, which has so many tokens in its rows before drafts."""
        num_rows, num_tokens, seconds = len(counts), sum(counts), whole_s - draft_s
        if not step.num_drafts:
            self.budget.note_other()
        if num_tokens == num_rows:
            self.costs.note(num_rows, step.num_drafts, seconds)
        if seconds <= 0:
            return
        self.best_rate.note(num_tokens, seconds)
        self.recent_rate.note(num_tokens, whole_s)
        if step.num_drafts:
            seconds = self.costs.without(num_rows, step.num_drafts, seconds)
        if not step.image_cost:
            prompts = [count for count in counts if count > 1]
            self.pace.note(sum(prompts), num_rows - len(prompts), seconds)


def state_of(estimate):
    """Return everything that an estimate remembers."""
    if hasattr(estimate, "__slots__"):
        return {name: getattr(estimate, name) for name in estimate.__slots__}
    return vars(estimate)


@given(st.lists(RUNS, max_size=6), st.lists(st.sampled_from(NAMES), max_size=6))
def test_an_estimate_is_read_as_if_it_had_been_told_of_every_step_at_once(runs, reads):
    speeds, told, reads = Speeds(CONFIG), Told(), iter(reads)
    speeds.budget.left = told.budget.left = -100.0  # far from full, where nothing more is earned
    for (counts, drafts, image_cost, whole_s, draft_s), times in runs:
        step = step_of(counts, drafts, image_cost)
        for _ in range(times):
            speeds.note(step, whole_s, draft_s)
            told.note(counts, step, whole_s, draft_s)
            assert len(speeds._unread) < UNREAD_MAX
        if (name := next(reads, None)) is not None:
            assert state_of(getattr(speeds, name)) == state_of(getattr(told, name))
    for name in NAMES:
        assert state_of(getattr(speeds, name)) == state_of(getattr(told, name)), name
