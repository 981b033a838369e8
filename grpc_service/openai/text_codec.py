"""Translates the bodies of chat and text completions into the engine's requests. Pure.

Rule 1: a parameter has OpenAI's name and meaning where OpenAI has it, else vLLM's; docs/openai.md
has the table, which a test compares with triolet.v1. Rule 2: what is not set stays unset, so that
the engine's own defaults hold at both doors.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.core.text.types import Constraint
from engine.errors import InvalidRequest, Unsupported
from engine.requests.text.answers.reasoning import SWITCHES
from engine.requests.text.chat_values import Chat
from engine.requests.text.values import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    GenerateRequest,
    OutputOptions,
    PromptOptions,
    ReasoningOptions,
    SamplingParams,
)
from grpc_service.openai.answers import ChatStream, ChatWhole, EchoAlone, TextStream, TextWhole
from grpc_service.openai.fields import (
    UINT64_MAX,
    Fields,
    ImageBytes,
    is_ids,
    most_of,
    texts_or_ids,
)
from grpc_service.openai.work import Context, Encoder, Work, id_of
from grpc_service.services.text_codec import function_tool

if TYPE_CHECKING:
    from collections.abc import Mapping

INT32_MAX = 2**31 - 1
PROMPTS_MAX = 64  # of one text completion: each is a request of its own. A guess.
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NUMBERS = ("temperature", "top_p", "min_p", "typical_p", *PENALTIES)
# Fields with values that change nothing, as clients send them. Others are refused by name.
HARMLESS: dict[str, tuple[object, ...]] = {
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "include_reasoning": (True,),
    "echo": (False,),
    "best_of": (1,),
    "functions": ([],),
    "verbosity": ("medium",),
}
INPUT_PATH = re.compile(r"(?:text|input|chat|token_ids\.ids)((?:\[\d+\])?)")
TOOL_MODES = ("auto", "none", "required")
NO_REASONING = "none"  # the effort of OpenAI's models that do not reason
BUDGETS = ("thinking_token_budget", "thinking_budget")  # vLLM's name, and that of Qwen's own API
ROLES = {"developer": "system"}  # the templates of open models know one of them
# Names of triolet.v1 in errors, and what the fields are called here.
RENAMED = {
    "sampling.max_tokens": "max_completion_tokens",
    "sampling.include_stop": "include_stop_str_in_output",
    "output.logprobs": "top_logprobs",
    "output.token_ids": "return_token_ids",
    "output.progress": "return_progress",
    "prompt.truncate_to": "truncate_prompt_tokens",
    "chat.template_args": "chat_template_kwargs",
    "reasoning.budget_tokens": BUDGETS[0],
    "reasoning.enabled": "reasoning_effort",
    "constraint.reasoning": "structured_outputs.enable_in_reasoning",
}


def rename(path: str) -> str:
    """Return what a field of triolet.v1 is called here."""
    if path in RENAMED:
        return RENAMED[path]
    path = re.sub(r"^(sampling|prompt|output|chat)\.", "", path)
    path = re.sub(r"\]\.image$", "].image_url.url", path.replace(".parts", ".content"))
    path = re.sub(r"(tool_calls\[\d+\])\.name", r"\1.function.name", path)
    path = re.sub(r"^(tools\[\d+\])\.", r"\1.function.", path)
    return path.replace(".arguments_json", ".function.arguments")


# ---- chats


def decode_chat(body: dict[str, Any], context: Context) -> Work:
    """Return the work of ``/v1/chat/completions``.

    Raises:
        InvalidRequest, Unsupported: a field has a wrong value, or is none that this server knows.
    """
    fields = Fields(body)
    images = ImageBytes(context.max_image_bytes)
    wants_logprobs, alternatives = fields.switch("logprobs"), fields.whole("top_logprobs")
    if alternatives and not wants_logprobs:
        fields.refuse("top_logprobs", "needs logprobs to be true")
    output = _output_of(fields, (alternatives or 0) if wants_logprobs else None)
    is_single_call = fields.switch("parallel_tool_calls") is False
    template_args = fields.take("chat_template_kwargs", "object") or {}
    try:
        json.dumps(template_args, allow_nan=False)
    except ValueError:
        fields.refuse("chat_template_kwargs", "has a number that is too large")
    effort = fields.text("reasoning_effort")
    if effort and effort != NO_REASONING:
        template_args = {"reasoning_effort": effort, **template_args}
    reasoning = _reasoning_of(fields, effort, template_args)
    chat = Chat(
        messages=tuple(
            _message_of(one, images) for one in fields.each("messages", most_of("Chat.messages"))
        ),
        tools=tuple(_tool_of(tool) for tool in fields.each("tools", most_of("Chat.tools"))),
        template_args=template_args,
        tool_choice=_tool_choice_of(fields),
        add_generation_prompt=fields.switch("add_generation_prompt"),
        continue_final_message=bool(fields.switch("continue_final_message")),
    )
    chat.look_through()
    is_stream, with_usage = _stream_of(fields, output)
    # A stream's calls come as they are generated, as clients of OpenAI's API expect.
    has_deltas = fields.switch("tool_argument_deltas")
    output = replace(output, tool_argument_deltas=is_stream if has_deltas is None else has_deltas)
    request = _request_of(fields, context, output, chat=chat, reasoning=reasoning)
    fields.done()
    request_id = request.request_id
    made = ChatStream if is_stream else ChatWhole
    encoder = made(
        f"chatcmpl-{request_id}",
        context.created,
        asked=request.model,
        num_choices=request.n or 1,
        with_usage=with_usage,
        with_logprobs=output.logprobs is not None,
        with_ids=bool(output.token_ids),
        is_single_call=is_single_call,
        stop_ids=request.sampling.stop_token_ids,
    )
    rename = partial(_as_sent, fields.sent_as, "messages")
    return Work(request_id, (request,), encoder, is_stream, images.num_chars, rename)


def _reasoning_of(
    fields: Fields, effort: str | None, template_args: Mapping[str, Any]
) -> ReasoningOptions:
    """Return how the model reasons. The templates' switches, set to false, hold for templates that
    have none, too."""
    budgets = [name for name in BUDGETS if fields.has(name)]
    found = {fields.whole(name) for name in budgets}
    if len(found) > 1:
        fields.refuse(budgets[1], f"differs from {budgets[0]}; set one of them")
    if budgets:
        fields.sent_as["reasoning.budget_tokens"] = budgets[0]
    switches = [name for name in SWITCHES if template_args.get(name) is False]
    if effort == NO_REASONING:
        fields.sent_as["reasoning.enabled"] = "reasoning_effort"
    elif switches:
        fields.sent_as["reasoning.enabled"] = f"chat_template_kwargs.{switches[0]}"
    is_off = bool(switches) or effort == NO_REASONING
    return ReasoningOptions(False if is_off else None, next(iter(found), None))


def _message_of(fields: Fields, images: ImageBytes) -> dict[str, Any]:
    """Return a turn as the engine's chats have it."""
    role = fields.text("role") or ""
    turn: dict[str, Any] = {"role": ROLES.get(role, role), "content": ""}
    if isinstance(fields.given("content"), list):
        most = most_of("Message.parts")
        turn["content"] = [_part_of(part, images) for part in fields.each("content", most)]
    else:
        turn["content"] = fields.text("content") or ""
    calls = [_call_of(call) for call in fields.each("tool_calls", most_of("Message.tool_calls"))]
    if calls:
        turn["tool_calls"] = calls
    for name in ("tool_call_id", "name", "reasoning_content"):
        if value := fields.text(name):
            turn[name] = value
    if (reasoning := fields.text("reasoning")) and "reasoning_content" not in turn:
        turn["reasoning_content"] = reasoning  # as newer versions of vLLM name it
    fields.expect("annotations", [])  # of an answer that comes back as it was
    fields.done()
    return turn


