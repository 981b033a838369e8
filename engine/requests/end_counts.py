"""Counts how requests ended. The server exports the counts.

Rule: only the Trio thread changes a count; readers get a frozen copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.core.common.types import EndReason
from engine.status import RequestsTotal

_FIELD_OF_END = {
    EndReason.STOP: "finished",
    EndReason.LENGTH: "finished",
    EndReason.CANCELLED: "cancelled",
    EndReason.DEADLINE: "deadline",
    EndReason.ABORTED: "aborted",
    EndReason.SHUTDOWN: "aborted",  # the operator drained the server
    EndReason.STALLED: "stalled",
    EndReason.FAILED: "failed",
}


@dataclass(slots=True)
class EndCounts:
    """Requests by how they ended; ends without success also by phase and reason."""

    requests_total: RequestsTotal = field(default_factory=RequestsTotal)
    early_ends: dict[tuple[str, str], int] = field(default_factory=dict)

    def count_end(self, reason: EndReason, phase: str = "") -> None:
        """Count the end of a request, and one without success also by its phase."""
        self._add(_FIELD_OF_END[reason])
        if not reason.is_success:
            key = (phase, reason.value)
            self.early_ends[key] = self.early_ends.get(key, 0) + 1

    def count_refusal(self) -> None:
        """Count a request that was refused."""
        self._add("refused")

    def _add(self, name: str) -> None:
        count = getattr(self.requests_total, name) + 1
        self.requests_total = replace(self.requests_total, **{name: count})
