"""Spans: the caller's trace goes on, phases are its parts, and imports happen only on request."""

import itertools
import json
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from grpc_service.app.gen_ai import LABELS, METRICS, GenAiMetrics
from grpc_service.app.tracing import Tracing, open_tracing
from grpc_service.client import stubs
from tests.support.encode_wire import embed, rerank
from tests.support.image_generation_wire import draw, draw_request
from tests.support.openai_calls import ask
from tests.support.programs import imported_by, output_of
from tests.support.server import fake
from tests.support.wire import generate, generate_request, wait_serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SECRET = "zanzibar-mackerel"


@pytest.fixture
def exporter():
    """Return an exporter that keeps spans in memory."""
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter):
    """Return a tracing that exports to memory."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


def fields(**others):
    """Return the fields of a finished call."""
    method = "triolet.v1.Inference/Generate"
    return {"method": method, "code": "OK", "elapsed_s": 1.0, "peer": "unix:"} | others


def test_a_call_goes_on_with_its_callers_trace(tracing, exporter):
    tracing.record(fields(model="m"), [("traceparent", TRACEPARENT), ("x-bin", b"\xff")], "r1")
    [span] = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert (span.attributes["triolet.request_id"], span.attributes["triolet.model"]) == ("r1", "m")
    assert span.end_time - span.start_time == 1_000_000_000
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_call_without_a_trace_begins_one(tracing, exporter, header):
    tracing.record(fields(), [("traceparent", header)], "r1")
    [span] = exporter.get_finished_spans()
    assert span.parent is None


def test_phases_follow_each_other_within_the_call(tracing, exporter):
    phases = {"load_s": 0.1, "queue_s": 0.2, "prefill_s": 0.3, "decode_s": 0.4, "parked_s": 0.0}
    tracing.record(fields(**phases), [], "r1")
    *parts, call = exporter.get_finished_spans()
    assert [part.name for part in parts] == ["load", "queue", "prefill", "decode"]
    assert parts[0].start_time == call.start_time
    for one, other in itertools.pairwise(parts):
        assert one.end_time == other.start_time
    assert parts[-1].end_time <= call.end_time
    assert all(part.parent.span_id == call.context.span_id for part in parts)


def test_phases_never_outlast_the_call(tracing, exporter):
    tracing.record(fields(wait_s=5.0, decode_s=5.0), [], "r1")
    *parts, call = exporter.get_finished_spans()
    assert all(part.end_time <= call.end_time for part in parts)


@pytest.mark.parametrize(("code", "is_fault"), [("INTERNAL", True), ("NOT_FOUND", False)])
def test_only_the_servers_faults_are_errors(tracing, exporter, code, is_fault):
    tracing.record(fields(code=code), [], "r1")
    [span] = exporter.get_finished_spans()
    assert (span.status.status_code is StatusCode.ERROR) == is_fault


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_EXPORTER": "jaeger"},
    ],
)
def test_without_configuration_there_is_no_tracing(environ):
    assert open_tracing(environ) is None


def test_a_missing_package_is_logged_and_the_server_goes_on(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert open_tracing({"OTEL_TRACES_EXPORTER": "console"}) is None
    assert "triolet[tracing]" in caplog.text


def test_nothing_is_imported_unless_it_is_configured():
    code = (
        "import grpc_service.app.application\n"
        "from grpc_service.app.tracing import open_tracing\n"
        "open_tracing({})\n"
    )
    assert "opentelemetry" not in imported_by(code)


def test_a_collector_that_hangs_does_not_hold_up_the_end():
    code = (
        "import time\n"
        "from opentelemetry.sdk.trace.export import ConsoleSpanExporter\n"
        "from grpc_service.app.tracing import open_tracing\n"
        "ConsoleSpanExporter.export = lambda *_: time.sleep(60)\n"
        "tracing = open_tracing({'OTEL_TRACES_EXPORTER': 'console'})\n"
        "tracing.record({'method': 'a/b', 'code': 'OK', 'elapsed_s': 1.0}, [], 'r1')\n"
        "tracing.flush()\n"
    )
    output_of(code, limit_s=20)


def test_a_server_exports_its_spans(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    with fake(script={"step_s": 0.01}) as server:
        wait_serving(server.channel)
        stub = stubs.InferenceStub(server.channel)
        request = generate_request(text=SECRET, max_tokens=5, request_id="r1")
        list(stub.Generate(request, timeout=10, metadata=[("traceparent", TRACEPARENT)]))
        assert server.stop() == 0
        spans = spans_in(server.out.partition("\n")[2])
    names = {span["name"] for span in spans if span["context"]["trace_id"] == f"0x{TRACE}"}
    assert {"triolet.v1.Inference/Generate", "prefill", "decode"} <= names
    assert not any("grpc.health" in span["name"] for span in spans)
    assert SECRET not in server.out


# ---- OpenTelemetry's names for what models do

SETTLED = {"prompt_tokens": 7, "tokens_done": 9, "first_s": 0.2}
TIMES = {"queue_s": 0.1, "load_s": 0.0, "prefill_s": 0.1, "decode_s": 0.6, "parked_s": 0.2}
ENDS = {"cached_tokens": 4, "reasoning_tokens": 3, "finish": "stop,length"}


def test_the_span_of_a_chat_has_the_conventions_names(tracing, exporter):
    tracing.record(fields(operation="chat", model="m", **SETTLED, **ENDS), [], "r1")
    [span] = exporter.get_finished_spans()
    named = {name: value for name, value in span.attributes.items() if "gen_ai" in name}
    assert named == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "triolet",
        "gen_ai.request.model": "m",
        "gen_ai.output.type": "text",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.reasoning.output_tokens": 3,
        "gen_ai.response.time_to_first_chunk": 0.2,
        "gen_ai.response.finish_reasons": ("stop", "length"),
    }
    assert "error.type" not in span.attributes


def test_the_span_of_an_attach_does_not_count_the_tokens_again(tracing, exporter):
    attach = {"method": "triolet.v1.Inference/Attach"}
    tracing.record(fields(operation="chat", model="m", **SETTLED, **ENDS, **attach), [], "r1")
    [span] = exporter.get_finished_spans()
    assert span.attributes["gen_ai.request.model"] == "m"
    assert not [name for name in span.attributes if name.startswith("gen_ai.usage")]


def test_a_call_that_fails_names_its_reason(tracing, exporter):
    failed = fields(operation="chat", model="m", code="DEADLINE_EXCEEDED", reason="DEADLINE")
    tracing.record(failed, [], "r1")
    tracing.record(fields(code="NOT_FOUND"), [], "r1")
    first, second = exporter.get_finished_spans()
    assert first.attributes["error.type"] == "DEADLINE"
    assert not any(name.startswith(("gen_ai", "error")) for name in second.attributes)


def test_metrics_have_the_conventions_bounds_and_labels():
    named = GenAiMetrics()
    done = fields(operation="chat", model="m", **SETTLED, **TIMES, finish="stop")
    named.record(done | {"elapsed_s": 1.2})  # the call lasted longer than its request
    named.record(done | {"elapsed_s": 0.8, "finish": "stop,length"})
    named.record(done | {"elapsed_s": 0.5, "tokens_done": 1})
    named.record(done | {"code": "ABORTED", "reason": "ABORTED"})
    named.record(done | {"method": "triolet.v1.Inference/Attach"})
    named.record(fields())
    found = {
        (metric.name.removeprefix("gen_ai_server_"), labels): (counted.count, counted.total)
        for metric, labels, counted in named.samples({"m"})
    }
    labels, failed = ("chat", "triolet", "m", ""), ("chat", "triolet", "m", "ABORTED")
    assert found == {
        ("request_duration_seconds", labels): (3, 2.5),
        ("request_duration_seconds", failed): (1, 1.0),
        ("time_to_first_token_seconds", labels): (3, pytest.approx(0.6)),
        ("time_per_output_token_seconds", labels): (1, 0.1),
    }
    # semantic-conventions-genai, docs/gen-ai/gen-ai-metrics.md
    assert [metric.bounds for metric in METRICS] == [
        (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10),
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ]
    assert LABELS == ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model",
                      "error_type")  # fmt: skip


def test_series_of_models_that_are_gone_are_dropped_at_a_scrape():
    named = GenAiMetrics()
    for model in ("m", "adapter"):
        named.record(fields(operation="chat", model=model))
    assert {labels[2] for _, labels, _ in named.samples({"m", "adapter"})} == {"m", "adapter"}
    assert {labels[2] for _, labels, _ in named.samples({"m"})} == {"m"}
    assert {labels[2] for _, labels, _ in named.samples({"m", "adapter"})} == {"m"}


def test_the_prompts_of_one_call_are_counted_together(monkeypatch):
    """Red if only the first of them is, or if their tokens are taken for one answer's."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    with fake(server={"openai_port": 0, "metrics_port": 0}) as server:
        wait_serving(server.channel)
        body = {"model": "fake", "max_tokens": 5, "prompt": ["a b c", "d e", "f"]}
        answer = json.loads(ask(server.openai_port, "/v1/completions", body).body)
        scraped = ask(server.openai_port, "/metrics", verb="GET").body.decode()
        assert server.stop() == 0
        spans = spans_in(server.out.partition("\n")[2])
    usage = answer["usage"]
    [span] = [one for one in spans if one["name"].endswith("/v1/completions")]
    counted = span["attributes"]
    assert counted["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert counted["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 15
    assert counted["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert "gen_ai_server_time_to_first_token_seconds_count" in scraped
    assert "gen_ai_server_time_per_output_token_seconds_count" not in scraped


MODELS = [
    {"name": "fake", "script": {"words": ("so ", SECRET, ".")}},
    {"name": "embedder", "capability": "text-embedding"},
    {"name": "ranker", "capability": "rerank"},
    {"name": "painter", "capability": "text-to-image"},
]
DONE = {  # OpenTelemetry's operations, and the model and the output of each
    "text_completion": ("fake", "text"),
    "chat": ("fake", "text"),
    "embeddings": ("embedder", None),
    "rerank": ("ranker", None),
    "generate_content": ("painter", "image"),
}


def test_no_span_and_no_metric_has_text_of_a_prompt_or_an_answer(monkeypatch):
    """Every kind of work by both doors, and a refused request, with a secret in every text."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    ports = {"openai_port": 0, "metrics_port": 0}
    with fake(models=MODELS, server=ports) as server:
        wait_serving(server.channel)
        chat = {"messages": [{"role": "user", "content": SECRET}]}
        said = generate(server.channel, text=SECRET, max_tokens=9).text()
        assert SECRET in said
        said = generate(server.channel, chat=chat, sampling={"max_tokens": 9}).text()
        assert SECRET in said
        assert embed(server.channel, [SECRET]).error is None
        assert rerank(server.channel, SECRET, [SECRET]).error is None
        assert draw(server.channel, draw_request(SECRET)).error is None
        bad = generate(server.channel, text=SECRET, temperature=-1.0, stop=[SECRET])
        assert bad.error is not None
        text = {"model": "fake", "max_tokens": 9}
        for path, body in (
            ("/v1/completions", text | {"prompt": SECRET}),
            ("/v1/chat/completions", text | chat | {"user": SECRET}),
            ("/v1/embeddings", {"input": SECRET, "model": "embedder"}),
            ("/v1/rerank", {"query": SECRET, "documents": [SECRET], "model": "ranker"}),
            ("/v1/images/generations", {"prompt": SECRET, "model": "painter"}),
        ):
            answer = ask(server.openai_port, path, body)
            assert answer.status == 200, answer.body
        scraped = ask(server.openai_port, "/metrics", verb="GET").body.decode()
        assert server.stop() == 0
        spans = spans_in(server.out.partition("\n")[2])
    assert SECRET not in server.out
    assert SECRET not in scraped
    for operation, (model, output) in DONE.items():
        own = [
            span["attributes"]
            for span in spans
            if span["attributes"].get("gen_ai.operation.name") == operation
        ]
        assert {one["rpc.system"] for one in own} == {"grpc", "http"}
        for one in own:
            assert one["gen_ai.request.model"] == model
            assert one.get("gen_ai.output.type") == output
            assert one["gen_ai.usage.input_tokens"] > 0
            assert ("gen_ai.usage.output_tokens" in one) == (output == "text")
        labels = f'gen_ai_operation_name="{operation}",gen_ai_provider_name="triolet"'
        assert f'gen_ai_server_request_duration_seconds_count{{error_type="",{labels}' in scraped
        first = f'gen_ai_server_time_to_first_token_seconds_count{{error_type="",{labels}'
        assert (first in scraped) == (output == "text")


def spans_in(text):
    """Return the JSON objects of a text, one after the other."""
    decoder, found, text = json.JSONDecoder(), [], text.strip()
    while text:
        one, end = decoder.raw_decode(text)
        found.append(one)
        text = text[end:].strip()
    return found
