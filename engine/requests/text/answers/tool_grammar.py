"""Makes the grammar of an answer that must call a tool, in the format of its model.

Rule: whatever the grammar allows, the format's `engine.requests.text.answers.reader.AnswerReader`
reads as calls of the chat's tools, after reasoning if the model reasons, and as nothing else. JSON
has the spacing that Python's `json.dumps` writes, as the models have seen it in training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.core.text.types import TOOLS_KIND, Constraint
from engine.errors import InvalidRequest, Unsupported
from engine.requests.text.answers.format import (
    CHANNEL,
    CHANNEL_ENDS,
    CONSTRAIN,
    FUNCTIONS,
    HERMES_CLOSE,
    HERMES_OPEN,
    MESSAGE,
    MISTRAL_ARGS,
    MISTRAL_ID,
    MISTRAL_OPEN,
    RECIPIENT,
    START,
    ToolFormat,
)
from engine.requests.text.answers.reader import NAME_CHARS_MAX
from engine.requests.text.chat_values import function_of
from engine.requests.text.values import MAX_CONSTRAINT_CHARS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.requests.text.answers.format import AnswerFormat

    Tool = Mapping[str, Any]
    FindId = Callable[[str], int | None]

# Templates of models whose calls are not JSON: Qwen3-Coder's and GLM's.
OTHER_CALLS = ("<function=", "<arg_key>")
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_ARGUMENTS = frozenset({"type", "properties"})  # the keys of a schema without arguments
PLAIN_NAME = re.compile(rf"[\w.-]{{1,{NAME_CHARS_MAX}}}")


def tool_constraint(
    tools: Sequence[Tool], only: str, template: str, form: AnswerFormat, find_id: FindId
) -> Constraint:
    """Return the constraint of an answer that calls at least one of the tools or, with a name in
    ``only``, that tool once.

    ``find_id`` returns the id of a text that is one token of its own in the model's vocabulary.

    Raises:
        Unsupported: the model's calls have a format that cannot be enforced.
        InvalidRequest: a tool cannot be called in this format.
    """
    if form.tools is None or any(mark in template for mark in OTHER_CALLS):
        raise Unsupported(
            "chat.tool_choice cannot be enforced for this model, whose calls are not written as "
            "JSON that is known here; leave it out, or set it to auto or none",
            field="chat.tool_choice",
        )
    wanted = [(i, function_of(tool)) for i, tool in enumerate(tools)]
    wanted = [(i, function) for i, function in wanted if only in ("", function["name"])]
    rules = [*_lead(form, find_id)]
    names = []
    for i, function in wanted:
        names.append(f"f{i}")
        rules.append(f"a{i}: {_arguments(i, function)}")
        rules.append(f"f{i}: {_function(i, function, template, form.tools, find_id)}")
    rules.append(f"one: {' | '.join(names)}")
    rules.append(f"calls: {_calls(template, form.tools, find_id, is_single=bool(only))}")
    source = "\n".join(rules) + "\n"
    if len(source) > MAX_CONSTRAINT_CHARS:
        what = f"make a grammar of {len(source)} characters, of at most {MAX_CONSTRAINT_CHARS}"
        raise InvalidRequest.of("chat.tools", f"{what}, for tool_choice to be enforced")
    return Constraint(TOOLS_KIND, source)


def _lead(form: AnswerFormat, find_id: FindId) -> list[str]:
    """Return the rules of the whole answer and of the reasoning before the calls."""
    if form.has_channels:
        begin = f'{_marker(CHANNEL, find_id)} "analysis" {_marker(MESSAGE, find_id)}'
        again = f'{_marker(START, find_id)} "assistant"'
        return [f"start: ({begin} thought {again})? calls", _thought(CHANNEL_ENDS[0], find_id)]
    if form.reasoning is None:
        return ["start: calls"]
    opening, closing, _ = form.reasoning
    rules = [r"reasoning: thought /[ \n]{1,4}/?", _thought(closing, find_id)]
    if form.begins_inside:
        return ["start: reasoning calls", *rules]
    return [f"start: ({_marker(opening, find_id)} reasoning)? calls", *rules]


def _thought(end: str, find_id: FindId) -> str:
    """Return the rule of any text up to a marker, with the marker."""
    token_id = find_id(end)
    if token_id is not None:
        return rf"thought: /(.|\n)*/ <[{token_id}]>"
    escaped = re.escape(end).replace("/", r"\/")
    return rf"thought[lazy]: /(.|\n)*{escaped}/"


def _calls(template: str, kind: ToolFormat, find_id: FindId, *, is_single: bool) -> str:
    """Return the right side of the grammar's rule for all calls; ``one`` is a bare call."""
    if kind is ToolFormat.HERMES:
        opening, closing = _marker(HERMES_OPEN, find_id), _marker(HERMES_CLOSE, find_id)
        call = f'{opening} "\\n" one "\\n" {closing}'
        return call if is_single else f'{call} ("\\n" {call})*'
    if kind is ToolFormat.LLAMA:  # Llama's templates take one call in a turn
        return "one"
    if kind is ToolFormat.CHANNELS:  # the answer ends after each call
        return f"{_marker(CHANNEL, find_id)} one"
    opening = _marker(MISTRAL_OPEN, find_id)
    if MISTRAL_ARGS in template:
        return f"{opening} one" if is_single else f"({opening} one)+"
    return f'{opening} " "? "[" one "]"' if is_single else f'{opening} " "? "[" one (", " one)* "]"'


