"""Proto to engine and back: nothing set is lost, nothing unset is invented, nothing is ignored."""

import dataclasses
import math

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from engine.core.common.events import Finished
from engine.core.common.prompts import PromptProgress
from engine.core.common.types import EndReason, Timings, Usage
from engine.core.text.types import Alternative, Constraint, TokenLogprob, Tokens
from engine.errors import InvalidRequest, RequestTooLarge, TrioletError
from engine.requests.text.values import (
    MAX_PROMPT_LOGPROBS,
    GenerateRequest,
    OutputOptions,
    PromptOptions,
    SamplingParams,
    Started,
)
from grpc_service._generated.triolet.v1 import (
    classes_pb2,
    common_pb2,
    control_pb2,
    inference_pb2,
    models_pb2,
    vectors_pb2,
)
from grpc_service.services import (
    classify_codec,
    encode_codec,
    operations_codec,
    text_codec,
    text_encoder,
)


def decode(**fields):
    """Return the engine's request of a GenerateRequest with these fields."""
    fields = fields if fields.keys() & {"text", "token_ids", "chat"} else {"text": "a"} | fields
    request = text_codec.decode_generate(inference_pb2.GenerateRequest(**fields))
    request.validate()  # as the supervisor does
    return request


# ---- requests --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "cls"),
    [
        (inference_pb2.SamplingParams, SamplingParams),
        (inference_pb2.PromptOptions, PromptOptions),
        (inference_pb2.OutputOptions, OutputOptions),
    ],
)
def test_the_engines_fields_are_the_protos(message, cls):
    names = {field.name for field in message.DESCRIPTOR.fields}
    assert names == {field.name for field in dataclasses.fields(cls)}


def test_an_empty_request_leaves_everything_unset():
    assert decode() == GenerateRequest(text="a")


SECTIONS = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
SET_SCALARS = [
    pytest.param(section, field, id=f"{section}.{field.name}")
    for section in ("sampling", "prompt", "output")
    for field in SECTIONS[section].message_type.fields
    if field.has_presence
]
NON_ZERO = {
    FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    FieldDescriptor.CPPTYPE_UINT32: 3,
    FieldDescriptor.CPPTYPE_UINT64: 3,
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_STRING: "a",
}
ZERO_IS_OUTSIDE = {
    "sampling.top_p",
    "sampling.repetition_penalty",
    "sampling.max_tokens",
    "prompt.truncate_to",
}


@pytest.mark.parametrize(("section", "field"), SET_SCALARS)
def test_unset_zero_and_set_differ(section, field):
    value = NON_ZERO[field.cpp_type]
    path = f"{section}.{field.name}"
    assert getattr(getattr(decode(), section), field.name) is None
    assert getattr(getattr(decode(**{section: {field.name: value}}), section), field.name) == value
    zero = type(value)()
    if path in ZERO_IS_OUTSIDE:
        with pytest.raises(InvalidRequest) as caught:
            decode(**{section: {field.name: zero}})
        assert [violation.field for violation in caught.value.violations] == [path]
        return
    got = getattr(getattr(decode(**{section: {field.name: zero}}), section), field.name)
    assert (got, type(got)) == (zero, type(zero))


