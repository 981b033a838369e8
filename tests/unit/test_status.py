"""Every class of engine.errors against every row of the status table, with the details."""

import base64
import logging

import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status.rpc_status import GRPC_DETAILS_METADATA_KEY

from engine import errors
from grpc_service.rpc.errors import (
    InvalidMessage,
    MessageTooLarge,
    MissingMessage,
    RpcError,
    TooManyHeld,
    UnsupportedEncoding,
)
from grpc_service.rpc.status import StatusCode
from grpc_service.services.error_status import DETAILS_KEY, DOMAIN, PUSHBACK_KEY, TABLE, status_of

BAD_REQUEST, RETRY_INFO = "BadRequest", "RetryInfo"
# What clients rely on, independent of `TABLE`: class, code, reason, details beside ErrorInfo.
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
NEVER_SENT = {"TrioletError", "ConfigError"}  # the base class, and an error of start-up
GRPC_HARD_LIMIT = 8192  # bytes of metadata that every grpc peer takes


def make(name):
    cls = getattr(errors, name)
    if issubclass(cls, errors.InvalidRequest):
        return cls.of("sampling.top_p", "is 2, outside (0, 1]")
    return cls("what happened")


def details(ending):
    """Return an ending's details by message name, after a check of what every status must have."""
    (key, value), *rest = ending.metadata
    assert key == DETAILS_KEY == GRPC_DETAILS_METADATA_KEY
    assert [name for name, _ in rest] in ([], [PUSHBACK_KEY])
    status = Status.FromString(value)
    assert (status.code, status.message) == (ending.code, ending.message)
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
    ending = status_of(error)
    found = details(ending)
    assert ending.code is StatusCode[code]
    assert ending.message == str(error)
    assert found["ErrorInfo"].reason == error.reason == reason
    assert found.keys() == {"ErrorInfo", *extra}


@pytest.mark.parametrize(
    ("error", "code", "reason", "message"),
    [
        (InvalidMessage("cut"), StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "cut"),
        (MissingMessage("none"), StatusCode.UNIMPLEMENTED, "INVALID_REQUEST", "none"),
        (
            *(MessageTooLarge("9 of 8"), StatusCode.RESOURCE_EXHAUSTED),
            *("REQUEST_TOO_LARGE", "9 of 8 (--max-message-bytes; of images --max-image-bytes)"),
        ),
        (
            *(TooManyHeld("too many"), StatusCode.RESOURCE_EXHAUSTED),
            *("MEMORY_EXHAUSTED", "Memory exhausted: too many (--max-held-bytes)"),
        ),
        (UnsupportedEncoding("zstd"), StatusCode.UNIMPLEMENTED, "UNSUPPORTED", "zstd"),
    ],
)
def test_the_librarys_errors_get_the_details_of_the_engines(error, code, reason, message, caplog):
    status = status_of(error)
    assert status.code is code
    assert details(status)["ErrorInfo"].reason == reason
    assert status.message == message
    assert not caplog.records


def test_any_other_error_of_the_library_has_its_own_status(caplog):
    error = RpcError(StatusCode.NOT_FOUND, "no such thing", [("x-bin", b"1")])
    assert status_of(error) == (StatusCode.NOT_FOUND, "no such thing", (("x-bin", b"1"),))
    assert not caplog.records


def test_every_class_has_a_row_here_and_in_the_table():
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TrioletError)
    }
    rows = {row[0] for row in DESIGN}
    assert classes - NEVER_SENT == rows
    assert {cls.__name__ for cls in TABLE} == rows


def test_the_sources_prefixes_stand_on_the_classes_that_carry_its_names():
    found = {cls.__name__: cls.prefix for cls in TABLE if cls.prefix}
    assert found == {
        "NoWorkers": "No workers available: ",
        "ShuttingDown": "Shutting down: ",
        "MemoryExhausted": "Memory exhausted: ",
        "SpawnFailed": "Worker spawn failed: ",
        "SpawnTimeout": "Spawn timeout: ",
    }
    assert all(str(make(name)) == f"{prefix}what happened" for name, prefix in found.items())


def test_only_retryable_errors_advise_to_retry():
    """`is_retryable` is true for the classes whose row has ``retry_s``.

    MemoryExhausted is the exception: nobody knows after how many seconds a retry may succeed.
    """
    for cls, row in TABLE.items():
        may = cls.is_retryable and cls is not errors.MemoryExhausted
        assert (row.retry_s is not None) == may, cls


@pytest.mark.parametrize("name", [row[0] for row in DESIGN])
def test_a_clients_retry_policy_learns_when_to_try_again(name):
    """gRPC's clients obey `PUSHBACK_KEY` for the codes that their policies name."""
    status = status_of(make(name))
    info = details(status).get(RETRY_INFO)
    milliseconds = dict(status.metadata).get(PUSHBACK_KEY)
    if info is None or status.code not in (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED):
        assert milliseconds is None
    else:
        assert int(milliseconds) == info.retry_delay.ToMilliseconds() > 0


def test_the_errors_own_hint_wins():
    for cls in (errors.Overloaded, errors.MemoryExhausted):
        info = details(status_of(cls("full", retry_after_s=12.5)))[RETRY_INFO]
        assert info.retry_delay.ToTimedelta().total_seconds() == 12.5
        metadata = dict(status_of(cls("full", retry_after_s=12.5)).metadata)
        assert metadata[PUSHBACK_KEY] == "12500"


def test_a_deadline_says_phase_and_tokens():
    error = errors.DeadlineInfeasible("no time", phase="prefill", tokens_done=7)
    assert dict(details(status_of(error))["ErrorInfo"].metadata) == {
        "phase": "prefill",
        "tokens_done": "7",
    }


def test_unsupported_names_its_field():
    info = details(status_of(errors.Unsupported("no", field="constraint")))["ErrorInfo"]
    assert dict(info.metadata) == {"field": "constraint"}
    assert not details(status_of(errors.Unsupported("no")))["ErrorInfo"].metadata


def test_every_violation_is_listed():
    error = errors.InvalidRequest(
        [errors.FieldViolation("n", "is 0"), errors.FieldViolation("sampling.top_p", "is 2")]
    )
    violations = details(status_of(error))[BAD_REQUEST].field_violations
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
def test_an_internal_error_is_logged_and_not_shown(error, caplog):
    ending = status_of(error)
    assert ending.code is StatusCode.INTERNAL
    assert details(ending)["ErrorInfo"].reason == "ENGINE_BUG"
    assert "secret" not in ending.message
    assert b"secret" not in ending.metadata[0][1]
    assert "a secret path" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR
    assert caplog.records[0].exc_info


def test_a_clients_mistake_is_not_logged(caplog):
    caplog.set_level(logging.INFO)
    status_of(make("InvalidRequest"))
    assert not caplog.records
    status_of(errors.WorkerLost("gone", log_detail="signal 9"))
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
        ending = status_of(error)
        found = details(ending)
        plain = sum(1 if 32 < b < 127 else 3 for b in ending.message.encode())  # percent-encoded
        packed = len(base64.b64encode(ending.metadata[0][1]))
        assert plain + packed < GRPC_HARD_LIMIT
        assert "…" in ending.message
        if BAD_REQUEST in found:
            *_, last = found[BAD_REQUEST].field_violations
            assert last.description.startswith("and ")
