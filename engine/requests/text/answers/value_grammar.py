"""Makes the grammar of a call's arguments in dialects that do not write them as one JSON object.

Rule: whatever the grammar allows, `engine.requests.text.answers.call_reader` reads as arguments
that the function's schema accepts. It may allow less: additional properties are never written, and
where a schema accepts strings beside other types, only strings that look like no other type. What
cannot be written exactly is refused by the name of its keyword.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from engine.errors import InvalidRequest, Unsupported
from engine.requests.text.answers.argument_values import STRING, TYPES, is_of, referred, types_of
from engine.requests.text.answers.reader import NAME_CHARS_MAX
from engine.requests.text.answers.reasoning_grammar import (
    Rules,
    literal,
    marker,
    with_escaped_slashes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.requests.text.answers.dialects import Form
    from engine.requests.text.answers.reasoning_grammar import FindId

    Schema = Mapping[str, Any]

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords that say nothing about which values are valid.
NOTES = frozenset({"title", "description", "default", "examples", "$schema", "$comment", "$id"})
NOTES |= {"$defs", "definitions", "deprecated", "readOnly", "writeOnly"}
OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
OF_ARRAYS = frozenset({"items", "minItems", "maxItems"})
OF_TEXTS = frozenset({"minLength", "maxLength", "pattern"})
OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
KEYS = {
    "object": OF_OBJECTS,
    "array": OF_ARRAYS,
    "string": OF_TEXTS,
    "number": OF_NUMBERS | {"format"},
    "integer": OF_NUMBERS | {"format"},
}
PLAIN_KEY = re.compile(rf"[^=,:(){{}}\[\]<>\s\"'`\\]{{1,{NAME_CHARS_MAX}}}")
# A string that an argument's conversion would take for a value of another type.
OTHER_TYPE = r"/\s*([\[\{(](?s:.*)|[\-+.0-9](?s:.*)|[tT]rue|[fF]alse|null|[nN]one|\"(?s:.*))\s*/"
ANY_TEXT = {"type": "string"}
COUNT_MAX = 100  # least items of an array, and alternatives of a string; a guess
# Keywords whose value may be null, and those whose value has schemas by any name.
OF_VALUES = frozenset({"const", "default"})
OF_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas"})
OF_SCHEMAS |= {"$defs", "definitions"}


def without_nulls(schema: Any) -> Any:
    """Return a schema without its keywords that are null, which say as much as absent ones."""
    if isinstance(schema, list | tuple):
        return [without_nulls(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, own in schema.items():
        if key in OF_SCHEMAS and isinstance(own, Mapping):
            kept[key] = {name: without_nulls(one) for name, one in own.items()}
        elif key in OF_VALUES or (key in ("enum", "examples") and own is not None):
            kept[key] = own
        elif own is not None:
            kept[key] = without_nulls(own)
    return kept


class ValueGrammar:
    """The grammar of one function's arguments. The names of ``rules``, to which the others refer,
    begin with ``prefix``."""

    def __init__(
        self, form: Form, schema: Schema, prefix: str, field: str, find_id: FindId
    ) -> None:
        self._form = form
        self._root = schema
        self._field = field
        self._find_id = find_id
        self._by_reference: dict[str, str] = {}
        self._num_alternatives = 0
        self._rules = Rules(prefix)

    @property
    def rules(self) -> list[str]:
        """The rules to which the others refer."""
        return self._rules.lines

    def parameters(self) -> str:
        """Return the right side of a rule for arguments that are written one by one."""
        schema, written = self._resolved(self._root), []
        for key, own in self._properties(schema):
            value = " ".join(self._pattern_of(key, own))
            written.append(value if key in schema.get("required", ()) else f"({value})?")
        return " ".join(written) or '""'

    def keywords(self) -> str:
        """Return the right side of a rule for arguments in the form's notation."""
        notation = self._form.notation
        schema = self._resolved(self._root)
        separator = ", " if notation.has_escapes else ","
        return self._members(schema, separator, lambda key: literal(key + notation.equals))

    # ---- arguments one by one

    def _pattern_of(self, key: str, schema: Any) -> list[str]:
        """Return the parts of an argument."""
        pattern = self._form.pattern
        kinds = [part.kind for part in pattern]
        at = kinds.index("value")
        written = [
            literal(key) if part.kind == "key" else marker(part.text, self._find_id)
            for part in pattern[:at]
        ]
        rest = pattern[at + 1 :]
        types = types_of(schema, self._root)
        if "string" in types:
            padding = "\n" if self._form.parameter.is_padded else ""
            closing = self._form.parameter.closing
            written += self._text(schema, closing, padding, is_mixed=types != STRING)
            rest = rest[[part.text for part in rest].index(closing) + 1 :]
        else:
            written.append(self._json(schema))
        return written + [marker(part.text, self._find_id) for part in rest]

    def _json(self, schema: Any) -> str:
        """Return a rule for the JSON of a schema."""
        own = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        try:
            return self._rules.add("%json " + json.dumps({**own, **schema, "x-guidance": SPACING}))
        except (TypeError, ValueError):
            raise InvalidRequest.of(self._field, "is not JSON") from None

    def _text(
        self, schema: Any, closing: str, padding: str = "", *, is_mixed: bool = False
    ) -> list[str]:
        """Return the grammar's symbols for a string without quotes and for ``closing``, the marker
        that ends it. ``is_mixed``: the schema accepts other types, too, and a text that reads as a
        value of theirs is not accepted."""
        self._num_alternatives = 0
        contents = " | ".join(self._contents(schema))
        end = re.escape(closing).replace("/", r"\/")
        rule = f"({contents}) & ~/(?s:.*){end}(?s:.*)/"
        if is_mixed:
            rule += f" & ~{OTHER_TYPE}"
        if padding:
            rule = f"({rule}) {literal(padding)}"
        ended = marker(closing, self._find_id)
        if ended.startswith("<["):
            return [self._rules.add(rule, is_terminal=True), ended]
        return [self._rules.add(f"({rule}) {ended}", is_terminal=True)]

    def _contents(self, schema: Any) -> list[str]:
        """Return the terminals of the strings that a schema accepts."""
        self._num_alternatives += 1
        if self._num_alternatives > COUNT_MAX:
            self._refuse(f"anyOf with more than {COUNT_MAX} alternatives, or one inside itself")
        schema = self._resolved(schema)
        values = self._values_of(schema)
        if values is not None:
            return [literal(value) for value in values if isinstance(value, str)]
        if branches := self._branches_of(schema):
            found = [one for one in branches if "string" in types_of(one, self._root)]
            if "oneOf" in schema and len(found) > 1:
                self._refuse("oneOf with types that overlap")
            return [content for one in found for content in self._contents(one)]
        self._check_keys(schema, NOTES | {"type"} | OF_TEXTS | OF_NUMBERS)
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        terminal = f"/(?s:.{{{least},{most}}})/" if least or most != "" else "/(?s:.*)/"
        if "pattern" in schema:
            pattern = str(schema["pattern"])
            before = "" if pattern.startswith("^") else "(?s:.*)"
            after = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else "(?s:.*)"
            core = pattern.removeprefix("^").removesuffix("" if after else "$")
            core = with_escaped_slashes(core)
            terminal = f"{terminal} & /{before}({core}){after}/"
        return [f"({terminal})"]

    # ---- arguments in a notation

    def _members(self, schema: Schema, separator: str, key_of: Callable[[str], str]) -> str:
        """Return the right side of a rule for an object's members, of which those that are not
        required may be missing."""
        rest = first = '""'
        for key, own in reversed(self._properties(schema)):
            value = f"{key_of(key)} {self._value(own)}"
            first_name, rest_name = self._rules.add(first), self._rules.add(rest)
            first = f"{value} {rest_name}"
            rest = f"{literal(separator)} {value} {rest_name}"
            if key not in schema.get("required", ()):
                first, rest = f"{first} | {first_name}", f"{rest} | {rest_name}"
        return first

    def _value(self, schema: Any) -> str:
        """Return a rule for a value of a schema."""
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            self._check_keys(schema, NOTES | {"$ref"}, beside="$ref")
            reference = schema["$ref"]
            if reference not in self._by_reference:
                name = self._by_reference[reference] = self._rules.add("")
                self._rules.put(name, self._value(referred(reference, self._root)))
            return self._by_reference[reference]
        if not isinstance(schema, Mapping):
            if schema is False:
                self._refuse("false")
            schema = {}
        if branches := self._branches_of(schema):
            each = [types_of(one, self._root) for one in branches]
            if "oneOf" in schema and sum(map(len, each)) != len(frozenset().union(*each)):
                self._refuse("oneOf with types that overlap")
            return self._rules.add(" | ".join(self._value(one) for one in branches))
        values = self._values_of(schema)
        if values is not None:
            return self._rules.add(" | ".join(self._constant(value) for value in values))
        types = types_of(schema, self._root)
        if types == TYPES:
            types = TYPES - {"object", "array"}  # of what may be anything
        types -= {"integer"} if "number" in types else frozenset()
        allowed = NOTES | {"type"}
        for one in types:
            allowed |= KEYS.get(one, frozenset())
        self._check_keys(schema, allowed)
        return self._rules.add(" | ".join(self._typed(one, schema) for one in sorted(types)))

    def _typed(self, kind: str, schema: Schema) -> str:
        """Return a value of one type."""
        notation = self._form.notation
        if kind == "boolean":
            return '("True" | "False")' if notation.has_escapes else '("true" | "false")'
        if kind == "null":
            return '"None"' if notation.has_escapes else '"null"'
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            separator = ", " if notation.has_escapes else ","
            members = self._members(schema, separator, self._key)
            return f'"{{" {self._rules.add(members)} "}}"'
        own = {key: schema[key] for key in KEYS[kind] - {"format"} if key in schema}
        if kind != "string":
            return self._json({"type": kind, **own})
        if not notation.has_escapes:
            [quote] = notation.quotes
            return " ".join([marker(quote, self._find_id), *self._text({**own, **ANY_TEXT}, quote)])
        if "pattern" in own:
            return self._json({**own, **ANY_TEXT})
        count = f"{{{own.get('minLength', 0)},{own.get('maxLength', '')}}}" if own else "*"
        character = r'([^"\\\x00-\x1F\x7F]|\\[nt"\\])'
        return self._rules.add(f'/"{character}{count}"/', is_terminal=True)

    def _array(self, schema: Schema) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if least > COUNT_MAX:
            self._refuse(f"minItems above {COUNT_MAX}")
        if most == 0:
            return '"[]"'
        item = self._value(schema.get("items", {}))
        separator = '", "' if self._form.notation.has_escapes else '","'
        more = f"({separator} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        items = f"{item} {more}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _key(self, key: str) -> str:
        if self._form.notation.has_escapes:
            return literal(json.dumps(key, ensure_ascii=False) + ": ")
        return literal(f"{key}:")

    def _constant(self, value: Any) -> str:
        """Return the text of a value."""
        notation = self._form.notation
        if isinstance(value, bool) or value is None:
            words = {True: "True", False: "False", None: "None"}
            plain = {True: "true", False: "false", None: "null"}
            return literal((words if notation.has_escapes else plain)[value])
        if isinstance(value, str) and not notation.has_escapes:
            quote = marker(notation.quotes[0], self._find_id)
            return f"{quote} {literal(value)} {quote}" if value else f"{quote} {quote}"
        if isinstance(value, dict | list):
            self._refuse("enum with objects or arrays")
        return literal(json.dumps(value, ensure_ascii=False))

    # ---- schemas

    def _resolved(self, schema: Any) -> Schema:
        for _ in range(COUNT_MAX):
            if not isinstance(schema, Mapping):
                return {}
            if not isinstance(schema.get("$ref"), str):
                return schema
            self._check_keys(schema, NOTES | {"$ref"}, beside="$ref")
            schema = referred(schema["$ref"], self._root)
        self._refuse("$ref to itself")

    def _values_of(self, schema: Schema) -> list[Any] | None:
        """Return the values that a schema lists; None if it lists none."""
        name = "const" if "const" in schema else "enum"
        if name not in schema:
            return None
        self._check_keys(schema, NOTES | {"type", name}, beside=name)
        types = types_of(schema, self._root)
        listed = [schema["const"]] if name == "const" else schema["enum"]
        values = [value for value in listed if is_of(value, types)]
        if not values:
            self._refuse(f"{name} without a value of its type")
        return values

    def _branches_of(self, schema: Schema) -> list[Any]:
        """Return the alternatives of a schema, as far as they are of its own type; none if it has
        no alternatives."""
        name = "anyOf" if schema.get("anyOf") else "oneOf"
        if not schema.get(name):
            return []
        self._check_keys(schema, NOTES | {"type", name}, beside=name)
        own = types_of({"type": schema["type"]} if "type" in schema else {}, self._root)
        found = []
        for branch in schema[name]:
            types = types_of(branch, self._root)
            if not types & own:
                continue
            one = {} if branch is True else branch
            if not types <= own:
                if one.keys() & {"$ref", "anyOf", "oneOf"}:
                    self._refuse(f"type beside {name}")
                one = {**one, "type": sorted(types & own)}
            found.append(one)
        if not found:
            self._refuse(f"{name} without an alternative of its type")
        return found

    def _properties(self, schema: Schema) -> list[tuple[str, Any]]:
        """Return the properties of an object, those that are only required among them."""
        self._check_keys(schema, NOTES | OF_OBJECTS | {"type"})
        required = schema.get("required") or ()
        properties = dict(schema.get("properties") or {})
        for key in required:
            properties.setdefault(key, schema.get("additionalProperties", {}))
        for key in [key for key, own in properties.items() if own is False]:
            if key in required:
                self._refuse(f"the property {key!r}, which is required and has no valid value")
            del properties[key]
        for key in properties:
            if not PLAIN_KEY.fullmatch(key):
                self._refuse(f"the property {key!r}, whose name is not plain")
        return list(properties.items())

    def _check_keys(self, schema: Schema, allowed: frozenset[str], *, beside: str = "") -> None:
        for key in schema:
            if key not in allowed:
                self._refuse(f"{key} beside {beside}" if beside else key)

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(
            f"{self._field} has {what}, which cannot be enforced in the model's dialect of tool "
            "calls; leave chat.tool_choice out, or set it to auto or none",
            field=self._field,
        )
