"""When a model that failed may be loaded again: backoff, and a circuit breaker over it.

Rule 1: pure, and the clock is the caller's. Rule 2: it says when; that nobody tries earlier is the
pool's business.

Closed: after the k-th failure in a row the next try may come `FIRST_DELAY_S` · 2^(k-1) seconds
later. Open, from the `FAILURES_TO_OPEN`-th on: `OPEN_S` seconds later, one try at a time, until
`SUCCESSES_TO_CLOSE` have succeeded in a row. Source: R114, R142; the figures are api.md's.
"""

from __future__ import annotations

import math

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
FAILURES_TO_OPEN = 5
OPEN_S = 60.0
SUCCESSES_TO_CLOSE = 3


class Breaker:
    """The failures of one model, and when the next try may be."""

    def __init__(self) -> None:
        self.num_failures = 0  # since it was last closed by successes
        self._num_successes = 0
        self._retry_at = -math.inf

    @property
    def is_open(self) -> bool:
        """So many failures that successes are counted before they are forgotten."""
        return self.num_failures >= FAILURES_TO_OPEN

    def wait_s(self, now: float) -> float:
        """Seconds until the next try may be; 0: now."""
        return max(0.0, self._retry_at - now)

    def failed(self, now: float) -> None:
        """A try failed at ``now``."""
        self.num_failures += 1
        self._num_successes = 0
        doubled = FIRST_DELAY_S * 2.0 ** (self.num_failures - 1) if not self.is_open else OPEN_S
        self._retry_at = now + min(doubled, LONGEST_DELAY_S)

    def succeeded(self) -> None:
        """A try succeeded."""
        self._num_successes += 1
        if not self.is_open or self._num_successes >= SUCCESSES_TO_CLOSE:
            self.reset()

    def reset(self) -> None:
        """Forget every failure: the operator has acted."""
        self.num_failures = self._num_successes = 0
        self._retry_at = -math.inf
