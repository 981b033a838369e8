"""What Prometheus reads: the engine's figures under stable names, on a port of their own.

Rule 1: `METRICS` is every name there is; names are vLLM's where vLLM has the thing, the prefix is
ours. Rule 2: nothing is counted here: a scrape asks the engine for one consistent copy of what it
counted, and so costs the engine a few hundred microseconds per scrape and nothing in between.
Rule 3: labels are models, replicas, phases, ends, RPCs and status codes, all of them few.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from engine.errors import ConfigError, TrioletError
from engine.threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

    from engine.status import Counts
    from engine.telemetry import Distribution, EngineTelemetry, ReplicaSnapshot
    from grpc_service.bridge import Bridge
    from grpc_service.config import ServerConfig
    from grpc_service.reception import Reception

log = logging.getLogger(__name__)

PREFIX = "triolet:"
SCRAPE_TIMEOUT_S = 5.0  # guess: half of Prometheus' own usual limit
REPLICA = ("model_name", "replica")


class Metric(NamedTuple):
    """A name without prefix, its kind, its labels, and what it means."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def _gauge(name: str, meaning: str, labels: tuple[str, ...] = REPLICA) -> Metric:
    return Metric(name, "gauge", labels, meaning)


def _counter(name: str, meaning: str, labels: tuple[str, ...] = REPLICA) -> Metric:
    return Metric(name, "counter", labels, meaning)


def _histogram(name: str, meaning: str, labels: tuple[str, ...] = REPLICA) -> Metric:
    return Metric(name, "histogram", labels, meaning)


# Of a replica's counts, by the field of `Counts` they show.
OF_COUNTS = {
    "running": _gauge("num_requests_running", "sequences that the next steps compute"),
    "waiting": _gauge("num_requests_waiting", "sequences that wait to be computed"),
    "parked": _gauge("num_requests_parked", "sequences whose readers have to catch up"),
    "free_blocks": _gauge("kv_blocks_free", "KV blocks that can be had, cached ones included"),
    "total_blocks": _gauge("kv_blocks", "KV blocks in all"),
    "prefix_queries": _counter("prefix_cache_queries_total", "prompt tokens looked up"),
    "prefix_hits": _counter("prefix_cache_hits_total", "prompt tokens found, and not computed"),
    "preemptions": _counter("num_preemptions_total", "sequences that lost their blocks"),
    "prompt_tokens_total": _counter("prompt_tokens_total", "prompt tokens of accepted requests"),
    "completion_tokens_total": _counter("generation_tokens_total", "tokens generated"),
    "step_count": _counter("steps_total", "steps run"),
}
# Of a replica's telemetry, by the name of the distribution.
OF_TELEMETRY = {
    "first_token": _histogram("time_to_first_token_seconds", "arrival to a choice's first token"),
    "inter_token": _histogram("inter_token_latency_seconds", "a choice's token to its next"),
    "request": _histogram("e2e_request_latency_seconds", "arrival to a request's last event"),
    "queue": _histogram("request_queue_time_seconds", "a request's arrival to its start"),
    "prefill": _histogram("request_prefill_time_seconds", "a request's time in prefill"),
    "decode": _histogram("request_decode_time_seconds", "a request's time in decode"),
    "parked": _histogram("parked_seconds", "how long a choice was parked, of those that were"),
    "prompt_tokens": _histogram("request_prompt_tokens", "a request's prompt"),
    "generation_tokens": _histogram("request_generation_tokens", "tokens of a choice"),
    "step": _histogram("step_seconds", "a step, the thread's hop included"),
    "step_gap": _histogram("step_gap_seconds", "a step's end to the next one's start, with work"),
    "step_rows": _histogram("step_rows", "sequences in a step"),
}
CACHE_USAGE = _gauge("kv_cache_usage_perc", "share of KV blocks in use, 0 to 1")
SUCCESS = _counter(
    "request_success_total", "requests ended, by reason", (*REPLICA, "finished_reason")
)
DISCARDED = _counter("plan_discarded_total", "steps planned ahead for nothing")
CANCEL_TO_FREE = _histogram(
    "cancel_to_free_seconds", "an early end to its blocks being free", (*REPLICA, "phase")
)
PROCESS_BYTES = _gauge("worker_resident_bytes", "memory in use by a worker with its own process")
MODEL_READY = _gauge("model_ready", "1 for a model that can be asked, else 0", ("model_name",))
DEGRADED = _gauge(
    "replicas_degraded", "replicas that died and are to come back, or that hang", ("model_name",)
)
DEATHS = _counter("worker_deaths_total", "workers that died", ("model_name",))
ENDED = _counter("requests_total", "requests ended, by how, refused ones included", ("end",))
DEADLINES = _counter("deadline_missed_total", "requests whose time ran out", ("phase",))
ZOMBIES = _gauge("zombie_calls", "ended calls whose clients do not read the end", ())
DRAINING = _gauge("drain_remaining_requests", "requests that a drain waits for", ())
MEMORY = _gauge("memory_reserved_bytes", "memory reserved for models", ())
MEMORY_LIMIT = _gauge("memory_limit_bytes", "memory that may be reserved", ())
RPCS = _counter("rpcs_total", "RPCs ended, by method and status", ("method", "code"))

METRICS = (
    *OF_COUNTS.values(),
    *OF_TELEMETRY.values(),
    *(CACHE_USAGE, SUCCESS, DISCARDED, CANCEL_TO_FREE, PROCESS_BYTES, MODEL_READY),
    *(DEGRADED, DEATHS, ENDED, DEADLINES, ZOMBIES, DRAINING, MEMORY, MEMORY_LIMIT, RPCS),
)


