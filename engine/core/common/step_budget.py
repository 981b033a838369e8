"""How many tokens a step may compute, after a step ran out of memory (D17)."""

from __future__ import annotations

CLEAN_STEPS = 16  # successful steps after which the budget doubles; a guess


class StepBudget:
    """A token budget that is halved by each step that runs out of memory.

    The budget recovers slowly: it doubles after every `CLEAN_STEPS` successful steps. If it
    recovered at once, every other step would run out of memory again. ``tokens`` is its current
    value.
    """

    def __init__(self, full: int) -> None:
        self.tokens = full
        self._full = full
        self._clean_steps = 0

    def note_success(self) -> None:
        """Count a step that succeeded."""
        if self.tokens == self._full:
            return
        self._clean_steps += 1
        if self._clean_steps >= CLEAN_STEPS:
            self._clean_steps = 0
            self.tokens = min(self._full, 2 * self.tokens)

    def halve(self, used: int | None = None) -> None:
        """Halve the budget, or the ``used`` tokens of the step that failed if those are fewer."""
        self._clean_steps = 0
        tokens = self.tokens if used is None else min(self.tokens, used)
        self.tokens = max(1, tokens // 2)
