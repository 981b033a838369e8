"""Serves the engine's figures to Prometheus under stable names, on a port of their own.

Rule 1: `METRICS` has every name. A name is vLLM's if vLLM has the same metric; the prefix is ours.
Rule 2: nothing is counted here. A scrape takes one consistent copy of the engine's counters, which
costs the engine a few hundred microseconds per scrape and nothing in between. Rule 3: labels are
models, replicas, phases, ends, holders, RPCs and status codes; there are few of each. Rule 4: every
scraper gets the plain text format. In OpenMetrics, and in escaped text, prometheus_client drops the
colon of a name in its samples and keeps it in its TYPE (prometheus/client_python#1177).
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from engine.errors import ConfigError, TrioletError
from engine.replica.threads import WorkerThreads
from grpc_service.app import gen_ai

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping

    from engine.core.common.types import DraftCounts
    from engine.replica.telemetry import Distribution, EngineTelemetry, ReplicaSnapshot
    from engine.requests.usage import UsageSums
    from engine.status import Counts
    from grpc_service.access.interceptor import Interceptor
    from grpc_service.app.gen_ai import GenAiMetrics
    from grpc_service.app.server_config import ServerConfig
    from grpc_service.services.backend import Backend

log = logging.getLogger(__name__)

PREFIX = "triolet:"
UNNAMED = "(unnamed)"  # clients without a key or a certificate
KINDS_OF_TOKENS = {  # of a holder, by the field of `UsageSums`
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "completion_tokens": "completion",
    "undelivered": "undelivered",
}
SCRAPE_TIMEOUT_S = 5.0  # the end waits so long for a scrape. Guess: half of Prometheus' limit
REPLICA = ("model_name", "replica")
_scrapes = trio.CapacityLimiter(1)  # over the port of OpenAI's API


class Metric(NamedTuple):
    """A metric: its name without the prefix, its kind, its labels, and its meaning."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


METRICS: list[Metric] = []  # `_metric` adds each one


def _metric(kind: str, name: str, meaning: str, labels: tuple[str, ...] = REPLICA) -> Metric:
    METRICS.append(Metric(name, kind, labels, meaning))
    return METRICS[-1]


_gauge, _counter, _histogram = (
    partial(_metric, kind) for kind in ("gauge", "counter", "histogram")
)

