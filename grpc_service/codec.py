"""Inference's messages to the engine's values and back. Pure: no waiting, no state, no grpc.

Rule 1: a proto3 field with presence that is unset becomes None, and nothing else does; zero and
unset are told apart all the way (only the engine fills in defaults).
Rule 2: no set field is ignored. What the engine cannot do yet stands in `grpc_service.later` and
is refused by name; a test walks every field.
Rule 3: what a client sends ends as an engine value or as a `TrioletError` that names the field.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from engine.core.events import Finished, Tokens
from engine.core.types import Constraint, EndReason
from engine.errors import FieldViolation, InvalidRequest, RequestTooLarge
from engine.requests import (
    AnswerTokens,
    Chat,
    GenerateRequest,
    OutputOptions,
    PromptOptions,
    SamplingParams,
    ToolCallDelta,
)
from grpc_service._generated.triolet.v1 import inference_pb2
from grpc_service.later import refuse_later

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from google.protobuf.struct_pb2 import Struct, Value

    from engine.core.plan import TokenSpan
    from engine.core.types import Timings, TokenLogprob
    from engine.requests import Started, StreamEvent
    from grpc_service._generated.triolet.v1 import models_pb2

MessageT = TypeVar("MessageT", bound=Message)

# Outgoing messages stay below 4 MiB, every client's default limit; the slack
# is for the fields that are not counted and the framing.
MESSAGE_BYTES_MAX = 4 * 2**20 - 4096


# ---- requests --------------------------------------------------------------------------------


def decode_generate(
    message: inference_pb2.GenerateRequest, timeout_s: float | None = None
) -> GenerateRequest:
    """The engine's request, checked as far as that needs no model.

    Raises:
        Unsupported: a set field's feature does not exist yet.
        InvalidRequest: with every broken field.
    """
    refuse_later(message)
    request = GenerateRequest(
        model=message.model,
        text=message.text if message.HasField("text") else None,
        token_ids=tuple(message.token_ids.ids) if message.HasField("token_ids") else None,
        chat=_decode_chat(message.chat) if message.HasField("chat") else None,
        sampling=SamplingParams(**_set_fields(message.sampling)),
        n=message.n if message.HasField("n") else None,
        priority=message.priority if message.HasField("priority") else None,
        request_id=message.request_id,
        constraint=_decode_constraint(message.constraint)
        if message.HasField("constraint")
        else None,
        prompt=PromptOptions(**_set_fields(message.prompt)),
        output=OutputOptions(**_set_fields(message.output)),
        timeout_s=timeout_s,
    )
    found = list(_generate_violations(message))
    try:
        request.validate()
    except InvalidRequest as error:
        found += error.violations
    if found:
        raise InvalidRequest(found)
    return request


def _set_fields(message: Message) -> dict[str, Any]:
    """The fields that are set, by name; lists as tuples, maps as sorted pairs."""
    return {field.name: _plain(value) for field, value in message.ListFields()}


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float)):
        return value
    return tuple(sorted(value.items())) if hasattr(value, "items") else tuple(value)


def _generate_violations(message: inference_pb2.GenerateRequest) -> Iterator[FieldViolation]:
    """What the proto allows and an engine value cannot even hold."""
    yield from _chat_violations(message.chat, is_set=message.HasField("chat"))
    if message.HasField("token_ids"):
        if not message.token_ids.ids:
            yield FieldViolation("token_ids.ids", "is empty")
        if message.prompt.HasField("add_special_tokens"):
            yield FieldViolation("prompt.add_special_tokens", "cannot be set beside token_ids")
    if message.HasField("constraint"):
        yield from _constraint_violations(message.constraint)


def _decode_chat(message: inference_pb2.Chat) -> Chat:
    return Chat(
        messages=tuple(_decode_message(turn) for turn in message.messages),
        tools=tuple(_decode_tool(tool) for tool in message.tools),
        template_args=_decode_struct(message.template_args),
        add_generation_prompt=message.add_generation_prompt
        if message.HasField("add_generation_prompt")
        else True,
    )


def _decode_message(message: inference_pb2.Message) -> dict[str, Any]:
    """In the form that chat templates are written for: transformers', which is OpenAI's but for
    arguments that are an object and no text."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments_json)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn | {"name": message.name} if message.name else turn


