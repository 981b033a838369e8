"""Spans: the caller's trace goes on, phases are its parts, and imports happen only on request."""

import itertools
import json
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from grpc_service.app.tracing import Tracing, open_tracing
from grpc_service.client import stubs
from tests.support.programs import imported_by, output_of
from tests.support.server import fake
from tests.support.wire import generate_request, wait_serving

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


def spans_in(text):
    """Return the JSON objects of a text, one after the other."""
    decoder, found, text = json.JSONDecoder(), [], text.strip()
    while text:
        one, end = decoder.raw_decode(text)
        found.append(one)
        text = text[end:].strip()
    return found
