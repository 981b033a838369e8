"""Every kind of bad input, over the wire: code and reason, and the field by name.

The server goes on after each. A client's mistake is never INTERNAL or UNKNOWN.
"""

import math
import socket

import pytest
from grpc import StatusCode

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from grpc_service.services.methods import CONTROL, INFERENCE, MODELS
from tests.support.core_driver import expected_tokens
from tests.support.server import fake
from tests.support.wire import (
    SERVING,
    broken_fields,
    ended,
    error_of,
    generate,
    generate_request,
    health,
    reason,
    tokenize,
    wait_idle,
    wait_serving,
)

VOCAB = 1000
MAX_MODEL_LEN = 512
INVALID = StatusCode.INVALID_ARGUMENT
METADATA_LIMIT = 8 * 1024  # a client may refuse longer metadata


@pytest.fixture(scope="module")
def server():
    """Yield a server with a small model."""
    with fake(runner={"max_model_len": MAX_MODEL_LEN}) as one:
        wait_serving(one.channel)
        yield one


@pytest.fixture
def channel(server):
    """Yield a channel. After every bad input the server is idle, has all blocks, and serves."""
    yield server.channel
    wait_idle(server.channel)
    heard = generate(server.channel, prompt_ids=[1], max_tokens=2)
    assert heard.ids() == expected_tokens([1], count=2)


@pytest.fixture(scope="module", autouse=True)
def all_were_refused(server):
    """Check at the end that no bad request ever ran: what did not finish was refused."""
    yield
    assert set(ended(server.channel)) <= {"finished", "refused"}


def check_invalid(error, fields, why="INVALID_REQUEST"):
    """Check that an error is INVALID_ARGUMENT and names these fields."""
    assert error.code() is INVALID
    assert reason(error) == why
    assert broken_fields(error) == list(fields)
    size = sum(len(key) + len(value) for key, value in error.trailing_metadata())
    assert size < METADATA_LIMIT


# ---- sampling --------------------------------------------------------------------------------

DOUBLES = {
    "temperature": (-0.1, 100.1),
    "top_p": (0.0, -0.5, 1.01),
    "min_p": (-0.01, 1.01),
    "typical_p": (-0.01, 1.01),
    "repetition_penalty": (0.0, -1.0),
    "presence_penalty": (-2.01, 2.01),
    "frequency_penalty": (-2.01, 2.01),
}
ODD = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, bad in DOUBLES.items() for value in (*bad, *ODD)],
)
def test_a_number_outside_its_range_is_named(channel, field, value):
    error = generate(channel, sampling={field: value}).error
    check_invalid(error, [f"sampling.{field}"])
    assert field in error.details()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"typical_p": 0.0},
        {"typical_p": 1.0},
        {"repetition_penalty": 1e-300},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {0: -100.0, VOCAB - 1: 100.0}},
        {"allowed_token_ids": [VOCAB - 1], "banned_token_ids": [0, 1]},
        {"banned_token_ids": list(range(VOCAB - 1))},
        {"bad_words": ["x" * 256] * 64},
        {"top_k": 0},
        {"top_k": 2**32 - 1},
        {"seed": 2**64 - 1},
        {"min_tokens": 2**32 - 1, "max_tokens": 2**32 - 1},
        {"stop": ["x" * 256] * 16},
        {"stop_token_ids": [VOCAB - 1]},
    ],
    ids=str,
)
def test_the_ends_of_every_range_are_inside(channel, fields):
    heard = generate(channel, sampling={"max_tokens": 2} | fields)
    assert heard.error is None


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "sampling.min_tokens"),
        ({"stop": ["a"] * 17}, "sampling.stop"),
        ({"stop": ["a", "x" * 257]}, "sampling.stop[1]"),
        ({"stop": [""]}, "sampling.stop[0]"),
        ({"stop_token_ids": [1, VOCAB]}, "sampling.stop_token_ids[1]"),
        ({"stop_token_ids": [2**32 - 1]}, "sampling.stop_token_ids[0]"),
        ({"allowed_token_ids": [1, VOCAB]}, "sampling.allowed_token_ids[1]"),
        ({"banned_token_ids": [VOCAB]}, "sampling.banned_token_ids[0]"),
        ({"allowed_token_ids": [1] * (VOCAB + 1)}, "sampling.allowed_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, f"sampling.logit_bias[{VOCAB}]"),
        ({"logit_bias": {7: 100.1}}, "sampling.logit_bias[7]"),
        ({"logit_bias": {7: math.nan}}, "sampling.logit_bias[7]"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "sampling.logit_bias"),
        ({"bad_words": ["a"] * 65}, "sampling.bad_words"),
        ({"bad_words": ["a", ""]}, "sampling.bad_words[1]"),
        ({"bad_words": ["x" * 257]}, "sampling.bad_words[0]"),
        ({"banned_token_ids": list(range(VOCAB))}, "sampling.banned_token_ids"),
        (
            {"allowed_token_ids": [1, 2, 3], "banned_token_ids": [1], "bad_words": ["<7><2>"]}
            | {"stop_token_ids": [3], "min_tokens": 1, "max_tokens": 3},
            "sampling.allowed_token_ids",
        ),
    ],
    ids=str,
)
def test_an_impossible_end_is_named(channel, sampling, field):
    check_invalid(generate(channel, sampling=sampling).error, [field])


