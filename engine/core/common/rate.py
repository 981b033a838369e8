"""How many tokens per second a replica has computed in its last steps."""

from __future__ import annotations

RATE_SMOOTHING = 0.2  # the newest step's weight; an estimate: the last five have two thirds


class RecentRate:
    """A running average, for estimates of how long a queue takes. ``tokens_per_s`` is 0 before any
    step."""

    __slots__ = ("tokens_per_s",)

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Count a step; one that took 0 seconds or less says nothing."""
        if seconds > 0.0:
            self.tokens_per_s += RATE_SMOOTHING * (num_tokens / seconds - self.tokens_per_s)
