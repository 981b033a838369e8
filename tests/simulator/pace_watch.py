"""How many prompt tokens a step may compute, by the watcher's own record of earlier steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import SchedulerConfig
    from engine.core.text.plan import StepPlan

LARGE = 8  # steps of an eighth of the budget or more show the speed; every step may take as much
FIXED = 4  # four times the shortest step is never too long
ROUNDING = 1e-9


class PaceWatch:
    """Watch one scheduler. Times are the core's."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._budget = config.max_num_batched_tokens
        self._target_s = config.step_time_target_s
        self._best, self._least_s = 0.0, math.inf
        self._most = self._most_before = math.inf  # now, and while the step before this one ran
        self._running: tuple[int, float] | None = None  # the step's tokens, and its start

    def planned(self, plan: StepPlan, now: float) -> str:
        """Return what is wrong with a plan that is sent now, or "".

        The plan may have been made while the step before it ran.
        """
        self._running = plan.num_tokens - plan.num_drafts, now
        most = max(self._most, self._most_before)
        prompts = sum(row.count for row in plan.rows if row.count > 1 and not row.drafts)
        if prompts <= most:
            return ""
        return f"{prompts} prompt tokens, and {most:g} at most for a target of {self._target_s:g} s"

    def done(self, now: float) -> None:
        """Take note that the step was computed."""
        if self._running is None:
            return
        (tokens, started_at), self._running = self._running, None
        self._most_before = self._most
        seconds = now - started_at
        if not self._target_s or seconds <= 0:
            return
        self._least_s = min(self._least_s, seconds)
        if tokens * LARGE >= self._budget:
            self._best = max(self._best, tokens / seconds)
        if self._best:
            most = self._best * max(self._target_s, FIXED * self._least_s) + ROUNDING
            self._most = max(-(-self._budget // LARGE), most)
