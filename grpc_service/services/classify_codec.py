"""Translates Classify's messages into the engine's values, and back. Pure, with the rules of
`grpc_service.services.text_codec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import InvalidRequest
from engine.requests.encode.classify_values import Classification, ClassifyRequest
from engine.requests.text.values import Started
from grpc_service._generated.triolet.v1 import classes_pb2
from grpc_service.services.encode_codec import unset_and_unknown
from grpc_service.services.text_codec import given, ids_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.requests.encode.classify_values import Labelled
    from engine.requests.encode.values import EncodeEvent

ACTIVATIONS = {
    classes_pb2.ACTIVATION_UNSPECIFIED: "",
    classes_pb2.ACTIVATION_NONE: "none",
    classes_pb2.ACTIVATION_SIGMOID: "sigmoid",
    classes_pb2.ACTIVATION_SOFTMAX: "softmax",
}
AGGREGATIONS = {
    classes_pb2.AGGREGATION_UNSPECIFIED: "",
    classes_pb2.AGGREGATION_NONE: "none",
    classes_pb2.AGGREGATION_SIMPLE: "simple",
    classes_pb2.AGGREGATION_FIRST: "first",
    classes_pb2.AGGREGATION_AVERAGE: "average",
    classes_pb2.AGGREGATION_MAX: "max",
}


def decode_classify(
    message: classes_pb2.ClassifyRequest, timeout_s: float | None = None
) -> ClassifyRequest:
    """Return the engine's request. Its ranges are not checked yet (`ClassifyRequest.validate`).

    Raises:
        InvalidRequest: Inputs are not set, or an enum has no such value; it names every field that
            is wrong.
    """
    violations = unset_and_unknown(
        message, "pair", {"activation": ACTIVATIONS, "aggregation": AGGREGATIONS}
    )
    request = ClassifyRequest(
        model=message.model,
        inputs=tuple(map(_input_of, message.inputs)),
        activation=ACTIVATIONS.get(message.activation, ""),
        aggregation=AGGREGATIONS.get(message.aggregation, ""),
        request_id=message.request_id,
        timeout_s=timeout_s,
        background=message.background,
        check=False,
        **given(message, "top_k", "truncate", "priority"),
    )
    if violations:
        raise InvalidRequest([*violations, *request.violations()])
    return request


def _input_of(input_: classes_pb2.ClassifyInput) -> Labelled:
    match input_.WhichOneof("input"):
        case "token_ids":
            return ids_of(input_.token_ids.ids)
        case "pair":
            return input_.pair.text, input_.pair.text_pair
    return input_.text


class ClassifyEncoder:
    """Makes the messages of one Classify's stream: one per input, the first with the model's
    name."""

    def __init__(self) -> None:
        self._model = ""

    def __call__(self, events: Sequence[EncodeEvent]) -> Iterator[classes_pb2.ClassifyResponse]:
        """Yield the messages, each made only when the one before it was written."""
        for event in events:
            if isinstance(event, Started):
                self._model = event.model
            elif isinstance(event, Classification):
                model, self._model = self._model, ""
                yield _message(event, model)


def _message(event: Classification, model: str) -> classes_pb2.ClassifyResponse:
    message = classes_pb2.ClassifyResponse(index=event.index, tokens=event.tokens, model=model)
    for label, score in event.labels:
        message.labels.add(label=label, score=score)
    for entity in event.entities:
        message.entities.add(**entity._asdict())
    return message
