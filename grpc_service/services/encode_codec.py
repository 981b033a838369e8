"""Translates Embed's and Rerank's messages into the engine's values, and back. Pure, with
the rules of `grpc_service.services.text_codec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import FieldViolation, InvalidRequest
from engine.requests.encode.values import (
    Embedding,
    EmbedRequest,
    IndexedInput,
    InputFault,
    RerankRequest,
    Score,
)
from engine.requests.text.values import Started
from grpc_service._generated.triolet.v1 import vectors_pb2
from grpc_service.services.text_codec import given, ids_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from engine.requests.encode.values import EmbedStreamEvent, EncodeEvent
    from grpc_service._generated.triolet.v1 import classes_pb2

VALUES_TAG = b"\x12"  # EmbedResponse.values: field 2, length-delimited
VECTORS_TAG, ERRORS_TAG = b"\x0a", b"\x12"  # EmbedStreamResponse: fields 1 and 2
RESULTS_BYTES = 2**16  # of the results of one message; a guess: a client's usual window
OPTIONAL = ("dimensions", "normalize", "truncate", "priority", "top_k", "threshold")
KINDS = {
    vectors_pb2.VECTOR_KIND_UNSPECIFIED: "",
    vectors_pb2.VECTOR_KIND_DENSE: "dense",
    vectors_pb2.VECTOR_KIND_SPARSE: "sparse",
    vectors_pb2.VECTOR_KIND_MULTI_VECTOR: "multi-vector",
}
PRECISIONS = {
    vectors_pb2.PRECISION_UNSPECIFIED: "",
    vectors_pb2.PRECISION_FLOAT32: "float32",
    vectors_pb2.PRECISION_FLOAT16: "float16",
    vectors_pb2.PRECISION_INT8: "int8",
    vectors_pb2.PRECISION_UINT8: "uint8",
    vectors_pb2.PRECISION_BINARY: "binary",
    vectors_pb2.PRECISION_UBINARY: "ubinary",
}


def unset_and_unknown(
    message: vectors_pb2.EmbedRequest | classes_pb2.ClassifyRequest,
    other: str,
    enums: Mapping[str, Container[Any]],
) -> list[FieldViolation]:
    """Return the violations of inputs that are not set, which may be texts, token ids or of the
    kind ``other``, and of enum fields whose value is none of ``enums``, by the field's name."""
    unset = [
        FieldViolation(f"inputs[{index}]", f"set exactly one of text, token_ids and {other}")
        for index, input_ in enumerate(message.inputs)
        if input_.WhichOneof("input") is None
    ]
    unknown = [
        FieldViolation(name, f"is {getattr(message, name)}, which the enum does not have")
        for name, known in enums.items()
        if getattr(message, name) not in known
    ]
    return unset + unknown


def decode_embed(message: vectors_pb2.EmbedRequest, timeout_s: float | None = None) -> EmbedRequest:
    """Return the engine's request. Its ranges are not checked yet (`EmbedRequest.validate`).

    Raises:
        InvalidRequest: Inputs are not set, or an enum has no such value; it names every field that
            is wrong.
    """
    violations = unset_and_unknown(message, "image", {"precision": PRECISIONS, "kind": KINDS})
    request = EmbedRequest(
        model=message.model,
        inputs=tuple(map(_input_of, message.inputs)),
        prompt_name=message.prompt_name,
        kind=KINDS.get(message.kind, ""),
        precision=PRECISIONS.get(message.precision, ""),
        ranges=(tuple(message.ranges.low), tuple(message.ranges.high))
        if message.HasField("ranges")
        else None,
        request_id=message.request_id,
        timeout_s=timeout_s,
        background=message.background,
        check=False,
        **given(message, *OPTIONAL),
    )
    if violations:
        raise InvalidRequest([*violations, *request.violations()])
    return request


class StreamedInputs(NamedTuple):
    """A message of the client of EmbedStream; the first one has ``parameters``."""

    parameters: EmbedRequest | None
    inputs: tuple[IndexedInput, ...]

    @property
    def request_id(self) -> str:
        """The client's own id."""
        return "" if self.parameters is None else self.parameters.request_id