def _arguments(written: str) -> dict[str, Any] | None:
    """The object that a call's arguments are; None: they are none (`_chat_violations`)."""
    try:
        arguments = json.loads(written, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _decode_tool(message: inference_pb2.Tool) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    if message.HasField("parameters"):
        parameters = _decode_struct(message.parameters)
    function = {
        "name": message.name,
        "description": message.description,
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def _chat_violations(message: inference_pb2.Chat, *, is_set: bool) -> Iterator[FieldViolation]:
    if is_set and not message.messages:
        yield FieldViolation("chat.messages", "is empty")
    for index, turn in enumerate(message.messages):
        path = f"chat.messages[{index}]"
        if not turn.role:
            yield FieldViolation(f"{path}.role", "is empty")
        for number, call in enumerate(turn.tool_calls):
            if not call.name:
                yield FieldViolation(f"{path}.tool_calls[{number}].name", "is empty")
            if _arguments(call.arguments_json) is None:
                yield FieldViolation(
                    f"{path}.tool_calls[{number}].arguments_json", "is not a JSON object"
                )
    for number, tool in enumerate(message.tools):
        if not tool.name:
            yield FieldViolation(f"chat.tools[{number}].name", "is empty")


def _decode_struct(struct: Struct) -> dict[str, Any]:
    """By name: protobuf's maps have another order in every process, and templates write it."""
    return {name: _decode_value(struct.fields[name]) for name in sorted(struct.fields)}


def _decode_value(value: Value) -> Any:
    """JSON has one kind of number; whole ones become int, as templates expect of them."""
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
    if kind == "choice":
        return Constraint(kind, "\0".join(message.choice.choices))
    return Constraint(kind, "" if kind == "json_object" else getattr(message, kind))


def _constraint_violations(message: inference_pb2.Constraint) -> Iterator[FieldViolation]:
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


class TokenizeInput(TypedDict):
    """What `Engine.tokenize` takes beside the model's name; one of text and chat is not None."""

    text: str | None
    chat: Chat | None
    add_special_tokens: bool | None


def decode_tokenize(message: inference_pb2.TokenizeRequest) -> TokenizeInput:
    """The text or chat to split.

    Raises:
        Unsupported: a set field's feature does not exist yet.
        InvalidRequest: neither is given, or the chat is broken.
    """
    refuse_later(message)
    found = list(_chat_violations(message.chat, is_set=message.HasField("chat")))
    if message.WhichOneof("input") is None:
        found.append(FieldViolation("input", "set exactly one of text and chat"))
    if found:
        raise InvalidRequest(found)
    return TokenizeInput(
        text=message.text if message.HasField("text") else None,
        chat=_decode_chat(message.chat) if message.HasField("chat") else None,
        add_special_tokens=message.add_special_tokens
        if message.HasField("add_special_tokens")
        else None,
    )


def decode_get_model(message: models_pb2.GetModelRequest) -> str:
    """The name asked for.

    Raises:
        InvalidRequest: it is empty.
    """
    if not message.model:
        raise InvalidRequest.of("model", "is empty")
    return message.model


# ---- a generation's events -------------------------------------------------------------------

FINISH_REASONS = {
    EndReason.STOP: inference_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def encode_events(
    events: Sequence[StreamEvent], *, token_ids: bool = False
) -> list[inference_pb2.GenerateResponse]:
    """The messages for events that are ready together, in an order every client may rely on:
    Started first, a choice's Delta before its Finished. A choice's Tokens become one Delta.

    ``token_ids``: the client asked for them. Ends that are no success give no message; the
    call's status says them.
    """
    messages: list[inference_pb2.GenerateResponse] = []
    pending: dict[int, list[Tokens]] = {}
    for event in events:
        if isinstance(event, Tokens):
            pending.setdefault(event.choice, []).append(event)
        elif isinstance(event, Finished):
            messages += _deltas(pending.pop(event.choice, ()), token_ids=token_ids)
            if event.reason.is_success:
                messages.append(_encode_finished(event))
        else:
            messages += _encode_started(event)
    for parts in pending.values():
        messages += _deltas(parts, token_ids=token_ids)
    return messages


class ShortDelta:
    """The wire's form of what nearly every step gives nearly every stream: one Tokens event that
    fits one message. As `encode_events`, in a fifth of the time, for one stream and one thread.

    ``token_ids``: the client asked for them.
    """

    __slots__ = ("_delta", "_message", "_token_ids")

    def __init__(self, *, token_ids: bool) -> None:
        self._message = inference_pb2.GenerateResponse()
        self._delta = self._message.delta
        self._token_ids = token_ids

    def encode(self, event: StreamEvent) -> bytes | None:
        """The message's bytes, none (b"") if there is nothing to tell; None: `encode_events` is
        to do it."""
        if event.__class__ is not Tokens:
            return None
        _, choice, ids, text, logprobs, _ = event
        # a character takes 4 bytes at most, an id 5, and 20 are enough for the rest
        if logprobs or 4 * len(text) + 5 * len(ids) + 20 > MESSAGE_BYTES_MAX:
            return None
        delta = self._delta
        if self._token_ids:
            del delta.token_ids[:]
            delta.token_ids.extend(ids)
        elif not text:
            return b""
        delta.choice = choice
        delta.text = text
        return self._message.SerializeToString() if text or ids else b""


def _deltas(
    parts: Sequence[Tokens], *, token_ids: bool
) -> Iterator[inference_pb2.GenerateResponse]:
    """One choice's Tokens as one message; as none when there is nothing to tell, as several
    when one would be too large."""
    message = inference_pb2.GenerateResponse()
    delta = message.delta
    delta.text = "".join([part.text for part in parts])
    for part in parts:
        delta.choice = part.choice
        if token_ids:
            delta.token_ids.extend(part.token_ids)
        if part.logprobs:
            delta.logprobs.extend([_encode_logprob(entry) for entry in part.logprobs])
        if isinstance(part, AnswerTokens):
            delta.reasoning += part.reasoning
            delta.tool_calls.extend([_encode_call(call) for call in part.tool_calls])
    if not (delta.text or delta.token_ids or delta.logprobs or delta.reasoning or delta.tool_calls):
        return
    if message.ByteSize() <= MESSAGE_BYTES_MAX or not _can_halve(parts):
        yield message
        return
    for half in _halves(parts):
        yield from _deltas(half, token_ids=token_ids)


def _encode_call(call: ToolCallDelta) -> inference_pb2.ToolCallDelta:
    return inference_pb2.ToolCallDelta(
        position=call.position, id=call.call_id, name=call.name, arguments_json=call.arguments_json
    )


def _can_halve(parts: Sequence[Tokens]) -> bool:
    [part, *others] = parts
    beside = _beside(part)
    return (
        bool(others)
        or any(len(grown) > 1 for grown in (part.text, part.token_ids, part.logprobs, *beside))
        or any(len(call.arguments_json) > 1 for call in beside[1])
    )


def _beside(part: Tokens) -> tuple[str, tuple[ToolCallDelta, ...]]:
    return (part.reasoning, part.tool_calls) if isinstance(part, AnswerTokens) else ("", ())


def _halves(parts: Sequence[Tokens]) -> tuple[Sequence[Tokens], Sequence[Tokens]]:
    """Split anywhere that keeps the order: a Delta is a suffix to append, however it is cut."""
    if len(parts) > 1:
        return parts[: len(parts) // 2], parts[len(parts) // 2 :]
    [part] = parts
    text, ids, logprobs = len(part.text) // 2, len(part.token_ids) // 2, len(part.logprobs) // 2
    first = (part.token_ids[:ids], part.text[:text], part.logprobs[:logprobs])
    second = (part.token_ids[ids:], part.text[text:], part.logprobs[logprobs:])
    reasoning, calls = _beside(part)
    at, (calls_first, calls_second) = len(reasoning) // 2, _halves_of_calls(calls)
    return (
        [
            AnswerTokens.of(
                Tokens(part.request_id, part.choice, *first), reasoning[:at], calls_first
            )
        ],
        [
            AnswerTokens.of(
                Tokens(part.request_id, part.choice, *second), reasoning[at:], calls_second
            )
        ],
    )


def _halves_of_calls(
    calls: tuple[ToolCallDelta, ...],
) -> tuple[tuple[ToolCallDelta, ...], tuple[ToolCallDelta, ...]]:
    """Between two calls or, of one, within its arguments: what comes then is its next part."""
    if len(calls) != 1 or len(calls[0].arguments_json) < 2:
        return calls[: len(calls) // 2], calls[len(calls) // 2 :]
    [call] = calls
    at = len(call.arguments_json) // 2
    rest = ToolCallDelta(call.position, "", "", call.arguments_json[at:])
    return (call._replace(arguments_json=call.arguments_json[:at]),), (rest,)


def _encode_started(event: Started) -> Iterator[inference_pb2.GenerateResponse]:
    """One message, or several where the prompt's log-probabilities fill more than one: each has
    the next of them, and all else again."""
    message = _bare_started(event)
    size = message.ByteSize()
    for entry in event.prompt_logprobs:
        encoded = _encode_logprob(entry)
        own = encoded.ByteSize() + 6  # and its tag and length; the slack holds the message's own
        if size + own > MESSAGE_BYTES_MAX:
            yield message
            message = _bare_started(event)
            size = message.ByteSize()
        message.started.prompt_logprobs.append(encoded)
        size += own
    yield message


def _bare_started(event: Started) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        started=inference_pb2.Started(
            request_id=event.request_id, model=event.model, prompt_tokens=event.prompt_tokens
        )
    )


def _encode_finished(event: Finished) -> inference_pb2.GenerateResponse:
    finished = inference_pb2.Finished(
        choice=event.choice,
        reason=FINISH_REASONS[event.reason],
        usage=inference_pb2.Usage(
            prompt_tokens=event.usage.prompt_tokens,
            cached_tokens=event.usage.cached_tokens,
            completion_tokens=event.usage.completion_tokens,
        ),
        timings=_encode_timings(event.timings),
    )
    if isinstance(event.matched, str):
        finished.stop = event.matched
    elif event.matched is not None:
        finished.stop_token_id = event.matched
    return inference_pb2.GenerateResponse(finished=finished)


def _encode_timings(timings: Timings) -> inference_pb2.Timings:
    return inference_pb2.Timings(
        queue=encode_duration(timings.queue_s),
        load=encode_duration(timings.load_s),
        prefill=encode_duration(timings.prefill_s),
        decode=encode_duration(timings.decode_s),
        parked=encode_duration(timings.parked_s),
    )


def encode_duration(seconds: float) -> Duration:
    """Seconds, rounded to nanoseconds; a clock's rounding never makes one negative."""
    nanos = max(0, round(seconds * 1e9))
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def _encode_logprob(entry: TokenLogprob) -> inference_pb2.TokenLogprob:
    """The core ranks from 0, the proto from 1."""
    return inference_pb2.TokenLogprob(
        token_id=entry.token_id,
        text=entry.text,
        logprob=entry.logprob,
        alternatives=[
            inference_pb2.Alternative(
                token_id=other.token_id, text=other.text, logprob=other.logprob, rank=other.rank + 1
            )
            for other in entry.alternatives
        ],
    )


# ---- tokens --------------------------------------------------------------------------------------


def encode_tokens(spans: Sequence[TokenSpan], max_model_len: int) -> inference_pb2.TokenizeResponse:
    """The tokens of a text.

    Raises:
        RequestTooLarge: they do not fit in one message.
    """
    return _fitting(
        inference_pb2.TokenizeResponse(
            tokens=[
                inference_pb2.Token(
                    id=span.token_id, text=span.text, start=span.start, end=span.end
                )
                for span in spans
            ],
            max_model_len=max_model_len,
        ),
        "input",
    )


def encode_text(text: str) -> inference_pb2.DetokenizeResponse:
    """The text of tokens.

    Raises:
        RequestTooLarge: it does not fit in one message.
    """
    return _fitting(inference_pb2.DetokenizeResponse(text=text), "ids")


def _fitting(message: MessageT, field: str) -> MessageT:
    if message.ByteSize() > MESSAGE_BYTES_MAX:
        raise RequestTooLarge.of(field, "is so long that the answer would exceed 4 MiB")
    return message