def asked(field, **values):
    """Return the engine's value of a scalar field outside of GenerateRequest's sections.

    The request has the fields that it requires, and ``values``.
    """
    message, name = field.containing_type.name, field.name
    match message:
        case "GenerateRequest":
            return getattr(decode(**values), name)
        case "Chat":
            return getattr(decode(chat={"messages": [{"role": "user"}]} | values).chat, name)
        case "Continuation":
            return getattr(decode(continuation=values).continuation, name)
        case "TokenizeRequest":
            request = inference_pb2.TokenizeRequest(text="a", **values)
            return text_codec.decode_tokenize(request).get(name)
        case "Reasoning":
            chat = {"messages": [{"role": "user"}]}
            return getattr(decode(chat=chat, reasoning=values).reasoning, name)
        case "Constraint":
            return getattr(decode(constraint={"regex": "a"} | values).constraint, name)
        case "EmbedRequest":
            kind = "VECTOR_KIND_SPARSE" if name in ("top_k", "threshold") else None
            request = vectors_pb2.EmbedRequest(inputs=[{"text": "a"}], kind=kind, **values)
            embed = encode_codec.decode_embed(request)
            embed.validate()
            return getattr(embed, name)
        case "RerankRequest":
            request = vectors_pb2.RerankRequest(query="q", documents=["d"], **values)
            rerank = encode_codec.decode_rerank(request)
            rerank.validate()
            return getattr(rerank, name)
        case "ClassifyRequest":
            request = classes_pb2.ClassifyRequest(inputs=[{"text": "a"}], **values)
            classify = classify_codec.decode_classify(request)
            classify.validate()
            return getattr(classify, name)
        case "GetUsageRequest":
            return operations_codec.decode_usage(control_pb2.GetUsageRequest(**values))[0]
        case "LoadModelRequest":
            return operations_codec.decode_load(models_pb2.LoadModelRequest(model="m", **values))[1]
    raise AssertionError(f"{message} is not in this test")


OTHER_SCALARS = [
    pytest.param(field, id=f"{message.name}.{field.name}")
    for file in (inference_pb2, models_pb2, control_pb2, common_pb2, vectors_pb2, classes_pb2)
    for message in file.DESCRIPTOR.message_types_by_name.values()
    for field in message.fields
    if field.containing_oneof is not None and field.containing_oneof.name == f"_{field.name}"
    # these are sections of GenerateRequest, an answer, or tested in tests/service/test_servicer.py
    if not message.name.endswith(("Params", "Options", "Logprob", "Started", "Response"))
    and message.name[:5] != "Detok"
]


@pytest.mark.parametrize("field", OTHER_SCALARS)
def test_unset_zero_and_set_differ_in_the_other_requests(field):
    assert asked(field) is None
    value = NON_ZERO.get(field.cpp_type, -5)
    assert asked(field, **{field.name: value}) == value
    zero = type(value)()
    if field.name in ("n", "dimensions", "top_n", "top_k", "replicas"):
        with pytest.raises(InvalidRequest) as caught:
            asked(field, **{field.name: zero})
        assert [violation.field for violation in caught.value.violations] == [field.name]
        return
    got = asked(field, **{field.name: zero})
    assert (got, type(got)) == (zero, type(zero))


def test_lists_become_tuples():
    sampling = decode(sampling={"stop": ["a", "b"], "stop_token_ids": [0, 7]}).sampling
    assert (sampling.stop, sampling.stop_token_ids) == (("a", "b"), (0, 7))


def test_each_kind_of_prompt():
    assert decode(text="").text == ""
    assert decode(token_ids={"ids": [0, 5]}).token_ids == (0, 5)
    chat = decode(
        chat={
            "messages": [{"role": "system", "content": "be"}, {"role": "user", "name": "Ann"}],
            "add_generation_prompt": False,
        }
    ).chat
    assert chat.messages == (
        {"role": "system", "content": "be"},
        {"role": "user", "content": "", "name": "Ann"},
    )
    assert chat.add_generation_prompt is False
    assert chat.opens_turn is False
    assert decode(chat={"messages": [{"role": "user"}]}).chat.opens_turn is True


def test_a_request_without_a_prompt_names_the_choice():
    with pytest.raises(InvalidRequest) as caught:
        text_codec.decode_generate(inference_pb2.GenerateRequest()).validate()
    assert [violation.field for violation in caught.value.violations] == ["input"]


