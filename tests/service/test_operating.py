"""Control over real gRPC: abort, pause, resume, reset and drain, and their effect on requests."""

import json
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from grpc_service.rpc.frame_filter import DRAIN_PING
from tests.support.core_driver import expected_tokens
from tests.support.raw_http2 import (
    ACK,
    DATA,
    END_STREAM,
    GET_STATS,
    GOAWAY,
    PING,
    End,
    RawClient,
    frame,
)
from tests.support.server import ROOT, fake
from tests.support.wire import (
    NOT_SERVING,
    Generation,
    broken_fields,
    error_of,
    generate,
    reason,
    stats,
    wait_idle,
    wait_serving,
    wait_until,
)

STEP_S = 0.02
LONG = 2000
SOON_S = 10.0
GENERATE = (
    *((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/triolet.v1.Inference/Generate")),
    *((b":authority", b"localhost"), (b"te", b"trailers")),
    (b"content-type", b"application/grpc"),
)
CHECK = "/grpc.health.v1.Health/Check"
ABORTED = pb.ABORT_OUTCOME_ABORTED
ALREADY_ENDED = pb.ABORT_OUTCOME_ALREADY_ENDED
REMEMBERED = pb.ABORT_OUTCOME_REMEMBERED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def server():
    """Yield a server of a slow fake model."""
    with fake(script={"step_s": STEP_S}, runner={"max_model_len": 4096}) as one:
        wait_serving(one.channel)
        yield one


def health_of(client):
    """Return the server's health, asked by a `RawClient`."""
    return health_pb2.HealthCheckResponse.FromString(client.ask(CHECK)).status


@pytest.fixture
def control(server):
    """Yield the stub of the service Control, and resume the server afterwards."""
    stub = stubs.ControlStub(server.channel)
    yield stub
    stub.Resume(pb.ResumeRequest(), timeout=10)
    wait_idle(server.channel)


def abort(control, *names):
    """Abort requests, and return the outcomes."""
    answer = control.Abort(pb.AbortRequest(request_ids=names), timeout=10)
    assert [result.request_id for result in answer.results] == list(names)
    return [result.outcome for result in answer.results]


def pause(control, mode, **fields):
    """Pause the server."""
    control.Pause(pb.PauseRequest(mode=f"PAUSE_MODE_{mode}", **fields), timeout=10)


def test_an_abort_ends_a_running_request_with_every_choice(server, control):
    with Generation(server.channel, request_id="a1", n=2, max_tokens=LONG) as call:
        call.read_deltas(4)
        assert abort(control, "a1") == [ABORTED]
        heard = call.finish()
    assert heard.error.code() is grpc.StatusCode.ABORTED
    assert reason(heard.error) == "ABORTED"
    assert abort(control, "a1") == [ALREADY_ENDED]


def test_an_abort_before_its_request_is_remembered_once(server, control):
    assert abort(control, "a2") == [REMEMBERED]
    assert reason(generate(server.channel, request_id="a2").error) == "ABORTED"
    assert generate(server.channel, request_id="a2", max_tokens=2).error is None


@pytest.mark.parametrize("names", [[], [""], ["x", ""]])
def test_an_abort_without_an_id_is_refused_by_name(control, names):
    request = pb.AbortRequest(request_ids=names)
    error = error_of(lambda: control.Abort(request, timeout=10))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert any(field.startswith("request_ids") for field in broken_fields(error))


def test_keep_freezes_running_requests_queues_new_ones_and_resumes_both(server, control):
    with Generation(server.channel, prompt_ids=[5, 6], max_tokens=60) as running:
        running.read_deltas(3)
        pause(control, "KEEP")
        wait_until(lambda: stats(server.channel).running == 1, 5, "one running")
        steps = stats(server.channel).step_count
        with Generation(server.channel, prompt_ids=[7], max_tokens=3) as queued:
            wait_until(lambda: stats(server.channel).waiting == 1, 5, "one waiting")
            assert stats(server.channel).step_count <= steps + 1
            control.Resume(pb.ResumeRequest(), timeout=10)
            assert queued.finish().ids() == expected_tokens([7], count=3)
        assert running.finish().ids() == expected_tokens([5, 6], count=60)


@pytest.mark.parametrize("mode", ["KEEP", "WAIT", "ABORT"])
def test_the_statistics_show_a_pause(control, mode):

    def told():
        [replica] = control.GetStats(pb.GetStatsRequest(), timeout=10).replicas
        return pb.PauseMode.Name(replica.pause).removeprefix("PAUSE_MODE_")

    assert told() == "UNSPECIFIED"
    pause(control, mode)
    assert told() == mode
    control.Resume(pb.ResumeRequest(), timeout=10)
    assert told() == "UNSPECIFIED"


def test_explain_describes_a_live_request_while_steps_run(server, control):
    with Generation(server.channel, request_id="live", max_tokens=LONG) as running:
        running.read_deltas(2)
        for _ in range(5):
            said = control.Explain(pb.ExplainRequest(request_id="live"), timeout=10)
            assert (said.state, said.position) == ("RUNNING", 0)
            assert said.computed_tokens
            assert not said.HasField("estimate")
        pause(control, "KEEP")
        ask = pb.ExplainRequest(request_id="live")
        pausing = "resume: the model is paused (keep)"
        wait_until(lambda: control.Explain(ask, timeout=10).waiting_for == pausing, 5, pausing)
    wait_idle(server.channel)
    error = error_of(lambda: control.Explain(ask, timeout=10))
    assert (error.code(), reason(error)) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")


def test_wait_lets_running_ones_finish_and_refuses_new_ones(server, control):
    with Generation(server.channel, prompt_ids=[5], max_tokens=30) as running:
        running.read_deltas(2)
        pause(control, "WAIT")
        refused = generate(server.channel, max_tokens=2)
        assert refused.error.code() is UNAVAILABLE
        assert reason(refused.error) == "PAUSED"
        assert running.finish().ids() == expected_tokens([5], count=30)


def test_abort_mode_ends_running_and_waiting_ones(server, control):
    with Generation(server.channel, max_tokens=LONG) as running:
        running.read_deltas(2)
        pause(control, "ABORT")
        assert reason(running.finish().error) == "ABORTED"
    assert reason(generate(server.channel).error) == "PAUSED"
    control.Resume(pb.ResumeRequest(), timeout=10)
    assert generate(server.channel, max_tokens=2).error is None


def test_a_pause_without_a_mode_or_of_an_unknown_model_is_refused_by_name(control):
    error = error_of(lambda: control.Pause(pb.PauseRequest(), timeout=10))
    assert broken_fields(error) == ["mode"]
    error = error_of(lambda: pause(control, "KEEP", model="nobody"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


def test_a_reset_cache_is_not_hit(server, control):
    prompt = list(range(1, 100))
    first = generate(server.channel, prompt_ids=prompt, max_tokens=1)
    assert first.finished().usage.cached_tokens == 0
    again = generate(server.channel, prompt_ids=prompt, max_tokens=1)
    assert again.finished().usage.cached_tokens == 96
    control.ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=10)
    after = generate(server.channel, prompt_ids=prompt, max_tokens=1)
    assert after.finished().usage.cached_tokens == 0


def command(server, *args):
    """Run a client command, and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "grpc_service", *args, "--server", server.address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command_line_operates_too(server, control):
    assert command(server, "pause", "--mode", "wait") == (0, "paused\n", "")
    assert reason(generate(server.channel).error) == "PAUSED"
    assert command(server, "resume") == (0, "resumed\n", "")
    assert command(server, "reset-prefix-cache") == (
        0,
        "forgot every cached prefix\n",
        "",
    )
    told = "nobody: not known; if it arrives within 60 s, it will be aborted\n"
    assert command(server, "abort", "nobody") == (0, told, "")
    code, out, _ = command(server, "abort", "nobody", "--json")
    assert code == 0
    assert json.loads(out)["results"][0]["outcome"] == "ABORT_OUTCOME_REMEMBERED"
    code, _, err = command(server, "pause", "--model", "nobody")
    assert (code, err.count("\n")) == (1, 1)
    assert "nobody" in err


def test_a_drain_goes_on_when_its_client_gives_up():
    with fake(script={"step_s": STEP_S}, runner={"max_model_len": 4096}) as one:
        wait_serving(one.channel)
        control = stubs.ControlStub(one.channel)
        with Generation(one.channel, prompt_ids=[5], max_tokens=60) as running:
            running.read_deltas(1)
            error = error_of(lambda: control.Drain(pb.DrainRequest(), timeout=0.2))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert generate(one.channel).error.code() is UNAVAILABLE
            assert running.finish().ids() == expected_tokens([5], count=60)


def test_a_drain_asks_clients_at_once_to_open_no_more_calls():
    with fake(script={"step_s": STEP_S}, runner={"max_model_len": 4096}) as one:
        wait_serving(one.channel)
        host, port = one.address.split(":")
        with RawClient((host, int(port))) as client:
            request = pb.GenerateRequest(token_ids={"ids": [5]}, sampling={"max_tokens": LONG})
            body = request.SerializeToString()
            prefixed = bytes(1) + len(body).to_bytes(4, "big") + body
            client.say(client.headers(1, GENERATE) + frame(DATA, END_STREAM, 1, prefixed))
            running = client.ends.setdefault(1, End())
            assert client.wait_for(lambda: running.body, SOON_S)
            drained = stubs.ControlStub(one.channel).Drain.future(pb.DrainRequest(), timeout=30)
            assert client.wait_for(lambda: client.goaway, SOON_S)
            num_bytes = len(running.body)
            assert client.wait_for(lambda: len(running.body) > num_bytes, SOON_S)
            assert not running.is_over
        drained.result(timeout=10)  # the client leaves, and its request ends


def test_a_drain_takes_leave_of_each_connection_in_two_steps():
    """The listener closes, and clients get a GOAWAY without a last stream and a ping. Calls that
    cross these are served; the ping's answer brings a GOAWAY with the last stream. Later calls are
    refused so that gRPC repeats them elsewhere, except health, Attach and Control.

    Red if a draining server accepts connections, or refuses a crossing call by a status.
    """

    def request(count):
        asked = pb.GenerateRequest(token_ids={"ids": [5]}, sampling={"max_tokens": count})
        return asked.SerializeToString()

    path = "/triolet.v1.Inference/Generate"
    with fake(script={"step_s": STEP_S}, runner={"max_model_len": 4096}) as one:
        wait_serving(one.channel)
        with RawClient(one.address) as client, RawClient(one.address) as idle:
            long = client.call(path, request(100))
            assert client.wait_for(lambda: long.body, SOON_S)
            idle.ask(CHECK)
            client.answers_pings = False
            client.heard.clear()
            one.signal()
            assert client.wait_for(lambda: PING in [kind for kind, *_ in client.heard], SOON_S)
            said = [(kind, body) for kind, _, stream, body in client.heard if not stream]
            assert said == [(GOAWAY, b"\x7f\xff\xff\xff" + bytes(4)), (PING, DRAIN_PING)]
            with pytest.raises(ConnectionRefusedError):
                RawClient(one.address)
            crossing = client.call(path, request(3))
            assert client.wait_for(lambda: crossing.body, SOON_S)
            client.heard.clear()
            client.say(frame(PING, ACK, 0, DRAIN_PING))
            assert client.wait_for(lambda: GOAWAY in [kind for kind, *_ in client.heard], SOON_S)
            [last] = [body for kind, _, _, body in client.heard if kind == GOAWAY]
            assert last == (3).to_bytes(4, "big") + bytes(4)
            late = client.call(path, request(3))
            assert client.wait_for(lambda: late.is_over, SOON_S)
            assert late.reset == "REFUSED_STREAM"
            for one_client in (client, idle):
                assert health_of(one_client) == NOT_SERVING
                attached = one_client.call("/triolet.v1.Inference/Attach", b"")
                assert one_client.wait_for(lambda end=attached: end.is_over, SOON_S)
                assert str(attached).startswith("grpc ")
            assert client.wait_for(lambda: crossing.is_over and long.is_over, SOON_S)
            assert str(crossing) == str(long) == "grpc 0"
            assert one.wait() == 0


def test_drain_finishes_running_requests_refuses_new_ones_and_leaves_the_server_up():
    with fake(script={"step_s": STEP_S}, runner={"max_model_len": 4096}) as one:
        wait_serving(one.channel)
        control = stubs.ControlStub(one.channel)
        with (
            RawClient(one.address) as connected,
            Generation(one.channel, prompt_ids=[5], max_tokens=20) as short,
            Generation(one.channel, prompt_ids=[6], max_tokens=LONG) as long,
        ):
            short.read_deltas(1)
            long.read_deltas(1)
            request = pb.DrainRequest()
            request.timeout.FromMilliseconds(1500)
            drained = control.Drain.future(request, timeout=30)
            wait_until(lambda: health_of(connected) == NOT_SERVING, 5, "NOT_SERVING")
            assert generate(one.channel).error.code() is UNAVAILABLE
            assert short.finish().ids() == expected_tokens([5], count=20)
            cut = long.finish()
            assert (cut.error.code(), reason(cut.error)) == (UNAVAILABLE, "SHUTTING_DOWN")
            assert cut.ids() == expected_tokens([6], count=len(cut.ids()))
            drained.result(timeout=10)
            resumed = connected.call("/triolet.v1.Control/Resume", b"")
            assert connected.wait_for(lambda: resumed.is_over, SOON_S)
            assert str(resumed) == "grpc 14"
            assert "resume does not undo" in resumed.message
            told = pb.GetStatsResponse.FromString(connected.ask(GET_STATS))
            assert told.totals.requests_total.finished == 1
        assert one.stop() == 75  # some requests were cut
