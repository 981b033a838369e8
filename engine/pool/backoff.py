"""When a model's load that failed, or a replica that died, may be tried again.

Rule: pure; the caller passes the time, in seconds of any one clock.

A `CircuitBreaker` counts a model's loads. While it is closed, the next try may come `FIRST_DELAY_S`
· 2^(k-1) seconds after the k-th failure in a row. The `FAILURES_TO_OPEN`-th failure opens it: then
tries come `OPEN_S` seconds after a failure, until `SUCCESSES_TO_CLOSE` tries in a row succeed.

A `RestartBackoff` counts one replica's deaths. The k-th death within `WINDOW_S` is followed by a
restart `FIRST_DELAY_S` · 2^(k-1) seconds later, at most `LONGEST_DELAY_S`; after the last death
that is allowed no restart follows.
"""

from __future__ import annotations

import math
from collections import deque

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
FAILURES_TO_OPEN = 5
OPEN_S = 60.0
SUCCESSES_TO_CLOSE = 3
DEATHS_MAX = 5
WINDOW_S = 600.0


def _delay_s(count: int) -> float:
    """Return the delay after ``count`` failures in a row."""
    return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (count - 1)))


class CircuitBreaker:
    """Counts the failed loads of one model and says when the next may begin."""

    def __init__(self) -> None:
        self.num_failures = 0  # failures since the breaker was last closed
        self._num_successes = 0
        self._retry_at = -math.inf

    @property
    def is_open(self) -> bool:
        """Whether so many tries have failed that one success does not reset the count."""
        return self.num_failures >= FAILURES_TO_OPEN

    def wait_s(self, now: float) -> float:
        """Return how many seconds the next try must wait; 0 if it may begin."""
        return max(0.0, self._retry_at - now)

    def failed(self, now: float) -> None:
        """Count a try that failed at ``now``."""
        self.num_failures += 1
        self._num_successes = 0
        self._retry_at = now + (OPEN_S if self.is_open else _delay_s(self.num_failures))

    def succeeded(self) -> None:
        """Count a try that succeeded."""
        self._num_successes += 1
        if not self.is_open or self._num_successes >= SUCCESSES_TO_CLOSE:
            self.reset()

    def reset(self) -> None:
        """Forget every failure, because the operator has acted."""
        self.num_failures = self._num_successes = 0
        self._retry_at = -math.inf


class RestartBackoff:
    """Counts the deaths of one replica, and decides when it is restarted.

    ``deaths_max`` is how many deaths within `WINDOW_S` end the restarts.
    """

    def __init__(self, deaths_max: int = DEATHS_MAX) -> None:
        self._deaths_max = deaths_max
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """Count a death at ``now``. Return how many seconds later the replica is restarted, or None
        if it is not restarted."""
        while self._deaths and self._deaths[0] <= now - WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) >= self._deaths_max:
            return None
        return _delay_s(len(self._deaths))