def _part_of(fields: Fields, images: ImageBytes) -> dict[str, Any]:
    kind = fields.text("type")
    if kind == "text":
        part: dict[str, Any] = {"type": "text", "text": fields.text("text") or ""}
    elif kind == "image_url":
        image = fields.inner("image_url")
        if image is None:
            fields.refuse("image_url", "is not set")
        image.expect("detail", "auto", "low", "high")  # the model has one size of its own
        url = image.text("url") or ""
        part = {"type": "image", "image": images.decode(image.path("url"), url)}
        image.done()
    else:
        path = fields.path("type")
        raise Unsupported(f"{path} is not one of text and image_url", field=path)
    fields.done()
    return part


def _call_of(fields: Fields) -> dict[str, Any]:
    fields.expect("type", "function")
    call = {"id": fields.text("id") or "", "type": "function"}
    function = fields.inner("function")
    if function is None:
        fields.refuse("function", "is not set")
    fields.raw("index")  # of a call that a client has put together from a stream
    arguments = function.text("arguments")
    called = {"name": function.text("name") or "", "arguments": arguments or "{}"}
    function.done()
    fields.done()
    return call | {"function": called}


def _tool_of(fields: Fields) -> dict[str, Any]:
    fields.expect("type", "function")
    function = fields.inner("function")
    if function is None:
        fields.refuse("function", "is not set")
    function.switch("strict")  # a call that tool_choice demands has its schema's form anyway
    tool = function_tool(
        function.text("name") or "",
        function.text("description") or "",
        function.take("parameters", "object"),
    )
    function.done()
    fields.done()
    return tool


