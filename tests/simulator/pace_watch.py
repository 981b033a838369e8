"""How many prompt tokens a step may compute: those of the estimate in the time that the watcher
allows, by its own record of earlier steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import SchedulerConfig
    from engine.core.common.types import SequenceId
    from engine.core.text.plan import StepPlan
    from engine.core.text.step_times import StepTimes


class PaceWatch:
    """Watch one scheduler. Times are the core's."""

    def __init__(self, config: SchedulerConfig, times: StepTimes) -> None:
        self._config, self._times = config, times
        self._fewest, self._fewest_s = math.inf, 0.0  # decodes of a step, and how long they took
        self._decodes_s = 0.0  # the longest step without prompts
        self._before = [math.inf, math.inf]  # allowed when the step before this one was sent
        self._sampled: set[SequenceId] = set()
        self._running: tuple[int, int, float] | None = None  # prompt tokens, decodes, and start

    def planned(self, plan: StepPlan, now: float) -> str:
        """Return what is wrong with a plan that is sent now, or "".

        The plan may have been made while the step before it ran.
        """
        short = [row for row in plan.rows if row.count == 1 or row.drafts]
        decodes = len([row for row in short if row.sequence in self._sampled])
        self._sampled |= {row.sequence for row in plan.rows if row.logits.samples}
        prompts = sum(row.count for row in plan.rows) - sum(row.count for row in short)
        self._running = prompts, decodes, now
        allowed = [self._alone(), self._beside()]
        before, self._before = self._before, allowed
        most = max(before[decodes > 0], allowed[decodes > 0])
        return f"{prompts} prompt tokens, and {most:g} at most" if prompts > most else ""

    def _alone(self) -> float:
        config = self._config
        if not config.step_time_target_s:
            return math.inf
        in_time = self._times.tokens_in(max(config.step_time_target_s, 4 * self._fewest_s))
        return max(in_time, -(-config.max_num_batched_tokens // 8))

    def _beside(self) -> float:
        config = self._config
        if not config.inter_token_target_s:
            return self._alone()
        in_time = self._times.tokens_in(max(config.inter_token_target_s, self._decodes_s))
        return max(in_time, 2 * config.max_num_seqs)

    def done(self, now: float) -> None:
        """Take note that the step was computed."""
        if self._running is None:
            return
        (prompts, decodes, started_at), self._running = self._running, None
        seconds = now - started_at
        if not prompts:
            self._decodes_s = max(self._decodes_s, seconds)
            if decodes < self._fewest:
                self._fewest, self._fewest_s = decodes, seconds
            elif decodes == self._fewest:
                self._fewest_s = max(self._fewest_s, seconds)
