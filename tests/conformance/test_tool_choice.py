"""A tool call that a request demands always comes, in every format that can be enforced.

A random walk through the grammar stands for a model that would rather write anything else. The
judges are the answer parser, which is what a client's calls come from, and `jsonschema`.
"""

import json
import shutil

import jsonschema
import pytest
from tokenizers import Tokenizer

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.common.events import Finished
from engine.core.common.types import EndReason
from engine.core.text.types import Constraint
from engine.errors import InvalidRequest, Unsupported
from engine.requests.text.answers.choice_parser import parser_of
from engine.requests.text.answers.dialects import DIALECTS, dialect_named
from engine.requests.text.answers.format import AnswerFormat, detect_format
from engine.requests.text.answers.tool_grammar import tool_constraint
from engine.requests.text.answers.value_grammar import without_nulls
from engine.requests.text.chat_values import Chat
from engine.requests.text.values import AnswerTokens, GenerateRequest, Tokens
from engine.worker.sampling.constraint_compiler import ConstraintCompiler
from engine.worker.tokenizing.tokenizer import HfTokenizer
from tests.checkpoints.text import EOS
from tests.support.dialect_turns import FAMILIES, draw
from tests.support.grammar_walks import walk
from tests.support.model_zoo import Zoo

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", 'the "Big" Apple', "Zürich"]},
            "days": {"$ref": "#/$defs/Days"},
            "note": {"type": "string", "maxLength": 4},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
    },
    "now": {"type": "object", "properties": {}},
    "add-up.2": {"properties": {"a": {"type": "boolean"}}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
TEMPLATES = {
    "hermes": "<tool_call></tool_call>",
    "hermes, reasoning": "<think></think><tool_call></tool_call>",
    "llama": "<|python_tag|>",
    "llama, reasoning": "</think><|python_tag|>",
    "mistral, named with reasoning": "[THINK][/THINK][TOOL_CALLS][ARGS]",
    "mistral": "[TOOL_CALLS]",
    "mistral, named": "[TOOL_CALLS][ARGS]",
    "mistral, named with ids": "[TOOL_CALLS][CALL_ID][ARGS]",
    "channels": "<|start|><|channel|><|message|>",
    **{
        dialect.name: " ".join(dialect.signs[0])
        for dialect in DIALECTS
        if dialect.name not in ("channels", "hermes", "llama", "mistral")
    },
    "glm, reasoning": "</think><arg_key>",
    "minimax-m2, reasoning": "</think><minimax:tool_call>",
}


def parse(form, text):
    """Return an answer's text, reasoning and calls."""
    parser = parser_of(form)
    parts = [parser.feed(text), parser.close()]
    calls = [call for part in parts for call in part.calls]
    return "".join(p.text for p in parts), "".join(p.reasoning for p in parts), calls


def check(calls, only):
    """Check that these are calls of the tools, with arguments that their schemas accept."""
    assert calls
    for call in calls:
        assert call.name == only or not only
        arguments = json.loads(call.arguments_json)
        assert isinstance(arguments, dict)
        jsonschema.Draft202012Validator(SCHEMAS[call.name]).validate(arguments)
        assert call.name != "now" or arguments == {}
    assert not only or len(calls) == 1


@pytest.mark.parametrize("only", ["", *SCHEMAS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_whatever_the_grammar_allows_is_parsed_as_calls(marked, name, only):
    tokenizer, grammars = marked
    template = TEMPLATES[name]
    of_think = "[THINK]\n" if name.startswith("mistral") else "<think>\n"
    prompts = ["", of_think] if "reasoning" in name else [""]
    prompts = ["<|start|>assistant"] if name == "channels" else prompts
    named = set()
    for prompt in prompts:
        form = detect_format(template, functions=SCHEMAS, prompt=prompt)
        constraint = tool_constraint(TOOLS, only, form, tokenizer.added_id_of)
        grammars.compile(constraint)
        begins = [""]
        if form.reasoning:  # a random walk would never end the reasoning
            opening, closing, _ = form.reasoning
            call = (*form.tools.openings, "{")[0] if not form.tools.bare else "{"
            begins = [call, f"{opening}\nhm{closing}"]
            if form.begins_inside:
                begins = [f"hm <b> </ hm{closing}\n\n"]
        if form.has_channels:
            thought = "<|channel|>analysis<|message|>hm <b> <|<|end|><|start|>assistant"
            begins = [f"{lead}<|channel|>commentary" for lead in ("", thought)]
        for seed in range(8):
            written = begins[seed % len(begins)]
            begin = tokenizer.encode(written, add_special_tokens=False) if written else ()
            tokens = walk(grammars.start(constraint), seed, begin)
            text, reasoning, calls = parse(
                form, tokenizer.decode(tokens, skip_special_tokens=False)
            )
            assert text == ""
            assert bool(reasoning) == ("hm" in written)
            check(calls, only)
            named |= {call.name for call in calls}
        grammars.forget(constraint)
    assert named == ({only} if only else set(SCHEMAS))


def with_short_texts(schema):
    """Return a drawn schema in which a random walk comes to the end of every string and array."""
    if isinstance(schema, dict):
        short = {key: with_short_texts(value) for key, value in schema.items()}
        bounds = {"string": {"minLength": 1, "maxLength": 5}, "array": {"maxItems": 2}}
        kind = short.get("type")
        if "enum" not in short and isinstance(kind, str):
            short |= bounds.get(kind, {})
        return short
    return [with_short_texts(one) for one in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("name", FAMILIES)
def test_drawn_schemas_are_kept_in_every_dialect(marked, name):
    """Nested schemas, of which some properties are required."""
    tokenizer, grammars = marked
    family = FAMILIES[name]
    dialect = dialect_named(family.dialect)
    num_calls, lead = 0, ()
    if dialect.has_channels:  # a random walk would never end the reasoning
        lead = tokenizer.encode("<|channel|>commentary", add_special_tokens=False)
    for seed in range(10):
        drawn, _ = draw(family, seed)
        functions = with_short_texts(drawn)
        for schema in functions.values():
            schema["required"] = sorted(schema["properties"])[::2]
            schema["additionalProperties"] = False
        form = AnswerFormat(dialect, functions, has_channels=dialect.has_channels)
        tools = [
            {"function": {"name": called, "parameters": own}} for called, own in functions.items()
        ]
        constraint = tool_constraint(tools, "", form, tokenizer.added_id_of)
        grammars.compile(constraint)
        for begin in range(3):
            tokens = walk(grammars.start(constraint), 10 * seed + begin, lead)
            written = tokenizer.decode(tokens, skip_special_tokens=False)
            text, reasoning, calls = parse(form, written)
            assert (text, reasoning) == ("", ""), written
            assert calls, written
            num_calls += len(calls)
            for call in calls:
                arguments = json.loads(call.arguments_json)
                validator = jsonschema.Draft202012Validator(functions[call.name])
                assert validator.is_valid(arguments), (written, functions[call.name])
        grammars.forget(constraint)
    assert num_calls >= 30


REQUIRED = {"type": "object", "required": ["a"]}
EXACT = {
    "pattern": {"type": "string", "pattern": "^[a-c]{2,3}$"},
    "part of a pattern": {"type": "string", "pattern": "a/b", "maxLength": 6},
    "numbers": {"type": "number", "minimum": 2, "exclusiveMaximum": 4},
    "digits or a small number": {
        "type": ["string", "integer"],
        "maximum": 3,
        "pattern": "^[0-9a]{2}$",
    },
    "text or null": {"type": ["string", "null"], "maxLength": 5},
    "anything short": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]},
    "mixed values": {"enum": ["a", 'b "c"', 3, None]},
    "a list": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    "itself": {"$ref": "#/$defs/Tree"},
    "not named": None,
}
TREE = {
    "type": "object",
    "properties": {
        "leaf": {"type": "boolean"},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Tree"}]},
    },
    "required": ["next"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("what", EXACT)
@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "pythonic", "gemma", "hermes"])
def test_a_value_has_what_its_schema_asks_for(marked, name, what):
    tokenizer, grammars = marked
    properties = {} if EXACT[what] is None else {"a": EXACT[what]}
    if EXACT[what] is None and name != "pythonic":
        properties = {"a": {"maxLength": 4, "type": ["string", "integer"]}}
    schema = {**REQUIRED, "properties": properties, "$defs": {"Tree": TREE}}
    if EXACT[what] is None and name == "pythonic":
        schema["required"] = []
    form = AnswerFormat(dialect_named(name), {"f": schema})
    tool = {"name": "f", "parameters": schema}
    constraint = tool_constraint([tool], "f", form, tokenizer.added_id_of)
    grammars.compile(constraint)
    for seed in range(12):
        tokens = walk(grammars.start(constraint), seed)
        written = tokenizer.decode(tokens, skip_special_tokens=False)
        _, _, [call] = parse(form, written)
        arguments = json.loads(call.arguments_json)
        assert jsonschema.Draft202012Validator(schema).is_valid(arguments), written
    grammars.forget(constraint)


SHORT = {"type": "string", "minLength": 1, "maxLength": 3}
BESIDE = {  # an argument's schema, and whether the dialects enforce it
    "a type beside anyOf": ({"type": "string", "anyOf": [SHORT, {"type": "integer"}]}, True),
    "a narrower type": ({"type": "integer", "anyOf": [{"type": "number"}, SHORT]}, True),
    "a type beside enum": ({"type": "integer", "enum": ["a", 1, None]}, True),
    "a type beside const": ({"type": ["string", "null"], "const": "x"}, True),
    "never, or a number": ({"anyOf": [False, {"type": "integer"}]}, True),
    "a value of another type": ({"type": "string", "const": 1}, False),
    "an alternative of another type": ({"type": "null", "anyOf": [SHORT]}, False),
    "const and enum": ({"const": "a", "enum": ["b", "a"]}, False),
    "enum beside anyOf": ({"enum": ["a", 1], "anyOf": [{"const": 1}, {"type": "null"}]}, False),
    "anyOf and oneOf": ({"anyOf": [SHORT, {"const": 1}], "oneOf": [{"const": "a"}, True]}, False),
    "oneOf of strings": ({"oneOf": [SHORT, {"type": "string"}]}, False),
    "a bound beside anyOf": ({"anyOf": [SHORT, {"type": "null"}], "maxLength": 1}, False),
    "a bound beside $ref": ({"$ref": "#/$defs/Text", "maxLength": 1}, False),
    "a type beside $ref": ({"$ref": "#/$defs/Any", "type": "string"}, False),
    "a bound beside $ref in a list": (
        {"type": "array", "items": {"$ref": "#/$defs/Text", "maxLength": 1}, "minItems": 1},
        False,
    ),
    "a note beside $ref": ({"$ref": "#/$defs/Text", "description": "a city"}, True),
}


@pytest.mark.parametrize("what", BESIDE)
@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "pythonic", "gemma"])
def test_keywords_beside_each_other_are_enforced_or_refused(marked, name, what):
    """Where a dialect writes a value as JSON, it may enforce more."""
    tokenizer, grammars = marked
    own, is_enforced = BESIDE[what]
    texts = {"Text": SHORT, "Any": {"anyOf": [SHORT, {"type": "integer", "maximum": 9}]}}
    schema = {**REQUIRED, "properties": {"a": own}, "$defs": texts}
    form = AnswerFormat(dialect_named(name), {"f": schema})
    tools = [{"name": "f", "parameters": schema}]
    is_refused = False
    try:
        constraint = tool_constraint(tools, "f", form, tokenizer.added_id_of)
        grammars.compile(constraint)
    except (Unsupported, InvalidRequest):
        is_refused = True
    assert not (is_enforced and is_refused)
    if is_refused:
        return
    for seed in range(12):
        tokens = walk(grammars.start(constraint), seed)
        written = tokenizer.decode(tokens, skip_special_tokens=False)
        _, _, [call] = parse(form, written)
        arguments = json.loads(call.arguments_json)
        assert jsonschema.Draft202012Validator(schema).is_valid(arguments), written
    grammars.forget(constraint)


