"""Every field of a Generate or Embed request is decoded or refused by name: none is ignored."""

import re

import pytest
from google.protobuf.descriptor import FieldDescriptor

from engine.errors import InvalidRequest
from grpc_service.client import messages as pb
from grpc_service.services import encode_codec, text_codec

NEEDED = {  # the required fields of a list's items
    "messages": {"role": "user"},
    "tools": {"name": "f"},
    "tool_calls": {"name": "f", "arguments_json": "{}"},
}


def decode(**fields):
    """Return the engine's request of a GenerateRequest with these fields."""
    fields = fields if fields.keys() & {"text", "token_ids", "chat"} else {"text": "a"} | fields
    return text_codec.decode_generate(pb.GenerateRequest(**fields))


def example(field):
    """Return a value that sets ``field``, to its zero if the field has presence."""
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return {1: 0.0}
        inner = NEEDED.get(field.name, {})
        return [inner] if field.is_repeated else inner
    zero = "" if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else 0
    zero = b"" if field.type == FieldDescriptor.TYPE_BYTES else zero
    if field.is_repeated:
        return [zero]
    is_switch = field.cpp_type == FieldDescriptor.CPPTYPE_BOOL
    return zero if field.has_presence else is_switch or "x"


def leaves(descriptor, prefix=""):
    """Yield every field of a request, as (path, the request that sets only it)."""
    for field in descriptor.fields:
        yield f"{prefix}{field.name}", {field.name: example(field)}
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if field.message_type.file.package != "triolet.v1":
            continue
        for path, inner in leaves(field.message_type, f"{prefix}{field.name}."):
            inner = NEEDED.get(field.name, {}) | inner
            yield path, {field.name: [inner] if field.is_repeated else inner}


EVERY_FIELD = dict(leaves(pb.GenerateRequest.DESCRIPTOR))


@pytest.mark.parametrize("path", sorted(EVERY_FIELD))
def test_no_set_field_is_ignored(path):
    """Every field shows in the engine's request, or is refused.

    Only empty sections and the defaults of templates may make no difference.
    """
    nothing = {"sampling", "prompt", "output", "reasoning", "chat", "chat.add_generation_prompt"}
    nothing |= {"chat.template_args", "chat.messages", "chat.messages.content"}
    nothing |= {"chat.messages.parts.text"}  # an empty text equals an empty content
    nothing |= {"chat.tools.parameters"}  # an empty object means unset
    base = {"text": "a"}
    fields = EVERY_FIELD[path]
    if path.startswith("chat"):
        base = {"chat": {"messages": [{"role": "user"}]}}
        fields = {"chat": base["chat"] | fields["chat"]}
        if path == "chat.add_generation_prompt":
            fields["chat"][path.split(".")[1]] = False
            nothing.remove(path)
        if path == "chat.messages.content":
            fields["chat"]["messages"] = [{"role": "user", "content": "x"}]
            nothing.remove(path)
        if path == "chat.messages.role":
            fields["chat"]["messages"] = [{"role": "assistant"}]
    if path == "text":
        fields = {"text": "b"}
    if path == "token_ids":
        fields = {"token_ids": {"ids": [1]}}
    if path == "constraint.reasoning":
        base = {"text": "a", "constraint": {"regex": "a"}}
        fields = {"constraint": {"regex": "a", "reasoning": False}}
    if path == "constraint.choice":
        fields = {"constraint": {"choice": {"choices": ["x"]}}}
    expected = decode(**base)
    try:
        got = decode(**fields)
    except InvalidRequest as error:
        fields = {violation.field for violation in error.violations}
        assert path in {re.sub(r"\[\d+\]", "", field) for field in fields}
        return
    assert (got != expected) or path in nothing


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        ({"text": ""}, ""),
        ({"token_ids": {"ids": [3, 1]}}, (3, 1)),
        ({"image": b"\x89PNG"}, b"\x89PNG"),
        ({"image": b""}, b""),
    ],
)
def test_every_kind_of_input_is_decoded(one, expected):
    request = encode_codec.decode_embed(pb.EmbedRequest(inputs=[{"text": "a"}, one]))
    assert request.inputs == ("a", expected)
    assert {field.name for field in pb.EmbedInput.DESCRIPTOR.fields} == {
        "text",
        "token_ids",
        "image",
    }
