"""Watches how many prompt tokens a step has: no more than the estimate computes in the allowed
time, which follows from the watcher's own record of earlier steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.core.text.step_times import CHUNK_MIN, TOKENS_EACH

if TYPE_CHECKING:
    from engine.config import SchedulerConfig
    from engine.core.common.types import SequenceId
    from engine.core.text.plan import StepPlan
    from engine.core.text.step_times import StepTimes


class PaceWatch:
    """Watch one scheduler. Times are on the core's clock."""

    def __init__(self, config: SchedulerConfig, times: StepTimes) -> None:
        self._config, self._times = config, times
        # the fewest rows of a step without prompts, and the seconds of such a step
        self._fewest, self._fewest_s = math.inf, math.inf
        self._decodes_s = 0.0  # the longest step without prompts
        self._before = [math.inf, math.inf]  # prompt tokens allowed at the step before
        # the sequences with a sampled token, and those that get one in the step in flight
        self._sampled: set[SequenceId] = set()
        self._samples: set[SequenceId] = set()
        self._running: tuple[int, int, float] | None = None  # prompt tokens, rows, and start

    def planned(self, plan: StepPlan, now: float) -> str:
        """Return what is wrong with a plan that is sent now, or "".

        The plan may have been made while the step before it ran.
        """
        short = [row for row in plan.rows if row.count == 1 or row.drafts]
        # A preempted sequence comes back as a prompt, even if it lacks one token only.
        goes_on = [row for row in short if row.blocks is None or row.blocks.keep]
        decodes = len([row for row in goes_on if row.sequence in self._sampled])
        self._samples = {row.sequence for row in plan.rows if row.logits.samples}
        prompts = sum(row.count for row in plan.rows) - sum(row.count for row in short)
        self._running = prompts, len(plan.rows), now
        allowed = [self._alone(), self._beside()]
        before, self._before = self._before, allowed
        most = max(before[decodes > 0], allowed[decodes > 0])
        return f"{prompts} prompt tokens, and {most:g} at most" if prompts > most else ""

    def _alone(self) -> float:
        target_s, budget = self._config.step_time_target_s, self._config.max_num_batched_tokens
        if not (target_s and any(self._times._prompts[:4])):  # no step was that large
            return math.inf
        in_time = self._times.tokens_in(max(target_s, 4 * self._fewest_s), doubles=False)
        return max(in_time, -(-budget // 8))

    def _beside(self) -> float:
        config, alone = self._config, self._alone()
        if not config.inter_token_target_s:
            return alone
        in_time = self._times.tokens_in(max(config.inter_token_target_s, self._decodes_s))
        return min(alone, max(in_time, CHUNK_MIN, TOKENS_EACH * config.max_num_seqs))

    def done(self, now: float) -> None:
        """Take note that the step was computed."""
        if self._running is None:
            return
        (prompts, num_rows, started_at), self._running = self._running, None
        self._sampled |= self._samples
        seconds = now - started_at
        if not prompts and seconds > 0.0:
            self._decodes_s = max(self._decodes_s, seconds)
            if num_rows < self._fewest:
                self._fewest, self._fewest_s = num_rows, 0.0
            if num_rows == self._fewest:
                self._fewest_s = max(self._fewest_s, seconds)