@pytest.mark.parametrize(
    ("properties", "others"),
    [({"a": False}, {}), ({}, {"additionalProperties": False}), ({"a": False, "b": True}, {})],
)
@pytest.mark.parametrize("name", ["qwen3-coder", "gemma", "pythonic"])
def test_a_property_that_is_never_valid_is_not_written(marked, name, properties, others):
    tokenizer, _ = marked
    schema = {**REQUIRED, "properties": properties, **others}
    form = AnswerFormat(dialect_named(name), {"f": schema})
    tools = [{"name": "f", "parameters": schema}]
    with pytest.raises(Unsupported):
        tool_constraint(tools, "f", form, tokenizer.added_id_of)
    schema["required"] = []
    assert '"a' not in tool_constraint(tools, "f", form, tokenizer.added_id_of).source


@pytest.mark.parametrize(
    ("own", "what"),
    [
        ({"type": "string", "format": "date"}, "format"),
        ({"$ref": "#/$defs/A", "maxLength": 3}, r"maxLength beside \$ref"),
        ({"anyOf": [{"type": "string"}], "maxLength": 3}, "maxLength beside anyOf"),
        ({"allOf": [{"type": "string"}]}, "allOf"),
        ({"type": "string", "not": {"const": "a"}}, "not"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3-coder", "gemma", "pythonic"])
def test_what_a_dialect_cannot_enforce_is_refused_by_name(name, own, what):
    schema = {"type": "object", "properties": {"a": own}}
    form = AnswerFormat(dialect_named(name), {"f": schema})
    tool = {"name": "f", "parameters": schema}
    with pytest.raises(Unsupported, match=what) as caught:
        tool_constraint([tool], "f", form, lambda _: None)
    assert caught.value.field == "chat.tools[0].parameters"


NULLS = {  # an argument's schema with null keywords
    "a text": {"type": "string", "enum": None, "maxLength": 3, "minLength": None, "pattern": None},
    "values": {"enum": ["a", None], "anyOf": None},
    "a null": {"const": None, "enum": None},
    "a list": {"type": "array", "minItems": None, "maxItems": 2, "items": {"type": "boolean"}},
    "a list of anything": {"type": "array", "maxItems": 0, "items": None},
    "an object": {
        "type": "object",
        "required": None,
        "properties": {"required": {"type": "boolean", "enum": None}},
        "additionalProperties": False,
    },
    "a reference": {"$ref": "#/$defs/A", "anyOf": None},
}


@pytest.mark.parametrize("what", NULLS)
@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "pythonic", "gemma", "hermes"])
def test_a_keyword_that_is_null_is_as_good_as_absent(marked, name, what):
    tokenizer, grammars = marked
    schema = {
        "type": "object",
        "properties": {"a": NULLS[what]},
        "required": ["a"],
        "additionalProperties": None,
        "$defs": {"A": {"type": "integer", "minimum": 1, "maximum": 9, "enum": None}},
    }
    form = AnswerFormat(dialect_named(name), {"f": schema})
    tool = {"name": "f", "parameters": schema}
    constraint = tool_constraint([tool], "f", form, tokenizer.added_id_of)
    grammars.compile(constraint)
    valid = jsonschema.Draft202012Validator(without_nulls(schema))
    for seed in range(6):
        tokens = walk(grammars.start(constraint), seed)
        written = tokenizer.decode(tokens, skip_special_tokens=False)
        _, _, [call] = parse(form, written)
        assert valid.is_valid(json.loads(call.arguments_json)), written
    grammars.forget(constraint)


MALFORMED = [
    {"properties": 5},
    {"properties": ["a"]},
    {"required": 5, "properties": {"a": {}}},
    {"required": [{}]},
    {"required": [5]},
    {"properties": {"a": {"type": "array", "minItems": "x"}}},
    {"properties": {"a": {"type": "array", "maxItems": []}}},
    {"properties": {"a": {"enum": 5}}},
    {"properties": {"a": {"anyOf": 5}}},
]


@pytest.mark.parametrize("schema", MALFORMED, ids=str)
@pytest.mark.parametrize("name", ["qwen3-coder", "gemma", "pythonic"])
def test_a_malformed_schema_is_the_requests_fault(marked, name, schema):
    tokenizer, grammars = marked
    form = AnswerFormat(dialect_named(name), {"f": schema})
    tools = [{"name": "g"}, {"name": "f", "parameters": schema}]
    with pytest.raises((InvalidRequest, Unsupported)) as caught:
        grammars.compile(tool_constraint(tools, "", form, tokenizer.added_id_of))
    refused = caught.value
    field = refused.field if isinstance(refused, Unsupported) else refused.violations[0].field
    assert field in ("chat.tools[1].parameters", "chat.tools")


@pytest.mark.parametrize("times", [1, 50])
def test_a_string_that_is_an_alternative_of_itself_is_refused(times):
    """Red with a RecursionError, or after 50^8 steps, if alternatives are followed without end."""
    own = {"anyOf": [{"$ref": "#/$defs/a"}] * times + [{"type": "string"}]}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": own}}
    form = AnswerFormat(dialect_named("qwen3-coder"), {"f": schema})
    tool = {"name": "f", "parameters": schema}
    with pytest.raises(Unsupported, match="anyOf") as caught:
        tool_constraint([tool], "f", form, lambda _: None)
    assert caught.value.field == "chat.tools[0].parameters"


def test_a_format_that_is_not_known_cannot_be_enforced():
    form = detect_format("", functions=SCHEMAS, prompt="")
    with pytest.raises(Unsupported, match=r"^chat\.tool_choice cannot be enforced") as caught:
        tool_constraint(TOOLS, "", form, lambda _: None)
    assert caught.value.field == "chat.tool_choice"


@pytest.mark.parametrize(
    ("template", "function", "field"),
    [
        (
            "<tool_call>",
            {"name": "f", "parameters": {"type": "string"}},
            "chat.tools[0].parameters",
        ),
        ("<tool_call>", {"name": "f", "parameters": True}, "chat.tools[0].parameters"),
        ("<tool_call>", {"name": "f", "parameters": {"enum": {1}}}, "chat.tools[0].parameters"),
        ("[TOOL_CALLS][ARGS]", {"name": "get it"}, "chat.tools[0].name"),
        ("<|channel|><|message|>", {"name": "get it"}, "chat.tools[0].name"),
        ("<tool_call>", {"name": "f" * 70_000}, "chat.tools"),
    ],
)
def test_a_tool_that_cannot_be_called_is_named(template, function, field):
    form = detect_format(template, functions=SCHEMAS, prompt="")
    with pytest.raises(InvalidRequest) as caught:
        tool_constraint([{"function": function}], "", form, lambda _: None)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_schema_that_cannot_be_enforced_is_refused_by_the_tools_field(marked):
    tokenizer, grammars = marked
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "foo"}}}}
    form = detect_format("<tool_call>", functions={"f": {}}, prompt="")
    constraint = tool_constraint([tool], "", form, tokenizer.added_id_of)
    with pytest.raises(InvalidRequest, match="foo") as caught:
        grammars.compile(constraint)
    assert [violation.field for violation in caught.value.violations] == ["chat.tools"]


