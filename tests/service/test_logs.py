"""The log: a line per call, the request's id on every line, the debug events, no prompt ever."""

import io
import json
import logging
import re
import signal

import grpc
import pytest

from engine import logs
from tests.support.server import fake, fake_process
from tests.support.wire import (
    SMALL_WINDOW,
    Generation,
    connect,
    generate,
    health,
    stats,
    tokenize,
    wait_idle,
    wait_serving,
    wait_until,
)

SOON_S = 15.0
GENERATE = "triolet.v1.Inference/Generate"
SECRET = "zanzibar-mackerel"


@pytest.fixture
def debugged(monkeypatch):
    """Make the servers of a test log all debug events."""
    monkeypatch.setenv("TRIOLET_LOG", "DEBUG")


def json_server(**settings):
    """Return a server that logs JSON."""
    settings["server"] = {"log_format": "json"} | settings.get("server", {})
    return fake(**settings)


def lines_of(server):
    """Return the log's lines."""
    return [json.loads(line) for line in server.log.splitlines()]


def access_lines(server, **wanted):
    """Return the access lines that have these values, once there is one."""

    def found():
        lines = [line for line in lines_of(server) if line["logger"] == "triolet.access"]
        return [line for line in lines if wanted.items() <= line.items()]

    return wait_until(found, SOON_S, f"an access line with {wanted}")


# ---- a line per call -------------------------------------------------------------------------


def test_a_finished_request_leaves_one_line_with_status_phases_and_tokens():
    with json_server() as server:
        wait_serving(server.channel)
        assert generate(server.channel, request_id="r1", prompt_ids=[1] * 10, max_tokens=5)
        [line] = access_lines(server, method=GENERATE)
        assert (line["code"], line["request_id"], line["level"]) == ("OK", "r1", "INFO")
        assert (line["prompt_tokens"], line["tokens_done"]) == (10, 5)
        assert line["model"] == "fake"
        phases = [line[f"{phase}_s"] for phase in ("queue", "load", "prefill", "decode", "parked")]
        assert all(phase >= 0 for phase in phases)
        assert 0 < sum(phases) <= line["elapsed_s"] + 0.01


def test_a_refused_calls_line_has_status_and_reason():
    with json_server() as server:
        wait_serving(server.channel)
        assert generate(server.channel, sampling={"top_p": 7.0}).error is not None
        [line] = access_lines(server, method=GENERATE)
        assert line["code"] == "INVALID_ARGUMENT"
        assert generate(server.channel, model="nobody", request_id="r2").error is not None
        [line] = access_lines(server, code="NOT_FOUND")
        assert (line["request_id"], line["reason"]) == ("r2", "MODEL_NOT_FOUND")


def test_an_early_ends_line_has_phase_and_tokens():
    with json_server(script={"step_s": 0.02}) as server:
        wait_serving(server.channel)
        with Generation(server.channel, request_id="r3", max_tokens=500) as call:
            call.read_deltas(3)
        [line] = access_lines(server, request_id="r3")
        assert (line["code"], line["reason"], line["phase"]) == ("CANCELLED", "CANCELLED", "decode")
        assert line["tokens_done"] >= 3
        assert line["decode_s"] >= 0.03
        error = generate(server.channel, request_id="r4", max_tokens=500, server_timeout=0.4).error
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        [line] = access_lines(server, request_id="r4")
        assert line["reason"] == "DEADLINE_EXCEEDED"


def test_the_keys_holder_is_named_and_the_key_is_not(tmp_path, debugged):
    keys = tmp_path / "keys"
    keys.write_text("alice the-key-of-alice-1\n")
    with json_server(server={"api_key_file": str(keys)}) as server:
        wait_serving(server.channel)
        stub = server.channel.unary_unary("/triolet.v1.Control/GetStats")
        stub(b"", metadata=[("authorization", "Bearer the-key-of-alice-1")], timeout=SOON_S)
        [line] = access_lines(server, method="triolet.v1.Control/GetStats")
        assert line["key"] == "alice"
        with pytest.raises(grpc.RpcError):
            stub(b"", metadata=[("authorization", "Bearer not-a-key-of-anyone")], timeout=SOON_S)
        [line] = access_lines(server, code="UNAUTHENTICATED")
        assert "key" not in line
        assert "the-key-of-alice-1" not in server.log
        assert "not-a-key-of-anyone" not in server.log


def test_probes_are_logged_at_debug_only():
    with json_server() as server:
        wait_serving(server.channel)
        assert health(server.channel) is not None
        stats(server.channel)
        methods = {line["method"] for line in access_lines(server)}
        assert methods == {"triolet.v1.Control/GetStats"}


