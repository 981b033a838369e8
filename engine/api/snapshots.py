"""Takes frozen copies of the engine's counters and timings, for statistics and metrics.

Rule: taking a copy changes nothing and never waits, not even for a step.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from engine.core.common.types import EndReason
from engine.core.text.types import TextStatistics
from engine.replica.telemetry import EngineTelemetry, ReplicaSnapshot
from engine.status import LEVELS, Counts, EngineStatistics, ModelState, ReplicaCounts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.pool.entry import Entry
    from engine.pool.pool import Pool
    from engine.replica.replica import AnyReplica
    from engine.requests.supervisor import Supervisor


class Snapshots:
    """Takes the snapshots of one engine. Belongs to its Trio thread."""

    def __init__(self, pool: Pool, supervisor: Supervisor) -> None:
        self._pool = pool
        self._supervisor = supervisor

    def statistics(self) -> EngineStatistics:
        """Return the counters of the whole engine, and of each replica."""
        entries = self._entries
        replicas = [
            info
            for entry in entries
            for info in sorted((*_loaded(entry), *_died(entry)), key=lambda info: info.replica)
        ]
        totals = _sum([replica.counts for replica in replicas])
        totals["requests_total"] = self._supervisor.metrics.requests_total
        totals["memory_reserved"] = self._pool.memory.total_reserved
        totals["memory_limit"] = self._pool.memory.total_limit
        return EngineStatistics(Counts(**totals), tuple(replicas))

    def telemetry(self) -> EngineTelemetry:
        """Return the statistics and the timings."""
        supervisor, entries = self._supervisor, self._entries
        return EngineTelemetry(
            self.statistics(),
            tuple([_telemetry_of(replica) for entry in entries for replica in entry.replicas]),
            models={
                status.name: status.is_available for entry in entries for status in entry.statuses()
            },
            adapters={
                version.name: replace(version.counts)
                for entry in entries
                for version in entry.adapters.values()
            },
            deaths={entry.config.name: entry.num_deaths for entry in entries},
            degraded={entry.config.name: entry.num_degraded for entry in entries},
            deadlines_missed={
                phase: count
                for (phase, reason), count in supervisor.metrics.early_ends.items()
                if reason == EndReason.DEADLINE.value
            },
            num_draining=supervisor.num_live if supervisor.is_draining else 0,
        )

    @property
    def _entries(self) -> Sequence[Entry]:
        return tuple(self._pool.registry.entries.values())


def _loaded(entry: Entry) -> Iterator[ReplicaCounts]:
    """Yield the counters of a model's loaded replicas."""
    pause = "" if entry.pause is None else entry.pause.mode.value
    for replica in entry.replicas:
        state = ModelState.DEGRADED if replica.loop.is_hung else replica.state
        yield ReplicaCounts(entry.config.name, replica.replica_id, state, _counts(replica), pause)


def _died(entry: Entry) -> Iterator[ReplicaCounts]:
    """Yield counters, all 0, for each of a model's replicas that died and will be restarted."""
    for replica_id in entry.degraded_ids:
        yield ReplicaCounts(entry.config.name, replica_id, ModelState.DEGRADED, Counts())


def _counts(replica: AnyReplica) -> Counts:
    names = {field.name for field in fields(Counts)}
    statistics = asdict(replica.loop.core.statistics())
    known = {name: value for name, value in statistics.items() if name in names}
    if replica.loop.cause_of_death is not None:  # its requests have ended
        known |= dict.fromkeys(LEVELS & known.keys(), 0)
    return Counts(**known, memory_reserved=replica.reservation.num_bytes)


def _sum(counts: Sequence[Counts]) -> dict[str, Any]:
    names = [field.name for field in fields(Counts) if field.name != "requests_total"]
    return {name: sum(getattr(count, name) for count in counts) for name in names}


def _telemetry_of(replica: AnyReplica) -> ReplicaSnapshot:
    snapshot = ReplicaSnapshot(
        replica.model,
        replica.replica_id,
        replica.loop.telemetry.snapshot() if replica.loop.telemetry else None,
        replica.process.rss_bytes() if replica.process else None,
    )
    statistics = replica.loop.core.statistics()
    if not isinstance(statistics, TextStatistics):
        return snapshot
    return replace(snapshot, plans_discarded=statistics.plans_discarded, drafts=statistics.drafts)
