"""OpenAI's API by raw HTTP: what an answer has, what is refused and how, and who may call."""

import base64
import contextlib
import json
import re
import ssl
import struct
import subprocess
import sys

import pytest
import trustme

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.openai_calls import (
    CHAT,
    DRAW,
    EMBED,
    RERANK,
    TEXT,
    Connection,
    ask,
    ids_of,
    request,
)
from tests.support.server import fake, openai_port_of, real
from tests.support.tool_model import TOOL, make_tool_model
from tests.support.wire import generate, stats, wait_idle, wait_serving, wait_until

TURNS = [{"role": "user", "content": "Tell me a story."}]
SEEDED = {"model": "stories", "seed": 7, "max_tokens": 8}
NAMED = {"type": "function", "function": {"name": "look_up"}}
KEY = "a-key-that-is-long-enough"
BODY = {"model": "fake", "prompt": [1, 2], "max_tokens": 2}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Serve the three small models of this repository; the story model takes tools."""
    models = [make_tool_model(tmp_path_factory.mktemp("model")), "demo-embed", "demo-rerank"]
    flags = [arg for model in models[1:] for arg in ("--model", model)]
    flags += ["--served-model-name", "stories", "--openai-port", "0"]
    with real(*flags, model=models[0]) as one:
        one.openai_port = openai_port_of(one)
        wait_until(lambda: num_ready(one) == len(models), 120, "models")
        yield one


def num_ready(server):
    """Return how many models are ready."""
    models = ask(server.openai_port, "/v1/models", verb="GET").json["data"]
    return sum(model["state"] == "ready" for model in models)


@pytest.fixture(scope="module")
def faked():
    """Serve fakes of every kind."""
    models = [
        {"name": "fake"},
        {"name": "seeing", "capability": "vision"},
        {"name": "embedder", "capability": "text-embedding"},
        {"name": "ranker", "capability": "rerank"},
        {"name": "painter", "capability": "text-to-image"},
    ]
    limits = {"openai_port": 0, "max_message_bytes": 100_000, "max_image_bytes": 50_000}
    with fake(models=models, server=limits) as server:
        wait_serving(server.channel)
        yield server


# ---- answers


@pytest.mark.model
def test_the_command_line_shows_the_call_that_a_model_must_make(demo, tmp_path):
    """The tool's result is the next line; the answer to it is a story."""
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    flags = ["--tools", str(tmp_path / "tools.json"), "--tool-choice", "look_up"]
    flags += ["--max-tokens", "90", "--seed", "7", "--server", demo.address]
    argv = [sys.executable, "-m", "grpc_service", "chat", *flags]
    said = f"{TURNS[0]['content']}\na boat\n"
    done = subprocess.run(argv, input=said, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    call, _, story = done.stdout.partition("\n")
    name, arguments = re.fullmatch(r"(\w+)\((.*)\)", call).groups()
    assert name == "look_up"
    assert json.loads(arguments).keys() == {"word"}
    assert len(story) > 20


@pytest.mark.model
def test_a_demanded_call_comes_in_openais_form_whole_and_streamed(demo):
    body = {**SEEDED, "messages": TURNS, "tools": [TOOL], "tool_choice": NAMED, "max_tokens": 90}
    whole = ask(demo.openai_port, CHAT, body).json["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    [call] = whole["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"]
    assert call["function"]["name"] == "look_up"
    assert set(json.loads(call["function"]["arguments"])) == {"word"}
    events = ask(demo.openai_port, CHAT, body | {"stream": True}).events
    parts = [
        part for event in events[:-1] for part in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert parts[0]["function"]["name"] == "look_up"
    assert {part["index"] for part in parts} == {0}
    assert len(parts) > 2  # the arguments come as they are generated
    joined = "".join([part["function"].get("arguments", "") for part in parts])
    assert joined == call["function"]["arguments"]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    at_once = body | {"stream": True, "tool_argument_deltas": False}
    deltas = [
        one["choices"][0]["delta"] for one in ask(demo.openai_port, CHAT, at_once).events[:-1]
    ]
    [part] = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert part["function"]["arguments"] == joined


@pytest.mark.model
def test_a_call_is_that_of_triolet_v1_and_its_answer_goes_on_in_a_second_turn(demo):
    body = {**SEEDED, "messages": TURNS, "tools": [TOOL], "tool_choice": NAMED, "max_tokens": 90}
    message = ask(demo.openai_port, CHAT, body).json["choices"][0]["message"]
    function = TOOL["function"]
    chat = pb.Chat(tool_choice="look_up")
    chat.messages.add(role="user", content=TURNS[0]["content"])
    tool = chat.tools.add(name=function["name"], description=function["description"])
    tool.parameters.update(function["parameters"])
    heard = generate(demo.channel, chat=chat, model="stories", seed=7, max_tokens=90)
    calls = [call for delta in heard.deltas for call in delta.tool_calls]
    assert (
        "".join(call.arguments_json for call in calls)
        == (message["tool_calls"][0]["function"]["arguments"])
    )
    output = {"tool_argument_deltas": True}
    grown = generate(demo.channel, chat=chat, model="stories", seed=7, max_tokens=90, output=output)
    parts = [call for delta in grown.deltas for call in delta.tool_calls]
    assert [bool(part.name) for part in parts] == [True] + [False] * (len(parts) - 1)
    assert len(parts) > 2
    assert "".join(part.arguments_json for part in parts) == calls[0].arguments_json
    found = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a boat"}
    second = {**SEEDED, "messages": [*TURNS, message, found], "tools": [TOOL]}
    answer = ask(demo.openai_port, CHAT, second)
    assert answer.status == 200, answer.body
    chat.tool_choice = ""
    turn = chat.messages.add(role="assistant")
    call = message["tool_calls"][0]
    turn.tool_calls.add(
        id=call["id"],
        name="look_up",
        arguments_json=call["function"]["arguments"],
    )
    chat.messages.add(role="tool", tool_call_id=call["id"], content="a boat")
    wanted = generate(demo.channel, chat=chat, model="stories", seed=7, max_tokens=8)
    assert answer.json["choices"][0]["message"]["content"] == wanted.text()


@pytest.mark.model
def test_log_probabilities_are_those_of_triolet_v1(demo):
    body = {**SEEDED, "messages": TURNS, "logprobs": True, "top_logprobs": 2}
    entries = ask(demo.openai_port, CHAT, body).json["choices"][0]["logprobs"]["content"]
    wanted = generate(
        demo.channel,
        model="stories",
        chat={"messages": TURNS},
        seed=7,
        max_tokens=8,
        output={"logprobs": 2},
    )
    ours = [entry for delta in wanted.deltas for entry in delta.logprobs]
    assert [entry["token"] for entry in entries] == [entry.text for entry in ours]
    assert [entry["logprob"] for entry in entries] == [entry.logprob for entry in ours]
    for entry, our in zip(entries, ours, strict=True):
        assert [one["logprob"] for one in entry["top_logprobs"]] == [
            one.logprob for one in our.alternatives
        ]
        assert bytes(entry["bytes"]).decode() == entry["token"]


@pytest.mark.model
def test_an_echo_with_log_probabilities_scores_the_prompt(demo):
    body = {**SEEDED, "prompt": "Once upon a time", "echo": True, "logprobs": 1, "max_tokens": 2}
    whole = ask(demo.openai_port, TEXT, body).json["choices"][0]
    scores = whole["logprobs"]
    assert whole["text"].startswith("Once upon a time")
    assert scores["token_logprobs"][0] is None
    special, *tokens = scores["tokens"]
    assert special == "<|bos|>"  # which the text leaves out
    assert "".join(tokens) == whole["text"]
    starts = [len("".join(tokens[:index])) for index in range(len(tokens))]
    assert scores["text_offset"] == [0, *starts]
    events = ask(demo.openai_port, TEXT, body | {"stream": True}).events[:-1]
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [token for one in streamed if one for token in one["tokens"]] == scores["tokens"]


@pytest.mark.model
@pytest.mark.parametrize("prompt", ["Once upon a time", [40, 50, 60, 70]], ids=["text", "ids"])
def test_an_echo_of_no_tokens_is_the_prompt_with_triolet_v1s_log_probabilities(demo, prompt):
    given = {"text": prompt} if isinstance(prompt, str) else {"prompt_ids": prompt}
    output = {"prompt_logprobs": 2, "echo": True}
    heard = generate(demo.channel, model="stories", max_tokens=1, output=output, **given)
    wanted = heard.started.prompt_logprobs
    body = {**SEEDED, "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0, "n": 2}
    body |= {"return_token_ids": True, "ignore_eos": True, "stop": ["e"], "logit_bias": {"0": -100}}
    answer = ask(demo.openai_port, TEXT, body).json
    assert answer["usage"]["prompt_tokens"] == heard.started.prompt_tokens
    assert answer["usage"]["completion_tokens"] == 0
    for choice in answer["choices"]:
        assert heard.text().startswith(choice["text"])
        assert choice["text"] == "".join([one.text for one in wanted if one.text != "<|bos|>"])
        assert (choice["finish_reason"], choice["token_ids"]) == ("length", [])
        scores = choice["logprobs"]
        assert scores["tokens"] == [one.text for one in wanted]
        found = [logprob for logprob in scores["token_logprobs"] if logprob is not None]
        assert found == [pytest.approx(one.logprob, abs=1e-6) for one in wanted[1:]]
        assert list(map(set, scores["top_logprobs"][1:])) == [
            {other.text for other in one.alternatives} for one in wanted[1:]
        ]
    streamed = ask(demo.openai_port, TEXT, body | {"stream": True, "n": 1}).events[:-1]
    choices = [event["choices"][0] for event in streamed]
    assert "".join([one["text"] for one in choices]) == answer["choices"][0]["text"]
    assert choices[0]["logprobs"] == answer["choices"][0]["logprobs"]
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.model
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"prompt": "Once", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "Once", "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        (CHAT, {"messages": TURNS, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_no_tokens_are_refused_where_there_is_no_echo(demo, path, fields, param):
    answer = ask(demo.openai_port, path, {"model": "stories", **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.model
def test_several_prompts_and_choices_are_numbered_through(demo):
    prompts = ["Once upon a time", "The dog"]
    body = {**SEEDED, "prompt": prompts, "n": 2, "return_token_ids": True}
    alone = [ask(demo.openai_port, TEXT, body | {"prompt": prompt}).json for prompt in prompts]
    for stream in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        answer = ask(demo.openai_port, TEXT, body | stream)
        wanted = [choice["token_ids"] for one in alone for choice in one["choices"]]
        assert [ids_of(answer, index) for index in range(4)] == wanted
        usage = answer.events[-2]["usage"] if stream else answer.json["usage"]
        assert usage["total_tokens"] == sum(one["usage"]["total_tokens"] for one in alone)


@pytest.mark.model
def test_vectors_of_a_list_are_those_of_triolet_v1_bit_for_bit(demo):
    texts = ["The dog sleeps by the fire.", "A ship left at dawn.", ""]
    body = {"model": "demo-embed", "input": texts}
    floats = ask(demo.openai_port, EMBED, body).json
    packed = ask(demo.openai_port, EMBED, body | {"encoding_format": "base64"}).json
    asked = pb.EmbedRequest(model="demo-embed", inputs=[{"text": text} for text in texts])
    ours = {one.index: one for one in stubs.InferenceStub(demo.channel).Embed(asked)}
    for index, (one, other) in enumerate(zip(floats["data"], packed["data"], strict=True)):
        wanted = struct.pack(f"<{len(ours[index].values)}f", *ours[index].values)
        assert struct.pack(f"<{len(one['embedding'])}f", *one["embedding"]) == wanted
        assert base64.b64decode(other["embedding"]) == wanted
    assert floats["usage"]["prompt_tokens"] == sum(one.tokens for one in ours.values())


@pytest.mark.model
@pytest.mark.parametrize("fields", [{"dimensions": 8}, {"normalize": False}])
def test_options_of_vectors_are_those_of_triolet_v1(demo, fields):
    answer = ask(demo.openai_port, EMBED, {"model": "demo-embed", "input": "a dog", **fields})
    asked = pb.EmbedRequest(model="demo-embed", inputs=[{"text": "a dog"}], **fields)
    [ours] = stubs.InferenceStub(demo.channel).Embed(asked)
    assert answer.json["data"][0]["embedding"] == list(ours.values)


@pytest.mark.model
@pytest.mark.parametrize("precision", ["float", "float16", "int8", "uint8", "binary", "ubinary"])
def test_precisions_of_vectors_are_those_of_triolet_v1(demo, precision):
    body = {"model": "demo-embed", "input": "a dog", "dimensions": 8, "output_dtype": precision}
    ranges = {"ranges": {"low": [-0.5] * 8, "high": [0.5] * 8}} if "int8" in precision else {}
    floats = ask(demo.openai_port, EMBED, body | ranges).json["data"][0]["embedding"]
    base64_body = body | ranges | {"encoding_format": "base64"}
    packed = ask(demo.openai_port, EMBED, base64_body).json["data"][0]["embedding"]
    name = precision.upper() if precision != "float" else "FLOAT32"
    asked = pb.EmbedRequest(
        model="demo-embed",
        inputs=[{"text": "a dog"}],
        dimensions=8,
        precision=f"PRECISION_{name}",
        **ranges,
    )
    [ours] = stubs.InferenceStub(demo.channel).Embed(asked)
    wanted = ours.packed or struct.pack("<8f", *ours.values)
    form = {"float": "f", "float16": "e", "int8": "b", "binary": "b"}.get(precision, "B")
    assert base64.b64decode(packed) == wanted == struct.pack(f"<{len(floats)}{form}", *floats)


@pytest.mark.model
@pytest.mark.parametrize("path", [RERANK, "/v2/rerank", "/rerank"])
def test_a_ranking_is_that_of_triolet_v1(demo, path):
    documents = ["The ship left.", "A hound naps near the hearth.", "Bread is baked."]
    body = {"model": "demo-rerank", "query": "Where is the dog?", "documents": documents}
    answer = ask(demo.openai_port, path, body | {"return_documents": True, "top_n": 2}).json
    asked = pb.RerankRequest(**body)
    ours = {one.index: one.score for one in stubs.InferenceStub(demo.channel).Rerank(asked)}
    best = sorted(ours, key=lambda index: -ours[index])[:2]
    assert [one["index"] for one in answer["results"]] == best
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(ours[one["index"]], rel=1e-6)
        assert one["document"] == {"text": documents[one["index"]]}


def test_a_drawing_comes_in_base64(faked):
    body = {"model": "painter", "prompt": "a red circle", "n": 2, "size": "16x8", "seed": 3}
    answer = ask(faked.openai_port, DRAW, body)
    assert answer.status == 200, answer.body
    files = [base64.b64decode(one["b64_json"]) for one in answer.json["data"]]
    assert len(files) == 2
    assert all(file.startswith(b"\x89PNG") for file in files)
    assert answer.json["size"] == "16x8"
    asked = pb.GenerateImageRequest(
        model="painter", prompt="a red circle", n=2, width=16, height=8, seed=3
    )
    parts = [
        one.part.data
        for one in stubs.InferenceStub(faked.channel).GenerateImage(asked)
        if one.HasField("part")
    ]
    assert files == parts


def test_an_image_of_a_chat_goes_as_a_data_url(faked):
    drawn = ask(faked.openai_port, DRAW, {"model": "painter", "prompt": "x", "size": "16x16"})
    data = drawn.json["data"][0]["b64_json"]
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ]
    body = {
        "model": "seeing",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 3,
        "return_token_ids": True,
    }
    answer = ask(faked.openai_port, CHAT, body)
    assert answer.status == 200, answer.body
    chat = pb.Chat()
    turn = chat.messages.add(role="user")
    turn.parts.add(text="What is it?")
    turn.parts.add(image=base64.b64decode(data))
    ours = generate(
        faked.channel, model="seeing", chat=chat, max_tokens=3, output={"token_ids": True}
    )
    assert ids_of(answer) == ours.ids()


# ---- what is refused

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def with_part(part):
    """Return the body of a chat whose message has a part."""
    return {"model": "seeing", "messages": [{"role": "user", "content": [part]}]}


WRONG = {
    "a field that is none": (TEXT, BODY | {"colour": "red"}, "colour"),
    "a field inside": (
        CHAT,
        {"messages": [{"role": "user", "content": "a", "mood": "glad"}]},
        "messages[0].mood",
    ),
    "a text for a number": (TEXT, BODY | {"temperature": "hot"}, "temperature"),
    "a switch for a number": (TEXT, BODY | {"temperature": True}, "temperature"),
    "a number that is too large": (TEXT, BODY | {"temperature": 10**400}, "temperature"),
    "a number outside": (TEXT, BODY | {"top_p": 2}, "top_p"),
    "a huge seed": (TEXT, BODY | {"seed": 2**64}, "seed"),
    "a fraction": (TEXT, BODY | {"max_tokens": 1.5}, "max_tokens"),
    "two limits": (TEXT, BODY | {"max_completion_tokens": 3}, "max_tokens"),
    "no messages": (CHAT, {"model": "fake"}, "messages"),
    "no prompt": (TEXT, {"model": "fake"}, "prompt"),
    "prompts of two kinds": (TEXT, BODY | {"prompt": ["a", 3]}, "prompt[1]"),
    "a token id below 0": (TEXT, BODY | {"prompt": [1, -1]}, "prompt[1]"),
    "too many prompts": (TEXT, BODY | {"prompt": ["a"] * 65}, "prompt"),
    "too many choices": (TEXT, BODY | {"n": 99}, "n"),
    "a bias of no token": (TEXT, BODY | {"logit_bias": {"a": 1}}, "logit_bias"),
    "two forms": (
        TEXT,
        BODY | {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    "options without a stream": (TEXT, BODY | {"stream_options": {}}, "stream_options"),
    "alternatives alone": (CHAT, {"messages": TURNS, "top_logprobs": 2}, "top_logprobs"),
    "an address of an image": (
        CHAT,
        with_part({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}),
        "messages[0].content[0].image_url.url",
    ),
    "no base64": (
        CHAT,
        with_part({"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}}),
        "messages[0].content[0].image_url.url",
    ),
    "no image": (CHAT, with_part(IMAGE), "messages[0].content[0].image_url.url"),
    "sound": (CHAT, with_part({"type": "input_audio"}), "messages[0].content[0].type"),
    "a choice that is none": (CHAT, {"messages": TURNS, "tool_choice": "any"}, "tool_choice"),
    "two answers": (TEXT, BODY | {"best_of": 2}, "best_of"),
    "a vector's form": (EMBED, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    "a vector's precision": (EMBED, {"input": "a", "output_dtype": "int4"}, "output_dtype"),
    "ranges without their use": (
        EMBED,
        {"input": "a", "ranges": {"low": [], "high": []}},
        "ranges",
    ),
    "no number in a range": (EMBED, {"input": "a", "ranges": {"low": ["1"]}}, "ranges.low[0]"),
    "ranges reversed": (
        EMBED,
        {"input": "a", "output_dtype": "int8", "ranges": {"low": [1], "high": [0]}},
        "ranges.high[0]",
    ),
    "no documents": (RERANK, {"query": "a"}, "documents"),
    "a size": (DRAW, {"prompt": "a", "size": "large"}, "size"),
    "an address of a drawing": (DRAW, {"prompt": "a", "response_format": "url"}, "response_format"),
    "a side": (DRAW, {"prompt": "a", "size": "17x16"}, "size"),
}


@pytest.mark.parametrize(("path", "body", "field"), WRONG.values(), ids=WRONG)
def test_a_wrong_field_is_refused_by_its_name_and_the_next_request_works(faked, path, body, field):
    with Connection(faked.openai_port) as client:
        answer = client.ask(path, body)
        assert answer.status == 400, answer.body
        assert answer.error["param"] == field
        assert field in answer.error["message"]
        assert answer.error["type"] == "invalid_request_error"
        assert answer.headers["x-request-id"]
        assert client.ask(TEXT, BODY).status == 200


HUGE = 2**31
SENT_AS = {
    "a token": (TEXT, {"prompt": [1, HUGE]}, "prompt[1]"),
    "a token of a prompt": (TEXT, {"prompt": [[1], [1, 2, HUGE]]}, "prompt[1][2]"),
    "the one prompt of a list": (TEXT, {"prompt": [[HUGE]]}, "prompt[0][0]"),
    "an empty prompt": (TEXT, {"prompt": [[1], []]}, "prompt[1]"),
    "a token of an input": (EMBED, {"input": [[1], [2, HUGE]]}, "input[1][1]"),
    "a token of the input": (EMBED, {"input": [1, HUGE]}, "input[1]"),
    "an empty input": (EMBED, {"input": [[1], []]}, "input[1]"),
    "a long chat": (CHAT, {"messages": [{"role": "user", "content": "a" * 20_000}]}, "messages"),
    "a long prompt": (TEXT, {"prompt": [1] * 20_000}, "prompt"),
    "a long echo": (TEXT, {"prompt": [1] * 20_000, "echo": True, "logprobs": 1}, "prompt"),
    "the second prompt": (TEXT, {"prompt": [[1], [1] * 20_000]}, "prompt[1]"),
    "the limit": (TEXT, {"prompt": [1], "max_tokens": 0}, "max_tokens"),
    "the new limit": (
        CHAT,
        {"messages": TURNS, "max_completion_tokens": 0},
        "max_completion_tokens",
    ),
    "a call": (
        CHAT,
        {"model": "fake", "messages": TURNS, "tools": [TOOL], "tool_choice": "required"},
        "tool_choice",
    ),
    "a schema": (TEXT, {"prompt": [1], "guided_json": ""}, "guided_json"),
    "a pattern": (TEXT, {"prompt": [1], "guided_regex": ""}, "guided_regex"),
    "a grammar": (TEXT, {"prompt": [1], "guided_grammar": ""}, "guided_grammar"),
    "a pattern inside": (
        TEXT,
        {"prompt": [1], "structured_outputs": {"regex": ""}},
        "structured_outputs.regex",
    ),
    "a schema of OpenAI's": (
        CHAT,
        {
            "messages": TURNS,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ""}},
        },
        "response_format.json_schema.schema",
    ),
}


@pytest.mark.parametrize(("path", "body", "field"), SENT_AS.values(), ids=SENT_AS)
def test_what_the_engine_refuses_is_called_as_it_was_sent(faked, path, body, field):
    answer = ask(faked.openai_port, path, body)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == field, answer.body
    assert field in answer.error["message"]


# Names of triolet.v1, and fields inside tools, that no route of OpenAI's API has.
UNKNOWN = {
    CHAT: (
        "input",
        "chat",
        "sampling",
        "text",
        "width",
        "inputs",
        "tools[0].type",
        "tools[0].name",
    ),
    TEXT: ("input", "chat", "sampling", "text", "width", "inputs"),
    EMBED: ("inputs", "text", "prompt"),
    RERANK: ("input", "inputs", "text"),
    DRAW: ("width", "height", "steps", "guidance", "format", "input"),
}


@pytest.mark.parametrize(("path", "names"), UNKNOWN.items(), ids=UNKNOWN)
def test_a_field_of_the_other_door_is_called_as_it_was_sent(faked, path, names):
    begun = {
        **{CHAT: {"messages": TURNS}, TEXT: {"prompt": "a"}, EMBED: {"input": "a"}},
        **{RERANK: {"query": "a", "documents": ["a"]}, DRAW: {"prompt": "a"}},
    }
    with Connection(faked.openai_port) as client:
        for name in names:
            fields = {name: 1}
            if name.startswith("tools"):
                fields = {"tools": [TOOL | {name.removeprefix("tools[0]."): 1}]}
            answer = client.ask(path, begun[path] | fields)
            assert answer.status == 400, answer.body
            assert answer.error["param"] == name


GARBAGE = {
    "no JSON": b"hello",
    "nothing": b"",
    "half": b'{"prompt": ',
    "a list": b"[]",
    "no UTF-8": b'{"prompt": "\xff"}',
    "half a pair": rb'{"prompt": "\ud800"}',
    "no number": b'{"temperature": NaN}',
    "a name twice": b'{"prompt": "a", "prompt": "b"}',
    "deep": b"[" * 50_000,
    "deep objects": b'{"a":' * 9000 + b"1" + b"}" * 9000,
    "deep enough to parse": b'{"tools": ' + b"[" * 60 + b"]" * 60 + b"}",
    "a long number": b'{"seed": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused_and_the_next_request_works(faked, body):
    with Connection(faked.openai_port) as client:
        answer = client.ask(CHAT, body)
        assert answer.status == 400, answer.body
        assert answer.error["code"] == "invalid_request"
        assert client.ask(TEXT, BODY).status == 200


def test_a_body_of_many_values_is_refused_before_it_is_parsed():
    with fake(server={"openai_port": 0}) as server:
        wait_serving(server.channel)
        body = b'{"prompt": [' + b"0," * 400_000 + b"0]}"
        answer = ask(server.openai_port, TEXT, body)
        assert answer.status == 400
        assert "values" in answer.error["message"]
        text = json.dumps(BODY | {"prompt": "a, [b], {c}: " * 40_000})
        assert "values" not in ask(server.openai_port, TEXT, text.encode()).error["message"]


def test_bodies_and_images_have_their_limits(faked):
    port = faked.openai_port
    large = ask(port, TEXT, BODY | {"prompt": "a" * 100_001})
    assert large.status == 413
    assert large.error["code"] == "request_too_large"
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    chunked += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with Connection(port) as client:
        client.send(chunked + b"".join(b"8000\r\n" + b" " * 0x8000 + b"\r\n" for _ in range(4)))
        assert client.read().status == 413
    data = base64.b64encode(bytes(60_000)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    refused = ask(port, CHAT, with_part(image))
    assert refused.status == 400
    assert "--max-image-bytes" in refused.error["message"]
    text = with_part({"type": "text", "text": "a" * 120_000})
    assert ask(port, CHAT, text).status == 413
    assert ask(port, TEXT, BODY).status == 200


@pytest.mark.parametrize(
    ("path", "verb", "headers", "status"),
    [
        ("/v1/none", "GET", {}, 404),
        ("/v1/responses", "POST", {}, 404),
        ("/v1/models/none", "GET", {}, 404),
        (CHAT, "GET", {}, 405),
        ("/v1/models", "POST", {}, 405),
        (TEXT, "POST", {"Content-Type": "text/plain"}, 415),
        (TEXT, "POST", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (TEXT, "POST", {"Content-Encoding": "gzip"}, 415),
    ],
)
def test_what_is_no_request_has_openais_form_of_error(faked, path, verb, headers, status):
    body = BODY if verb == "POST" else None
    answer = ask(faked.openai_port, path, body, verb=verb, headers=headers)
    assert answer.status == status
    assert answer.error["message"]
    if path == "/v1/responses":
        assert CHAT in answer.error["message"]


def test_models_have_their_names_and_states(faked):
    models = ask(faked.openai_port, "/v1/models", verb="GET").json["data"]
    assert [model["id"] for model in models] == [
        *("fake", "seeing", "embedder", "ranker", "painter")
    ]
    one = ask(faked.openai_port, "/v1/models/fake", verb="GET").json
    assert (one["object"], one["owned_by"]) == ("model", "triolet")


def test_the_log_and_the_metrics_count_requests_by_path(faked):
    name = "counted-here"
    answer = ask(faked.openai_port, TEXT, BODY, headers={"X-Request-Id": name})
    assert answer.headers["x-request-id"] == name
    assert answer.json["id"] == f"cmpl-{name}"
    for verb in ("GET", "POST", "OPTIONS", "PUT"):
        for headers in ({}, {"Origin": "http://elsewhere"}, {"Host": "elsewhere"}):
            ask(faked.openai_port, "/v1/../secret?a=b", verb=verb, headers=headers)
    wait_idle(faked.channel)
    lines = [line for line in faked.log.splitlines() if name in line]
    assert any("/v1/completions OK" in line and "prompt_tokens=2" in line for line in lines)
    assert "secret" not in faked.log
    text = ask(faked.openai_port, "/metrics", verb="GET").body.decode()
    assert re.search(r'triolet:rpcs_total\{code="OK",method="/v1/completions"\} \d', text)
    assert "triolet:kv_cache_usage_perc" in text
    assert "secret" not in text


def test_a_request_is_known_to_control_by_its_id():
    with fake(script={"step_s": 0.05}, server={"openai_port": 0}) as server:
        wait_serving(server.channel)
        with Connection(server.openai_port) as client:
            body = BODY | {"max_tokens": 500, "stream": True}
            client.send(request(TEXT, body, headers={"X-Request-Id": "mine"}))
            client.read_head()
            control = stubs.ControlStub(server.channel)
            assert control.Explain(pb.ExplainRequest(request_id="mine")).state
            again = ask(server.openai_port, TEXT, BODY, headers={"X-Request-Id": "mine"})
            assert again.status == 409
            control.Abort(pb.AbortRequest(request_ids=["mine"]))
            while part := client.read_chunk():
                last = part
            assert part == b""
            assert b'"code":"aborted"' in last


# ---- who may call


@pytest.fixture
def guarded(tmp_path):
    """Serve with a file of keys, one of them with a limit."""
    keys = tmp_path / "keys"
    keys.write_text(f"ours {KEY} max_requests=1\n")
    with fake(
        script={"step_s": 0.05}, server={"openai_port": 0, "api_key_file": str(keys)}
    ) as server:
        yield server


def test_keys_are_those_of_grpc(guarded):
    port, bearer = guarded.openai_port, {"Authorization": f"Bearer {KEY}"}
    missing = ask(port, TEXT, BODY)
    assert (missing.status, missing.error["type"]) == (401, "authentication_error")
    assert missing.headers["www-authenticate"] == "Bearer"
    assert ask(port, TEXT, b"garbage").status == 401  # nothing is parsed
    assert ask(port, TEXT, BODY, headers={"Authorization": "Bearer wrong"}).status == 401
    assert ask(port, "/v1/models", verb="GET").status == 401
    assert ask(port, "/metrics", verb="GET").status == 401
    assert ask(port, "/health", verb="GET").status in (200, 503)
    assert ask(port, TEXT, BODY, headers=bearer).status == 200
    with Connection(port) as client:
        client.send(request(TEXT, BODY | {"max_tokens": 400, "stream": True}, headers=bearer))
        client.read_head()
        over = ask(port, TEXT, BODY, headers=bearer)
        assert over.status == 429
        assert int(over.headers["retry-after"]) >= 1
    twice = request(TEXT, BODY, headers=bearer)
    wrong = twice.replace(b"Authorization", b"Authorization: Bearer wrong\r\nAuthorization")
    with Connection(port) as client:
        client.send(wrong)
        assert client.read().status == 400
    assert KEY not in guarded.log


def test_each_prompt_of_a_list_is_a_request_of_its_key(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"ours {KEY} max_requests=3\n")
    settings = {"openai_port": 0, "api_key_file": str(keys)}
    bearer = {"Authorization": f"Bearer {KEY}"}
    with fake(script={"step_s": 0.05}, server=settings) as server:
        for is_stream in (False, True):
            body = BODY | {"prompt": [[1], [2], [3], [4]], "stream": is_stream}
            over = ask(server.openai_port, TEXT, body, headers=bearer)
            assert over.status == 400, over.body  # they never fit, however long a client waits
            assert json.loads(over.body)["error"]["param"] == "prompt"
            assert "retry-after" not in over.headers
        three = BODY | {"prompt": [[1], [2], [3]]}
        assert ask(server.openai_port, TEXT, three, headers=bearer).status == 200
        with Connection(server.openai_port) as client:
            long = BODY | {"max_tokens": 400, "stream": True}
            client.send(request(TEXT, long, headers=bearer))
            client.read_head()
            over = ask(server.openai_port, TEXT, three, headers=bearer)
            assert over.status == 429, over.body
            assert int(over.headers["retry-after"]) >= 1
            two = BODY | {"prompt": [[1], [2]]}
            assert ask(server.openai_port, TEXT, two, headers=bearer).status == 200
        wait_until(lambda: ask(server.openai_port, TEXT, three, headers=bearer).status == 200)


ORIGINS = {
    "no page": ({}, 200),
    "the server's own page": ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
    "a foreign page": ({"Origin": "http://evil.example"}, 403),
    "a file": ({"Origin": "null"}, 403),
    "no origin": ({"Origin": "http://["}, 403),
    "another port": ({"Host": "localhost:8000", "Origin": "http://localhost:9000"}, 403),
    "a name that leads here": ({"Host": "evil.example"}, 403),
    "an address that is not ours": ({"Host": "10.0.0.1:8000"}, 403),
    "no host": ({"Host": ""}, 403),
    "a page that is named": ({"Origin": "https://chat.example"}, 200),
    "an absolute name": ({"Host": "localhost.:8000"}, 200),
    "the address": ({"Host": "127.0.0.1:8000"}, 200),
    "the address of IPv6": ({"Host": "[::1]:8000"}, 200),
}


@pytest.fixture(scope="module")
def paged():
    """Serve the pages of one origin."""
    origins = ["https://chat.example"]
    with fake(server={"openai_port": 0, "openai_origins": origins}) as server:
        wait_serving(server.channel)
        yield server


@pytest.mark.parametrize(("headers", "status"), ORIGINS.values(), ids=ORIGINS)
def test_pages_of_other_origins_and_hosts_get_nothing(paged, headers, status):
    answer = ask(paged.openai_port, TEXT, BODY, headers=headers)
    assert answer.status == status, answer.body
    allowed = answer.headers.get("access-control-allow-origin")
    assert allowed == ("https://chat.example" if "chat" in str(headers) else None)


def test_a_page_that_is_named_may_ask_first(paged):
    headers = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    answer = ask(paged.openai_port, CHAT, verb="OPTIONS", headers=headers)
    assert answer.status == 204
    assert "authorization" in answer.headers["access-control-allow-headers"]
    for wanted in ("authorization,content-type,x-stainless-os,x-request-id", "openai-project"):
        asked = headers | {"Access-Control-Request-Headers": wanted}
        answer = ask(paged.openai_port, CHAT, verb="OPTIONS", headers=asked)
        assert answer.headers["access-control-allow-headers"] == wanted
    foreign = headers | {"Origin": "https://evil.example"}
    refused = ask(paged.openai_port, CHAT, verb="OPTIONS", headers=foreign)
    assert refused.status == 403
    assert "access-control-allow-headers" not in refused.headers


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MALFORMED = {
    "no request": (b"hello\r\n\r\n", 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "no number": (HEAD + b"Content-Length: -5\r\n\r\n", 400),
    "no chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "no end of the headers": (HEAD + b"X: " + b"y" * 70_000, 431),
    "another encoding": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
}


@pytest.mark.parametrize(("sent", "status"), MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_http_has_openais_form_of_error_and_ends_its_connection(faked, sent, status):
    with Connection(faked.openai_port) as client:
        client.send(sent)
        answer = client.read()
        assert (answer.status, answer.error["code"]) == (status, "invalid_request")
        assert answer.error["message"]
        assert client.read_until(b"never") == b""


def test_http_2_and_websockets_are_not_spoken(paged):
    with Connection(paged.openai_port) as client:
        client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert not client.read_until(b"never").startswith(b"\0")
    upgrade = {
        "Upgrade": "h2c",
        "Connection": "Upgrade, HTTP2-Settings",
        "HTTP2-Settings": "AAMAAABk",
    }
    assert ask(paged.openai_port, "/health", verb="GET", headers=upgrade).status == 200
    socket = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    with Connection(paged.openai_port) as client:
        for _ in range(2):  # it is answered as if it did not ask for a WebSocket, and stays
            assert client.ask("/health", verb="GET", headers=socket).status == 200
    foreign = socket | {"Origin": "https://evil.example"}
    assert ask(paged.openai_port, "/health", verb="GET", headers=foreign).status == 403


def test_the_port_speaks_tls_with_the_servers_certificate(tmp_path):
    authority = trustme.CA()
    pair = authority.issue_cert("localhost")
    files = {"tls_cert": tmp_path / "cert", "tls_key": tmp_path / "key"}
    pair.cert_chain_pems[0].write_to_path(files["tls_cert"])
    pair.private_key_pem.write_to_path(files["tls_key"])
    settings = {"openai_port": 0, **{name: str(path) for name, path in files.items()}}
    with fake(server=settings) as server:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        for protocols in ([], ["http/1.1"]):
            if protocols:
                context.set_alpn_protocols(protocols)
            client = Connection(server.openai_port)
            client.socket = context.wrap_socket(client.socket, server_hostname="localhost")
            with client:
                assert client.ask(TEXT, BODY | {"stream": True}).events[-1] == "[DONE]"


def test_pipelined_requests_are_answered_in_order(faked):
    with Connection(faked.openai_port) as client:
        client.send(b"".join(request(TEXT, BODY | {"max_tokens": count}) for count in (3, 1, 2)))
        counts = [client.read().json["usage"]["completion_tokens"] for _ in range(3)]
    assert counts == [3, 1, 2]


def test_a_client_that_waits_before_its_body_is_told_to_go_on(faked):
    sent = request(TEXT, BODY, headers={"Expect": "100-continue"})
    head = sent.index(b"\r\n\r\n") + 4
    with Connection(faked.openai_port) as client:
        client.send(sent[:head])
        assert client.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        client.send(sent[head:])
        assert client.read().status == 200


def test_half_sent_bodies_do_not_fill_the_memory():
    """Each of the clients announces a megabyte; together they may have four."""
    limits = {"openai_port": 0, "max_message_bytes": 2**20, "max_image_bytes": 0}
    with fake(server=limits | {"max_held_bytes": 2**22}) as server:
        wait_serving(server.channel)
        before = server.memory_bytes()
        clients = [Connection(server.openai_port) for _ in range(40)]
        body = json.dumps(BODY | {"user": "a" * 900_000}).encode()
        sent = request(TEXT, body)
        for client in clients:
            client.socket.settimeout(0.2)
            try:
                client.socket.sendall(sent[:-10])
            except TimeoutError:
                continue  # the server does not read on
        assert server.memory_bytes() - before < 24 * 2**20
        assert stats(server.channel).running == 0
        assert ask(server.openai_port, TEXT, BODY).status == 200
        for client in clients:
            client.close()
        last = ask(server.openai_port, TEXT, body)
        assert last.status == 200, last.body


def test_a_refused_body_that_nobody_reads_leaves_no_task(faked):
    sent = request(TEXT, b" " * 4_000_000)
    before = None
    for _ in range(40):
        ask(faked.openai_port, TEXT, BODY)
        before = before or faked.ask("tasks")["trio_tasks"]
        with Connection(faked.openai_port) as client:
            client.socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.socket.send(sent)
            client.socket.settimeout(20)
            assert client.read().status in (0, 413)
    wait_until(lambda: faked.ask("tasks")["trio_tasks"] <= before, 10, "tasks")
