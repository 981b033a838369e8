"""Estimates how long prompts take, from the last steps that computed parts of prompts.

Rule 1: a token takes ``a + b * context`` seconds: its attention reads all tokens before it. Rule 2:
both are medians, so a step that waited for something else does not count. Rule 3: a step's fixed
cost is a part of ``a``, so what counts are steps of about the size that is asked for.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

KEPT = 16  # steps; estimate: a prompt of 4,000 tokens has as many
# Tokens of context that double the time of a prompt's token, until that is measured. By arithmetic
# they are 3,000 for a model of 135 million weights, 8,000 for one of 500 million.
DOUBLING = 8192
SPREAD = 1024  # tokens of context between steps from which on their slope is taken; estimate


class _Step(NamedTuple):
    """A measured step: its prompt tokens, their mean context, and seconds for each of them."""

    num_tokens: int
    context: float
    token_s: float


class PromptPace:
    """The measured steps of one scheduler. Not thread-safe."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=KEPT)

    def note(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """Count a step that computed ``num_tokens`` prompt tokens in ``seconds``, its decodes not
        counted. ``num_pairs`` is the sum of the tokens' contexts."""
        self._steps.append(_Step(num_tokens, num_pairs / num_tokens, seconds / num_tokens))

    def seconds(self, num_tokens: int, num_pairs: float, chunk: int) -> float | None:
        """Return how long it usually takes to compute ``num_tokens`` prompt tokens, whose contexts
        add up to ``num_pairs``, in steps of ``chunk`` tokens; None if no step was about as large,
        or larger."""
        least = max(1, min(chunk, num_tokens)) / 2
        steps = [step for step in self._steps if step.num_tokens >= least]
        steps = [step for step in steps if step.num_tokens < 4 * least] or steps
        if not steps:
            return None
        growth = _growth(steps)
        token_s = median([step.token_s / (1.0 + growth * step.context) for step in steps])
        return token_s * (num_tokens + growth * num_pairs)


def _growth(steps: list[_Step]) -> float:
    """Return by which share of its time each token of context makes a prompt's token slower."""
    contexts = [step.context for step in steps]
    if max(contexts) - min(contexts) < SPREAD:
        return 1.0 / DOUBLING
    slopes = [
        (two.token_s - one.token_s) / (two.context - one.context)
        for index, one in enumerate(steps)
        for two in steps[:index]
        if abs(two.context - one.context) >= SPREAD / 2
    ]
    slope = max(0.0, median(slopes))
    base_s = median([step.token_s - slope * step.context for step in steps])
    # Where all is said to be attention, the slope is an accident of few steps.
    return slope / base_s if base_s > 0.0 else 1.0 / DOUBLING
