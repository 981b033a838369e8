"""Reasoning at every door: by gRPC, by OpenAI's API, and at the port for smg's gateway."""

import json
import re
import uuid

import grpc
import jsonschema
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from tests.support.openai_calls import CHAT, ask
from tests.support.server import openai_port_of, real
from tests.support.thinkers import make_thinker
from tests.support.wire import broken_fields, generate, reason

pytestmark = pytest.mark.model

MESSAGES = [{"role": "user", "content": "Tell me a story."}]
CLOSING = 2  # the token </think>
REGEX = "[a-f]{3} [0-9]{2}"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Serve a model that reasons, and whose template has a switch, by all doors."""
    model = make_thinker(tmp_path_factory.mktemp("served"), "tokens")
    name = ("--served-model-name", "thinker")
    ports = ("--openai-port", "0", "--vllm-engine-port", "0")
    with real(*name, *ports, model=str(model)) as one:
        one.openai_port = openai_port_of(one)
        yield one


def chat(server, **fields):
    sampling = {"temperature": 0.0, "max_tokens": 90}
    return generate(server.channel, chat={"messages": MESSAGES}, sampling=sampling, **fields)


def reasoning_of(heard):
    return "".join(delta.reasoning for delta in heard.deltas)


def test_a_budget_and_a_form_by_grpc(server):
    heard = chat(server, reasoning={"budget_tokens": 12}, constraint={"regex": REGEX})
    assert re.fullmatch(REGEX, heard.text())
    assert 12 <= heard.finished().usage.reasoning_tokens <= 15
    assert len(reasoning_of(heard)) > 12
    heard = chat(server, reasoning={"enabled": False}, constraint={"regex": REGEX})
    assert re.fullmatch(REGEX, heard.text())
    assert (reasoning_of(heard), heard.finished().usage.reasoning_tokens) == ("", 0)
    at_once = chat(server, constraint={"regex": REGEX, "reasoning": False})
    assert (re.fullmatch(REGEX, at_once.text()) is not None, reasoning_of(at_once)) == (True, "")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"reasoning": {"enabled": False, "budget_tokens": 3}}, "reasoning.budget_tokens"),
        (
            {"reasoning": {"enabled": False}, "constraint": {"regex": "a", "reasoning": True}},
            "constraint.reasoning",
        ),
        (
            {"reasoning": {"budget_tokens": 3}, "constraint": {"regex": "a", "reasoning": False}},
            "reasoning.budget_tokens",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(server, fields, field):
    heard = chat(server, **fields)
    assert reason(heard.error) == "INVALID_REQUEST"
    assert broken_fields(heard.error) == [field]


def test_a_banned_end_of_the_reasoning_is_refused_by_name(server):
    fields = {"chat": {"messages": MESSAGES}, "reasoning": {"budget_tokens": 3}}
    heard = generate(server.channel, sampling={"banned_token_ids": [2]}, **fields)
    assert broken_fields(heard.error) == ["sampling.banned_token_ids"]


def by_http(server, **fields):
    body = {"model": "thinker", "messages": MESSAGES, "temperature": 0.0, "max_tokens": 90}
    answer = ask(server.openai_port, CHAT, body | fields)
    assert answer.status == 200, answer.body
    message, usage = answer.json["choices"][0]["message"], answer.json["usage"]
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    return message.get("reasoning_content") or "", message["content"], counted


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget"])
def test_a_budget_and_a_form_by_openais_api(server, name):
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    thought, content, counted = by_http(server, response_format=schema, **{name: 12})
    assert json.loads(content)["a"] in (1, 22)
    assert 12 <= counted <= 15
    heard = chat(server, reasoning={"budget_tokens": 12}, constraint={"json_object": True})
    assert thought == reasoning_of(heard)


@pytest.mark.parametrize(
    "fields",
    [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}],
)
def test_reasoning_is_switched_off_by_openais_api(server, fields):
    thought, content, counted = by_http(server, **fields)
    assert (thought, counted) == ("", 0)
    assert content


def asked_by_gateway(server, **params):
    """Return the ids of an answer over the port for gateways."""
    found = re.compile(r"to gateways on grpc://[^:]+:(\d+)")
    port = int(server.wait_for_output(lambda _: found.search(server.log), 20)[1])
    sampling = {"max_tokens": 400, "temperature": 1.5, "seed": 4} | params
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        request = vllm_engine_pb2.GenerateRequest(
            request_id=uuid.uuid4().hex,
            text="<think>Once upon a time</",
            sampling_params=sampling,
        )
        [*_, last] = stub.Generate(request, timeout=60)
        return list(last.complete.output_ids)


CALLS = {  # a model's tool calls, as smg describes them
    "type": "tags_with_separator",
    "tags": [
        {
            "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": SCHEMA | {"additionalProperties": False},
            },
            "end": "}\n</tool_call>",
        }
        for name in ("look_up", "now")
    ],
    "separator": "\n",
    "at_least_one": True,
    "stop_after_first": True,
}
CALL = re.compile(
    r'(?s)(.*)<tool_call>\n\{"name": "(look_up|now)", "arguments": (.*)\}\n</tool_call>'
)


@pytest.mark.parametrize("from_first", [False, True])
def test_the_gateways_port_enforces_a_structural_tag(server, from_first):
    """At once, or behind the reasoning in which the prompt ends."""
    tag = json.dumps({"type": "structural_tag", "format": CALLS})
    bias = {CLOSING: 20.0} if not from_first else {}
    ids = asked_by_gateway(
        server, structural_tag=tag, grammar_from_first_token=from_first, logit_bias=bias
    )
    assert (CLOSING in ids) is not from_first
    asked = pb.DetokenizeRequest(ids=ids)
    text = stubs.InferenceStub(server.channel).Detokenize(asked, timeout=20).text
    _, name, arguments = CALL.fullmatch(text).groups()
    assert name in ("look_up", "now")
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_the_gateways_port_begins_a_form_behind_the_reasoning(server):
    """Unless the gateway says that the grammar holds from the first token."""
    for from_first in (False, True):
        ids = asked_by_gateway(
            server,
            regex="[a-f]{3}",
            grammar_from_first_token=from_first,
            logit_bias={CLOSING: 20.0},
        )
        assert (CLOSING in ids) is not from_first