def test_every_broken_field_is_listed(channel):
    sampling = {"temperature": -1.0, "top_p": math.nan, "max_tokens": 0, "stop": [""]}
    error = generate(channel, sampling=sampling, n=0, request_id="\n").error
    assert error.code() is INVALID
    assert set(broken_fields(error)) == {
        "n",
        "request_id",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.max_tokens",
        "sampling.stop[0]",
    }


# ---- the request -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 2**32 - 1}, "n"),
        ({"text": ""}, "input"),
        ({"prompt_ids": []}, "token_ids.ids"),
        ({"prompt_ids": [1, VOCAB]}, "token_ids.ids[1]"),
        ({"prompt_ids": [2**32 - 1]}, "token_ids.ids[0]"),
        ({"prompt_ids": [1], "prompt": {"add_special_tokens": False}}, "prompt.add_special_tokens"),
        ({"chat": {}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "user"}, {"content": "x"}]}}, "chat.messages[1].role"),
        ({"prompt": {"truncate_to": 0}}, "prompt.truncate_to"),
        ({"constraint": {}}, "constraint"),
        ({"constraint": {"json_object": False}}, "constraint.json_object"),
        ({"constraint": {"json_schema": ""}}, "constraint.json_schema"),
        ({"constraint": {"regex": ""}}, "constraint.regex"),
        ({"constraint": {"lark": "x" * 65_537}}, "constraint.lark"),
        ({"constraint": {"choice": {}}}, "constraint.choice.choices"),
        ({"output": {"logprobs": 21}}, "output.logprobs"),
        ({"output": {"prompt_logprobs": 2**32 - 1}}, "output.prompt_logprobs"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"request_id": "x" * 100_000}, "request_id"),
        ({"request_id": "line\nbreak"}, "request_id"),
        ({"request_id": "nul\0"}, "request_id"),
        ({"request_id": "\u202edetrever"}, "request_id"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_broken_field_is_named(channel, fields, field):
    check_invalid(generate(channel, **fields).error, [field])


@pytest.mark.parametrize("request_id", ["x" * 128, "ünï-✓", " "])
def test_a_printable_request_id_is_taken_as_it_is(channel, request_id):
    heard = generate(channel, request_id=request_id, max_tokens=1)
    assert heard.started.request_id == request_id


def test_a_missing_input_is_named(channel):
    stub = stubs.InferenceStub(channel)
    error = error_of(lambda: list(stub.Generate(pb.GenerateRequest(), timeout=10)))
    check_invalid(error, ["input"])


@pytest.mark.parametrize("num_tokens", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 262_144])
def test_a_prompt_that_leaves_no_room_is_too_large(channel, num_tokens):
    error = generate(channel, prompt_ids=[1] * num_tokens).error
    check_invalid(error, ["input"], "REQUEST_TOO_LARGE")
    assert str(num_tokens) in error.details()
    assert str(MAX_MODEL_LEN - 1) in error.details()


def test_a_text_that_leaves_no_room_is_too_large_unless_it_is_cut(channel):
    text = "x" * 100_000
    check_invalid(generate(channel, text=text).error, ["input"], "REQUEST_TOO_LARGE")
    assert generate(channel, text=text, prompt={"truncate_to": 5}, max_tokens=1).error is None


def test_more_copies_of_a_prompt_than_there_are_blocks_are_too_large():
    with fake(runner={"max_model_len": 128, "num_blocks": 8}) as server:
        wait_serving(server.channel)
        error = generate(server.channel, prompt_ids=[1] * 100, n=3).error
        check_invalid(error, ["n"], "REQUEST_TOO_LARGE")
        assert generate(server.channel, prompt_ids=[1] * 100, n=2, max_tokens=5).error is None


