"""Reports the load of a model to gateways (GetLoads), from the engine's counters.

Rule: a model's replicas are one worker to the gateway, so their counters are summed.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import trio
from smg_grpc_proto.generated import vllm_engine_pb2

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.pool.entry import Entry
    from engine.status import Counts, EngineStatistics

RATE_INTERVAL_S = 1.0  # the least time over which tokens per second are counted; guess


class Loads:
    """The load of one model."""

    def __init__(self, entry: Entry, config: EngineConfig) -> None:
        self._entry = entry
        self._config = config
        self._rate = 0.0
        self._counted = 0  # tokens that were generated until `_counted_at`
        self._counted_at = trio.current_time()

    def encode(self, statistics: EngineStatistics) -> Any:
        """Return the answer to GetLoads. It has no load while no replica is loaded."""
        name = self._entry.config.name
        counts = [replica.counts for replica in statistics.replicas if replica.model == name]
        loads = [self._encode(counts)] if self._entry.ready else []
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            dp_rank_count=len(loads),
            loads=loads,
        )

    def _encode(self, counts: list[Counts]) -> Any:
        total = sum(x.total_blocks for x in counts)
        used = total - sum(x.free_blocks for x in counts)
        queries = sum(x.prefix_queries for x in counts)
        running = sum(x.running + x.parked for x in counts)
        waiting = sum(x.waiting for x in counts)
        seats = self._config.max_num_seqs * len(self._entry.ready)
        queued = [replica.loop.core.statistics().queued_tokens for replica in self._entry.ready]
        return vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=used * self._config.block_size,
            max_total_num_tokens=total * self._config.block_size,
            token_usage=used / total if total else 0.0,
            gen_throughput=self._tokens_per_s(sum(x.completion_tokens_total for x in counts)),
            cache_hit_rate=sum(x.prefix_hits for x in counts) / queries if queries else 0.0,
            utilization=running / seats,
            max_running_requests=seats,
            num_waiting_uncached_tokens=sum(queued),
        )

    def _tokens_per_s(self, generated: int) -> float:
        """Return the tokens per second since this was last computed; within `RATE_INTERVAL_S`,
        return the same rate again. When a replica dies, the total falls, and the rate is 0."""
        now = trio.current_time()
        if now - self._counted_at >= RATE_INTERVAL_S:
            made = max(0, generated - self._counted)
            self._rate = made / (now - self._counted_at)
            self._counted, self._counted_at = generated, now
        return self._rate
