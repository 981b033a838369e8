"""When a replica that died comes back: backoff, and how often at most.

Rule: pure, and the clock is the caller's.

The k-th death within `WINDOW_S` is followed by a restart `FIRST_DELAY_S` · 2^(k-1) seconds later,
at most `LONGEST_DELAY_S`; the `DEATHS_MAX`-th by none. Source: R98, R141; the figures are api.md's.
"""

from __future__ import annotations

from collections import deque

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
DEATHS_MAX = 5
WINDOW_S = 600.0


class Restarts:
    """The deaths of one replica. ``deaths_max`` may be raised where they are planned."""

    def __init__(self, deaths_max: int = DEATHS_MAX) -> None:
        self._deaths_max = deaths_max
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """A replica died at ``now``: seconds until it may come back; None: it is given up."""
        while self._deaths and self._deaths[0] <= now - WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) >= self._deaths_max:
            return None
        return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (len(self._deaths) - 1)))