def _tool_choice_of(fields: Fields) -> str:
    given = fields.given("tool_choice")
    if not isinstance(given, dict):
        choice = fields.text("tool_choice") or "auto"
        if choice not in TOOL_MODES:
            what = "is not auto, none, required or an object with a function"
            fields.refuse("tool_choice", what)
        return choice
    chosen = fields.inner("tool_choice")
    assert chosen is not None
    chosen.expect("type", "function")
    function = chosen.inner("function")
    if function is None or not (name := function.text("name")):
        chosen.refuse("function.name", "is not set")
    if name in TOOL_MODES:  # the engine would take it for the mode
        function.refuse("name", f"cannot be {name}, for the function to be demanded")
    function.done()
    chosen.done()
    return name


# ---- texts


def decode_completion(body: dict[str, Any], context: Context) -> Work:
    """Return the work of ``/v1/completions``. Raises as `decode_chat`."""
    fields = Fields(body)
    fields.sent_as["output.logprobs"] = "logprobs"
    echoes = bool(fields.switch("echo"))
    logprobs = fields.whole("logprobs", 0, MAX_LOGPROBS)
    prompts = _prompts_of(fields)
    output = _output_of(fields, logprobs, echoes=echoes)
    is_stream, with_usage = _stream_of(fields, output)
    fields.expect("suffix", "")
    shared = _request_of(fields, context, output, text="")
    is_echo_alone = echoes and shared.sampling.max_tokens == 0
    if is_echo_alone:
        shared = _echo_alone(fields, shared)
    fields.done()
    many = len(prompts) > 1
    requests = tuple(
        _with_prompt(shared, prompt, f"-{number}" if many else "")
        for number, prompt in enumerate(prompts)
    )
    made = TextStream if is_stream else TextWhole
    encoder: Encoder = made(
        f"cmpl-{shared.request_id}",
        context.created,
        asked=shared.model,
        num_choices=shared.n or 1,
        num_sources=len(prompts),
        with_usage=with_usage,
        with_logprobs=logprobs is not None,
        with_ids=bool(output.token_ids),
        stop_ids=shared.sampling.stop_token_ids,
    )
    if is_echo_alone:
        encoder = EchoAlone(encoder)
    is_list = isinstance(body["prompt"], list) and not is_ids(body["prompt"])
    where = "prompt[{}]" if is_list else "prompt"
    rename = partial(_as_sent, fields.sent_as, where)
    return Work(shared.request_id, requests, encoder, is_stream, rename=rename)


def _echo_alone(fields: Fields, request: GenerateRequest) -> GenerateRequest:
    """Return the request for a prompt's echo without an answer. The engine computes at least one
    token: here one that has no text, since it ends the choice, and that `EchoAlone` leaves out."""
    if request.sampling.min_tokens:
        fields.refuse("min_tokens", "must not exceed max_tokens")
    shapes: dict[str, Any] = {"stop": (), "include_stop": None, "bad_words": (), "logit_bias": {}}
    shapes |= {"allowed_token_ids": (0,), "banned_token_ids": (), "stop_token_ids": (0,)}
    sampling = replace(request.sampling, max_tokens=1, min_tokens=0, **shapes)
    output = replace(request.output, logprobs=None)
    return replace(request, sampling=sampling, output=output, constraint=None, check=False)


