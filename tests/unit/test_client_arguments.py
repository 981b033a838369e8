"""Every argument of the Python client that a method cannot take is refused by name, before a call
is made, and so is every field of a mapping that stands for a message."""

import asyncio
import inspect
import math

import pytest
from google.protobuf.message_factory import GetMessageClass

from grpc_service.client import AsyncClient, Client, messages
from grpc_service.client.requests import TEXT_FIELDS, message_of, request_of

SILENT = "127.0.0.1:1"  # nobody listens on port 1
GOOD = {"conversation": "Hi", "choice": 0, "requests": []}
NO_REQUEST = (3, None, [1], b"Once", object(), messages.Usage())
WRONG = {
    "requests": (3, None, b"Once", "Once", {"inputs": []}, messages.EmbedStreamRequest()),
    "conversation": (3, None, b"Hi", {"role": "user"}, ["Hi"], [{"rule": "user"}], [{"role": 3}]),
    "timeout": ("3", [1], b"3", math.nan),
    "on_break": (3, "x"),
    "model": (3, None),
    "sampling": (3, "x", {"max_token": 1}, {"max_tokens": "x"}, {"max_tokens": -1}),
}
OPTIONS = ({"max_token": 1}, {"max_tokens": "x"}, {"stop": 3}, {"logit_bias": {"a": 1}})
PARTS = {"": "", "models": "Models", "control": "Control"}


def methods(made):
    """Return the public methods of a client and of its parts, by their names."""
    client = made(SILENT)
    return {
        (part, name): function
        for part in PARTS
        for name, function in inspect.getmembers(
            getattr(client, part) if part else client, inspect.ismethod
        )
        if not name.startswith("_") and name != "close"
    }


def request_class(function):
    """Return the class of a method's request."""
    text = inspect.signature(function).parameters["request"].annotation
    return getattr(messages, text.partition("messages.")[2].partition("]")[0])


def cases(function):
    """Yield the arguments of calls with one wrong argument, and the beginning of the error."""
    name, taken = function.__name__, inspect.signature(function).parameters
    good = {}
    if "request" in taken:
        made = request_class(function)
        good = {"request": made()}
        texts = () if made in TEXT_FIELDS else ("Once",)
        for wrong in (*NO_REQUEST, *texts):
            yield {"request": wrong}, f"{name} takes "
        for key, wrong in (("nothing", 1), (next(iter(made.DESCRIPTOR.fields_by_name)), object())):
            yield {"request": {key: wrong}}, made.__name__
    good |= {key: value for key, value in GOOD.items() if key in taken}
    for key, parameter in taken.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((good | wrong, name) for wrong in OPTIONS)
        elif key != "request":
            yield from ((good | {key: wrong}, key) for wrong in WRONG[key])


async def refusal(function, given):
    """Return the error of a call, whether it raises at once or when it is awaited."""
    try:
        called = function(**given)
        if inspect.isawaitable(called):
            await called
    except (TypeError, ValueError) as error:
        return str(error)
    return f"nothing, for {given}"


@pytest.mark.parametrize("made", [Client, AsyncClient])
def test_a_wrong_argument_of_any_method_is_named(made):
    async def ask():
        found = {
            (key, str(given), begins): await refusal(function, given)
            for key, function in methods(made).items()
            for given, begins in cases(function)
        }
        return found

    found = asyncio.run(ask())
    assert len(found) > 200
    assert {case: told for case, told in found.items() if not told.startswith(case[-1])} == {}


def fields_of(descriptor, path=()):
    """Yield the path of every field of a message and of the messages in it, as descriptors."""
    for field in descriptor.fields:
        yield (*path, field)
        inner = field.message_type
        if inner is None or inner.full_name.startswith("google.") or len(path) > 3:
            continue
        if not inner.GetOptions().map_entry:
            yield from fields_of(inner, (*path, field))