def decode_embed_stream(
    message: vectors_pb2.EmbedStreamRequest, timeout_s: float | None = None
) -> StreamedInputs:
    """Return a message's parameters and inputs. Their ranges are not checked yet.

    Raises:
        InvalidRequest: a field of the parameters is wrong, as in `decode_embed`.
    """
    parameters = None
    if message.HasField("parameters"):
        try:
            parameters = decode_embed(message.parameters, timeout_s)
        except InvalidRequest as error:
            named = error.renamed(lambda field: f"parameters.{field}")
            kept = [one for one in named.violations if one.field != "parameters.inputs"]
            raise InvalidRequest(kept) from None
    return StreamedInputs(
        parameters,
        tuple(
            IndexedInput(
                item.index,
                None if item.input.WhichOneof("input") is None else _input_of(item.input),
            )
            for item in message.inputs
        ),
    )


def _input_of(input_: vectors_pb2.EmbedInput) -> str | bytes | tuple[int, ...]:
    match input_.WhichOneof("input"):
        case "token_ids":
            return ids_of(input_.token_ids.ids)
        case "image":
            return input_.image
    return input_.text


def decode_rerank(
    message: vectors_pb2.RerankRequest, timeout_s: float | None = None
) -> RerankRequest:
    """Return the engine's request. Its ranges are not checked yet (`RerankRequest.validate`)."""
    return RerankRequest(
        model=message.model,
        query=message.query,
        documents=tuple(message.documents),
        request_id=message.request_id,
        timeout_s=timeout_s,
        background=message.background,
        check=False,
        **given(message, "raw_scores", "truncate", "top_n", "priority"),
    )


class EmbedEncoder:
    """Makes the messages of one Embed's stream: one per vector, the first with the model's name."""

    def __init__(self) -> None:
        self._model = ""

    def __call__(self, events: Sequence[EncodeEvent]) -> Iterator[vectors_pb2.EmbedResponse]:
        """Yield the messages, each made only when the one before it was written."""
        for event in events:
            if isinstance(event, Started):
                self._model = event.model
            elif isinstance(event, Embedding):
                yield self._message(event)

    def _message(self, event: Embedding) -> vectors_pb2.EmbedResponse:
        message = vectors_pb2.EmbedResponse(index=event.index, tokens=event.tokens)
        if self._model:
            message.model, self._model = self._model, ""
        if event.rows is not None:
            message.rows = event.rows
        if event.indices is not None:
            message.sparse.SetInParent()  # set, even if it has no weights
            message.sparse.indices.extend(event.indices)
            message.sparse.weights.extend(event.values)
            return message
        if event.precision != "float32":
            message.packed = event.values.tobytes()
            return message
        # To copy a vector of 384 packed numbers takes 2 µs; to append them one at a time, 20 µs.
        numbers = event.values.tobytes()
        message.MergeFromString(VALUES_TAG + _varint(len(numbers)) + numbers)
        return message


class EmbedStreamEncoder:
    """Makes the messages of one EmbedStream, each of results that are ready together."""

    def __init__(self) -> None:
        self._vectors = EmbedEncoder()

    def __call__(self, events: Sequence[EmbedStreamEvent]) -> Iterator[bytes]:
        """Yield the messages, each made only when the one before it was written."""
        parts: list[bytes] = []
        num_bytes = 0
        for event in events:
            for part in self._parts(event):
                if parts and num_bytes + len(part) > RESULTS_BYTES:
                    yield b"".join(parts)
                    parts, num_bytes = [], 0
                parts.append(part)
                num_bytes += len(part)
        if parts:
            yield b"".join(parts)

    def _parts(self, event: EmbedStreamEvent) -> Iterator[bytes]:
        """Yield the field of a message that an event becomes: a vector is not copied by protobuf
        into another message and serialised again."""
        if isinstance(event, InputFault):
            index, reason, text = event
            made = vectors_pb2.InputError(index=index, reason=reason, message=text)
            yield _field(ERRORS_TAG, made.SerializeToString())
            return
        for vector in self._vectors([event]):
            yield _field(VECTORS_TAG, vector.SerializeToString())


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


def encode_scores(events: Sequence[EncodeEvent]) -> list[vectors_pb2.RerankResponse]:
    """Return one message per score."""
    return [
        vectors_pb2.RerankResponse(index=event.index, score=event.score)
        for event in events
        if isinstance(event, Score)
    ]
