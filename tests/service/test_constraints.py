"""Structured output over gRPC, with the demo model.

Answers follow their forms, bad forms name their field, costly ones delay nobody, and a client that
leaves while one compiles frees everything.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import time

import pytest
from grpc import RpcError, StatusCode

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.server import children_of
from tests.support.wire import (
    LENGTH,
    STOP,
    Generation,
    broken_fields,
    details,
    ended,
    generate,
    reason,
    stats,
    wait_idle,
    wait_until,
)

pytestmark = pytest.mark.model
NUMBERS = itertools.count()

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "animal": {"enum": ["fox", "owl", "mouse"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "animal", "age"],
    "additionalProperties": False,
}
FORMS = {
    "json_schema": ({"json_schema": json.dumps(SCHEMA)}, lambda text: json.loads(text)["animal"]),
    "json_object": ({"json_object": True}, lambda text: type(json.loads(text)) is dict),
    "regex": ({"regex": "[A-Z][a-z]{2,9} (ran|sat)\\."}, lambda text: text.endswith(".")),
    "lark": ({"lark": 'start: "(" start? ")"'}, lambda text: re.fullmatch(r"\(+\)+", text)),
    "choice": ({"choice": {"choices": ["fox", "owl"]}}, lambda text: text in ("fox", "owl")),
}


def costly(number):
    """Return a schema that llguidance would work on for a minute; no two are the same."""
    patterns = [{"type": "string", "pattern": f"{number}a{i}"} for i in range(1500)]
    return {"json_schema": json.dumps({"allOf": patterns})}


@pytest.mark.parametrize("kind", FORMS)
def test_a_form_holds_for_every_choice(demo, kind):
    constraint, is_right = FORMS[kind]
    sampling = {"temperature": 1.2, "seed": 5, "max_tokens": 300}
    heard = generate(
        demo.channel, text="Once upon a time", constraint=constraint, sampling=sampling, n=4
    )
    assert heard.error is None
    for choice in range(4):
        finished = heard.finished(choice)
        if finished.reason == LENGTH:
            assert kind in ("json_object", "lark"), "the others are short"
            continue
        assert finished.reason == STOP
        assert is_right(heard.text(choice)), heard.text(choice)
        assert finished.WhichOneof("matched") in (None, "stop_token_id")
    assert any(heard.finished(choice).reason == STOP for choice in range(4))
    wait_idle(demo.channel)


BAD = [
    ({"json_schema": "{"}, "constraint.json_schema"),
    ({"json_schema": '{"type": "thing"}'}, "constraint.json_schema"),
    ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "constraint.json_schema"),
    ({"json_schema": '{"enum": [1234567890123456789]}'}, "constraint.json_schema"),
    ({"lark": 'start: %json {"const": 1234567890123456789}'}, "constraint.lark"),
    ({"regex": "a(b"}, "constraint.regex"),
    ({"regex": "(?=a)b"}, "constraint.regex"),
    ({"lark": "start: NOWHERE"}, "constraint.lark"),
    ({"lark": "start: r\nr: r r"}, "constraint.lark"),
    (
        {
            "lark": "start: r0\n"
            + "\n".join(f"r{i}: r{i + 1}" for i in range(4000))
            + '\nr4000: "a"'
        },
        "constraint.lark",
    ),
    ({"choice": {"choices": []}}, "constraint.choice.choices"),
    ({"choice": {"choices": ["x" * 70_000]}}, "constraint.choice.choices"),
    (costly(0), "constraint.json_schema"),
]


@pytest.mark.parametrize(("constraint", "field"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_constraint_names_its_field_and_says_why(demo, constraint, field):
    start = time.monotonic()
    error = generate(demo.channel, constraint=constraint, max_tokens=5).error
    took = time.monotonic() - start
    assert error.code() is StatusCode.INVALID_ARGUMENT
    assert reason(error) == "INVALID_REQUEST"
    assert broken_fields(error) == [field]
    [violation] = details(error)["BadRequest"].field_violations
    assert len(violation.description) > 5
    assert took < 30  # at most a second of processor time, but on a machine that may be busy
    wait_idle(demo.channel)
    fine = generate(demo.channel, constraint={"regex": "ok[0-9]"}, max_tokens=5)
    assert re.fullmatch("ok[0-9]", fine.text())


def test_settings_that_leave_no_token_are_the_clients_mistake(demo):
    sampling = {"allowed_token_ids": [50, 51], "max_tokens": 9}
    error = generate(demo.channel, constraint={"regex": "[0-9]{4}Q"}, sampling=sampling).error
    assert error.code() is StatusCode.INVALID_ARGUMENT
    assert broken_fields(error) == ["constraint"]
    wait_idle(demo.channel)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_with_a_special_token_ends_every_choice_at_the_token(demo, include):
    """As in vLLM#2123. The constraint makes the model write the token, which the text leaves
    out."""
    form = {"lark": 'start: "ab" <|user|> "cd"'}
    sampling = {"max_tokens": 20, "stop": ["b<|user|>"], "include_stop": include}
    unstopped = generate(demo.channel, constraint=form, max_tokens=20)
    assert unstopped.text() == "abcd"
    heard = generate(demo.channel, constraint=form, sampling=sampling, n=3)
    for choice in range(3):
        finished = heard.finished(choice)
        assert (finished.reason, finished.stop) == (STOP, "b<|user|>")
        assert heard.text(choice) == ("ab" if include else "a")
    wait_idle(demo.channel)


@contextlib.contextmanager
def stopped_compilers(demo):
    """Stop the processes that compile constraints during the block. A new constraint, compiled
    before, has left one process idle, which takes the next."""
    new = {"regex": f"new{next(NUMBERS)}"}
    assert generate(demo.channel, constraint=new, max_tokens=9).error is None
    compilers = children_of(demo.process.pid)
    for pid in compilers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in compilers:
            os.kill(pid, signal.SIGCONT)


def is_compiling(channel, name):
    """Return whether a request waits for its constraint."""
    try:
        found = stubs.ControlStub(channel).Explain(pb.ExplainRequest(request_id=name))
    except RpcError:  # the request has not arrived
        return False
    return "constraint" in found.waiting_for


def test_a_cancel_while_a_constraint_compiles_frees_everything(demo):
    before = ended(demo.channel)
    fields = {"request_id": "compiling", "constraint": {"regex": "cut[0-9]"}, "max_tokens": 5}
    with stopped_compilers(demo), Generation(demo.channel, **fields) as call:
        wait_until(lambda: is_compiling(demo.channel, "compiling"))
        assert stats(demo.channel).waiting == 0
        call.cancel()
        wait_until(lambda: ended(demo.channel) != before)
        assert ended(demo.channel).get("cancelled", 0) == before.get("cancelled", 0) + 1
        wait_idle(demo.channel)


def test_a_deadline_that_passes_while_a_constraint_compiles_says_where(demo):
    with stopped_compilers(demo):
        for timeout_s in (0.4, 0.8, 1.6, 3.2):  # until a deadline passes during compilation
            error = generate(
                demo.channel, constraint={"regex": "late"}, max_tokens=5, server_timeout=timeout_s
            ).error
            assert error.code() is StatusCode.DEADLINE_EXCEEDED
            phase = details(error)["ErrorInfo"].metadata["phase"]
            if phase == "compile":
                break
        assert phase == "compile"
        wait_idle(demo.channel)


# ---- other requests do not wait --------------------------------------------------------------


def gaps(channel, until):
    """Return the seconds between Deltas until ``until()``.

    Streams follow one another, because a context may be full before a compilation is over.
    """
    found, last = [], time.monotonic()
    while not until():
        with Generation(
            channel, text="Once", sampling={"ignore_eos": True, "max_tokens": 1900}
        ) as stream:
            while not until() and stream.read() is not None:
                now = time.monotonic()
                found.append(now - last)
                last = now
            assert stream.heard.error is None
    return found


@pytest.mark.alone
def test_a_costly_constraint_does_not_hold_up_another_stream(demo, capsys):
    """No step waits for the compiler, which is a process of lower priority than the server."""
    end = time.monotonic() + 1.5
    alone = gaps(demo.channel, lambda: time.monotonic() > end)
    with Generation(demo.channel, constraint=costly(3), max_tokens=5) as bad:
        beside = gaps(demo.channel, bad.call.done)
        bad.finish()
    assert bad.heard.error.code() is StatusCode.INVALID_ARGUMENT
    assert len(beside) > 20
    with capsys.disabled():
        for name, some in (("alone", alone), ("beside a compilation", beside)):
            middle, worst = statistics.median(some), max(some)
            print(f"\n{name}: {1e3 * middle:.1f} ms p50, {1e3 * worst:.1f} ms worst", end="")
    assert max(beside) < 0.5
    assert statistics.median(beside) < 3 * statistics.median(alone) + 0.01
    wait_idle(demo.channel)