# Metrics of a replica's counts, by the field of `Counts`.
OF_COUNTS = {
    "running": _gauge("num_requests_running", "sequences that the next steps compute"),
    "waiting": _gauge("num_requests_waiting", "sequences that wait to be computed"),
    "peak_waiting": _gauge(
        "num_requests_waiting_peak", "the most sequences in the queue at once since the load"
    ),
    "parked": _gauge(
        "num_requests_parked", "sequences whose clients must read more before they go on"
    ),
    "free_blocks": _gauge("kv_blocks_free", "KV blocks that are free, including cached ones"),
    "total_blocks": _gauge("kv_blocks", "KV blocks in total"),
    "free_states": _gauge(
        "state_slots_free",
        "state slots of recurrent layers that are free, including those with snapshots",
    ),
    "total_states": _gauge("state_slots", "state slots in total"),
    "prefix_queries": _counter("prefix_cache_queries_total", "prompt tokens looked up"),
    "prefix_hits": _counter("prefix_cache_hits_total", "prompt tokens found, and not computed"),
    "preemptions": _counter("num_preemptions_total", "sequences that lost their blocks"),
    "prompt_tokens_total": _counter("prompt_tokens_total", "prompt tokens of accepted requests"),
    "completion_tokens_total": _counter("generation_tokens_total", "tokens generated"),
    "step_count": _counter("steps_total", "steps run"),
}
# Metrics of a replica's telemetry, by the name of the distribution.
OF_TELEMETRY = {
    "first_token": _histogram(
        "time_to_first_token_seconds", "from arrival to a choice's first token"
    ),
    "inter_token": _histogram(
        "inter_token_latency_seconds",
        "from one message with tokens of a choice to the next, and with drafts a message may have "
        "several tokens",
    ),
    "request": _histogram("e2e_request_latency_seconds", "from arrival to a request's last event"),
    "queue": _histogram("request_queue_time_seconds", "from a request's arrival to its start"),
    "prefill": _histogram("request_prefill_time_seconds", "a request's time in prefill"),
    "decode": _histogram("request_decode_time_seconds", "a request's time in decode"),
    "parked": _histogram(
        "parked_seconds", "how long a choice was parked; choices that never were are not counted"
    ),
    "prompt_tokens": _histogram("request_prompt_tokens", "tokens in a request's prompt"),
    "generation_tokens": _histogram("request_generation_tokens", "tokens of a choice"),
    "step": _histogram("step_seconds", "a step, including the hop into its thread"),
    "step_gap": _histogram(
        "step_gap_seconds", "from a step's end to the next step's start, while there is work"
    ),
    "step_rows": _histogram("step_rows", "sequences in a step"),
}
CACHE_USAGE = _gauge("kv_cache_usage_perc", "share of KV blocks in use, 0 to 1")
SUCCESS = _counter("request_success_total", "choices that finished", (*REPLICA, "finished_reason"))
DISCARDED = _counter("plan_discarded_total", "steps that were planned ahead and not used")
BY_DRAFTER = (*REPLICA, "drafter")
DRAFTS = _counter("spec_decode_num_drafts_total", "drafts that steps verified", BY_DRAFTER)
DRAFTED = _counter(
    "spec_decode_num_draft_tokens_total", "drafted tokens that steps verified", BY_DRAFTER
)
ACCEPTED = _counter(
    "spec_decode_num_accepted_tokens_total", "drafted tokens that were right", BY_DRAFTER
)
ACCEPTED_AT = _counter(
    "spec_decode_num_accepted_tokens_per_pos_total",
    "drafts that were right up to the token at this position, from 0",
    (*BY_DRAFTER, "position"),
)
CANCEL_TO_FREE = _histogram(
    "cancel_to_free_seconds", "from an early end until its blocks are free", (*REPLICA, "phase")
)
LOOP = _counter(
    "loop_seconds_total", "time that the loop took itself, beside its steps", (*REPLICA, "phase")
)
PROCESS_BYTES = _gauge(
    "worker_resident_bytes", "memory in use by a worker with a process of its own"
)
MODEL_READY = _gauge("model_ready", "1 if requests for the model succeed, else 0", ("model_name",))
DEGRADED = _gauge(
    "replicas_degraded",
    "replicas that died and wait for their restart, or that hang",
    ("model_name",),
)
ADAPTER_RUNNING = _gauge(
    "adapter_requests_running", "requests that use the adapter now", ("model_name",)
)
ADAPTER_REQUESTS = _counter(
    "adapter_requests_total", "requests that have used the adapter", ("model_name",)
)
ADAPTER_TOKENS = _counter(
    "adapter_generation_tokens_total", "tokens that they got", ("model_name",)
)
DEATHS = _counter("worker_deaths_total", "workers that died", ("model_name",))
ENDED = _counter("requests_total", "requests that ended, including refused ones", ("end",))
DEADLINES = _counter("deadline_missed_total", "requests whose time ran out", ("phase",))
UNREAD_CALLS = _gauge("unread_calls", "succeeded calls whose clients do not read the answer", ())
DETACHED = _gauge("detached", "streams that wait for clients which lost their connections", ())
DRAINING = _gauge("drain_remaining_requests", "requests that a drain waits for", ())
MEMORY = _gauge("memory_reserved_bytes", "memory reserved for models", ())
MEMORY_LIMIT = _gauge("memory_limit_bytes", "memory that may be reserved", ())
RPCS = _counter("rpcs_total", "RPCs that ended", ("method", "code"))
BY_HOLDER = ("holder",)
HOLDER_REQUESTS = _counter("holder_requests_total", "requests of a holder that ended", BY_HOLDER)
HOLDER_TOKENS = _counter(
    "holder_tokens_total",
    "tokens of a holder's requests: prompt, cached (a part of those), completion, undelivered",
    (*BY_HOLDER, "kind"),
)
HOLDER_STEPS = _counter(
    "holder_step_seconds_total", "a holder's part of the time of steps", BY_HOLDER
)

# OpenTelemetry's metrics of calls, whose names have no prefix.
OF_GEN_AI = {
    metric: Metric(metric.name, "histogram", gen_ai.LABELS, metric.meaning)
    for metric in gen_ai.METRICS
}
ALL = (*METRICS, *OF_GEN_AI.values())


def samples_of(
    telemetry: EngineTelemetry, calls: Iterable[tuple[tuple[str, str], int]]
) -> Iterator[tuple[Metric, tuple[str, ...], Any]]:
    """Yield every sample: its metric, the values of its labels, and a number or a
    `Distribution`."""
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
    for model, used in telemetry.adapters.items():
        yield ADAPTER_RUNNING, (model,), used.running
        yield ADAPTER_REQUESTS, (model,), used.requests
        yield ADAPTER_TOKENS, (model,), used.tokens
    totals = statistics.totals
    for end in totals.requests_total.__slots__:
        yield ENDED, (end,), getattr(totals.requests_total, end)
    for phase, count in telemetry.deadlines_missed.items():
        yield DEADLINES, (phase,), count
    yield UNREAD_CALLS, (), totals.unread_calls
    yield DETACHED, (), totals.detached
    yield DRAINING, (), telemetry.num_draining
    yield MEMORY, (), totals.memory_reserved
    yield MEMORY_LIMIT, (), totals.memory_limit
    for (method, code), count in calls:
        yield RPCS, (method, code), count


