"""OpenTelemetry spans of calls: one for the call, and one for each phase that it went through.

Rule 1: nothing of OpenTelemetry is imported unless OpenTelemetry's own variables configure it:
``OTEL_TRACES_EXPORTER`` (otlp or console), or an endpoint in ``OTEL_EXPORTER_OTLP_ENDPOINT``. Rule
2: spans are made after a call has ended, from times that the engine measured anyway, so that
tracing takes no time from a step. Rule 3: a span belongs to the caller's trace if the call's
metadata has a W3C ``traceparent``. No attribute has text of a prompt or an answer.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from engine.errors import install_command
from grpc_service.app.gen_ai import attributes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_S = 1.0  # guess: how long the end of the process may wait for a collector
PHASES = ("load", "queue", "wait", "prefill", "decode")  # in this order; a call has some of them
# The gRPC codes that OpenTelemetry's conventions count as the server's fault.
FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}


def open_tracing(environ: Mapping[str, str]) -> Tracing | None:
    """Return the tracing that the environment configures, None if it configures none or if
    OpenTelemetry is not installed."""
    kind = environ.get("OTEL_TRACES_EXPORTER", "")
    kind = kind or ("otlp" if any(environ.get(name) for name in ENDPOINTS) else "none")
    if kind == "none" or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if kind not in ("otlp", "console"):
        log.warning("no traces: OTEL_TRACES_EXPORTER is %r, not otlp, console or none", kind)
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(kind)
    except ImportError as error:
        log.warning("no traces: no %s; %s", error.name, install_command("tracing"))
        return None
    name = environ.get("OTEL_SERVICE_NAME", "triolet")
    resource = Resource.create({"service.name": name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `flush` is bounded
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def _exporter(kind: str) -> Any:
    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    module = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    return module.OTLPSpanExporter()


class Tracing:
    """Makes spans of ended calls. `record` may be called on any thread."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("triolet")
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self,
        fields: Mapping[str, str | int | float],
        metadata: Iterable[tuple[str, str | bytes]],
        request_id: str,
    ) -> None:
        """Make the spans of a call that has just ended. ``fields`` are those of its log line."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        carrier = {name: value for name, value in metadata if isinstance(value, str)}
        ended = time.time_ns()
        started = ended - _ns(fields["elapsed_s"])
        code = str(fields["code"])
        service, _, method = str(fields["method"]).rpartition("/")
        system = "http" if service.startswith("/") else "grpc"
        span = self._tracer.start_span(
            str(fields["method"]),
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=started,
            attributes={
                "rpc.system": system,
                "rpc.service": service,
                "rpc.method": method,
                "rpc.grpc.status": code,
                "triolet.request_id": request_id,
                **{
                    f"triolet.{name}": value
                    for name, value in fields.items()
                    if name in ("model", "phase", "prompt_tokens", "tokens_done", "reason", "key")
                },
                **attributes_of(fields),
            },
        )
        if code in FAULTS:
            span.set_status(StatusCode.ERROR, code)
        inside, at = set_span_in_context(span), started
        for phase in PHASES:
            length = _ns(fields.get(f"{phase}_s", 0.0))
            if length > 0:
                part = self._tracer.start_span(phase, context=inside, start_time=at)
                at = min(at + length, ended)
                part.end(at)
        span.end(ended)

    def flush(self) -> None:
        """Send the remaining spans, within `FLUSH_S`, and accept no more. The limit is needed
        because OpenTelemetry's own timeouts do not apply while an exporter is sending."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        thread.start()
        thread.join(FLUSH_S)


def _ns(seconds: str | int | float) -> int:
    return int(float(seconds) * 1e9)
