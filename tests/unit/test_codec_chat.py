"""Chats and answers on the wire: tools in the templates' form, reasoning and calls in deltas."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.text.types import Tokens
from engine.errors import InvalidRequest
from engine.requests.text.values import AnswerTokens, ToolCallDelta, validate_tokenize
from grpc_service.client import messages as pb
from grpc_service.services import text_codec, text_encoder

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number", "maximum": 3}}}
CHAT = {
    "messages": [
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "abc123def", "name": "add", "arguments_json": '{"a": 1, "b": [1.5]}'}
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "abc123def", "name": "add"},
    ],
    "tools": [{"name": "add", "description": "Adds.", "parameters": PARAMETERS}, {"name": "now"}],
}


def test_a_chat_comes_in_the_form_of_chat_templates():
    chat = text_codec.decode_generate(pb.GenerateRequest(chat=CHAT)).chat
    assert chat.messages == (
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "abc123def",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 1, "b": [1.5]}'},
                }
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "abc123def", "name": "add"},
    )
    add, now = (tool["function"] for tool in chat.tools)
    assert [tool["type"] for tool in chat.tools] == ["function", "function"]
    assert add == {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
    assert now["parameters"] == {"type": "object", "properties": {}}
    again = text_codec.decode_tokenize(pb.TokenizeRequest(chat=CHAT))
    assert again["chat"] == chat


def test_the_fields_of_an_object_come_by_their_names():
    """Red if the fields keep protobuf's order, which differs in each process."""
    names = [f"p{number:02}" for number in range(40)]
    inner = dict.fromkeys(reversed(names), 1.5)
    chat = pb.Chat(
        messages=[{"role": "user"}], tools=[{"name": "f", "parameters": {"b": inner, "a": [inner]}}]
    )
    chat.template_args.update(inner)
    decoded = text_codec.decode_generate(pb.GenerateRequest(chat=chat)).chat
    parameters = decoded.tools[0]["function"]["parameters"]
    assert list(parameters) == ["a", "b"]
    for one in (parameters["a"][0], parameters["b"], decoded.template_args):
        assert list(one) == names


@pytest.mark.parametrize("written", ["", "x", "[1]", "null", '{"a": NaN}', '{"a": 1', "{" * 9999])
@pytest.mark.parametrize("kind", ["generate", "tokenize"])
def test_arguments_that_are_not_an_object_are_refused_by_name(written, kind):
    call = {"name": "f", "arguments_json": written}
    chat = {"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": [call, {}]}]}
    if kind == "generate":
        request = text_codec.decode_generate(pb.GenerateRequest(chat=chat))
        validate = request.validate
    else:
        asked = text_codec.decode_tokenize(pb.TokenizeRequest(chat=chat))
        validate = partial(validate_tokenize, asked.get("text"), asked["chat"])
    with pytest.raises(InvalidRequest) as caught:
        validate()
    path = "chat.messages[1].tool_calls"
    assert [violation.field for violation in caught.value.violations] == [
        f"{path}[0].arguments_json",
        f"{path}[1].name",
        f"{path}[1].arguments_json",
    ]


def test_a_tool_needs_a_name():
    chat = {"messages": [{"role": "user"}], "tools": [{"name": "f"}, {}]}
    with pytest.raises(InvalidRequest, match=r"chat\.tools\[1\]\.name: is empty"):
        text_codec.decode_generate(pb.GenerateRequest(chat=chat)).validate()


def test_the_choice_of_a_tool_is_decoded_and_auto_if_it_is_unset():
    chat = {"messages": [{"role": "user"}], "tools": [{"name": "f"}]}
    for written, told in {"": "auto", "auto": "auto", "none": "none", "f": "f"}.items():
        message = pb.GenerateRequest(chat=chat | {"tool_choice": written})
        request = text_codec.decode_generate(message)
        request.validate()
        assert request.chat.tool_choice == told


calls = st.lists(
    st.builds(ToolCallDelta, st.integers(0, 3), st.just("i"), st.just("f"), st.text(max_size=60)),
    max_size=3,
).map(tuple)
answers = st.builds(
    lambda ids, text, reasoning, made: AnswerTokens.of(Tokens("r", 0, ids, text), reasoning, made),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.text(max_size=60),
    st.text(max_size=60),
    calls,
)


@given(events=st.lists(answers, min_size=1, max_size=4), limit=st.sampled_from([40, 120, 4000]))
def test_parsed_parts_arrive_whole_in_messages_that_fit(events, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_encoder, "MESSAGE_BYTES_MAX", limit)
        deltas = [message.delta for message in text_encoder.encode_events(events, token_ids=True)]
    assert "".join(delta.text for delta in deltas) == "".join(one.text for one in events)
    assert "".join(d.reasoning for d in deltas) == "".join(one.reasoning for one in events)
    assert [i for d in deltas for i in d.token_ids] == [i for e in events for i in e.token_ids]
    told = []
    for part in (part for delta in deltas for part in delta.tool_calls):
        if part.name:
            told.append([part.position, part.id, part.name, part.arguments_json])
        else:
            assert told[-1][0] == part.position
            told[-1][3] += part.arguments_json
    assert told == [list(call) for one in events for call in one.tool_calls]
    longest = max((len(c.arguments_json) for e in events for c in e.tool_calls), default=0)
    if limit > 40 or not longest:
        assert all(delta.ByteSize() <= limit for delta in deltas)


def test_tokens_without_content_make_no_message():
    nothing = AnswerTokens.of(Tokens("r", 0, (1,), ""))
    assert text_encoder.encode_events([nothing]) == []
    [message] = text_encoder.encode_events([nothing], token_ids=True)
    assert list(message.delta.token_ids) == [1]