def samples_of(
    telemetry: EngineTelemetry, calls: Iterable[tuple[tuple[str, str], int]]
) -> Iterator[tuple[Metric, tuple[str, ...], Any]]:
    """Every sample: its metric, its labels' values, and a number or a `Distribution`."""
    statistics = telemetry.statistics
    for entry in statistics.replicas:
        labels = (entry.model, str(entry.replica))
        yield from _of_counts(entry.counts, labels)
    for replica in telemetry.replicas:
        yield from _of_replica(replica, (replica.model, str(replica.replica)))
    for model, is_ready in telemetry.models.items():
        yield MODEL_READY, (model,), int(is_ready)
    for model, count in telemetry.degraded.items():
        yield DEGRADED, (model,), count
    for model, count in telemetry.deaths.items():
        yield DEATHS, (model,), count
    totals = statistics.totals
    for end in totals.requests_total.__slots__:
        yield ENDED, (end,), getattr(totals.requests_total, end)
    for phase, count in telemetry.deadlines_missed.items():
        yield DEADLINES, (phase,), count
    yield ZOMBIES, (), totals.zombies
    yield DRAINING, (), telemetry.num_draining
    yield MEMORY, (), totals.memory_reserved
    yield MEMORY_LIMIT, (), totals.memory_limit
    for (method, code), count in calls:
        yield RPCS, (method, code), count


def _of_counts(
    counts: Counts, labels: tuple[str, ...]
) -> Iterator[tuple[Metric, tuple[str, ...], Any]]:
    for field, metric in OF_COUNTS.items():
        yield metric, labels, getattr(counts, field)
    used = counts.total_blocks - counts.free_blocks
    yield CACHE_USAGE, labels, used / counts.total_blocks if counts.total_blocks else 0.0


def _of_replica(
    replica: ReplicaSnapshot, labels: tuple[str, ...]
) -> Iterator[tuple[Metric, tuple[str, ...], Any]]:
    yield DISCARDED, labels, replica.plans_discarded
    if replica.process_bytes is not None:
        yield PROCESS_BYTES, labels, replica.process_bytes
    telemetry = replica.telemetry
    if telemetry is None:
        return
    for name, metric in OF_TELEMETRY.items():
        yield metric, labels, telemetry.distributions[name]
    for phase, distribution in telemetry.cancel_to_free.items():
        yield CANCEL_TO_FREE, (*labels, phase), distribution
    for reason, count in telemetry.ends.items():
        yield SUCCESS, (*labels, reason), count


# ---- for prometheus_client -------------------------------------------------------------------


class Collector:
    """What a registry asks at a scrape. ``ask`` gives every sample; it may be called on any
    thread."""

    def __init__(self, ask: Callable[[], Iterable[tuple[Metric, tuple[str, ...], Any]]]) -> None:
        self._ask = ask

    def describe(self) -> list[Any]:
        """Nothing: so that nobody asks before there is anything."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family per metric, also one without samples yet."""
        try:
            found = list(self._ask())
        except (RuntimeError, TrioletError) as error:
            log.warning("a scrape found nobody to ask: %s", error)
            return
        families = {metric: _family(metric) for metric in METRICS}
        for metric, labels, value in found:
            if metric.kind == "histogram":
                families[metric].add_metric(labels, _buckets(value), sum_value=value.total)
            else:
                families[metric].add_metric(labels, value)
        yield from families.values()


def _family(metric: Metric) -> Any:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    kinds = {
        "gauge": GaugeMetricFamily,
        "counter": CounterMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    return kinds[metric.kind](PREFIX + metric.name, metric.meaning, labels=metric.labels)


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Prometheus' own: of each bound, how many values are not above it."""
    buckets, total = [], 0
    for bound, count in zip((*distribution.bounds, None), distribution.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound is None else str(bound), float(total)))
    return buckets


@asynccontextmanager
async def serving_metrics(
    config: ServerConfig, bridge: Bridge, reception: Reception
) -> AsyncIterator[None]:
    """Answer Prometheus while the block lasts, from threads of prometheus_client's; nothing where
    no port is wanted.

    Raises:
        ConfigError: the port cannot be had.
    """
    if config.metrics_port is None:
        yield
        return
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    token = trio.lowlevel.current_trio_token()

    def answer() -> list[tuple[Metric, tuple[str, ...], Any]]:
        return list(samples_of(bridge.telemetry(), reception.calls.items()))

    def ask() -> list[tuple[Metric, tuple[str, ...], Any]]:
        return trio.from_thread.run_sync(answer, trio_token=token)

    registry = CollectorRegistry()
    registry.register(Collector(ask))
    ProcessCollector(registry=registry)  # memory, processor time, files: process_…
    host = config.metrics_host.strip("[]")
    try:
        server, thread = start_http_server(config.metrics_port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {config.metrics_host}:{config.metrics_port}: "
            f"{error.strerror}; choose another --metrics-port or --metrics-host"
        ) from None
    where = f"{config.metrics_host}:{server.server_port}"
    log.info("metrics are served on http://%s/metrics", where)
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):  # a scrape under way is answered
            await WorkerThreads().run(partial(_stop, server, thread), trio.CapacityLimiter(1))


def _stop(server: Any, thread: Any) -> None:
    server.shutdown()
    server.server_close()
    thread.join(SCRAPE_TIMEOUT_S)
