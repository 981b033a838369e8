"""What a call's trailer, GetUsage and the usage log say of requests over gRPC and HTTP.

`tests/service/test_endings.py` compares the sums with the server's counters after each end in each
phase; the simulator compares each record with what its reader received.
"""

import json
import signal

import grpc
import pytest

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.openai_calls import ask
from tests.support.server import fake
from tests.support.wire import Generation, generate_request, wait_serving, wait_until

SOON_S = 15.0
STEP_S = 0.02


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("usage") / "log"


@pytest.fixture(scope="module")
def server(log):
    settings = {"usage_log": str(log), "openai_port": 0}
    with fake(script={"step_s": STEP_S}, server=settings) as one:
        wait_serving(one.channel)
        yield one


def records(log):
    lines = log.read_text().splitlines() if log.exists() else []
    return {record["request_id"]: record for record in map(json.loads, lines)}


def record_of(log, name):
    """Return a request's record, once it is in the log."""
    return wait_until(lambda: records(log).get(name), SOON_S, f"the record of {name}")


def trailer_of(call):
    """Return what a call's trailer says."""
    [found] = [value for key, value in call.trailing_metadata() if key == "triolet-usage-bin"]
    return pb.RequestUsage.FromString(found)


def test_a_calls_trailer_is_its_record(server, log):
    asked = generate_request(prompt_ids=range(1, 41), max_tokens=5, n=2, request_id="whole")
    call = stubs.InferenceStub(server.channel).Generate(asked, timeout=SOON_S)
    num_bytes = sum(message.ByteSize() for message in call)
    used, record = trailer_of(call), record_of(log, "whole")
    assert (used.prompt_tokens, used.completion_tokens, used.undelivered) == (40, 10, 0)
    assert used.sent_bytes == num_bytes
    assert used.step.ToNanoseconds() >= 4 * STEP_S * 1e9
    for field in used.DESCRIPTOR.fields:
        if field.message_type is None:
            assert getattr(used, field.name) == record[field.name], field.name
    assert used.step.ToNanoseconds() == pytest.approx(1e9 * record["step_s"], abs=1000)
    assert (record["end"], record["holder"], record["model"]) == ("OK", "", "fake")


def test_a_call_that_was_aborted_has_a_trailer_and_its_record_has_a_step_more(server, log):
    asked = generate_request(prompt_ids=[5], max_tokens=2000, request_id="aborted")
    call = stubs.InferenceStub(server.channel).Generate(asked, timeout=SOON_S)
    for _ in range(3):
        next(call)
    stubs.ControlStub(server.channel).Abort(pb.AbortRequest(request_ids=["aborted"]))
    with pytest.raises(grpc.RpcError):
        list(call)
    used, record = trailer_of(call), record_of(log, "aborted")
    assert record["end"] == "ABORTED"
    assert 1 <= used.completion_tokens <= record["completion_tokens"] <= used.completion_tokens + 1
    late_s = record["step_s"] - used.step.ToNanoseconds() / 1e9
    assert -1e-6 <= late_s < 10 * STEP_S


def test_a_request_over_http_that_is_sent_whole_is_delivered_whole_or_not_at_all(server, log):
    asked = {"model": "fake", "prompt": "<5>", "max_tokens": 6, "ignore_eos": True}
    headers = {"X-Request-Id": "http"}
    answer = ask(server.openai_port, "/v1/completions", asked, headers=headers)
    assert answer.status == 200
    record = record_of(log, "http")
    assert record["completion_tokens"] == answer.json["usage"]["completion_tokens"] > 0
    assert (record["end"], record["undelivered"]) == ("OK", 0)
    assert record["sent_bytes"] > 0


def test_refused_requests_have_records(server, log):
    asked = generate_request(prompt_ids=[5], max_tokens=1, model="none", request_id="refused")
    with pytest.raises(grpc.RpcError):
        list(stubs.InferenceStub(server.channel).Generate(asked, timeout=SOON_S))
    record = record_of(log, "refused")
    assert record["end"] == "MODEL_NOT_FOUND"
    assert record["prompt_tokens"] == record["step_s"] == 0


def test_no_client_fills_the_log_or_the_sums_with_names_of_its_own(server, log):
    """Red if a refused request's record has the model and the id as the client wrote them."""
    stub = stubs.InferenceStub(server.channel)
    for model in ("no such model " * 10_000, "other", "\n"):
        asked = generate_request(model=model, request_id="x" * 10_000 + model[:3])
        with pytest.raises(grpc.RpcError):
            list(stub.Generate(asked, timeout=SOON_S))
    asked = generate_request(model="fake", request_id="named", max_tokens=10**9)
    with pytest.raises(grpc.RpcError):
        list(stub.Generate(asked, timeout=SOON_S))
    assert record_of(log, "named")["model"] == "fake"
    sums = stubs.ControlStub(server.channel).GetUsage(pb.GetUsageRequest()).sums
    assert {one.model for one in sums} <= {"", "fake"}
    assert record_of(log, "x" * 128)["model"] == ""
    assert max(map(len, log.read_text().splitlines())) < 1000


def test_a_killed_server_has_written_what_is_older_than_a_second(tmp_path):
    log = tmp_path / "log"
    with fake(server={"usage_log": str(log)}) as server:
        wait_serving(server.channel)
        with Generation(server.channel, prompt_ids=[5], max_tokens=3, request_id="old") as call:
            call.finish()
        assert record_of(log, "old")["completion_tokens"] == 3
        log.write_bytes(log.read_bytes() + b'{"ended_at":"20')
        server.signal(signal.SIGKILL)
        server.wait()
    with fake(server={"usage_log": str(log)}, may_log="torn line") as server:
        wait_serving(server.channel)
        with Generation(server.channel, prompt_ids=[5], max_tokens=2, request_id="new") as call:
            call.finish()
        assert record_of(log, "new")["completion_tokens"] == 2
    assert list(records(log)) == ["old", "new"]