@pytest.mark.parametrize("name", ["nobody", "FAKE", "fake ", "x" * 10_000, "\0"])
def test_an_unknown_model_is_not_found(channel, name):
    for error in (
        generate(channel, model=name).error,
        error_of(lambda: tokenize(channel, "x", model=name)),
    ):
        assert error.code() is StatusCode.NOT_FOUND
        assert reason(error) == "MODEL_NOT_FOUND"
        assert len(error.details()) < 1000


# ---- bytes -----------------------------------------------------------------------------------

METHODS = [method for service in (INFERENCE, MODELS, CONTROL) for method in service.methods]


def send(channel, path, data, *, streams=False):
    """Return the error of a call whose request has these bytes."""
    make = channel.unary_stream if streams else channel.unary_unary
    call = make(path)
    return error_of(lambda: list(call(data, timeout=10)) if streams else call(data, timeout=10))


def path_of(method):
    """Return the path of an RPC."""
    return f"/{method.containing_service.full_name}/{method.name}"


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff", b"\x0a\x05ab", b"\x0a", bytes(range(256)), b"\x0b" * 10_000],
    ids=["garbage", "cut short", "no length", "all bytes", "nested groups"],
)
@pytest.mark.parametrize("method", METHODS, ids=path_of)
def test_malformed_bytes_are_an_invalid_argument(channel, method, data):
    error = send(channel, path_of(method), data, streams=method.server_streaming)
    assert error.code() is INVALID
    assert reason(error) == "INVALID_REQUEST"
    assert method.input_type.full_name in error.details()


def test_a_text_that_is_not_utf_8_is_an_invalid_argument(channel):
    for name in ("Generate", "Tokenize"):  # field 2 of both requests is the text
        path = f"/triolet.v1.Inference/{name}"
        error = send(channel, path, b"\x12\x03a\xff\xfe", streams=name == "Generate")
        assert error.code() is INVALID
        assert reason(error) == "INVALID_REQUEST"


def nested(depth):
    """Return a GenerateRequest whose chat's template_args has lists in lists, ``depth`` deep."""

    def field(number, data):
        size, encoded = len(data), b""
        while size > 127:
            encoded, size = encoded + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + encoded + bytes([size]) + data

    value = b""
    for _ in range(depth):
        value = field(6, field(1, value))  # Value.list_value, ListValue.values
    args = field(1, field(1, b"name") + field(2, value))  # Struct.fields
    chat = field(1, field(1, b"user") + field(2, b"hi")) + field(3, args)
    return field(4, chat) + field(5, b"\x48\x01")  # max_tokens 1


def test_values_that_are_nested_beyond_protobufs_limit_are_an_invalid_argument(channel):
    call = channel.unary_stream("/triolet.v1.Inference/Generate")
    assert len(list(call(nested(20), timeout=10))) == 3
    for depth in (100, 10_000):
        error = send(channel, "/triolet.v1.Inference/Generate", nested(depth), streams=True)
        assert error.code() is INVALID


def test_a_request_of_5_mib_is_refused_and_the_connection_goes_on(channel):
    for error in (
        generate(channel, text="x" * 5 * 2**20).error,
        error_of(lambda: tokenize(channel, "x" * 5 * 2**20)),
    ):
        assert (error.code(), reason(error)) == (
            StatusCode.RESOURCE_EXHAUSTED,
            "REQUEST_TOO_LARGE",
        )
        assert "4194304" in error.details()


def test_a_request_of_any_size_beyond_the_limit_is_refused(channel):
    error = generate(channel, text="x" * 9 * 2**20).error
    assert error.code() is StatusCode.RESOURCE_EXHAUSTED
    assert reason(error) == "REQUEST_TOO_LARGE"


def test_a_request_just_below_4_mib_is_served(channel):
    check_invalid(generate(channel, request_id="x" * (4 * 2**20 - 64)).error, ["request_id"])


def test_unknown_fields_of_a_newer_client_are_ignored(channel):
    request = generate_request(prompt_ids=[1], max_tokens=1).SerializeToString()
    newer = request + b"\xf8\x3f\x01"  # field 1023, varint 1
    call = channel.unary_stream("/triolet.v1.Inference/Generate")
    assert len(list(call(newer, timeout=10))) == 3


@pytest.mark.parametrize(
    "path", ["/triolet.v1.Inference/Nothing", "/triolet.v1.Nothing/Generate", "/x", "/"]
)
def test_an_unknown_method_is_unimplemented(channel, path):
    assert send(channel, path, b"").code() is StatusCode.UNIMPLEMENTED


# ---- the other calls -------------------------------------------------------------------------


