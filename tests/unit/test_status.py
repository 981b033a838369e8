"""Every class of engine.errors against every row of the table it is told by, and the details."""

from __future__ import annotations

import base64
import logging

import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from engine import errors
from grpc_service.status import DOMAIN, TABLE, ending_of

BAD_REQUEST, RETRY_INFO = "BadRequest", "RetryInfo"
# What clients rely on, written down a second time: class, code, reason, details beside ErrorInfo.
DESIGN = [
    ("InvalidRequest", "INVALID_ARGUMENT", "INVALID_REQUEST", {BAD_REQUEST}),
    ("RequestTooLarge", "INVALID_ARGUMENT", "REQUEST_TOO_LARGE", {BAD_REQUEST}),
    ("ModelNotFound", "NOT_FOUND", "MODEL_NOT_FOUND", set()),
    ("RequestNotFound", "NOT_FOUND", "REQUEST_NOT_FOUND", set()),
    ("DuplicateRequest", "ALREADY_EXISTS", "DUPLICATE_REQUEST", set()),
    ("Overloaded", "RESOURCE_EXHAUSTED", "QUEUE_FULL", {RETRY_INFO}),
    ("MemoryExhausted", "RESOURCE_EXHAUSTED", "MEMORY_EXHAUSTED", set()),
    ("RequestCancelled", "CANCELLED", "CANCELLED", set()),
    ("DeadlineExceeded", "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", set()),
    ("DeadlineInfeasible", "DEADLINE_EXCEEDED", "DEADLINE_INFEASIBLE", set()),
    ("RequestAborted", "ABORTED", "ABORTED", set()),
    ("ReaderStalled", "ABORTED", "READER_STALLED", set()),
    ("ShuttingDown", "UNAVAILABLE", "SHUTTING_DOWN", {RETRY_INFO}),
    ("Paused", "UNAVAILABLE", "PAUSED", {RETRY_INFO}),
    ("NoWorkers", "UNAVAILABLE", "NO_WORKERS", {RETRY_INFO}),
    ("WorkerLost", "UNAVAILABLE", "WORKER_LOST", {RETRY_INFO}),
    ("SpawnTimeout", "UNAVAILABLE", "SPAWN_TIMEOUT", {RETRY_INFO}),
    ("SpawnFailed", "FAILED_PRECONDITION", "SPAWN_FAILED", set()),
    ("StepFailed", "INTERNAL", "STEP_FAILED", set()),
    ("EngineBug", "INTERNAL", "ENGINE_BUG", set()),
    ("Unsupported", "UNIMPLEMENTED", "UNSUPPORTED", set()),
    ("Unauthenticated", "UNAUTHENTICATED", "UNAUTHENTICATED", set()),
    ("NotAllowed", "PERMISSION_DENIED", "PERMISSION_DENIED", set()),
]
NEVER_SENT = {"TrioletError", "ConfigError"}  # the base, and start-up's own
GRPC_HARD_LIMIT = 8192  # bytes of metadata that grpc peers take at the least


def make(name):
    cls = getattr(errors, name)
    if issubclass(cls, errors.InvalidRequest):
        return cls.of("sampling.top_p", "is 2, outside (0, 1]")
    return cls("what happened")


def details(ending):
    """The details of an ending by message name; checks what all have in common."""
    [(key, value)] = ending.trailing_metadata
    assert key == "grpc-status-details-bin"
    status = Status.FromString(value)
    assert (status.code, status.message) == (ending.code.value[0], ending.message)
    found = {}
    for packed in status.details:
        name = packed.TypeName().removeprefix("google.rpc.")
        found[name] = getattr(error_details_pb2, name)()
        assert any_pb2.Any.Unpack(packed, found[name])
    assert found["ErrorInfo"].domain == DOMAIN == "triolet"
    return found


