"""How fast this replica has been at its best: what it cannot do in time (D18), and how much of
prompts a step may compute to be over in the time a step should take.

Rule: an estimate is never above what a prompt takes, as far as that was measured; without a
measurement it is 0.
"""

from __future__ import annotations

import math

DOUBT = 1.1  # guess: the eighth refusal halves what is thought, the 25th divides it by ten
LARGE_SHARE = 8  # a step of at least an eighth of the budget tells how fast prompts are; guess
SHORTEST_STEPS = 4  # what every step costs is a quarter of one with prompts at most; guess


class BestRate:
    """The most tokens per second that a step has reached, to tell what cannot be done in time.

    A small step is dominated by what every step costs, and says nothing of large ones. So rates
    are kept by the step's size in halvings of the step budget, and a prompt is compared only with
    steps at least as large as the largest chunk it can be computed in: the estimate is then never
    above what the prompt takes, if a step's time grows at most linearly above a fixed cost.

    What was measured once may have been an accident, and what is refused is not measured again. So
    whoever refuses says so (`doubt`), and each time the estimate is a little less, until a prompt
    is tried and its steps tell.

    ``step_time_target_s``: how long a step with prompts in it should take; 0: no bound but the step
    budget. ``prompt_budget`` is how many prompt tokens a step gets for that. Four times the
    shortest step counts instead where that is longer: where a step costs much whatever it
    computes, as of a large model on a CPU, small steps would pay that cost for each part of a
    prompt.
    """

    def __init__(self, max_num_batched_tokens: int, step_time_target_s: float = 0.0) -> None:
        self.prompt_budget = max_num_batched_tokens
        self._budget = max_num_batched_tokens
        self._target_s = step_time_target_s
        self._shortest_s = math.inf  # that a step took
        # [k]: the best of the steps of at least budget / 2**k tokens that are below [k - 1]'s
        self._rates = [0.0] * (max_num_batched_tokens.bit_length() + 1)
        # [k]: divides estimates from [:k] of these; grows by refusals, until a step of such a size
        self._doubts = [1.0] * (len(self._rates) + 1)

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step was committed; ``seconds`` is more than 0."""
        k = (-(-self._budget // num_tokens) - 1).bit_length()
        if num_tokens / seconds > self._rates[k]:
            self._rates[k] = num_tokens / seconds
        self._shortest_s = min(self._shortest_s, seconds)
        self.prompt_budget = self._prompt_budget()
        for larger in range(k + 1, len(self._doubts)):
            self._doubts[larger] = 1.0

    def seconds_for(self, prompt_tokens: int) -> float:
        """The least time a prompt takes; 0.0 as long as no step was large enough to tell."""
        count = self._num_sizes(prompt_tokens)
        best = max(self._rates[:count])
        if best and self.prompt_budget < self._budget:
            # no step is as large as those were any more: what smaller ones say counts too
            best = max(best, self._best_of_large())
        return prompt_tokens / best / self._doubts[count] if best else 0.0

    def doubt(self, prompt_tokens: int) -> None:
        """A prompt was refused for what `seconds_for` says of it."""
        self._doubts[self._num_sizes(prompt_tokens)] *= DOUBT

    def _prompt_budget(self) -> int:
        """The tokens that take that long at the best rate of large steps, and an eighth of the
        budget at least."""
        best = self._best_of_large()
        if not best or not self._target_s:
            return self._budget
        wanted = best * max(self._target_s, SHORTEST_STEPS * self._shortest_s)
        return max(-(-self._budget // LARGE_SHARE), int(min(self._budget, wanted)))

    def _best_of_large(self) -> float:
        return max(self._rates[: LARGE_SHARE.bit_length()])

    def _num_sizes(self, prompt_tokens: int) -> int:
        """How many of ``_rates`` are of steps at least as large as the prompt's largest chunk."""
        chunk = min(max(1, prompt_tokens), self.prompt_budget)
        return (self._budget // chunk).bit_length()
