"""How fast this replica has been at its best: what it cannot do in time (D18), and how much of
prompts a step may compute to be over in the time a step should take.

Rule: an estimate is never above what a prompt takes, as far as that was measured; without a
measurement it is 0.
"""

from __future__ import annotations

import math

DOUBT = 1.1  # guess: the eighth refusal halves what is thought, the 25th divides it by ten
LARGE = 8  # a step of at least an eighth of the budget tells how fast prompts are; guess
FIXED = 4  # what every step costs is a quarter of one with prompts at most; guess


class BestRate:
    """The most tokens per second that a step has reached, to tell what cannot be done in time.

    A small step is dominated by what every step costs, and says nothing of large ones. So rates
    are kept by the step's size in halvings of the step budget, and a prompt is compared only with
    steps at least as large as the largest chunk it can be computed in: the estimate is then never
    above what the prompt takes, if a step's time grows at most linearly above a fixed cost.

    What was measured once may have been an accident, and what is refused is not measured again. So
    whoever refuses says so (`doubt`), and each time the estimate is a little less, until a prompt
    is tried and its steps tell.

    ``step_s``: how long a step with prompts in it should take; 0: as long as the budget's tokens
    take. ``chunk`` is what follows for a step's prompt tokens. Where even the shortest step took
    a quarter of that or more, it is four of those: steps that cost much whatever they compute, as
    a large model's on a CPU do, would otherwise cost it eight times for a prompt.
    """

    def __init__(self, max_num_batched_tokens: int, step_s: float = 0.0) -> None:
        self.chunk = max_num_batched_tokens
        self._budget = max_num_batched_tokens
        self._step_s = step_s
        self._least_s = math.inf  # that a step took
        # [k]: the best of the steps of at least budget / 2**k tokens that are below [k - 1]'s
        self._rates = [0.0] * (max_num_batched_tokens.bit_length() + 1)
        # [k]: divides estimates from [:k] of these; grows by refusals, until a step of such a size
        self._doubts = [1.0] * (len(self._rates) + 1)

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step was committed; ``seconds`` is more than 0."""
        k = (-(-self._budget // num_tokens) - 1).bit_length()
        if num_tokens / seconds > self._rates[k]:
            self._rates[k] = num_tokens / seconds
        self._least_s = min(self._least_s, seconds)
        self.chunk = self._chunk()
        for larger in range(k + 1, len(self._doubts)):
            self._doubts[larger] = 1.0

    def seconds_for(self, prompt_tokens: int) -> float:
        """The least time a prompt takes; 0.0 as long as no step was large enough to tell."""
        count = self._num_sizes(prompt_tokens)
        best = max(self._rates[:count])
        return prompt_tokens / best / self._doubts[count] if best else 0.0

    def doubt(self, prompt_tokens: int) -> None:
        """A prompt was refused for what `seconds_for` says of it."""
        self._doubts[self._num_sizes(prompt_tokens)] *= DOUBT

    def _chunk(self) -> int:
        """The tokens that take that long at the best rate of large steps, and an eighth of the
        budget at least."""
        best = max(self._rates[: LARGE.bit_length()])
        if not best or not self._step_s:
            return self._budget
        wanted = int(best * max(self._step_s, FIXED * self._least_s))
        return max(-(-self._budget // LARGE), min(self._budget, wanted))

    def _num_sizes(self, prompt_tokens: int) -> int:
        """How many of ``_rates`` are of steps at least as large as the prompt's largest chunk."""
        chunk = min(max(1, prompt_tokens), self.chunk)
        return (self._budget // chunk).bit_length()
