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
from engine.requests.text.answers.dialects import (
    CHANNEL,
    CONSTRAIN,
    FUNCTIONS,
    MESSAGE,
    RECIPIENT,
    parts_of,
)
from engine.requests.text.answers.reader import NAME_CHARS_MAX
from engine.requests.text.answers.reasoning_grammar import lead_rules, literal, marker
from engine.requests.text.answers.value_grammar import SPACING, ValueGrammar, without_nulls
from engine.requests.text.chat_values import function_of
from engine.requests.text.values import MAX_CONSTRAINT_CHARS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.requests.text.answers.dialects import Dialect, Form, Part
    from engine.requests.text.answers.format import AnswerFormat
    from engine.requests.text.answers.reasoning_grammar import FindId

    Tool = Mapping[str, Any]

NO_ARGUMENTS = frozenset({"type", "properties"})  # the keys of a schema without arguments
PLAIN_NAME = re.compile(rf"[\w.-]{{1,{NAME_CHARS_MAX}}}")


def tool_constraint(
    tools: Sequence[Tool], only: str, form: AnswerFormat, find_id: FindId
) -> Constraint:
    """Return the constraint of an answer that calls at least one of the tools or, with a name in
    ``only``, that tool once.

    ``find_id`` returns the id of a text that is one token of its own in the model's vocabulary.

    Raises:
        Unsupported: the model's calls have a format that cannot be enforced.
        InvalidRequest: a tool cannot be called in this format.
    """
    if form.tools is None:
        raise Unsupported(
            "chat.tool_choice cannot be enforced for this model, whose chat template has no dialect"
            " of calls that is known here; leave it out, or set it to auto or none; the server may "
            "name the dialect by --tool-format",
            field="chat.tool_choice",
        )
    grammar = _Grammar(form.tools, find_id)
    wanted = [(i, function_of(tool)) for i, tool in enumerate(tools)]
    wanted = [(i, function) for i, function in wanted if only in ("", function["name"])]
    rules = lead_rules(form, find_id, "calls")
    for i, function in wanted:
        rules.append(f"f{i}: {grammar.function(i, function)}")
    rules += grammar.rules
    rules.append(f"one: {' | '.join(f'f{i}' for i, _ in wanted)}")
    rules.append(f"calls: {grammar.calls(is_single=bool(only))}")
    source = "\n".join(rules) + "\n"
    if len(source) > MAX_CONSTRAINT_CHARS:
        what = f"make a grammar of {len(source)} characters, of at most {MAX_CONSTRAINT_CHARS}"
        raise InvalidRequest.of("chat.tools", f"{what}, for tool_choice to be enforced")
    return Constraint(TOOLS_KIND, source)


class _Grammar:
    """The grammar of calls in a dialect. ``rules`` are those that others refer to."""

    def __init__(self, dialect: Dialect, find_id: FindId) -> None:
        self._dialect = dialect
        self._find_id = find_id
        self.rules: list[str] = []

    def calls(self, *, is_single: bool) -> str:
        """Return the right side of the rule for all calls; ``one`` is a bare call."""
        form = self._dialect.write
        if form is None:  # the answer ends after each call
            return f"{marker(CHANNEL, self._find_id)} one"
        several = "one"
        if not is_single and self._dialect.name != "llama":  # whose templates take one in a turn
            several = f"one ({self._written(form.between)} one)*" if form.between else "one+"
        return f"{self._written(form.opening)} {several} {self._written(form.closing)}".strip()

    def function(self, index: int, function: Tool) -> str:
        """Return the right side of the rule for a call of one function."""
        form, name = self._dialect.write, function["name"]
        if form is None:
            _check_name(index, name)
            to = literal(f"commentary {RECIPIENT}{FUNCTIONS}{name} ")
            markers = marker(CONSTRAIN, self._find_id), marker(MESSAGE, self._find_id)
            self.rules.append(f"a{index}: {_arguments(index, function)}")
            return f'{to} {markers[0]} "json" {markers[1]} a{index}'
        written: list[str] = []
        for part in _with_groups(form.call):
            if isinstance(part, list):
                inner = " ".join(self._part(form, one, index, function) for one in part)
                has_id = any(one.kind == "id" for one in part)
                written.append(f"({inner})?" if has_id else inner)
            else:
                written.append(self._part(form, part, index, function))
        return " ".join(written)

    def _written(self, parts: Sequence[Part]) -> str:
        return " ".join(marker(part.text, self._find_id) for part in parts)

    def _part(self, form: Form, part: Part, index: int, function: Tool) -> str:
        """Return how a part of a call is written."""
        if part.kind in ("text", "space"):
            return marker(part.text, self._find_id)
        if part.kind == "name":
            _check_name(index, function["name"])
            return literal(function["name"])
        if part.kind == "id":
            return f"/{self._dialect.id}/"
        if part.kind == "object":
            return self._object(index, function)
        if part.kind == "arguments":
            self.rules.append(f"a{index}: {_arguments(index, function)}")
            return f"a{index}"
        schema = _schema_of(index, function)
        field = f"chat.tools[{index}].parameters"
        values = ValueGrammar(form, schema, f"v{index}", field, self._find_id)
        try:
            right = values.parameters() if part.kind == "parameters" else values.keywords()
        except (TypeError, ValueError, AttributeError):  # a keyword's value is of another type
            raise InvalidRequest.of(field, "is not a valid JSON Schema") from None
        self.rules += [f"a{index}: {right}", *values.rules]
        return f"a{index}"

    def _object(self, index: int, function: Tool) -> str:
        """Return how the object of a call is written."""
        written = []
        self.rules.append(f"a{index}: {_arguments(index, function)}")
        for part in parts_of(self._dialect.object):
            if part.kind == "name":
                written.append(literal(json.dumps(function["name"], ensure_ascii=False)))
            elif part.kind == "id":
                written.append(f"/{self._dialect.id}/")
            else:
                written.append(f"a{index}" if part.kind == "arguments" else literal(part.text))
        return " ".join(written)


def _with_groups(parts: Sequence[Part]) -> list[Part | list[Part]]:
    """Return the parts, of which those of one group are a list."""
    found: list[Part | list[Part]] = []
    group = 0
    for part in parts:
        if part.group and part.group == group:
            found[-1].append(part)  # type: ignore[union-attr]
        else:
            found.append([part] if part.group else part)
        group = part.group
    return found


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
    schema = _schema_of(index, function)
    if not schema.get("properties") and schema.keys() <= NO_ARGUMENTS:
        return '"{}"'
    try:
        return "%json " + json.dumps({"type": "object", **schema, "x-guidance": SPACING})
    except (TypeError, ValueError):
        raise InvalidRequest.of(f"chat.tools[{index}].parameters", "is not JSON") from None


def _schema_of(index: int, function: Tool) -> Mapping[str, Any]:
    """Return the schema of a function's arguments."""
    schema = without_nulls(function.get("parameters") or {})
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        field = f"chat.tools[{index}].parameters"
        raise InvalidRequest.of(field, "must be the schema of an object")
    return schema
