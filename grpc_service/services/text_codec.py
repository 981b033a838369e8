"""Translates Inference's messages into the engine's values. Pure: no waiting, no state, no grpc.

Rule 1: a proto3 field with presence that is unset becomes None, and nothing else does. Zero and
unset stay different all the way; only the engine fills in defaults.
Rule 2: no set field is ignored; a test walks every field.
Rule 3: the codec checks no range; the engine's values do (`validate`), and
`grpc_service.services.value_counts` has counted the values of every list. The codec refuses only
what an engine value cannot represent, with a `TrioletError` that names the field. Rule 4: the codec
may run in a thread, where no single call may hold Python's lock for long: ids are converted in
parts.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from engine.core.text.types import Constraint
from engine.errors import FieldViolation, InvalidRequest
from engine.requests.text.chat_values import VIOLATIONS_MAX, Chat
from engine.requests.text.continuation import Continuation, ContinuedChoice
from engine.requests.text.kept_events import ReceivedChoice
from engine.requests.text.values import (
    GenerateRequest,
    OutputOptions,
    PromptOptions,
    ReasoningOptions,
    SamplingParams,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from google.protobuf.message import Message
    from google.protobuf.struct_pb2 import Struct, Value

    from grpc_service._generated.triolet.v1 import common_pb2, inference_pb2


IDS_PART = 2**16  # ids that are converted in one call, in about two milliseconds


# ---- requests --------------------------------------------------------------------------------


def decode_generate(
    message: inference_pb2.GenerateRequest, timeout_s: float | None = None
) -> GenerateRequest:
    """Return the engine's request. Its ranges are not checked yet (`GenerateRequest.validate`).

    Raises:
        InvalidRequest: The constraint, or the parts of a chat's messages, cannot be represented.
    """
    request = GenerateRequest(
        model=message.model,
        token_ids=ids_of(message.token_ids.ids) if message.HasField("token_ids") else None,
        chat=_decode_chat(message.chat) if message.HasField("chat") else None,
        sampling=SamplingParams(**_set_fields(message.sampling)),
        request_id=message.request_id,
        constraint=_decode_constraint(message.constraint)
        if message.HasField("constraint")
        else None,
        prompt=PromptOptions(**_set_fields(message.prompt)),
        output=OutputOptions(**_set_fields(message.output)),
        timeout_s=timeout_s,
        continuation=_decode_continuation(message.continuation)
        if message.HasField("continuation")
        else None,
        resume_window_s=message.resume_window.ToNanoseconds() / 1e9
        if message.HasField("resume_window")
        else None,
        reasoning=ReasoningOptions(**_set_fields(message.reasoning)),
        background=message.background,
        check=False,
        **given(message, "text", "n", "priority"),
    )
    if message.HasField("constraint"):
        violations = list(_constraint_violations(message.constraint))
        if violations:
            raise InvalidRequest([*violations, *request.violations()])
    return request


def given(message: Message, *names: str) -> dict[str, Any]:
    """Return the fields of ``names`` that are set, by name. Proto3 must track their presence."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _set_fields(message: Message) -> dict[str, Any]:
    """Return the fields that are set, by name: lists as tuples, maps as dicts in their keys'
    order."""
    return {field.name: _plain(value) for field, value in message.ListFields()}


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float)):
        return value
    return dict(sorted(value.items())) if hasattr(value, "items") else ids_of(value)