def _of_holders(
    shown: Mapping[str, UsageSums],
) -> Iterator[tuple[Metric, tuple[str, ...], Any]]:
    for holder, sums in shown.items():
        labels = (holder or UNNAMED,)
        yield HOLDER_REQUESTS, labels, sums.requests
        yield HOLDER_STEPS, labels, sums.step_s
        for field, kind in KINDS_OF_TOKENS.items():
            yield HOLDER_TOKENS, (*labels, kind), getattr(sums, field)


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
    for counts in replica.drafts:
        yield from _of_drafts(counts, (*labels, counts.drafter))
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
    for phase, seconds in telemetry.loop_s.items():
        yield LOOP, (*labels, phase), seconds


def _of_drafts(
    counts: DraftCounts, labels: tuple[str, ...]
) -> Iterator[tuple[Metric, tuple[str, ...], Any]]:
    yield DRAFTS, labels, counts.drafts
    yield DRAFTED, labels, counts.drafted
    yield ACCEPTED, labels, counts.accepted
    for position, count in enumerate(counts.by_position):
        yield ACCEPTED_AT, (*labels, str(position)), count


# ---- for prometheus_client -------------------------------------------------------------------


class Collector:
    """Collects the samples for a registry of prometheus_client. ``ask`` returns every sample, and
    is called on the scrape's thread."""

    def __init__(self, ask: Callable[[], Iterable[tuple[Metric, tuple[str, ...], Any]]]) -> None:
        self._ask = ask

    def describe(self) -> list[Any]:
        """Return nothing, so that registering this object does not call `collect`."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield one family per metric, also for a metric without samples."""
        try:
            samples = list(self._ask())
        except (RuntimeError, TrioletError) as error:
            log.warning("a scrape failed, because the engine has ended: %s", error)
            return
        families = {metric: _family(metric) for metric in ALL}
        for metric, labels, value in samples:
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
    name = metric.name if metric in OF_GEN_AI.values() else PREFIX + metric.name
    return kinds[metric.kind](name, metric.meaning, labels=metric.labels)


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Return Prometheus' buckets: for each bound, how many values are not above it."""
    buckets, total = [], 0
    for bound, count in zip((*distribution.bounds, None), distribution.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound is None else str(bound), float(total)))
    return buckets


@asynccontextmanager
async def serving_metrics(
    config: ServerConfig, backend: Backend, interceptor: Interceptor, named: GenAiMetrics
) -> AsyncIterator[None]:
    """Serve Prometheus while the block runs, on threads of prometheus_client. Does nothing if no
    port is configured.

    Raises:
        ConfigError: the server cannot listen on the port.

    Cancellation: a scrape that has begun is answered first.
    """
    if config.metrics_port is None:
        yield
        return
    from prometheus_client import start_http_server

    token = trio.lowlevel.current_trio_token()

    def answer() -> list[tuple[Metric, tuple[str, ...], Any]]:
        return _samples(backend, interceptor, named)

    def ask() -> list[tuple[Metric, tuple[str, ...], Any]]:
        return trio.from_thread.run_sync(answer, trio_token=token)

    registry = _registry(ask)
    host = config.metrics_host.strip("[]")
    try:
        server, thread = start_http_server(config.metrics_port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {config.metrics_host}:{config.metrics_port}: "
            f"{error.strerror}; choose another --metrics-port or --metrics-host"
        ) from None
    server.set_app(partial(_answer_in_plain_text, server.get_app()))
    where = f"{config.metrics_host}:{server.server_port}"
    log.info("metrics are served on http://%s/metrics", where)
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):  # a scrape that has begun is answered
            await WorkerThreads().run(partial(_stop, server, thread), trio.CapacityLimiter(1))


async def text_of(backend: Backend, interceptor: Interceptor, named: GenAiMetrics) -> bytes:
    """Return every metric in Prometheus' plain text. Cancellation: waits for the thread's end."""
    from prometheus_client import generate_latest

    samples = _samples(backend, interceptor, named)
    job = partial(lambda: generate_latest(_registry(lambda: samples)))
    return await WorkerThreads().run(job, _scrapes)


def _samples(
    backend: Backend, interceptor: Interceptor, named: GenAiMetrics
) -> list[tuple[Metric, tuple[str, ...], Any]]:
    models = {
        name for status in backend.engine.list_models() for name in (status.name, *status.aliases)
    }
    of_gen_ai = [
        (OF_GEN_AI[metric], labels, value) for metric, labels, value in named.samples(models)
    ]
    of_calls = samples_of(backend.telemetry(), interceptor.calls.items())
    return [*of_calls, *_of_holders(backend.engine.usage.shown), *of_gen_ai]


def _registry(ask: Callable[[], Iterable[tuple[Metric, tuple[str, ...], Any]]]) -> Any:
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry()
    registry.register(Collector(ask))
    ProcessCollector(registry=registry)  # memory, processor time, files: process_…
    return registry


def _answer_in_plain_text(app: Any, environ: dict[str, Any], start_response: Any) -> Any:
    """Answer as if the scraper had no preference, as each of them reads the plain text format."""
    return app(environ | {"HTTP_ACCEPT": ""}, start_response)


def _stop(server: Any, thread: Any) -> None:
    server.shutdown()
    server.server_close()
    thread.join(SCRAPE_TIMEOUT_S)