def test_an_id_cannot_forge_a_line():
    with json_server() as server:
        wait_serving(server.channel)
        forged = 'x\n{"level": "FORGED"}'
        assert generate(server.channel, request_id=forged).error is not None
        assert generate(server.channel, request_id="y" * 100_000).error is not None
        lines = access_lines(server, code="INVALID_ARGUMENT")
        wait_until(lambda: len(access_lines(server, code="INVALID_ARGUMENT")) == 2, SOON_S)
        assert lines[0]["request_id"] == 'x?{"level": "FORGED"}'
        assert len(server.log) < 20_000


def test_a_server_without_a_terminal_logs_for_machines():
    with fake_process(is_command=True, server={"log_format": "auto"}) as server:
        wait_until(lambda: "is ready" in server.log, SOON_S)
        wait_until(lambda: "Triolet is ready" in server.out, SOON_S)
        told = [line for line in server.log.splitlines() if not line.startswith("loading ")]
        assert any(json.loads(line)["message"].startswith("model fake is ready") for line in told)


# ---- the request's id, the debug events, and no text -----------------------------------------


def test_every_line_of_a_request_has_its_id_also_when_the_server_made_it(debugged):
    with json_server() as server:
        wait_serving(server.channel)
        own = generate(server.channel, request_id="mine", max_tokens=3)
        made = generate(server.channel, max_tokens=3).started.request_id
        assert own.error is None
        wait_idle(server.channel)
        for name in ("mine", made):
            wait_until(lambda name=name: access_lines(server, request_id=name), SOON_S)
            told = [line["message"] for line in lines_of(server) if line["request_id"] == name]
            for event in ("registered", "results sent: 3"):
                assert any(event in message for message in told), (event, told)
            assert any("stop reason of choice 0: length" in message for message in told)
            assert any("unregistered: ok after 3 tokens" in message for message in told)
        of_requests = ("registered", "unregistered", "results sent", "stop reason")
        nameless = [
            line
            for line in lines_of(server)
            if line["message"].startswith(of_requests) and line["request_id"] == "-"
        ]
        assert nameless == []


def test_no_text_of_prompts_or_answers_is_logged(debugged):
    with json_server(engine={"stream_buffer": 16}) as server:
        wait_serving(server.channel)
        heard = generate(server.channel, text=SECRET, max_tokens=8)
        assert heard.error is None
        chat = {"messages": [{"role": "user", "content": SECRET}]}
        generate(server.channel, chat=chat, max_tokens=2)
        generate(server.channel, text=SECRET, sampling={"stop": [SECRET], "top_p": 9.0})
        generate(server.channel, text=SECRET, model="nobody")
        generate(server.channel, text=SECRET, sampling={"bad_words": [SECRET]})
        tokenize(server.channel, SECRET)
        with (
            connect(server.address, *SMALL_WINDOW) as channel,
            Generation(channel, text=SECRET, max_tokens=1000) as call,
        ):
            call.read_deltas(1)
            server.signal(signal.SIGUSR1)
            wait_until(lambda: "statistics:" in server.log, SOON_S)
        wait_idle(server.channel)
        assert SECRET not in server.log
        texts = re.findall(r"<\d+>", heard.text())
        assert texts
        assert not any(text in server.log for text in texts)


# ---- the formats -----------------------------------------------------------------------------


def record(**extra):
    """Return a log record with these fields."""
    one = logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": "a %s", "args": ("b",)})
    vars(one).update(extra)
    logs.RequestIdFilter().filter(one)
    return one


def test_json_has_the_fields_by_name_and_a_traceback_in_one_line():
    try:
        raise ValueError("planted")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    text = logs.JsonFormatter().format(record(exc_info=info, fields={"tokens": 3}, request_id="r"))
    assert "\n" not in text
    said = json.loads(text)
    assert (said["message"], said["tokens"], said["request_id"]) == ("a b", 3, "r")
    assert "ValueError: planted" in said["exception"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", said["time"])


@pytest.mark.parametrize(
    ("style", "is_terminal", "is_json"),
    [
        ("auto", True, False),
        ("auto", False, True),
        ("json", True, True),
        ("human", False, False),
    ],
)
def test_a_terminal_gets_lines_for_a_person(monkeypatch, style, is_terminal, is_json):
    class Terminal(io.StringIO):
        def isatty(self):
            return is_terminal

    out = Terminal()
    monkeypatch.setattr("sys.stderr", out)
    logs.configure("INFO", style)
    logging.getLogger("here").info("said", extra={"request_id": "r1"})
    assert out.getvalue().startswith("{") == is_json
    assert "r1" in out.getvalue()
