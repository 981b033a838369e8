"""What the times of committed steps say of how fast the next ones will be.

Rule: each estimate is up to date whenever it is read. A step that only decodes is first noted in a
list, which the estimates take in before one of them is read, or once it holds `UNREAD_MAX` steps.
Between two steps the processor's caches are cold, and a line of a list costs less than the state of
five estimates. Each estimate takes in the same steps in the same order as if it were told of them
at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.common.rate import RecentRate
from engine.core.text.drafting.draft_lengths import DraftBudget, StepCosts
from engine.core.text.pace.best_rate import BestRate
from engine.core.text.pace.decode_pace import DecodePace

if TYPE_CHECKING:
    from engine.config import SchedulerConfig
    from engine.core.text.ledger import Ledger
    from engine.core.text.plan import StepPlan
    from engine.core.text.planned_step import PlannedStep

# Steps; a guess. More of them would save little, and the step after the last one would start later.
UNREAD_MAX = 16


class Speeds:
    """The estimates of one scheduler that follow from the times of its steps. `note` tells them of
    each step. What else an estimate learns, such as a refused prompt, its reader tells it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._recent_rate = RecentRate()
        self._best_rate = BestRate(config.max_num_batched_tokens, config.step_time_target_s)
        self._pace = DecodePace(config.max_num_batched_tokens, config.inter_token_target_s)
        self._costs = StepCosts()
        self._budget = DraftBudget()
        self._unread: list[tuple[int, float]] = []  # rows and seconds of steps that only decode

    def note(self, step: PlannedStep, whole_s: float, draft_s: float) -> None:
        """Count a committed step that took ``whole_s``, of which a draft model took ``draft_s``."""
        num_rows = len(step.rows)
        num_tokens = step.plan.num_tokens - step.num_drafts  # a sum over the rows
        is_special = step.num_drafts or step.image_cost or draft_s
        if num_tokens == num_rows and whole_s > 0 and not is_special:
            self._unread.append((num_rows, whole_s))
            if len(self._unread) >= UNREAD_MAX:
                self._catch_up()
            return
        self._catch_up()
        if not step.num_drafts:
            self._budget.note_other()
        seconds = whole_s - draft_s  # what a draft model took is no part of a step's pace
        if num_tokens == num_rows:
            self._costs.note(num_tokens, step.num_drafts, seconds)
        if seconds > 0:
            self._best_rate.note(num_tokens, seconds)
            self._recent_rate.note(num_tokens, whole_s)
            if step.num_drafts:  # decodes that verify drafts take longer
                seconds = self._costs.without(num_rows, step.num_drafts, seconds)
            if not step.image_cost:  # images that are kept cost it nothing, and others much
                self._pace.note(*_prompts_and_decodes(step.plan, num_tokens), seconds)

    def _catch_up(self) -> None:
        """Tell every estimate of the steps that are not read yet."""
        for num_rows, seconds in self._unread:
            self._budget.note_other()
            self._costs.note(num_rows, 0, seconds)
            self._best_rate.note(num_rows, seconds)
            self._recent_rate.note(num_rows, seconds)
            self._pace.note(0, num_rows, seconds)
        self._unread.clear()

    def prompt_tokens(self, ledger: Ledger, limit: int, num_decodes: int) -> int:
        """Return how many prompt tokens a step may have beside so many decodes: the smallest of
        ``limit``, of what can be computed in the time that a step should take, and of what the
        decodes can wait for (D4)."""
        num_sequences = len(ledger.running) + len(ledger.waiting)
        num_sequences = min(num_sequences, ledger.config.max_num_seqs)
        limit = min(limit, self.best_rate.prompt_budget)
        return self.pace.prompt_tokens(limit, num_sequences, num_decodes)

    # ---- the estimates, up to date

    @property
    def recent_rate(self) -> RecentRate:
        """The rate of the last steps."""
        self._catch_up()
        return self._recent_rate

    @property
    def best_rate(self) -> BestRate:
        """The highest rate of any step."""
        self._catch_up()
        return self._best_rate

    @property
    def pace(self) -> DecodePace:
        """How many prompt tokens decodes can wait for."""
        self._catch_up()
        return self._pace

    @property
    def costs(self) -> StepCosts:
        """How much longer a step with drafts takes."""
        self._catch_up()
        return self._costs

    @property
    def budget(self) -> DraftBudget:
        """What the drafts of a draft model may still cost."""
        self._catch_up()
        return self._budget


def _prompts_and_decodes(plan: StepPlan, num_tokens: int) -> tuple[int, int]:
    """Return how many prompt tokens a plan of ``num_tokens``, drafts not counted, has, and how many
    decodes. A plan with prompts has no drafts."""
    if num_tokens == len(plan.rows):
        return 0, len(plan.rows)
    chunks = [row.count for row in plan.rows if row.count > 1]
    return sum(chunks), len(plan.rows) - len(chunks)