def _as_sent(sent_as: Mapping[str, str], given: str, source: int, path: str) -> str:
    """Return under which name a field of triolet.v1 came; ``given`` is the form of the input's
    name."""
    if found := INPUT_PATH.fullmatch(path):
        return given.format(source) + found[1]
    return sent_as.get(path) or rename(path)


def _prompts_of(fields: Fields) -> list[str | tuple[int, ...]]:
    return texts_or_ids(fields, "prompt", most_of("TokenIds.ids"), 1, PROMPTS_MAX, noun=" prompts")


def _with_prompt(
    shared: GenerateRequest, prompt: str | tuple[int, ...], mark: str
) -> GenerateRequest:
    text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    request_id = shared.request_id + mark
    return replace(shared, text=text, token_ids=ids, request_id=request_id, check=False)


# ---- what both have


def _request_of(
    fields: Fields, context: Context, output: OutputOptions, **prompt: Any
) -> GenerateRequest:
    request = GenerateRequest(
        model=fields.text("model") or "",
        sampling=_sampling_of(fields),
        n=fields.whole("n", 1, MAX_CHOICES),  # here, as the answer's encoder keeps parts of each
        priority=fields.whole("priority", -INT32_MAX - 1, INT32_MAX),
        request_id=id_of(fields, context),
        constraint=_constraint_of(fields),
        prompt=_prompt_of(fields),
        output=output,
        timeout_s=context.timeout_s,
        background=fields.is_flex(),
        check=False,
        **prompt,
    )
    for name, values in HARMLESS.items():
        fields.expect(name, *values)
    return request


def _sampling_of(fields: Fields) -> SamplingParams:
    limits = [name for name in ("max_completion_tokens", "max_tokens") if fields.has(name)]
    found = {fields.whole(name) for name in limits}
    if len(found) > 1:
        fields.refuse("max_tokens", "differs from max_completion_tokens; set one of them")
    if limits:
        fields.sent_as["sampling.max_tokens"] = limits[0]
    seed = fields.whole("seed", -(2**63), UINT64_MAX)
    return SamplingParams(
        **{name: fields.number(name) for name in NUMBERS},
        top_k=_top_k_of(fields),
        max_tokens=next(iter(found), None),
        min_tokens=fields.whole("min_tokens"),
        seed=None if seed is None else seed % 2**64,  # negative seeds by their bits
        ignore_eos=fields.switch("ignore_eos"),
        stop=fields.texts("stop", most_of("SamplingParams.stop"), one=True),
        stop_token_ids=fields.ids("stop_token_ids", most_of("SamplingParams.stop_token_ids")),
        include_stop=fields.switch("include_stop_str_in_output"),
        logit_bias=_biases_of(fields),
        allowed_token_ids=fields.ids(
            "allowed_token_ids", most_of("SamplingParams.allowed_token_ids")
        ),
        banned_token_ids=fields.ids("banned_token_ids", most_of("SamplingParams.banned_token_ids")),
        bad_words=fields.texts("bad_words", most_of("SamplingParams.bad_words")),
        speculation=fields.switch("speculation"),
    )


def _top_k_of(fields: Fields) -> int | None:
    """Return top_k; -1 keeps all tokens, as in vLLM."""
    value = fields.whole("top_k", -1)
    return 0 if value == -1 else value


