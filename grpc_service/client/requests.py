"""Makes request messages of the arguments that a program passes to a client's methods.

Rule 1: an argument with only one meaning is taken: a mapping for a message that has these fields,
and a text or a list of texts where a request has a main field (`TEXT_FIELDS`). Rule 2: anything
else is refused before a call is made, by an error that names the argument or the field and says
what it takes; protobuf's own errors name neither.

These are the forms that the engine's own methods take (`engine.api.arguments`).
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping
from math import inf, isnan
from numbers import Real
from typing import Any, TypeAlias, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from grpc_service.client import messages

MessageT = TypeVar("MessageT", bound=Message)
Given: TypeAlias = MessageT | Mapping[str, Any]  # what programs may pass for a message
# Objects of grpc's asyncio alone may be asynchronous.
EmbedRequests: TypeAlias = (
    AsyncIterable[messages.EmbedStreamRequest] | Iterable[messages.EmbedStreamRequest]
)
Conversation: TypeAlias = str | Iterable[messages.Message | Mapping[str, Any]]

SHOWN_CHARS_MAX = 60  # characters of a wrong value in an error message
# The field that gets a text which is given in place of a request.
TEXT_FIELDS = {
    messages.GenerateRequest: "text",
    messages.TokenizeRequest: "text",
    messages.GenerateImageRequest: "prompt",
    messages.GetModelRequest: "model",
    messages.LoadModelRequest: "model",
    messages.UnloadModelRequest: "model",
    messages.UnloadAdapterRequest: "model",
    messages.ResumeRequest: "model",
    messages.ResetPrefixCacheRequest: "model",
    messages.ExplainRequest: "request_id",
    messages.AbortRequest: "request_ids",
    messages.AttachRequest: "request_id",
}
WHOLE = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
}
NUMBERS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def wrong_type(name: str, wanted: str, given: object) -> TypeError:
    """Return the error of a value that an argument or a field cannot take."""
    text, kind = repr(given), type(given).__name__
    shown = f"{text} ({kind})" if len(text) <= SHOWN_CHARS_MAX else f"a value of type {kind}"
    return TypeError(f"{name} takes {wanted}, not {shown}")


def checked(name: str, given: Any, classes: Any, wanted: str) -> Any:
    """Return an argument.

    Raises:
        TypeError: ``given`` is of none of the classes.
    """
    if not isinstance(given, classes):
        raise wrong_type(name, wanted, given)
    return given


def seconds_of(given: float | None, name: str = "timeout") -> float | None:
    """Return a time in seconds; None and infinity stand for no limit.

    Raises:
        TypeError: the time is no number. ValueError: the time is NaN.
    """
    if given is None:
        return None
    seconds = float(checked(name, given, Real, "seconds or None"))
    if isnan(seconds):
        raise ValueError(f"{name} is {given}, which is no time")
    return None if seconds == inf else seconds


def request_of(method: str, made: type[MessageT], given: Given[MessageT] | str) -> MessageT:
    """Return the request of a call of ``method``.

    Raises:
        TypeError, ValueError: a value is wrong (`message_of`), or this request takes no text.
    """
    if isinstance(given, made):
        return given
    text_field = TEXT_FIELDS.get(made)
    if isinstance(given, str) and text_field:
        given = {text_field: given}
    if isinstance(given, Mapping):
        return message_of(made, made.__name__, given)
    forms = f"{'a text, ' if text_field else ''}a messages.{made.__name__} or a mapping"
    raise wrong_type(method, f"{forms} of its fields", given)


def requests_of(given: EmbedRequests) -> Any:
    """Return the requests of a call that takes a stream of them, as grpc takes them.

    Raises:
        TypeError: ``given`` is no such thing.
    """
    is_one = isinstance(given, str | bytes | Mapping | Message)
    if is_one or not isinstance(given, Iterable | AsyncIterable):
        raise wrong_type("requests", "messages.EmbedStreamRequest, one after the other", given)
    return iter(given) if isinstance(given, Iterable) else given


def chat_request(
    conversation: Conversation,
    model: str,
    sampling: Given[messages.SamplingParams] | None,
    options: Mapping[str, Any],
) -> messages.GenerateRequest:
    """Return the request for an answer to ``conversation``; a text is the user's one message.
    ``options`` are fields of ``sampling``, and override it.

    Raises:
        TypeError, ValueError: an argument has a value that it cannot take.
    """
    if isinstance(conversation, str):
        conversation = [{"role": "user", "content": conversation}]
    wanted = "a text, or a list of messages with role and content"
    if isinstance(conversation, Mapping | bytes) or not isinstance(conversation, Iterable):
        raise wrong_type("conversation", wanted, conversation)
    turns = [
        _message(messages.Message, f"conversation[{place}]", turn)
        for place, turn in enumerate(conversation)
    ]
    if sampling is not None:
        sampling = _message(messages.SamplingParams, "sampling", sampling)
    request = messages.GenerateRequest(
        model=checked("model", model, str, "a text"),
        chat=messages.Chat(messages=turns),
        sampling=sampling,
    )
    return _with_options("chat", request, options)


def completion_request(
    given: Given[messages.GenerateRequest] | str, options: Mapping[str, Any]
) -> messages.GenerateRequest:
    """Return the request of a call of ``complete``, whose ``options`` override its sampling.

    Raises:
        TypeError, ValueError: as `request_of` raises, or the request asks for several choices.
    """
    request = request_of("complete", messages.GenerateRequest, given)
    if request.HasField("n") and request.n != 1:
        raise ValueError(f"n is {request.n}, but complete returns one text; use generate")
    return _with_options("complete", request, options)


def _with_options(
    method: str, request: messages.GenerateRequest, options: Mapping[str, Any]
) -> messages.GenerateRequest:
    """Return a request with other sampling; ``request`` itself stays as it is."""
    if not options:
        return request
    sampling = message_of(messages.SamplingParams, method, options)
    changed = messages.GenerateRequest()
    changed.CopyFrom(request)
    for name in options:
        changed.sampling.ClearField(name)
    changed.sampling.MergeFrom(sampling)
    return changed


def message_of(made: type[MessageT], name: str, fields: Mapping[str, Any]) -> MessageT:
    """Return a message with these fields; those that are None stay unset. ``name`` is the
    message's, for errors.

    Raises:
        TypeError: there is no such field, or it cannot take the value. ValueError: the value is
            outside what the field can hold, or two fields exclude each other.
    """
    known = made.DESCRIPTOR.fields_by_name
    values = {}
    for key, value in fields.items():
        if key not in known:
            its = f"its fields are {', '.join(known)}"
            raise TypeError(f"{name} has no field {key!r}; {its}")
        if value is not None:
            values[key] = _value(known[key], f"{name}.{key}", value)
    for oneof in made.DESCRIPTOR.oneofs:
        given = [field.name for field in oneof.fields if field.name in values]
        if len(given) > 1:  # protobuf would silently keep one of them
            raise ValueError(f"{name} takes only one of {' and '.join(given)}")
    return made(**values)


def _value(field: Any, name: str, given: Any) -> Any:
    """Return the value of a field, after checks, as the message's constructor takes it."""
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        pairs = checked(name, given, Mapping, "a mapping").items()
        key_type, value_type = entry.fields_by_name["key"], entry.fields_by_name["value"]
        return {
            _single(key_type, f"{name} (a key)", key): _single(value_type, f"{name}[{key}]", value)
            for key, value in pairs
        }
    if not field.is_repeated:
        return _single(field, name, given)
    if isinstance(given, str) and field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        given = [given]  # one text, whose characters protobuf would take for several
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise wrong_type(name, f"a list, each of which is {_wanted(field)}", given)
    return [_single(field, f"{name}[{place}]", item) for place, item in enumerate(given)]


