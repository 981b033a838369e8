"""How fast this replica has been at its best, to tell what it cannot do in time (D18).

Rule: an estimate is never above what a prompt takes, as far as that was measured; without a
measurement it is 0.
"""

from __future__ import annotations

DOUBT = 1.1  # guess: the eighth refusal halves what is thought, the 25th divides it by ten


class BestRate:
    """The most tokens per second that a step has reached, to tell what cannot be done in time.

    A small step is dominated by what every step costs, and says nothing of large ones. So rates
    are kept by the step's size in halvings of the step budget, and a prompt is compared only with
    steps at least as large as the largest chunk it can be computed in: the estimate is then never
    above what the prompt takes, if a step's time grows at most linearly above a fixed cost.

    What was measured once may have been an accident, and what is refused is not measured again. So
    whoever refuses says so (`doubt`), and each time the estimate is a little less, until a prompt
    is tried and its steps tell.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._budget = max_num_batched_tokens
        # [k]: the best of the steps of at least budget / 2**k tokens that are below [k - 1]'s
        self._rates = [0.0] * (max_num_batched_tokens.bit_length() + 1)
        # [k]: divides estimates from [:k] of these; grows by refusals, until a step of such a size
        self._doubts = [1.0] * (len(self._rates) + 1)

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step was committed; ``seconds`` is more than 0."""
        k = (-(-self._budget // num_tokens) - 1).bit_length()
        if num_tokens / seconds > self._rates[k]:
            self._rates[k] = num_tokens / seconds
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

    def _num_sizes(self, prompt_tokens: int) -> int:
        """How many of ``_rates`` are of steps at least as large as the prompt's largest chunk."""
        chunk = min(max(1, prompt_tokens), self._budget)
        return (self._budget // chunk).bit_length()