@pytest.mark.parametrize(("name", "code", "reason", "extra"), DESIGN, ids=[r[0] for r in DESIGN])
def test_every_row_of_the_design(name, code, reason, extra):
    error = make(name)
    ending = ending_of(error)
    found = details(ending)
    assert ending.code is StatusCode[code]
    assert ending.message == str(error)
    assert found["ErrorInfo"].reason == error.reason == reason
    assert found.keys() == {"ErrorInfo", *extra}


def test_every_class_has_a_row_here_and_in_the_table():
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TrioletError)
    }
    rows = {row[0] for row in DESIGN}
    assert classes - NEVER_SENT == rows
    assert {cls.__name__ for cls in TABLE} == rows


def test_advice_to_retry_goes_to_those_that_may():
    """`is_retryable` and the row agree; memory is retryable once the operator or time helped,
    which no number of seconds says."""
    for cls, row in TABLE.items():
        may = cls.is_retryable and cls is not errors.MemoryExhausted
        assert (row.retry_s is not None) == may, cls


def test_the_errors_own_hint_wins():
    for cls in (errors.Overloaded, errors.MemoryExhausted):
        info = details(ending_of(cls("full", retry_after_s=12.5)))[RETRY_INFO]
        assert info.retry_delay.ToTimedelta().total_seconds() == 12.5


def test_a_deadline_says_phase_and_tokens():
    error = errors.DeadlineInfeasible("no time", phase="prefill", tokens_done=7)
    assert dict(details(ending_of(error))["ErrorInfo"].metadata) == {
        "phase": "prefill",
        "tokens_done": "7",
    }


def test_unsupported_names_its_field():
    info = details(ending_of(errors.Unsupported("no", field="constraint")))["ErrorInfo"]
    assert dict(info.metadata) == {"field": "constraint"}
    assert not details(ending_of(errors.Unsupported("no")))["ErrorInfo"].metadata


def test_every_violation_is_listed():
    error = errors.InvalidRequest(
        [errors.FieldViolation("n", "is 0"), errors.FieldViolation("sampling.top_p", "is 2")]
    )
    violations = details(ending_of(error))[BAD_REQUEST].field_violations
    assert [(v.field, v.description) for v in violations] == [
        ("n", "is 0"),
        ("sampling.top_p", "is 2"),
    ]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a secret path"),
        errors.ConfigError("a secret path"),
        errors.TrioletError("a secret path"),
        errors.EngineBug("a secret path"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_ours_is_logged_and_not_shown(error, caplog):
    ending = ending_of(error)
    assert ending.code is StatusCode.INTERNAL
    assert details(ending)["ErrorInfo"].reason == "ENGINE_BUG"
    assert "secret" not in ending.message
    assert b"secret" not in ending.trailing_metadata[0][1]
    assert "a secret path" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR
    assert caplog.records[0].exc_info


def test_a_clients_mistake_is_not_logged(caplog):
    caplog.set_level(logging.INFO)
    ending_of(make("InvalidRequest"))
    assert not caplog.records
    ending_of(errors.WorkerLost("gone", log_detail="signal 9"))
    assert "signal 9" in caplog.text


@pytest.mark.parametrize("letter", ["x", "é", "\n", "€"])
def test_a_status_fits_into_metadata_whatever_it_quotes(letter):
    long = letter * 100_000
    violations = [errors.FieldViolation(f"stop[{i}]{long}", long) for i in range(50)]
    for error in (
        errors.ModelNotFound(f"no model is called {long}"),
        errors.InvalidRequest(violations),
        errors.DeadlineExceeded(long, phase=long),
        errors.Unsupported(long, field=long),
    ):
        ending = ending_of(error)
        found = details(ending)
        plain = sum(1 if 32 < b < 127 else 3 for b in ending.message.encode())  # percent-encoded
        packed = len(base64.b64encode(ending.trailing_metadata[0][1]))
        assert plain + packed < GRPC_HARD_LIMIT
        assert "…" in ending.message
        if BAD_REQUEST in found:
            *_, last = found[BAD_REQUEST].field_violations
            assert last.description.startswith("and ")