def test_every_broken_field_is_named_at_once():
    with pytest.raises(InvalidRequest) as caught:
        decode(
            token_ids={},
            n=17,
            sampling={"top_p": math.inf, "stop": ["", "a" * 257]},
            prompt={"add_special_tokens": True},
        )
    assert [violation.field for violation in caught.value.violations] == [
        "token_ids.ids",
        "prompt.add_special_tokens",
        "n",
        "sampling.top_p",
        "sampling.stop[0]",
        "sampling.stop[1]",
    ]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer())
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON))
def test_template_args_are_the_json_that_was_sent(args):
    chat = inference_pb2.Chat(messages=[inference_pb2.Message(role="user")])
    chat.template_args.update(args)
    assert decode(chat=chat).chat.template_args == args


@given(st.data())
def test_any_request_decodes_or_is_refused_by_the_engines_own_errors(data):
    """Random bytes that parse as a request never raise another kind of exception."""
    raw = data.draw(st.binary(max_size=60))
    try:
        message = inference_pb2.GenerateRequest.FromString(raw)
    except Exception:
        return
    try:
        request = text_codec.decode_generate(message)
    except TrioletError as error:
        assert str(error)  # noqa: PT017 (either is fine)
    else:
        assert isinstance(request, GenerateRequest)


CONSTRAINTS = [
    ({"json_schema": "{}"}, Constraint("json_schema", "{}")),
    ({"json_object": True}, Constraint("json_object", "")),
    ({"regex": "a+"}, Constraint("regex", "a+")),
    ({"lark": "start: A"}, Constraint("lark", "start: A")),
    ({"choice": {"choices": ["a", ""]}}, Constraint("choice", "a\0")),
]


