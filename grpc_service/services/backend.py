"""The engine as the services see it, whose counters include those of the gRPC side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.api.engine import Engine
    from engine.replica.telemetry import EngineTelemetry
    from engine.status import EngineStatistics
    from grpc_service.access.unread_calls import UnreadCalls


@dataclass(frozen=True, slots=True)
class Backend:
    """What every service of one server shares."""

    engine: Engine
    unread_calls: UnreadCalls

    def statistics(self) -> EngineStatistics:
        """Return the engine's counters as they stand, with the number of unread calls."""
        return self._with_unread_calls(self.engine.statistics())

    def telemetry(self) -> EngineTelemetry:
        """Return the counters and the measured durations, with the number of unread calls."""
        telemetry = self.engine.telemetry()
        return replace(telemetry, statistics=self._with_unread_calls(telemetry.statistics))

    def _with_unread_calls(self, statistics: EngineStatistics) -> EngineStatistics:
        totals = replace(
            statistics.totals,
            unread_calls=self.unread_calls.count(),
            detached=self.engine.detached.count,
        )
        return replace(statistics, totals=totals)