def test_a_tokenizer_that_cannot_be_constrained_names_the_choice():
    from tokenizers import models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    own = ConstraintCompiler(HfTokenizer(words), 3, frozenset({2}))
    form = detect_format("<tool_call>", functions=SCHEMAS, prompt="")
    constraint = tool_constraint(TOOLS, "", form, lambda _: None)
    with pytest.raises(Unsupported, match="tokenizer") as caught:
        own.compile(constraint)
    assert caught.value.field == "chat.tool_choice"
    own.close()


# ---- by a model ------------------------------------------------------------------------------


# Text added to a tiny model's template, so that it takes tools: in Hermes' format, or in channels.
TAKES_TOOLS = {
    "llama": "{% if tools %}<tool_call></tool_call>{% endif %}",
    "gpt_oss": "{% if tools %}f{% endif %}<|channel|>final<|message|>?<|end|><|start|>assistant",
}


@pytest.fixture(scope="module", params=TAKES_TOOLS)
def directory(request, tmp_path_factory):
    """Return a tiny model with a template that takes tools, in Hermes' format or in channels."""
    made = tmp_path_factory.mktemp("model") / request.param
    shutil.copytree(Zoo(tmp_path_factory.mktemp("zoo")).directory(request.param), made)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # EOS is a marker of channels
        (made / name).write_text((made / name).read_text().replace(EOS, "<|eos|>"))
    path = made / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] += TAKES_TOOLS[request.param]
    path.write_text(json.dumps(config))
    return made


