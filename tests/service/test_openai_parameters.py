"""Every parameter of the list in docs/openai.md gives the same tokens at both doors.

Each row's value goes by HTTP, whole and streamed, and its equal by triolet.v1. Token ids, texts,
the reason of the end, and usage are equal.
"""

import json
import re
from pathlib import Path

import pytest
from google.protobuf import json_format

from grpc_service.client import messages as pb
from grpc_service.client import stubs
from grpc_service.openai import text_codec
from grpc_service.openai.fields import IGNORED, Fields
from grpc_service.openai.work import Context
from tests.support.openai_calls import CHAT, TEXT, ask, ids_of
from tests.support.server import openai_port_of, real

pytestmark = pytest.mark.model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai.md"
ROW = re.compile(r"(\w+) (.*?)(?: -> ([\w.]+)(?: (.*))?)?")
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
PROMPT = "Once upon a time there was"
BASE = {"model": "stories", "seed": 7, "max_tokens": 12, "temperature": 0.9}
# What a value needs to have an effect, by the names of other rows.
BESIDE = {
    "include_stop_str_in_output": {"stop": ["drag"]},
    "min_p": {"temperature": 2.0},
    "presence_penalty": {"logit_bias": {"265": 9.0}},
    "frequency_penalty": {"logit_bias": {"265": 9.0}},
}
OF_CHATS = {
    *("chat_template_kwargs", "reasoning_effort", "add_generation_prompt"),
    *("continue_final_message", "tool_choice", "tool_argument_deltas"),
}
OF_TEXTS = {"echo"}
# Fields of a request that the page names in the text below its list of parameters.
NAMED_BELOW = {
    *("model", "messages", "prompt", "tools", "stream", "stream_options", "logprobs"),
    *("top_logprobs", "parallel_tool_calls", "request_id"),
    *("thinking_token_budget", "thinking_budget", "return_progress"),
}


def rows():
    """Return the list: name, value, path in triolet.v1, and the value there."""
    part = PAGE.read_text().split("<!-- parameters:")[1].split("```")[1]
    found = []
    for line in part.splitlines()[1:]:
        match = ROW.fullmatch(line)
        assert match, line
        name, given, path, there = match.groups()
        value = json.loads(given)
        there = value if there is None else json.loads(there)
        found.append((name, value, path or f"sampling.{name}", there))
    assert len(found) > 40
    return found


ROWS = rows()


@pytest.fixture(scope="module")
def server():
    """Serve the story model by both doors."""
    with real("--served-model-name", "stories", "--openai-port", "0") as one:
        one.openai_port = openai_port_of(one)
        yield one


def proto_of(fields, *, is_chat):
    """Return a GenerateRequest of fields by path."""
    message = {"model": "stories"}
    if is_chat:
        message["chat"] = {"messages": MESSAGES}
    else:
        message["text"] = PROMPT
    for path, value in fields.items():
        place = message
        *inside, last = path.split(".")
        for name in inside:
            place = place.setdefault(name, {})
        place[last] = value
    return json_format.ParseDict(message, pb.GenerateRequest())


def by_grpc(server, request):
    """Return, for each choice, token ids, text and the reason of its end; and the usage."""
    choices, usage = {}, None
    for event in stubs.InferenceStub(server.channel).Generate(request, timeout=60):
        if event.HasField("delta"):
            one = choices.setdefault(event.delta.choice, [[], "", ""])
            one[0] += event.delta.token_ids
            one[1] += event.delta.text
        elif event.HasField("finished"):
            reason = pb.FinishReason.Name(event.finished.reason).rpartition("_")[2].lower()
            choices.setdefault(event.finished.choice, [[], "", ""])[2] = reason
            done = 0 if usage is None else usage[1]
            usage = (
                event.finished.usage.prompt_tokens,
                (done + event.finished.usage.completion_tokens),
            )
    return choices, usage


def by_http(server, path, body):
    """Return the same of an answer by HTTP."""
    answer = ask(server.openai_port, path, body)
    assert answer.status == 200, answer.body
    assert not answer.is_cut
    events = answer.events if body.get("stream") else [answer.json]
    if body.get("stream"):
        assert events.pop() == "[DONE]"
    choices = {}
    for one in (one for event in events for one in event["choices"]):
        found = choices.setdefault(one["index"], [[], "", ""])
        inside = one.get("message") or one.get("delta") or one
        found[1] += inside.get("content") or inside.get("text") or ""
        found[2] = one["finish_reason"] or found[2]
    for index, found in choices.items():
        found[0] = ids_of(answer, index)
    usage = events[-1]["usage"]
    return choices, (usage["prompt_tokens"], usage["completion_tokens"])


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}-{index}" for index, row in enumerate(ROWS)])
def test_a_parameter_gives_the_tokens_of_triolet_v1(server, row, is_chat):
    name, value, path, there = row
    if name in (OF_TEXTS if is_chat else OF_CHATS):
        body = {**BASE, "messages": MESSAGES} if is_chat else {**BASE, "prompt": PROMPT}
        answer = ask(server.openai_port, CHAT if is_chat else TEXT, {**body, name: value})
        assert answer.status == 400
        assert answer.error["param"] == name
        return
    base = {"sampling.seed": 7, "sampling.max_tokens": 12, "sampling.temperature": 0.9}
    fields = {**base, "output.token_ids": True, path: there}
    body = {**BASE, "return_token_ids": True, name: value, **BESIDE.get(name, {})}
    paths = {row[0]: row[2] for row in ROWS}
    fields |= {paths[other]: beside for other, beside in BESIDE.get(name, {}).items()}
    if name == "max_completion_tokens":
        del body["max_tokens"]
    wanted = by_grpc(server, proto_of(fields, is_chat=is_chat))
    body |= {"messages": MESSAGES} if is_chat else {"prompt": PROMPT}
    where = CHAT if is_chat else TEXT
    assert by_http(server, where, body) == wanted
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert by_http(server, where, body | stream) == wanted


def test_most_parameters_change_the_tokens(server):
    """Else the comparison would say nothing: these values have an effect on this model."""
    shared = {**BASE, "prompt": PROMPT, "return_token_ids": True}
    same = []
    for name, value, _, _ in ROWS:
        if name in OF_CHATS or name in ("max_completion_tokens", "return_token_ids"):
            continue
        body = shared | BESIDE.get(name, {})
        if by_http(server, TEXT, body | {name: value}) == by_http(server, TEXT, body):
            same.append(name)
    silent = {
        "priority",
        "service_tier",
        "speculation",
        "cache_salt",
        "bypass_prefix_cache",
        "prompt_logprobs",
    }
    silent |= {"ignore_eos", "min_tokens", "add_special_tokens", "skip_special_tokens"}
    assert set(same) <= silent


def test_every_field_that_is_read_is_on_the_page(monkeypatch):
    seen = set()

    def watched(method):
        def look(self, name, *given, **options):
            if not self.where:
                seen.add(name)
            return method(self, name, *given, **options)

        return look

    for name in ("take", "given", "raw", "has", "items", "texts"):
        monkeypatch.setattr(Fields, name, watched(getattr(Fields, name)))
    context = Context("id", None, 0, 1000)
    text_codec.decode_chat({"messages": MESSAGES}, context)
    text_codec.decode_completion({"prompt": PROMPT}, context)
    page = PAGE.read_text()
    assert seen == {row[0] for row in ROWS} | NAMED_BELOW
    for name in (*NAMED_BELOW, *IGNORED):
        assert f"`{name}" in page, name
