"""OpenTelemetry's names for what calls of models did, in spans and in metrics beside ours.

Rule 1: no attribute and no label has text of a prompt or an answer. Rule 2: the names, and the
bounds of the histograms, are those of OpenTelemetry's semantic conventions for generative AI
(semantic-conventions-genai, docs/gen-ai), which are in development. Reranking has no operation
there, so that its name is ours. In Prometheus' names a unit stands at the end, and "_" for ".".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from engine.replica.telemetry import Histogram
from grpc_service.access.interceptor import COUNTED_ALREADY

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from engine.replica.telemetry import Distribution

    Fields = Mapping[str, str | int | float]  # the fields of a log line

PROVIDER = "triolet"
# Attributes of spans, by the field of a call's log line.
ATTRIBUTES = {
    "operation": "gen_ai.operation.name",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "tokens_done": "gen_ai.usage.output_tokens",
    "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
    "first_s": "gen_ai.response.time_to_first_chunk",
}
USAGE = "gen_ai.usage."
# The phases of a request's whole time, by the clock of its ``first_s``.
PHASES = ("queue_s", "load_s", "prefill_s", "decode_s", "parked_s")
# What each operation has for output; those that generate text count its tokens.
OUTPUTS = {"chat": "text", "text_completion": "text", "generate_content": "image"}


class GenAiMetric(NamedTuple):
    """A histogram of calls, in seconds."""

    name: str
    meaning: str
    bounds: tuple[float, ...]


DURATION = GenAiMetric(
    "gen_ai_server_request_duration_seconds",
    "from a call's arrival to its end",
    tuple(0.01 * 2**power for power in range(14)),
)
FIRST_TOKEN = GenAiMetric(
    "gen_ai_server_time_to_first_token_seconds",
    "from a request's arrival to its first token, of calls that succeeded",
    (*(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0), 7.5, 10.0),
)
PER_TOKEN = GenAiMetric(
    "gen_ai_server_time_per_output_token_seconds",
    "the time behind the first token, divided by the other tokens, of calls for one answer that "
    "succeeded",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
METRICS = (DURATION, FIRST_TOKEN, PER_TOKEN)
LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "error_type")
MODEL = LABELS.index("gen_ai_request_model")


def attributes_of(fields: Fields) -> dict[str, Any]:
    """Return the attributes of the span of a call with these fields of its log line; none unless
    the call's request has reached the engine."""
    operation = fields.get("operation")
    if not operation or not fields["model"]:
        return {}
    named: dict[str, Any] = {
        name: fields[field] for field, name in ATTRIBUTES.items() if field in fields
    }
    named["gen_ai.provider.name"] = PROVIDER
    if operation in OUTPUTS:
        named["gen_ai.output.type"] = OUTPUTS[str(operation)]
    if OUTPUTS.get(str(operation)) != "text":
        del named["gen_ai.usage.output_tokens"]
    if fields["method"] in COUNTED_ALREADY:  # the span of the first call has the usage
        named = {name: value for name, value in named.items() if not name.startswith(USAGE)}
    if fields.get("finish"):
        named["gen_ai.response.finish_reasons"] = str(fields["finish"]).split(",")
    if error := _error_of(fields):
        named["error.type"] = error
    return named


class GenAiMetrics:
    """Counts calls that have ended. Belongs to the Trio thread. A series exists for each pair of
    operation and model, and for each way in which such calls have failed."""

    def __init__(self) -> None:
        self._histograms: dict[tuple[GenAiMetric, tuple[str, ...]], Histogram] = {}

    def record(self, fields: Fields) -> None:
        """Count a call, of which these are the fields of its log line."""
        operation = str(fields.get("operation", ""))
        if not operation or not fields["model"] or fields["method"] in COUNTED_ALREADY:
            return
        error = _error_of(fields)
        labels = (operation, PROVIDER, str(fields["model"]), error)
        elapsed = float(fields["elapsed_s"])
        self._observe(DURATION, labels, elapsed)
        if error or "first_s" not in fields:
            return
        first, more = float(fields["first_s"]), int(fields["tokens_done"]) - 1
        self._observe(FIRST_TOKEN, labels, first)
        has_one = "decode_s" in fields and "," not in str(fields.get("finish", ""))
        if more > 0 and has_one:
            whole = sum(float(fields.get(phase, 0.0)) for phase in PHASES)
            self._observe(PER_TOKEN, labels, max(0.0, whole - first) / more)

    def samples(
        self, models: Container[str]
    ) -> Iterator[tuple[GenAiMetric, tuple[str, ...], Distribution]]:
        """Yield a copy of each histogram with the values of its labels. Those of models and
        adapters that are not among ``models`` any more are dropped."""
        for key in [key for key in self._histograms if key[1][MODEL] not in models]:
            del self._histograms[key]
        for (metric, labels), histogram in self._histograms.items():
            yield metric, labels, histogram.snapshot()

    def _observe(self, metric: GenAiMetric, labels: tuple[str, ...], value: float) -> None:
        key = metric, labels
        if key not in self._histograms:
            self._histograms[key] = Histogram(metric.bounds)
        self._histograms[key].observe(value)


def _error_of(fields: Fields) -> str:
    """Return the reason for which a call failed; "" if it succeeded."""
    if fields["code"] == "OK":
        return ""
    return str(fields.get("reason", fields["code"]))
