"""Turns an argument that a model wrote as text into JSON, by the schema of its tool.

Dialects with a marked value for each argument have no types: a string stands there as it is, and
other values as JSON or, by some templates, as Python literals. So a value is a string where the
schema allows nothing else, and wherever the text is no value of another type that it allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.requests.text.answers.reader import refuse_constant
from engine.requests.text.answers.value_reader import literal_json

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
STRING = frozenset({"string"})
DEPTH_MAX = 16  # schemas inside each other whose types are looked at; a guess
SCHEMAS_MAX = 256  # of them all; references may name one schema any number of times

_PYTHON_TYPES = {str: "string", bool: "boolean", type(None): "null", int: "integer"}
_PYTHON_TYPES |= {float: "number", dict: "object", list: "array"}


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """Return JSON's types that a schema may accept. ``root`` is what its references refer to. What
    lies beyond `DEPTH_MAX` and `SCHEMAS_MAX` may accept any."""
    return _types_of(schema, root, 0, iter(range(SCHEMAS_MAX)))


def _types_of(schema: Any, root: Any, depth: int, left: Iterator[int]) -> frozenset[str]:
    """`types_of` at a depth, while schemas are ``left``."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping) or depth > DEPTH_MAX or next(left, None) is None:
        return TYPES
    found = TYPES
    if isinstance(schema.get("$ref"), str):
        found &= _types_of(referred(schema["$ref"], root), root, depth + 1, left)
    named = schema.get("type")
    if isinstance(named, str):
        named = [named]
    if isinstance(named, list | tuple):
        found &= frozenset(one for one in named if isinstance(one, str))
        found |= {"integer"} if "number" in found else frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list | tuple):
        kinds = frozenset(_PYTHON_TYPES.get(type(value), "object") for value in values)
        found &= kinds | ({"integer"} if "number" in kinds else frozenset())
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list | tuple):
            parts = [_types_of(one, root, depth + 1, left) for one in schema[key]]
            found &= frozenset().union(*parts)
    every = schema.get("allOf")
    if isinstance(every, list | tuple):
        for one in every:
            found &= _types_of(one, root, depth + 1, left)
    return found


def referred(reference: str, root: Any) -> Any:
    """Return the schema that a reference into ``root`` names; None if there is none."""
    if not reference.startswith("#"):
        return None
    found = root
    for name in reference.split("/")[1:]:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name.replace("~1", "/").replace("~0", "~"))
    return found


def argument_json(text: str, types: frozenset[str]) -> str:
    """Return an argument's JSON. The model's spelling of JSON is kept."""
    if types == STRING:
        return json.dumps(text, ensure_ascii=False)
    for written in (text.strip(), literal_json(text)):
        try:
            value = json.loads(written, parse_constant=refuse_constant)
        except (ValueError, RecursionError):  # to json, an int of 5,000 digits is a ValueError
            continue
        if "string" not in types:
            return written
        # Where a string may stand, a number that JSON does not have, such as 02139, is one.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_as_written = written == text.strip() or not is_number
        if is_as_written and not isinstance(value, str) and is_of(value, types):
            return written
    return json.dumps(text, ensure_ascii=False)


def is_of(value: Any, types: frozenset[str]) -> bool:
    """Return whether a value has one of these types; a whole float is an integer, too."""
    kind = _PYTHON_TYPES.get(type(value), "object")
    return kind in types or (kind == "number" and "integer" in types and value.is_integer())