async def answer(eng, chat, **fields):
    """Return each choice's text, calls and end."""
    found = [["", [], None] for _ in range(fields.get("n", 1))]
    sampling = {"max_tokens": 400, "temperature": 3.0, "seed": 1}
    async with eng.generate(GenerateRequest(chat=chat, sampling=sampling, **fields)) as stream:
        async for event in stream:
            if isinstance(event, Finished):
                found[event.choice][2] = event.reason
            elif isinstance(event, Tokens):
                found[event.choice][0] += event.text
                if isinstance(event, AnswerTokens):
                    found[event.choice][1] += event.tool_calls
    return found


async def test_a_random_model_calls_what_it_must(directory):
    ask = [{"role": "user", "content": "How will the weather be?"}]
    config = EngineConfig(models=(ModelConfig(str(directory)),), check_level=2)
    async with open_engine(config) as eng:
        for choice in ("get_weather", "now", "required"):
            found = await answer(eng, Chat(ask, TOOLS, tool_choice=choice), n=8)
            for text, calls, reason in found:
                if reason is EndReason.STOP:
                    assert text == ""
                    check(calls, "" if choice == "required" else choice)
            assert any(reason is EndReason.STOP for _, _, reason in found)
        for choice in ("auto", "none"):
            [(text, calls, _)] = await answer(eng, Chat(ask, TOOLS, tool_choice=choice))
            assert text
            assert calls == []


