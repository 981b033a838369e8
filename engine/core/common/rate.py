"""How many tokens per second a replica has computed in its last steps."""

from __future__ import annotations

RATE_SMOOTHING = 0.2  # weight of the newest step; estimate: the last five together weigh two thirds


class RecentRate:
    """A running average, for estimates of how long a queue takes. ``tokens_per_s`` is 0 before any
    step."""

    __slots__ = ("tokens_per_s",)

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Count a step, unless it took 0 seconds or less: then no rate follows from it."""
        if seconds > 0.0:
            self.tokens_per_s += RATE_SMOOTHING * (num_tokens / seconds - self.tokens_per_s)
