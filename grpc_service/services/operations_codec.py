"""Translates the requests of Control and Models into the engine's values, and the results back.
Pure, like `grpc_service.services.text_codec`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from engine.config import ADAPTER_FILES, REPLICAS_MAX
from engine.core.common.events import PauseMode
from engine.errors import InvalidRequest
from engine.requests.text.values import MAX_REQUEST_ID_CHARS
from grpc_service._generated.triolet.v1 import control_pb2, models_pb2
from grpc_service.services.snapshots_codec import encode_timestamp, shared_fields
from grpc_service.services.text_encoder import encode_duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.core.common.types import Explanation
    from engine.pool.load_watch import LoadStatus
    from engine.requests.usage import Pair, UsageRecord, UsageSums
    from engine.status import AbortOutcome

MIN_SECONDS, MAX_SECONDS = -62_135_596_800, 253_402_300_799  # of a Timestamp, since 1970
ABORTS_MAX = 1024  # ids in one call. Guess: ending 1,024 requests takes the loop a few milliseconds


def decode_pause_mode(message: control_pb2.PauseRequest) -> PauseMode:
    """Return the mode.

    Raises:
        InvalidRequest: the mode is unspecified or unknown.
    """
    modes = {control_pb2.PauseMode.Value(f"PAUSE_MODE_{mode.name}"): mode for mode in PauseMode}
    if message.mode not in modes:
        raise InvalidRequest.of("mode", "must be PAUSE_MODE_ABORT, _WAIT or _KEEP")
    return modes[message.mode]


def decode_abort(message: control_pb2.AbortRequest) -> tuple[str, ...]:
    """Return the ids to abort.

    Raises:
        InvalidRequest: there is no id, there are too many, or one is of a length that no request's
            id has. The engine remembers unknown ids, so their lengths must be bounded, too.
    """
    if not 0 < len(message.request_ids) <= ABORTS_MAX:
        raise InvalidRequest.of("request_ids", f"must hold 1 to {ABORTS_MAX} ids")
    for index, name in enumerate(message.request_ids):
        if not 0 < len(name) <= MAX_REQUEST_ID_CHARS:
            raise InvalidRequest.of(
                f"request_ids[{index}]", f"must have 1 to {MAX_REQUEST_ID_CHARS} characters"
            )
    return tuple(message.request_ids)


def encode_aborts(
    names: Sequence[str], outcomes: Sequence[AbortOutcome]
) -> control_pb2.AbortResponse:
    """Return one result per id, in the order of the request."""
    return control_pb2.AbortResponse(
        results=[
            control_pb2.AbortResult(request_id=name, outcome=f"ABORT_OUTCOME_{outcome.name}")
            for name, outcome in zip(names, outcomes, strict=True)
        ]
    )


def encode_explanation(explained: Explanation) -> control_pb2.ExplainResponse:
    """Return the message that describes what a request does and waits for."""
    estimate = explained.estimate_s
    others = {
        "estimate": None if estimate is None else encode_duration(estimate),
        "parked": encode_duration(explained.parked_s),
        "drafts": [
            control_pb2.DraftCounts(
                drafter=draft.drafter, drafted_tokens=draft.drafted, accepted_tokens=draft.accepted
            )
            for draft in explained.drafts
            if draft.drafted
        ],
    }
    shared = shared_fields(explained, control_pb2.ExplainResponse)
    return control_pb2.ExplainResponse(**shared | others)


def decode_usage(message: control_pb2.GetUsageRequest) -> tuple[str | None, str, float]:
    """Return the holder (None: every holder), the model ("": every model), and since when, in
    seconds after 1970.

    Raises:
        InvalidRequest: ``since`` is no time of a Timestamp.
    """
    if not MIN_SECONDS <= message.since.seconds <= MAX_SECONDS:
        raise InvalidRequest.of("since", "is not between the years 1 and 9999")
    holder = message.holder if message.HasField("holder") else None
    return holder, message.model, message.since.seconds + message.since.nanos * 1e-9


def encode_usage(since: float, sums: Mapping[Pair, UsageSums]) -> control_pb2.GetUsageResponse:
    """Return the message with the sums of requests that have ended ``since`` then."""
    return control_pb2.GetUsageResponse(
        since=encode_timestamp(since),
        sums=[
            control_pb2.UsageSums(
                holder=holder,
                model=model,
                requests=own.requests,
                succeeded=own.succeeded,
                usage=encode_request_usage(own),
            )
            for (holder, model), own in sorted(sums.items())
        ],
    )


def encode_request_usage(used: UsageSums | UsageRecord) -> control_pb2.RequestUsage:
    """Return the message of what one request, or several together, have used."""
    times = {"queue": encode_duration(used.queue_s), "step": encode_duration(used.step_s)}
    return control_pb2.RequestUsage(**shared_fields(used, control_pb2.RequestUsage) | times)


def decode_load(message: models_pb2.LoadModelRequest) -> tuple[str, int | None]:
    """Return the model, and how many replicas it should have (None: as configured).

    Raises:
        InvalidRequest: the model is empty, or the number of replicas is out of range.
    """
    name = decode_name(message)
    if not message.HasField("replicas"):
        return name, None
    if not 0 < message.replicas <= REPLICAS_MAX:
        raise InvalidRequest.of("replicas", f"is {message.replicas}, outside [1, {REPLICAS_MAX}]")
    return name, message.replicas


def decode_load_adapter(
    message: models_pb2.LoadAdapterRequest, root: str
) -> tuple[str, str, tuple[str, ...]]:
    """Return the adapter's name, its directory and its further names. ``root`` is the directory
    below which adapters may be loaded; "": none may be.

    Raises:
        InvalidRequest: a field is empty, or the directory or one of its two files is not below the
            root. Links are followed before that is decided.
    """
    name = decode_name(message)
    directory = decode_name(message, "directory")
    if not root:
        raise InvalidRequest.of(
            "directory", "cannot be loaded from: the server was started without --adapter-root"
        )
    if "\0" in directory:
        raise InvalidRequest.of("directory", "holds a NUL")
    inside = os.path.realpath(root)
    path = os.path.realpath(os.path.join(inside, directory))
    for text in (path, *(os.path.realpath(os.path.join(path, name)) for name in ADAPTER_FILES)):
        if text == inside or os.path.commonpath((inside, text)) != inside:
            raise InvalidRequest.of("directory", "is not below the server's --adapter-root")
    if not all(message.aliases):
        raise InvalidRequest.of("aliases", "holds an empty name")
    return name, path, tuple(message.aliases)


def encode_load(status: LoadStatus) -> models_pb2.LoadModelResponse:
    """Return the message for a stage of a load."""
    progress = shared_fields(status.progress, models_pb2.LoadModelResponse)
    return models_pb2.LoadModelResponse(**progress, state=f"MODEL_STATE_{status.state.name}")


def decode_name(message: Any, field: str = "model") -> str:
    """Return the name of the model or adapter that a request is about, or the text of another
    field.

    Raises:
        InvalidRequest: the text is empty.
    """
    name: str = getattr(message, field)
    if not name:
        raise InvalidRequest.of(field, "is empty")
    return name


def decode_seconds(message: Any, field: str) -> float | None:
    """Return a Duration field in seconds, None if it is not set.

    Raises:
        InvalidRequest: the Duration is negative.
    """
    if not message.HasField(field):
        return None
    duration = getattr(message, field)
    seconds: float = duration.seconds + duration.nanos / 1e9
    if seconds < 0:
        raise InvalidRequest.of(field, f"is {seconds:g} s, but must not be negative")
    return seconds
