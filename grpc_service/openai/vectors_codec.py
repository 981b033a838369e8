"""Sparse vectors and vectors of tokens over HTTP: ``/embed_sparse`` in TEI's form, ``/pooling`` in
vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.core.common.events import Finished
from engine.requests.encode.values import MAX_INPUTS, Embedding, EmbedRequest
from engine.requests.text.values import Started
from grpc_service.openai.encode_codec import common_fields, input_renamer
from grpc_service.openai.fields import Fields, most_of, texts_or_ids
from grpc_service.openai.json_text import encode_json
from grpc_service.openai.work import Context, WholeEncoder, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.requests.encode.values import EncodeEvent

# vLLM's names of what is asked for, and our kinds of vectors.
TASKS = {"embed": "", "token_embed": "multi-vector"}


def decode_embed_sparse(body: dict[str, Any], context: Context) -> Work:
    """Return the work of ``/embed_sparse``.

    Raises:
        InvalidRequest, Unsupported: a field has a wrong value, or is none that this server knows.
    """
    fields = Fields(body)
    fields.expect("truncation_direction", "Right", "right")
    request = EmbedRequest(
        inputs=tuple(texts_or_ids(fields, "inputs", most_of("TokenIds.ids"), 0, MAX_INPUTS)),
        kind="sparse",
        truncate=fields.switch("truncate"),
        prompt_name=fields.text("prompt_name") or "",
        top_k=fields.whole("top_k"),
        threshold=fields.number("threshold"),
        background=fields.is_flex(),
        **common_fields(fields, context),
    )
    fields.done()
    rename = input_renamer(fields, body, "inputs")
    return Work(request.request_id, (request,), SparseWhole(), rename=rename)


def decode_pooling(body: dict[str, Any], context: Context) -> Work:
    """Return the work of ``/pooling``. Raises as `decode_embed_sparse`."""
    fields = Fields(body)
    task = fields.text("task") or "token_embed"
    if task not in TASKS:
        fields.refuse("task", f"is not one of {', '.join(TASKS)}")
    fields.expect("encoding_format", "float")
    request = EmbedRequest(
        inputs=tuple(texts_or_ids(fields, "input", most_of("TokenIds.ids"), 0, MAX_INPUTS)),
        kind=TASKS[task],
        dimensions=fields.whole("dimensions"),
        normalize=fields.switch("normalize"),
        truncate=fields.switch("truncate"),
        prompt_name=fields.text("prompt_name") or "",
        background=fields.is_flex(),
        **common_fields(fields, context),
    )
    fields.done()
    fields.sent_as |= {"inputs": "input", "kind": "task"}
    encoder = PoolingWhole(request.request_id, context.created)
    return Work(request.request_id, (request,), encoder, rename=input_renamer(fields, body))


class _VectorsWhole(WholeEncoder):
    """Keeps vectors, and makes the answer when the last one has come."""

    def __init__(self) -> None:
        self._model = ""
        self._found: dict[int, Embedding] = {}

    def is_heavy(self, events: Sequence[EncodeEvent]) -> bool:
        """Return whether the whole answer is made of these events."""
        return any(isinstance(event, Finished) for event in events)

    def encode(self, source: int, events: Sequence[EncodeEvent]) -> list[bytes]:
        """Keep vectors; after the last one, return the answer, in the inputs' order."""
        for event in events:
            if isinstance(event, Started):
                self._model = event.model
            elif isinstance(event, Embedding):
                self._found[event.index] = event
            elif isinstance(event, Finished) and event.reason.is_success:
                return [self._answer([self._found[index] for index in sorted(self._found)])]
        return []

    def _answer(self, vectors: Sequence[Embedding]) -> bytes:
        raise NotImplementedError


class SparseWhole(_VectorsWhole):
    """The answer of ``/embed_sparse``: of each text its weights, by ascending index."""

    def _answer(self, vectors: Sequence[Embedding]) -> bytes:
        return encode_json(
            [
                [
                    {"index": index, "value": weight}
                    for index, weight in zip(one.indices or (), one.values, strict=True)
                ]
                for one in vectors
            ]
        )


class PoolingWhole(_VectorsWhole):
    """The answer of ``/pooling``: of each text its vector, or a list of those of its tokens."""

    def __init__(self, request_id: str, created: int) -> None:
        super().__init__()
        self._id = request_id
        self._created = created

    def _answer(self, vectors: Sequence[Embedding]) -> bytes:
        tokens = sum([one.tokens for one in vectors])
        return encode_json(
            {
                "id": f"pool-{self._id}",
                "object": "list",
                "created": self._created,
                "model": self._model,
                "data": [
                    {"index": one.index, "object": "pooling", "data": _rows_of(one)}
                    for one in vectors
                ],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )


def _rows_of(found: Embedding) -> list[Any]:
    numbers = list(found.numbers)
    if found.rows is None:
        return numbers
    width = len(numbers) // max(1, found.rows)
    return [numbers[at : at + width] for at in range(0, len(numbers), width or 1)]
