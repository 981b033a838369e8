"""The names of fields in the errors of OpenAI's API: each is one that the client may send there.

The engine's errors name fields of triolet.v1. So each path of its requests must be called as a
field of the route, whose wrong value is refused under the same name; but for the paths that no
request of the route can set.
"""

import ast
import copy
import re
from itertools import pairwise
from pathlib import Path

import pytest

import engine
from engine.errors import FieldViolation, InvalidRequest, RequestTooLarge, Unsupported
from grpc_service.client import messages as pb
from grpc_service.openai import classify_codec, encode_codec, text_codec, vectors_codec
from grpc_service.openai.errors import NAMED, renamed
from grpc_service.openai.work import Context

CONTEXT = Context("an-id", None, 0, 2**20)
FUNCTION = {"name": "f", "parameters": {}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MESSAGE = {"role": "assistant", "content": [PART, {"type": "text"}], "tool_calls": [CALL]}
TOOL = {"type": "function", "function": FUNCTION}
ROUTES = {
    "chat": (text_codec.decode_chat, pb.GenerateRequest, {"messages": [MESSAGE], "tools": [TOOL]}),
    "text": (text_codec.decode_completion, pb.GenerateRequest, {"prompt": [1]}),
    "texts": (text_codec.decode_completion, pb.GenerateRequest, {"prompt": [[1], [2]]}),
    "embed": (encode_codec.decode_embeddings, pb.EmbedRequest, {"input": [1]}),
    "embed many": (encode_codec.decode_embeddings, pb.EmbedRequest, {"input": [[1]]}),
    "sparse": (vectors_codec.decode_embed_sparse, pb.EmbedRequest, {"inputs": [[1]]}),
    "pooling": (vectors_codec.decode_pooling, pb.EmbedRequest, {"input": [[1]]}),
    "classify": (
        *(classify_codec.decode_classify, pb.ClassifyRequest),
        {"input": [{"text": "a", "text_pair": "b"}]},
    ),
    "rerank": (encode_codec.decode_rerank, pb.RerankRequest, {"query": "a", "documents": ["b"]}),
    "draw": (encode_codec.decode_images, pb.GenerateImageRequest, {"prompt": "a"}),
}
# Paths that no request of a route sets, by the beginning of their names.
RESUMED = ("continuation", "resume_window")
NEVER = {
    "chat": (*RESUMED, "token_ids", "chat.truncate", "prompt.truncate_left"),
    "text": (
        *(*RESUMED, "chat", "reasoning", "constraint.reasoning"),
        *("prompt.truncate_left", "output.tool_argument_deltas"),
    ),
    "embed": ("inputs[0].image", "kind", "top_k", "threshold"),
    "sparse": ("inputs[0].image", "kind", "dimensions", "normalize", "precision", "ranges"),
    "pooling": ("inputs[0].image", "top_k", "threshold", "precision", "ranges"),
    "classify": ("inputs[0].token_ids",),
    "rerank": (),
    "draw": ("source", "strength", "preview_every"),
}
# Paths of no field of their own: inputs as a whole, and single values of lists.
OTHERS = {
    pb.GenerateRequest: ("input", "chat", "token_ids.ids[0]", "sampling.logit_bias[5]"),
    pb.EmbedRequest: ("inputs", "inputs[0]", "inputs[0].token_ids.ids[0]"),
    pb.ClassifyRequest: ("inputs", "inputs[0]", "inputs[0].pair"),
    pb.RerankRequest: ("documents[0]",),
    pb.GenerateImageRequest: (),
}
WRONG = (1.5, True, [[[1]]], {"colour": 1}, "x" * 20, -1)


def paths_of(descriptor, prefix=""):
    """Yield the paths of a message's fields, with the index of a value for each list."""
    for field in descriptor.fields:
        path, inner = f"{prefix}{field.name}", field.message_type
        is_ours = inner is not None and inner.file.package == "triolet.v1"
        if not is_ours or inner.GetOptions().map_entry:
            yield path
            if field.is_repeated and inner is None:
                yield f"{path}[0]"
        elif field.is_repeated:
            yield path
            yield f"{path}[0]"
            for one in paths_of(inner, f"{path}[0]."):
                yield one.replace("parts[0].text", "parts[1].text")
        else:
            yield from paths_of(inner, f"{path}.")


def paths_at(route):
    """Return the paths of triolet.v1 that the errors of a route may have."""
    message = ROUTES[route][1]
    never = NEVER[{"texts": "text", "embed many": "embed"}.get(route, route)]
    every = [*paths_of(message.DESCRIPTOR), *OTHERS[message]]
    return [path for path in every if not path.startswith(never) and not is_form(path)]


def is_form(path):
    """Whether a path is of a form, which a body names by one of several fields."""
    return path.startswith("constraint.") and path != "constraint.reasoning"


def is_sent_as(route, name):
    """Whether a wrong value of the field ``name`` is refused by this name."""
    if name == "X-Request-Id":
        return True
    return any(
        one.field == name and "that this server knows" not in one.description
        for value in WRONG
        for one in refusals(route, name, value)
    )


def refusals(route, name, value):
    """Return what a body is refused for whose field ``name`` has a value."""
    decode, _, body = ROUTES[route]
    try:
        work = decode(put(body, name, value), CONTEXT)
    except InvalidRequest as error:
        return error.violations
    except Unsupported as error:
        return [FieldViolation(error.field, str(error))]
    try:
        for request in work.requests:
            request.validate()
    except InvalidRequest as error:
        return renamed(error, lambda path: work.rename(0, path)).violations
    return ()


def work_rename(route, path):
    """Return what a field of triolet.v1 is called in the body of a route."""
    decode, _, body = ROUTES[route]
    return decode(copy.deepcopy(body), CONTEXT).rename(0, path)


def put(body, name, value):
    """Return a copy of ``body`` whose field ``name``, such as ``messages[0].role``, is a value."""
    body = copy.deepcopy(body)
    steps = [int(step) if step.isdigit() else step for step in re.findall(r"\w+", name)]
    place = body
    for step, following in pairwise(steps):
        if isinstance(place, dict):
            # A token's number is a name in the object of biases.
            is_list = isinstance(following, int) and step != "logit_bias"
            place = place.setdefault(step, [None] if is_list else {})
        else:
            place[step] = place[step] if place[step] is not None else {}
            place = place[step]
    place[steps[-1] if isinstance(place, list) else str(steps[-1])] = value
    return body


CASES = [(route, path) for route in ROUTES for path in paths_at(route)]


@pytest.mark.parametrize(("route", "path"), CASES, ids=lambda value: str(value))
def test_what_the_engine_names_is_a_field_of_the_route(route, path):
    name = work_rename(route, path)
    assert is_sent_as(route, name), name


FORMS = {
    "guided_json": ({}, "constraint.json_schema"),
    "guided_regex": ("a", "constraint.regex"),
    "guided_grammar": ("start: /a/", "constraint.lark"),
    "guided_choice": (["a"], "constraint.choice.choices"),
    "guided_json_object": (True, "constraint.json_object"),
    "structured_outputs.json": ({}, "constraint.json_schema"),
    "structured_outputs.regex": ("a", "constraint.regex"),
    "structured_outputs.grammar": ("start: /a/", "constraint.lark"),
    "structured_outputs.choice": (["a"], "constraint.choice.choices"),
    "structured_outputs.json_object": (True, "constraint.json_object"),
    "response_format.json_schema.schema": ({}, "constraint.json_schema"),
    "response_format": ({"type": "json_object"}, "constraint.json_object"),
}


@pytest.mark.parametrize("route", ["chat", "text", "texts"])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_called_as_it_was_sent(route, name):
    decode, _, body = ROUTES[route]
    value, path = FORMS[name]
    made = put(body, name, value)
    if name.endswith(".schema"):
        made["response_format"]["type"] = "json_schema"
    rename = decode(made, CONTEXT).rename
    assert {rename(0, path), rename(0, "constraint")} == {name}


SEVERAL = {
    "max_tokens": (5, "sampling.max_tokens", "chat"),
    "max_completion_tokens": (5, "sampling.max_tokens", "text"),
    "thinking_budget": (5, "reasoning.budget_tokens", "chat"),
    "thinking_token_budget": (5, "reasoning.budget_tokens", "chat"),
    "reasoning_effort": ("none", "reasoning.enabled", "chat"),
    "chat_template_kwargs.thinking": (False, "reasoning.enabled", "chat"),
    "logprobs": (2, "output.prompt_logprobs", "text"),
    "request_id": ("own", "request_id", "embed"),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_field_of_several_names_is_called_by_the_one_that_was_sent(name):
    value, path, route = SEVERAL[name]
    decode, _, body = ROUTES[route]
    beside = {"echo": True} if name == "logprobs" else {}
    assert decode(put(body, name, value) | beside, CONTEXT).rename(0, path) == name


@pytest.mark.parametrize("kind", [InvalidRequest, RequestTooLarge])
def test_an_error_keeps_its_kind_and_names_no_field_of_triolet_v1(kind):
    what = "cannot be set where reasoning.enabled is false, beside chat.template_args['a']"
    error = kind([FieldViolation("reasoning.budget_tokens", what)])
    error.log_detail = "for the log"
    made = renamed(error, lambda path: work_rename("chat", path))
    assert type(made) is kind
    assert made.log_detail == "for the log"
    told = "cannot be set where reasoning_effort is false, beside chat_template_kwargs['a']"
    assert str(made) == f"thinking_token_budget: {told}"


def test_a_text_without_fields_stays():
    text = "this model's tokenizer cannot be used with a constraint: none"
    made = renamed(Unsupported(text, field="constraint"), lambda path: "guided_regex")
    assert (str(made), made.field) == (text, "guided_regex")


def test_every_field_that_a_description_of_the_engine_names_gets_its_name():
    """Names in sentences of the engine are those that `NAMED` finds."""
    found = set()
    root = Path(engine.__file__).parent
    rooms = ("requests", "core", "worker")
    for file in [one for room in rooms for one in (root / room).rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                sentence = node.value if " " in node.value and "\n" not in node.value else ""
                found |= set(NAMED.findall(sentence))
    assert found >= {"chat.template_args", "reasoning.enabled", "chat.continue_final_message"}
    for path in found:
        assert is_sent_as("chat", work_rename("chat", path)), path
