"""Classifications: the body in vLLM's form as the engine's request, and its answer.

Beside vLLM's fields, those of Hugging Face's pipelines choose what is computed. A pair of texts is
an object with ``text`` and ``text_pair``, as a pipeline takes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.core.common.events import Finished
from engine.requests.encode.classify_values import Classification, ClassifyRequest
from engine.requests.encode.values import MAX_INPUTS
from engine.requests.text.values import Started
from grpc_service.openai.encode_codec import common_fields, input_renamer
from grpc_service.openai.fields import Fields, is_ids, most_of, texts_or_ids
from grpc_service.openai.json_text import encode_json
from grpc_service.openai.work import Context, WholeEncoder, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.requests.encode.classify_values import Labelled
    from engine.requests.encode.values import EncodeEvent


def decode_classify(body: dict[str, Any], context: Context) -> Work:
    """Return the work of ``/classify``.

    Raises:
        InvalidRequest, Unsupported: a field has a wrong value, or is none that this server knows.
    """
    fields = Fields(body)
    request = ClassifyRequest(
        inputs=_inputs_of(fields),
        activation=_activation_of(fields),
        top_k=fields.whole("top_k"),
        aggregation=fields.text("aggregation_strategy") or "",
        truncate=fields.switch("truncate"),
        background=fields.is_flex(),
        **common_fields(fields, context),
    )
    fields.done()
    fields.sent_as |= {
        "inputs": "input",
        "activation": "function_to_apply",
        "aggregation": "aggregation_strategy",
    }
    encoder = ClassifyWhole(request.request_id, context.created)
    return Work(request.request_id, (request,), encoder, rename=input_renamer(fields, body))


def _inputs_of(fields: Fields) -> tuple[Labelled, ...]:
    given = fields.given("input")
    if isinstance(given, dict):
        return (_pair_of(fields.raw("input"), "input"),)
    if not isinstance(given, list) or is_ids(given) or dict not in map(type, given):
        return tuple(texts_or_ids(fields, "input", most_of("TokenIds.ids"), 0, MAX_INPUTS))
    return tuple(
        _pair_of(one, f"input[{index}]")
        for index, one in enumerate(fields.items("input", MAX_INPUTS) or ())
    )


def _pair_of(given: object, path: str) -> str | tuple[str, str]:
    if isinstance(given, str):
        return given
    pair = Fields(given, f"{path}.")
    made = pair.text("text") or "", pair.text("text_pair") or ""
    pair.done()
    return made


def _activation_of(fields: Fields) -> str:
    """Take ``function_to_apply`` or vLLM's switch, which turns the activation off."""
    activation = fields.text("function_to_apply") or ""
    is_off = False
    for name in ("use_activation", "activation"):
        is_off = fields.switch(name) is False or is_off
    if is_off and activation not in ("", "none"):
        fields.refuse("function_to_apply", f"is {activation[:40]!r}, and use_activation is false")
    return "none" if is_off else activation


class ClassifyWhole(WholeEncoder):
    """The answer of ``/classify``: of each input its best label and the scores of all labels in the
    model's order or, with top_k, of these alone; with an aggregation, its entities."""

    def __init__(self, request_id: str, created: int) -> None:
        self._id = request_id
        self._created = created
        self._model = ""
        self._found: dict[int, Classification] = {}

    def is_heavy(self, events: Sequence[EncodeEvent]) -> bool:
        """Return whether the whole answer is made of these events."""
        return any(isinstance(event, Finished) for event in events)

    def encode(self, source: int, events: Sequence[EncodeEvent]) -> list[bytes]:
        """Keep results; after the last one, return the answer, in the inputs' order."""
        for event in events:
            if isinstance(event, Started):
                self._model = event.model
            elif isinstance(event, Classification):
                self._found[event.index] = event
            elif isinstance(event, Finished) and event.reason.is_success:
                return [self._answer(event.usage.prompt_tokens)]
        return []

    def _answer(self, tokens: int) -> bytes:
        data = [_shown(self._found[index]) for index in sorted(self._found)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        head = {"id": f"classify-{self._id}", "object": "list", "created": self._created}
        return encode_json({**head, "model": self._model, "data": data, "usage": usage})


def _shown(found: Classification) -> dict[str, Any]:
    """Return the object of one input."""
    if found.spans is not None:
        return {"index": found.index, "entities": [one._asdict() for one in found.entities]}
    in_order = sorted(zip(found.ids, found.scores, strict=True))
    return {
        "index": found.index,
        "label": found.names[found.ids[0]],
        "probs": [score for _, score in in_order],
        "num_classes": len(found.names),
        "labels": [found.names[label] for label, _ in in_order],
    }