def _function(index: int, function: Tool, template: str, kind: ToolFormat, find_id: FindId) -> str:
    """Return the right side of the grammar's rule for a call of one function. It names the rule of
    the arguments by the function's index."""
    name: str = function["name"]
    if kind is ToolFormat.CHANNELS:
        _check_name(index, name)
        to = _literal(f"commentary {RECIPIENT}{FUNCTIONS}{name} ")
        markers = _marker(CONSTRAIN, find_id), _marker(MESSAGE, find_id)
        return f'{to} {markers[0]} "json" {markers[1]} a{index}'
    if kind is ToolFormat.MISTRAL and MISTRAL_ARGS in template:
        _check_name(index, name)
        call_id = ""
        if MISTRAL_ID in template:
            call_id = f"({_marker(MISTRAL_ID, find_id)} /[a-zA-Z0-9]{{9}}/)?"
        return f"{json.dumps(name)} {call_id} {_marker(MISTRAL_ARGS, find_id)} a{index}"
    key = "parameters" if kind is ToolFormat.LLAMA else "arguments"
    written = json.dumps(name, ensure_ascii=False)
    return f'{_literal(f"""{{"name": {written}, "{key}": """)} a{index} "}}"'


def _check_name(index: int, name: str) -> None:
    """Check a function's name where the model writes it without quotes."""
    if not PLAIN_NAME.fullmatch(name):
        raise InvalidRequest.of(
            f"chat.tools[{index}].name",
            "must be letters, digits, _, - and . for tool_choice to be enforced",
        )


def _arguments(index: int, function: Tool) -> str:
    """Return the right side of the grammar's rule for a function's arguments: an object that the
    function's schema accepts, and an empty object without a schema."""
    schema = function.get("parameters") or {}
    field = f"chat.tools[{index}].parameters"
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidRequest.of(field, "must be the schema of an object")
    if not schema.get("properties") and schema.keys() <= NO_ARGUMENTS:
        return '"{}"'
    try:
        return "%json " + json.dumps({"type": "object", **schema, "x-guidance": SPACING})
    except (TypeError, ValueError):
        raise InvalidRequest.of(field, "is not JSON") from None


def _marker(text: str, find_id: FindId) -> str:
    """Return a marker as a grammar has it: by its id if it is one token, otherwise by its text."""
    token_id = find_id(text)
    return _literal(text) if token_id is None else f"<[{token_id}]>"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