@pytest.mark.parametrize(
    ("fields", "constraint"), CONSTRAINTS, ids=[c[1].kind for c in CONSTRAINTS]
)
def test_each_kind_of_constraint_decodes(fields, constraint):
    assert decode(constraint=fields).constraint == constraint


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "constraint"),
        ({"json_object": False}, "constraint.json_object"),
        ({"regex": ""}, "constraint.regex"),
        ({"choice": {}}, "constraint.choice.choices"),
        ({"choice": {"choices": ["a", "b\0"]}}, "constraint.choice.choices[1]"),
        ({"json_schema": ""}, "constraint.json_schema"),
        ({"lark": ""}, "constraint.lark"),
        ({"regex": "a" * 65_537}, "constraint.regex"),
        ({"choice": {"choices": ["é" * 8_192] * 9}}, "constraint.choice.choices"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_empty_and_oversized_constraints_are_refused_by_name(fields, field):
    with pytest.raises(InvalidRequest) as caught:
        decode(constraint=fields)
    assert [violation.field for violation in caught.value.violations] == [field]


# ---- events ----------------------------------------------------------------------------------


def tokens(text="a", *, choice=0, ids=(1,), **kwargs):
    return Tokens("r", choice, ids, text, **kwargs)


def ended(choice=0, reason=EndReason.STOP, matched=None):
    timings = Timings(queue_s=1.25, load_s=0.0, prefill_s=1e-9, decode_s=61.0, parked_s=-1e-12)
    return Finished("r", choice, reason, Usage(5, 4, 3, 2), timings, matched)


def test_started_is_encoded_completely():
    for seed in (None, 0, 2**64 - 1):
        [message] = text_encoder.encode_events([Started("r", "m", 7, seed=seed)])
        assert message == inference_pb2.GenerateResponse(
            started=inference_pb2.Started(request_id="r", model="m", prompt_tokens=7, seed=seed)
        )


def test_progress_is_encoded_completely_in_its_place():
    told = PromptProgress("prefill", 3, 10, 20, 7, 5, 2, 1.5, 0.25)
    unknown = PromptProgress("load")
    messages = text_encoder.encode_events([unknown, Started("r", "m", 7), told, tokens()])
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["progress", "started", "progress", "delta"]
    assert not messages[0].progress.HasField("first_token")
    assert json_format.MessageToDict(messages[2].progress, preserving_proto_field_name=True) == {
        "phase": "prefill",
        "position": 3,
        "loaded_bytes": "10",
        "total_bytes": "20",
        "prompt_tokens": 7,
        "computed_tokens": 5,
        "cached_tokens": 2,
        "prefill": "1.500s",
        "first_token": "0.250s",
    }


def test_finished_is_encoded_completely():
    [message] = text_encoder.encode_events([ended(2, EndReason.LENGTH)])
    assert json_format.MessageToDict(message, preserving_proto_field_name=True) == {
        "finished": {
            "choice": 2,
            "reason": "FINISH_REASON_LENGTH",
            "usage": {
                "prompt_tokens": 5,
                "cached_tokens": 4,
                "completion_tokens": 3,
                "resumed_tokens": 2,
            },
            "timings": {
                "queue": "1.250s",
                "load": "0s",
                "prefill": "0.000000001s",
                "decode": "61s",
                "parked": "0s",
            },
        }
    }


@pytest.mark.parametrize(
    ("matched", "kind"), [("\n", "stop"), (0, "stop_token_id"), ("", "stop"), (None, None)]
)
def test_the_match_that_ended_a_choice_is_encoded_even_when_it_is_zero(matched, kind):
    [message] = text_encoder.encode_events([ended(matched=matched)])
    assert message.finished.WhichOneof("matched") == kind
    if kind:
        assert getattr(message.finished, kind) == matched


@pytest.mark.parametrize("reason", [reason for reason in EndReason if not reason.is_success])
def test_other_ends_are_left_to_the_status(reason):
    messages = text_encoder.encode_events([tokens("x"), ended(reason=reason)])
    assert [message.delta.text for message in messages] == ["x"]


def test_log_probabilities_keep_their_absence_and_rank_from_one():
    entry = TokenLogprob(4, "d", None, (Alternative(5, "e", -0.5, 0),))
    [message] = text_encoder.encode_events([tokens(logprobs=(entry,))])
    [got] = message.delta.logprobs
    assert not got.HasField("logprob")
    assert (got.alternatives[0].rank, got.alternatives[0].logprob) == (1, -0.5)


def wide_entry(token_id):
    likely = tuple(Alternative(i, "x" * 60, -1.0, i) for i in range(20))
    return TokenLogprob(token_id, "y" * 60, -0.5, likely)


def test_a_prompts_log_probabilities_never_fill_more_than_a_message():
    """At the engine's maximum an answer begins with several Started, each with the next entries."""
    entries = tuple(wide_entry(i) for i in range(MAX_PROMPT_LOGPROBS // 21))
    messages = text_encoder.encode_events([Started("r", "m", len(entries), entries)])
    assert len(messages) > 1
    assert all(message.ByteSize() < 4 * 2**20 for message in messages)
    assert [m.started.prompt_tokens for m in messages] == [len(entries)] * len(messages)
    told = [entry.token_id for m in messages for entry in m.started.prompt_logprobs]
    assert told == list(range(len(entries)))


@pytest.mark.parametrize("limit", [2_000, 4_000, 10_000])
def test_log_probabilities_are_cut_where_a_message_is_full(limit):
    entries = tuple(wide_entry(i) for i in range(9))
    events = [Started("r", "m", 9, entries), tokens("abc", ids=tuple(range(9)), logprobs=entries)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_encoder, "MESSAGE_BYTES_MAX", limit)
        messages = text_encoder.encode_events(events, token_ids=True)
    assert all(message.ByteSize() <= limit + 8 for message in messages)
    for got in (
        [e.token_id for m in messages for e in m.started.prompt_logprobs],
        [e.token_id for m in messages for e in m.delta.logprobs],
        [i for m in messages for i in m.delta.token_ids],
    ):
        assert got == list(range(9))
    assert "".join(m.delta.text for m in messages) == "abc"


EVENTS = st.lists(
    st.builds(
        tokens,
        st.text(max_size=3),
        choice=st.integers(0, 2),
        ids=st.lists(st.integers(0, 2**32 - 1), max_size=2).map(tuple),
    )
    | st.builds(ended, st.integers(0, 2)),
    max_size=12,
)


@given(EVENTS, st.booleans())
def test_coalescing_keeps_each_choices_text_tokens_and_order(events, with_ids):
    messages = text_encoder.encode_events(events, token_ids=with_ids)
    for choice in range(3):
        want = [event for event in events if event.choice == choice]
        got = [m for m in messages if getattr(m, m.WhichOneof("event")).choice == choice]
        assert read(got) == read_events(want, with_ids=with_ids)
    deltas = [m.delta for m in messages if m.HasField("delta")]
    assert all(delta.text or delta.token_ids for delta in deltas)


def read(messages):
    """Return the text and the tokens that a client has at each Finished."""
    parts, text, ids = [], "", []
    for message in messages:
        if message.HasField("finished"):
            parts.append((text, ids))
            text, ids = "", []
        text += message.delta.text
        ids = ids + list(message.delta.token_ids)
    return [*parts, (text, ids)]


def read_events(events, *, with_ids):
    """Return what `read` returns for the messages of these events."""
    parts, text, ids = [], "", []
    for event in events:
        if isinstance(event, Finished):
            parts.append((text, ids))
            text, ids = "", []
            continue
        text += event.text
        ids = ids + (list(event.token_ids) if with_ids else [])
    return [*parts, (text, ids)]


def test_tokens_of_a_choice_that_are_ready_together_are_one_message():
    events = [tokens("a"), tokens("b", choice=1), tokens("c"), tokens("d", choice=1)]
    assert [m.delta.text for m in text_encoder.encode_events(events)] == ["ac", "bd"]


@pytest.mark.parametrize("limit", [20, 40, 200])
@given(events=EVENTS)
def test_no_message_exceeds_the_limit(limit, events):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_encoder, "MESSAGE_BYTES_MAX", limit)
        messages = text_encoder.encode_events(events, token_ids=True)
    assert all(m.ByteSize() <= limit for m in messages if m.HasField("delta"))
    for choice in range(3):
        want = [event for event in events if event.choice == choice]
        got = [m for m in messages if getattr(m, m.WhichOneof("event")).choice == choice]
        assert read(got) == read_events(want, with_ids=True)


@given(
    text=st.text(max_size=40),
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=9),
    choice=st.integers(0, 2),
    token_ids=st.booleans(),
    limit=st.integers(40, 80),
)
def test_a_token_alone_is_encoded_as_one_among_others(text, ids, choice, token_ids, limit):
    event = tokens(text, choice=choice, ids=tuple(ids))
    short = text_encoder.ShortDelta(token_ids=token_ids)
    short.encode(tokens("before", choice=2, ids=(4, 5)))  # leaves nothing in the encoder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_encoder, "MESSAGE_BYTES_MAX", limit)
        messages = text_encoder.encode_events([event], token_ids=token_ids)
        data = short.encode(event)
    if data is not None:
        assert ([data] if data else []) == [message.SerializeToString() for message in messages]
        assert len(data) <= limit


def test_only_a_token_is_encoded_alone():
    short = text_encoder.ShortDelta(token_ids=True)
    assert short.encode(Started("r", "m", 7)) is None
    assert short.encode(ended(0, EndReason.STOP)) is None
    assert short.encode(tokens("a", logprobs=(TokenLogprob(4, "d", -1.0),))) is None


def test_an_event_that_cannot_be_split_is_sent_whole():
    entry = TokenLogprob(4, "d" * 100, -1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_encoder, "MESSAGE_BYTES_MAX", 50)
        messages = text_encoder.encode_events([tokens("", logprobs=(entry,))])
    assert [len(m.delta.logprobs) for m in messages] == [1]


def test_a_text_that_does_not_fit_in_a_message_is_too_large():
    """The most tokens that a request may have make such a text if each has more than 16 bytes."""
    assert len(text_encoder.encode_text("x" * 4_000_000).text) == 4_000_000
    with pytest.raises(RequestTooLarge) as caught:
        text_encoder.encode_text("x" * 4 * 2**20)
    assert [violation.field for violation in caught.value.violations] == ["ids"]