def _single(field: Any, name: str, given: Any) -> Any:
    if field.message_type is not None and not field.message_type.full_name.startswith("google."):
        return _message(GetMessageClass(field.message_type), name, given)
    if field.type == FieldDescriptor.TYPE_BYTES and isinstance(given, bytearray | memoryview):
        return bytes(given)
    if given is None:
        raise wrong_type(name, _wanted(field), given)
    try:  # protobuf checks what the field can hold
        made = GetMessageClass(field.containing_type)
        made(**{field.name: [given] if field.is_repeated else given})
    except (TypeError, AttributeError):
        raise wrong_type(name, _wanted(field), given) from None
    except UnicodeError:
        raise ValueError(f"{name} has a character that is not Unicode text") from None
    except ValueError:
        if isinstance(given, int) and field.cpp_type in WHOLE:
            least, most = WHOLE[field.cpp_type]
            raise ValueError(f"{name} is {given}, outside [{least}, {most}]") from None
        raise wrong_type(name, _wanted(field), given) from None
    return given


def _message(made: type[MessageT], name: str, given: Any) -> MessageT:
    if isinstance(given, made):
        return given
    if isinstance(given, Mapping):
        return message_of(made, name, given)
    raise wrong_type(name, f"a messages.{made.__name__} or a mapping of its fields", given)


def _wanted(field: Any) -> str:
    """Return a description of the values that a field takes."""
    if field.enum_type is not None:
        return f"one of {', '.join(field.enum_type.values_by_name)}"
    if field.message_type is not None:
        own = not field.message_type.full_name.startswith("google.")
        what = {"Duration": "a datetime.timedelta", "Struct": "a mapping for JSON"}
        named = f"a messages.{field.message_type.name} or a mapping of its fields"
        return named if own else what.get(field.message_type.name, "a message of protobuf")
    if field.cpp_type in WHOLE:
        return "a whole number"
    if field.cpp_type in NUMBERS:
        return "a number"
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return "True or False"
    return "bytes" if field.type == FieldDescriptor.TYPE_BYTES else "a text"