def _biases_of(fields: Fields) -> Mapping[int, float]:
    given = fields.take("logit_bias", "object") or {}
    if len(given) > (most := most_of("SamplingParams.logit_bias")):
        fields.refuse("logit_bias", f"has {len(given)} values, of at most {most}")
    made = {}
    for name, bias in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            fields.refuse("logit_bias", "has a name that is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            fields.refuse(f"logit_bias[{name}]", "is not a number")
        if int(name) in made:
            fields.refuse("logit_bias", f"has the token {int(name)} twice")
        made[int(name)] = float(bias) if abs(bias) < 1e9 else 1e9
    return dict(sorted(made.items()))


def _prompt_of(fields: Fields) -> PromptOptions:
    kept = fields.whole("truncate_prompt_tokens", 1)
    return PromptOptions(
        truncate_to=kept,
        truncate_left=None if kept is None else True,
        cache_salt=fields.text("cache_salt") or "",
        bypass_prefix_cache=fields.switch("bypass_prefix_cache"),
        add_special_tokens=fields.switch("add_special_tokens"),
    )


def _output_of(fields: Fields, logprobs: int | None, *, echoes: bool = False) -> OutputOptions:
    of_prompt = fields.whole("prompt_logprobs", 0, MAX_LOGPROBS)
    if echoes and logprobs is not None:
        of_prompt = logprobs
        fields.sent_as["output.prompt_logprobs"] = "logprobs"
    return OutputOptions(
        logprobs=logprobs,
        prompt_logprobs=of_prompt,
        token_ids=fields.switch("return_token_ids"),
        echo=echoes or None,
        skip_special_tokens=fields.switch("skip_special_tokens"),
        progress=fields.switch("return_progress"),
    )


def _stream_of(fields: Fields, output: OutputOptions) -> tuple[bool, bool]:
    """Return whether the answer is a stream, and whether a stream ends with the usage."""
    is_stream = bool(fields.switch("stream"))
    if output.progress and not is_stream:
        fields.refuse("return_progress", "needs stream to be true")
    options = fields.inner("stream_options")
    if options is None:
        return is_stream, False
    if not is_stream:
        fields.refuse("stream_options", "needs stream to be true")
    with_usage = bool(options.switch("include_usage"))
    options.expect("include_obfuscation", False)
    options.done()
    return is_stream, with_usage


# ---- forms


def _constraint_of(fields: Fields) -> Constraint | None:
    """Return the form of the answer, which may be written in three ways, of which one may be
    set."""
    found = _response_format(fields) | _guided(fields) | _structured(fields)
    if len(found) > 1:
        fields.refuse("response_format", "is not the only form that is set; set one")
    for path, constraint in found.items():
        fields.sent_as |= {"constraint": path, constraint.field: path}
        return constraint
    return None


def _response_format(fields: Fields) -> dict[str, Constraint]:
    form = fields.inner("response_format")
    if form is None:
        return {}
    kind, made = form.text("type"), {}
    if kind == "json_object":
        made["response_format"] = Constraint("json_object", "")
    elif kind == "json_schema":
        described = form.inner("json_schema")
        if described is None:
            form.refuse("json_schema", "is not set")
        for name in ("name", "description"):
            described.text(name)  # for the reader of the request
        described.switch("strict")  # every schema is kept to
        schema = described.raw("schema")
        if schema is None:
            described.refuse("schema", "is not set")
        made[described.path("schema")] = _schema(described, "schema", schema)
        described.done()
    elif kind != "text":
        form.refuse("type", "is not text, json_object or json_schema")
    form.done()
    return made


def _guided(fields: Fields) -> dict[str, Constraint]:
    names = {name: f"guided_{name}" for name in ("json", "regex", "choice", "grammar")}
    return _forms(fields, names | {"json_object": "guided_json_object"})


def _structured(fields: Fields) -> dict[str, Constraint]:
    inside = fields.inner("structured_outputs")
    if inside is None:
        return {}
    names = ("json", "regex", "choice", "grammar", "json_object")
    made = _forms(inside, {name: name for name in names})
    in_reasoning = inside.switch("enable_in_reasoning")  # vLLM's name, of a server's option
    inside.done()
    if in_reasoning is None:
        return made
    return {name: replace(form, reasoning=not in_reasoning) for name, form in made.items()}


def _forms(fields: Fields, names: dict[str, str]) -> dict[str, Constraint]:
    """Return the forms that are set, by their paths."""
    schema = fields.raw(names["json"])
    choices = fields.texts(names["choice"], most_of("Choice.choices"))
    regex, grammar = fields.text(names["regex"]), fields.text(names["grammar"])
    for choice in choices:
        if "\0" in choice:
            fields.refuse(names["choice"], "has a choice that holds a NUL")
    made = {
        "json": None if schema is None else _schema(fields, names["json"], schema),
        "regex": None if regex is None else Constraint("regex", regex),
        "grammar": None if grammar is None else Constraint("lark", grammar),
        "choice": Constraint("choice", "\0".join(choices)) if choices else None,
        "json_object": (
            Constraint("json_object", "") if fields.switch(names["json_object"]) else None
        ),
    }
    return {fields.path(names[name]): one for name, one in made.items() if one is not None}


def _schema(fields: Fields, name: str, schema: Any) -> Constraint:
    if isinstance(schema, str):
        return Constraint("json_schema", schema)
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest.of(fields.path(name), "is not a JSON schema")
    return Constraint("json_schema", json.dumps(schema, ensure_ascii=False))
