"""The highest rate that a replica has reached. From this rate follow which prompts cannot be
computed in time (D18), and how many prompt tokens a step may compute to take no longer than it
should.

Rule: an estimate never exceeds the time that the prompt will take, as far as that was measured;
without a measurement it is 0.
"""

from __future__ import annotations

import math

DISCOUNT = 1.1  # guess: the eighth refusal halves an estimate, the 25th divides it by ten
LARGE_SHARE = 8  # guess: a step of at least an eighth of the budget shows how fast prompts are
SHORTEST_STEPS = 4  # guess: the fixed cost of a step is at most a quarter of one with prompts


class BestRate:
    """The most tokens per second that a step has reached.

    A small step is dominated by its fixed cost and says nothing of large ones. So rates are kept by
    the step's size in halvings of the step budget, and a prompt is compared only with steps at
    least as large as the largest chunk that it can be computed in: the estimate is then never above
    what the prompt takes, if a step's time grows at most linearly above a fixed cost.

    One measurement may have been an outlier, and a refused prompt is not measured. So each refusal
    is noted (`note_refusal`) and lowers the estimate a little, until a prompt is tried and its
    steps are measured.

    ``step_time_target_s`` is how long a step with prompts in it should take; 0 leaves the step
    budget as the only bound. ``prompt_budget`` is how many prompt tokens a step gets for that time.
    If four times the shortest step is longer than the target, that time counts instead: where every
    step has a high fixed cost, as with a large model on a CPU, small steps would pay this cost for
    each part of a prompt.
    """

    def __init__(self, max_num_batched_tokens: int, step_time_target_s: float = 0.0) -> None:
        self.prompt_budget = max_num_batched_tokens
        self._budget = max_num_batched_tokens
        self._target_s = step_time_target_s
        self._shortest_s = math.inf  # duration of the shortest step
        # [k] is the best rate of the steps that have at least budget / 2**k tokens and are too
        # small for [k - 1].
        self._rates = [0.0] * (max_num_batched_tokens.bit_length() + 1)
        # [k] divides estimates that are made from _rates[:k]. Refusals raise this divisor, and a
        # step of that size resets it.
        self._discounts = [1.0] * (len(self._rates) + 1)
        self._has_discounts = False  # one of them is not 1

    def note(self, num_tokens: int, seconds: float) -> None:
        """Count a committed step that took ``seconds``, which is more than 0."""
        k = (-(-self._budget // num_tokens) - 1).bit_length()
        if num_tokens / seconds > self._rates[k] or seconds < self._shortest_s:
            self._rates[k] = max(self._rates[k], num_tokens / seconds)
            self._shortest_s = min(self._shortest_s, seconds)
            self.prompt_budget = self._prompt_budget()
        if self._has_discounts:
            self._discounts[k + 1 :] = [1.0] * (len(self._discounts) - k - 1)
            self._has_discounts = max(self._discounts) > 1.0

    def seconds_for(self, prompt_tokens: int) -> float:
        """Return the least time that a prompt takes, in seconds; 0.0 while no step was large enough
        to measure that."""
        count = self._num_sizes(prompt_tokens)
        best = max(self._rates[:count])
        if best and self.prompt_budget < self._budget:
            # No step is that large any more, so the rates of smaller ones count, too.
            best = max(best, self._best_of_large())
        return prompt_tokens / best / self._discounts[count] if best else 0.0

    def note_refusal(self, prompt_tokens: int) -> None:
        """Count a prompt that was refused because of `seconds_for`."""
        self._discounts[self._num_sizes(prompt_tokens)] *= DISCOUNT
        self._has_discounts = True

    def _prompt_budget(self) -> int:
        """Return the tokens that take the target time at the best rate of large steps, but at least
        an eighth of the step budget."""
        best = self._best_of_large()
        if not best or not self._target_s:
            return self._budget
        wanted = best * max(self._target_s, SHORTEST_STEPS * self._shortest_s)
        return max(-(-self._budget // LARGE_SHARE), int(min(self._budget, wanted)))

    def _best_of_large(self) -> float:
        return max(self._rates[: LARGE_SHARE.bit_length()])

    def _num_sizes(self, prompt_tokens: int) -> int:
        """Return how many of ``_rates`` are of steps at least as large as the prompt's largest
        chunk."""
        chunk = min(max(1, prompt_tokens), self.prompt_budget)
        return (self._budget // chunk).bit_length()