def ids_of(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values of a repeated field of ids or texts, taken in parts."""
    if len(values) <= IDS_PART:
        return tuple(values)
    taken: list[Any] = []
    for at in range(0, len(values), IDS_PART):
        taken += values[at : at + IDS_PART]
    return tuple(taken)


def _decode_chat(message: inference_pb2.Chat) -> Chat:
    violations = list(islice(_part_violations(message), VIOLATIONS_MAX))
    if violations:
        raise InvalidRequest(violations)
    chat = Chat(
        messages=tuple(_decode_message(turn) for turn in message.messages),
        tools=tuple(_decode_tool(tool) for tool in message.tools),
        template_args=_decode_struct(message.template_args),
        tool_choice=message.tool_choice or "auto",
        continue_final_message=message.continue_final_message,
        **given(message, "add_generation_prompt"),
    )
    chat.look_through()
    return chat


def decode_received(message: common_pb2.AttachRequest) -> tuple[ReceivedChoice, ...]:
    """Return how many tokens of each choice a client has, and whether it has the choice's end.

    Raises:
        InvalidRequest: the id or the token is empty.
    """
    empty = [name for name in ("request_id", "attach_token") if not getattr(message, name)]
    if empty:
        raise InvalidRequest([FieldViolation(name, "is empty") for name in empty])
    return tuple([ReceivedChoice(choice.tokens, choice.finished) for choice in message.received])


def _decode_continuation(message: common_pb2.Continuation) -> Continuation:
    choices = [ContinuedChoice(ids_of(c.token_ids), c.finished) for c in message.choices]
    return Continuation(tuple(choices), **given(message, "seed"))


def _content_of(message: inference_pb2.Message) -> str | list[dict[str, Any]]:
    """Return the content of a message that has parts: one text if none of them is an image."""
    if not any(part.HasField("image") for part in message.parts):
        return "".join([part.text for part in message.parts])
    return [
        {"type": "image", "image": part.image}
        if part.HasField("image")
        else {"type": "text", "text": part.text}
        for part in message.parts
    ]


def _part_violations(message: inference_pb2.Chat) -> Iterator[FieldViolation]:
    """Yield the violations in a chat's messages whose content has parts."""
    for index, turn in enumerate(message.messages):
        path = f"chat.messages[{index}]"
        if turn.parts and turn.content:
            yield FieldViolation(f"{path}.content", "cannot be set beside parts")
        for number, part in enumerate(turn.parts):
            if part.WhichOneof("part") is None:
                yield FieldViolation(f"{path}.parts[{number}]", "set exactly one of text and image")


def _decode_message(message: inference_pb2.Message) -> dict[str, Any]:
    """Return a turn in OpenAI's form."""
    content = _content_of(message) if message.parts else message.content
    turn: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn | {"name": message.name} if message.name else turn


def _decode_tool(message: inference_pb2.Tool) -> dict[str, Any]:
    parameters = _decode_struct(message.parameters) if message.HasField("parameters") else None
    return function_tool(message.name, message.description, parameters)


def function_tool(name: str, description: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a tool as templates read it. A function without parameters has no arguments."""
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _decode_struct(struct: Struct) -> dict[str, Any]:
    """Return a JSON object's fields as a dict, sorted by name: the order of protobuf's maps differs
    between processes, and chat templates write fields in the dict's order."""
    return {name: _decode_value(struct.fields[name]) for name in sorted(struct.fields)}


def _decode_value(value: Value) -> Any:
    """Return a JSON value in Python's types. JSON has one kind of number; whole numbers become int,
    as templates expect."""
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return _decode_struct(value.struct_value)
    if kind == "list_value":
        return [_decode_value(item) for item in value.list_value.values]
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() else number
    return None if kind in (None, "null_value") else getattr(value, kind)


def _decode_constraint(message: inference_pb2.Constraint) -> Constraint | None:
    kind = message.WhichOneof("kind")
    if kind is None:
        return None
    source = "" if kind == "json_object" else getattr(message, kind)
    if kind == "choice":
        source = "\0".join(message.choice.choices)
    return Constraint(kind, source, **given(message, "reasoning"))


def _constraint_violations(message: inference_pb2.Constraint) -> Iterator[FieldViolation]:
    """Yield the violations of a constraint that `Constraint` cannot represent."""
    kind = message.WhichOneof("kind")
    if kind is None:
        yield FieldViolation("constraint", "set exactly one kind")
    elif kind == "choice":
        if not message.choice.choices:
            yield FieldViolation("constraint.choice.choices", "is empty")
        for index, choice in enumerate(message.choice.choices):
            if "\0" in choice:
                yield FieldViolation(f"constraint.choice.choices[{index}]", "holds a NUL")
    elif kind == "json_object" and not message.json_object:
        yield FieldViolation("constraint.json_object", "is false")


def decode_tokenize(message: inference_pb2.TokenizeRequest) -> dict[str, Any]:
    """Return the arguments of `Engine.tokenize`, which checks them."""
    chat = {"chat": _decode_chat(message.chat)} if message.HasField("chat") else {}
    return {"model": message.model, **given(message, "text", "add_special_tokens"), **chat}


def decode_detokenize(message: common_pb2.DetokenizeRequest) -> dict[str, Any]:
    """Return the arguments of `Engine.detokenize`."""
    ids = ids_of(message.ids)
    return {"model": message.model, "ids": ids, **given(message, "skip_special_tokens")}