def wrapped(path):
    """Return fields in which a path's last field has a wrong value, and that field's name."""
    value, names = object(), []
    for field in reversed(path):
        entry = field.message_type
        is_map = entry is not None and entry.GetOptions().map_entry
        value = {1: value} if is_map else [value] if field.is_repeated else value
        names.append(f"{field.name}[{1 if is_map else 0}]" if field.is_repeated else field.name)
        value = {field.name: value}
    return value, ".".join(reversed(names))


REQUESTS = [
    *(getattr(messages, name) for name in sorted(messages.__all__) if name.endswith("Request")),
    messages.SamplingParams,
]


@pytest.mark.parametrize("made", REQUESTS, ids=lambda made: made.__name__)
def test_a_wrong_field_anywhere_in_a_mapping_is_named(made):
    for path in fields_of(made.DESCRIPTOR):
        fields, name = wrapped(path)
        with pytest.raises(TypeError) as caught:
            message_of(made, made.__name__, fields)
        assert str(caught.value).startswith(f"{made.__name__}.{name} takes ")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"n": -1}, "GenerateRequest.n is -1, outside [0, 4294967295]"),
        ({"text": "a", "chat": {}}, "GenerateRequest takes only one of text and chat"),
        ({"text": "\ud800"}, "GenerateRequest.text has a character that is not Unicode text"),
        ({"sampling": {"stop": [3]}}, "GenerateRequest.sampling.stop[0] takes a text, not 3 (int)"),
        ({"chat": {"messages": {}}}, "GenerateRequest.chat.messages takes a list, each of which "
         "is a messages.Message or a mapping of its fields, not {} (dict)"),
        ({"sampling": {"logit_bias": {-1: 2}}}, "GenerateRequest.sampling.logit_bias (a key) is "
         "-1, outside [0, 4294967295]"),
        ({"sampling": {"logit_bias": {1: None}}}, "GenerateRequest.sampling.logit_bias[1] takes "
         "a number, not None (NoneType)"),
    ],
)  # fmt: skip
def test_what_a_field_cannot_hold_is_said(fields, told):
    with pytest.raises((TypeError, ValueError)) as caught:
        message_of(messages.GenerateRequest, "GenerateRequest", fields)
    assert str(caught.value) == told


def test_one_text_is_a_list_of_one_and_bytes_may_have_any_form():
    made = message_of(messages.SamplingParams, "sampling", {"stop": "end", "seed": None})
    assert (list(made.stop), made.HasField("seed")) == (["end"], False)
    inputs = [{"image": bytearray(b"png")}, messages.EmbedInput(image=b"png")]
    made = message_of(messages.EmbedRequest, "EmbedRequest", {"inputs": inputs})
    assert made.inputs[0] == made.inputs[1]
    enum = message_of(messages.PauseRequest, "PauseRequest", {"mode": "PAUSE_MODE_WAIT"})
    assert enum.mode == messages.PAUSE_MODE_WAIT


@pytest.mark.parametrize("made", TEXT_FIELDS, ids=lambda made: made.__name__)
def test_a_text_stands_for_the_field_that_a_program_would_name(made):
    asked = request_of("call", made, "x")
    [(field, value)] = asked.ListFields()
    assert field.name == TEXT_FIELDS[made]
    assert value in ("x", ["x"])
    assert GetMessageClass(made.DESCRIPTOR) is made


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"address": 50051}, "address takes a text: HOST"),
        ({"api_key": b"k"}, "api_key takes a text"),
        ({"resume_s": "1"}, "resume_s takes seconds"),
        ({"tls": True}, "tls takes a Tls"),
        ({"max_message_bytes": "1MiB"}, "max_message_bytes takes a whole number"),
        ({"keepalive_time_s": "20"}, "keepalive_time_s takes seconds"),
        ({"options": 3}, "options takes a list"),
        ({"key": "k"}, "there is no setting 'key'; there are tls, max_message_bytes"),
    ],
)
@pytest.mark.parametrize("made", [Client, AsyncClient])
def test_a_wrong_setting_is_named(made, settings, told):
    async def make():
        made(**{"address": SILENT} | settings)

    with pytest.raises(TypeError) as caught:
        asyncio.run(make())
    assert str(caught.value).startswith(told)
