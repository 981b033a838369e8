"""Plain counters of what ended how. Exporting them is the front's business.

Rule: incremented on the Trio thread only; a reader takes a frozen copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.core.types import EndReason
from engine.status import RequestsTotal

_FIELD_OF_END = {
    EndReason.STOP: "finished",
    EndReason.LENGTH: "finished",
    EndReason.CANCELLED: "cancelled",
    EndReason.DEADLINE: "deadline",
    EndReason.ABORTED: "aborted",
    EndReason.SHUTDOWN: "aborted",  # a drain's cuts count as the operator's
    EndReason.STALLED: "stalled",
    EndReason.FAILED: "failed",
}


@dataclass(slots=True)
class Metrics:
    """Requests by end, and early ends by phase and reason."""

    requests_total: RequestsTotal = field(default_factory=RequestsTotal)
    early_ends: dict[tuple[str, str], int] = field(default_factory=dict)

    def count_end(self, reason: EndReason, phase: str = "") -> None:
        """One request ended; early ends are counted by phase too."""
        self._add(_FIELD_OF_END[reason])
        if not reason.is_success:
            key = (phase, reason.value)
            self.early_ends[key] = self.early_ends.get(key, 0) + 1

    def count_refusal(self) -> None:
        """One request was never accepted."""
        self._add("refused")

    def _add(self, name: str) -> None:
        count = getattr(self.requests_total, name) + 1
        self.requests_total = replace(self.requests_total, **{name: count})