def inference(channel, name, request):
    """Return the error of a call of the service Inference."""
    stub = stubs.InferenceStub(channel)
    return error_of(lambda: getattr(stub, name)(request, timeout=10))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "input"),
        ({"chat": {}}, "chat.messages"),
        ({"chat": {"messages": [{"content": "x"}]}}, "chat.messages[0].role"),
    ],
    ids=str,
)
def test_a_broken_tokenize_is_named(channel, fields, field):
    error = inference(channel, "Tokenize", pb.TokenizeRequest(**fields))
    check_invalid(error, [field])


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        ({"tools": [{"name": "t"}, {"description": "x"}]}, "chat.tools[1].name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"arguments_json": "{}"}]}]},
            "chat.messages[0].tool_calls[0].name",
        ),
        (
            {"messages": [{"role": "a", "tool_calls": [{"name": "f", "arguments_json": "[]"}]}]},
            "chat.messages[0].tool_calls[0].arguments_json",
        ),
        ({"messages": [{"role": "user", "content": "x"}] * 400}, "input"),
    ],
)
def test_a_broken_chat_is_named_by_both_calls_and_the_next_is_served(channel, chat, field):
    whole = {"messages": [{"role": "user", "content": "x"}]}
    error = generate(channel, chat=whole | chat).error
    check_invalid(error, [field], "REQUEST_TOO_LARGE" if field == "input" else "INVALID_REQUEST")
    if field != "input":  # counting tokens has no context limit
        request = pb.TokenizeRequest(chat=whole | chat)
        check_invalid(inference(channel, "Tokenize", request), [field], "INVALID_REQUEST")
    assert generate(channel, chat=whole, max_tokens=1).error is None


def test_more_ids_than_a_request_may_have_are_named(channel):
    request = pb.DetokenizeRequest(ids=[VOCAB - 1] * 900_000)
    check_invalid(inference(channel, "Detokenize", request), ["ids"])


@pytest.mark.parametrize("place", [0, 1, 999])
def test_detokenize_names_the_id_outside_the_vocabulary(channel, place):
    ids = [1] * 1000
    ids[place] = VOCAB
    error = inference(channel, "Detokenize", pb.DetokenizeRequest(ids=ids))
    check_invalid(error, [f"ids[{place}]"])


def test_detokenize_of_no_ids_is_empty_and_of_many_is_joined(channel):
    stub = stubs.InferenceStub(channel)
    assert not stub.Detokenize(pb.DetokenizeRequest(), timeout=10).text
    ids = [VOCAB - 1, 0, 1]
    request = pb.DetokenizeRequest(ids=ids, skip_special_tokens=False)
    assert stub.Detokenize(request, timeout=10).text == "<999><0><1>"
    request.skip_special_tokens = True
    assert stub.Detokenize(request, timeout=10).text == "<999><1>"


def test_get_model_of_no_name_is_named_and_of_an_unknown_one_not_found(channel):
    call = channel.unary_unary(
        "/triolet.v1.Models/GetModel",
        request_serializer=pb.GetModelRequest.SerializeToString,
    )
    check_invalid(error_of(lambda: call(pb.GetModelRequest(), timeout=10)), ["model"])
    error = error_of(lambda: call(pb.GetModelRequest(model="nobody"), timeout=10))
    assert (error.code(), reason(error)) == (StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


@pytest.mark.parametrize(
    ("method", "fields", "field"),
    [
        ("Pause", {}, "mode"),
        ("Pause", {"mode": 99}, "mode"),
        ("Abort", {}, "request_ids"),
        ("Abort", {"request_ids": ["x"] * 10_001}, "request_ids"),
        ("Abort", {"request_ids": ["x", ""]}, "request_ids[1]"),
        ("Abort", {"request_ids": ["x" * 129]}, "request_ids[0]"),
        ("Drain", {"timeout": {"seconds": -1}}, "timeout"),
        ("Drain", {"timeout": {"nanos": -1}}, "timeout"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_broken_operation_is_named_and_does_nothing(channel, method, fields, field):
    stub = stubs.ControlStub(channel)
    request = getattr(pb, f"{method}Request")(**fields)
    check_invalid(error_of(lambda: getattr(stub, method)(request, timeout=10)), [field])
    assert health(channel) == SERVING


def test_a_client_that_speaks_no_grpc_at_all_disturbs_nobody(channel, server):
    """Bytes of other protocols on the port, and connections that send nothing."""
    host, port = server.address.rsplit(":", 1)
    for data in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 100, b"\x16\x03\x01\x02\x00"):
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(data)
    assert generate(channel, max_tokens=1).error is None