@pytest.mark.parametrize("name", ["glm", "qwen3-coder", "kimi-k2", "lfm2", "gemma"])
async def test_a_setting_names_the_dialect_of_a_model(directory, name):
    """The template has another dialect, Hermes' or channels; whole calls and parts are equal."""
    ask = [{"role": "user", "content": "How will the weather be?"}]
    model = ModelConfig(str(directory), tool_format=name)
    async with open_engine(EngineConfig(models=(model,), check_level=2)) as eng:
        chat = Chat(ask, TOOLS, tool_choice="get_weather")
        whole = await answer(eng, chat, n=8)
        parts = await answer(eng, chat, n=8, output={"tool_argument_deltas": True})
    ended = 0
    for (text, calls, reason), (_, grown, _) in zip(whole, parts, strict=True):
        if reason is EndReason.STOP:
            ended += 1
            assert text == ""
            check(calls, "get_weather")
            assert "".join(call.arguments_json for call in grown) == calls[0].arguments_json
            assert (grown[0].name, len(grown) > 1) == ("get_weather", True)
    assert ended


SAID = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello!"


async def test_channels_come_as_reasoning_and_text(directory):
    """A constraint makes the model write channels, which are text for models without channels."""
    constraint = Constraint("choice", SAID)
    chat = Chat([{"role": "user", "content": "Hi"}])
    config = EngineConfig(models=(ModelConfig(str(directory)),), check_level=2)
    async with open_engine(config) as eng:
        request = GenerateRequest(chat=chat, constraint=constraint, sampling={"max_tokens": 200})
        async with eng.generate(request) as stream:
            events = [event async for event in stream if isinstance(event, Tokens)]
    text = "".join(event.text for event in events)
    reasoning = "".join(e.reasoning for e in events if isinstance(e, AnswerTokens))
    is_parsed = directory.name == "gpt_oss"
    assert (text, reasoning) == (("Hello!", "Hm.") if is_parsed else (SAID, ""))
