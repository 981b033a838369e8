"""Rewrites a JSON schema so that llguidance allows no answer that the schema rejects.

llguidance interprets some keywords more loosely than JSON Schema. Here each such keyword is
replaced by others that llguidance follows exactly, or refused with its place in the schema:

- It keeps numbers as doubles and is off by one where a number has more digits than 2^53: refused.
- It forgets that a bound is exclusive if the other bound has the same integer part, as in
  5 < x <= 5.5: the next number of 15 digits replaces it, as an inclusive bound.
- It computes `multipleOf` with 32 bits: refused beyond.
- Its dates have a 29 February in every year and a year 0, its times a second 60, and its host names
  any length: a pattern is added.
- It spells names of additional properties with ``\\u`` escapes, and so can repeat a listed name:
  these escapes are switched off.
- It may write the name of an additional property twice: a `minProperties` that needs two additional
  names is refused.
- `additionalItems` beside `prefixItems` has no meaning, but makes it ignore `prefixItems`: dropped.

`tests/conformance/test_schema_answers.py` checks this with random schemas and answers.

Rule: only keywords that could let a wrong answer through are changed. llguidance reports every
other fault of a schema.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Context, Decimal
from typing import Any, NamedTuple
from urllib.parse import unquote

EXACT_MAX = 2**53  # Doubles hold each integer up to this one.
DECIMALS_MAX = 22  # Places after the point: doubles hold the powers of ten up to this one.
# Beyond these, llguidance's 32 bits overflow: in a remainder times ten, and in a product.
MULTIPLE_MAX = 2**32 // 10 - 1
PRODUCT_MAX = 2**32 - 1
DIGITS = Context(prec=15)
SMALLEST = 1e-20  # stands for the next number after 0: llguidance rounds smaller numbers
ESCAPES = 'nrbtf\\"'
PLACE_CHARS = 200  # the most characters of a JSON pointer in a message
EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
ONES = ("items", "additionalItems", "additionalProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COMBINING = ("allOf", "anyOf", "oneOf", "$ref")

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY = "(?:(?:0[13-9]|1[0-2])-[0-9]{2}|02-(?:[01][0-9]|2[0-8]))"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP})"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
FORMATS = {  # the pattern that is added to each of these formats
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[tT]{_TIME}",
    "time": f"^{_TIME}",
    "hostname": "^.{1,253}$",
}

# In a Lark grammar, tokens in which %json is plain text (comments, strings, …), and %json itself.
_LARK = re.compile(
    r'(?:\#|//)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|<[^<>\s]+>|(?P<json>%json\s*)'
)


def exact_schema(source: str, **options: object) -> str:
    """Return a schema's text rewritten, with llguidance's ``options`` unless it has its own.

    Raises:
        ValueError: The text is no JSON, or has a part that cannot be followed exactly.
    """
    try:
        schema = _DECODER.decode(source)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    return json.dumps(_exact(schema, options))


def exact_lark(source: str) -> str:
    """Return a Lark grammar with each schema after a ``%json`` rewritten.

    Raises:
        ValueError: A schema is not JSON, or has a part that cannot be followed exactly.
    """
    made, start = [], 0
    while (match := _next_schema(source, start)) is not None:
        try:
            schema, end = _DECODER.raw_decode(source, match)
        except ValueError as error:
            raise ValueError(f"has a %json that is not JSON: {error}") from None
        made += [source[start:match], json.dumps(_exact(schema, {}))]
        start = end
    return "".join([*made, source[start:]])


def _next_schema(source: str, start: int) -> int | None:
    """Return the place where the text of the next schema begins; None if there is none."""
    for token in _LARK.finditer(source, start):
        if token["json"]:
            return token.end()
    return None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _exact(schema: Any, options: dict[str, object]) -> Any:
    """Rewrite a parsed schema in place, and return it with llguidance's options."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    nodes = _nodes(schema)
    for node, place in nodes:
        _check_numbers(node, place)
        _check_names(node, place)
    _check_multiples(nodes)
    _make_inclusive(nodes)
    for node, _ in nodes:
        _complete_format(node)
        _separate_items(node)
    own = schema.get("x-guidance")
    merged = dict(own) if isinstance(own, dict) else dict(options)
    escapes = merged.get("json_allowed_escapes")
    merged["json_allowed_escapes"] = (
        escapes.replace("u", "") if isinstance(escapes, str) else ESCAPES
    )
    schema["x-guidance"] = merged
    return schema


class _Place(NamedTuple):
    """A place in a schema. Its JSON pointer is made only for a message: those of a schema's many
    values under a long name would take gigabytes."""

    parent: _Place | None
    part: str | int

    def __truediv__(self, part: str | int) -> _Place:
        return _Place(self, part)

    def __str__(self) -> str:
        parts, place = [], self
        while place.parent is not None:
            parts.append(str(place.part))
            place = place.parent
        pointer = "/".join([str(place.part), *reversed(parts)])
        return pointer if len(pointer) <= PLACE_CHARS else f"{pointer[:PLACE_CHARS]}…"


_Nodes = list[tuple[dict[str, Any], _Place]]


def _nodes(root: dict[str, Any]) -> _Nodes:
    """Return each part of a schema that is a schema itself (values of keywords, and targets of
    references), with its place."""
    nodes: dict[int, tuple[dict[str, Any], _Place]] = {}
    waiting: list[tuple[Any, _Place]] = [(root, _Place(None, "#"))]
    while waiting:
        node, place = waiting.pop()
        if not isinstance(node, dict) or id(node) in nodes:
            continue
        nodes[id(node)] = (node, place)
        for key in MAPS:
            if isinstance(parts := node.get(key), dict):
                waiting += [(part, place / key / name) for name, part in parts.items()]
        for key in LISTS:
            if isinstance(parts := node.get(key), list):
                waiting += [(part, place / key / at) for at, part in enumerate(parts)]
        waiting += [(node[key], place / key) for key in ONES if key in node]
        target = node.get("$ref")
        if isinstance(target, str) and target.startswith("#/"):
            waiting.append((_resolve(root, target), _Place(None, target)))
    return [*nodes.values()]


def _resolve(root: Any, pointer: str) -> Any:
    """Return the target of a reference; None if there is none."""
    node = root
    for part in unquote(pointer[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def _number(value: object) -> float | None:
    """Return a number; None for anything else."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _check_numbers(node: dict[str, Any], place: _Place) -> None:
    """Refuse numbers and characters that llguidance cannot write exactly."""
    waiting = [(node[key], place / key) for key in (*BOUNDS, "const", "enum") if key in node]
    while waiting:
        value, at = waiting.pop()
        if isinstance(value, dict):
            waiting += [(item, at / name) for name, item in value.items()]
        elif isinstance(value, list):
            waiting += [(item, at / number) for number, item in enumerate(value)]
        elif isinstance(value, str) and (match := UNWRITABLE.search(value)) is not None:
            raise ValueError(
                f"has the control character U+{ord(match[0]):04X} at {at}, which no answer can have"
            )
        elif (number := _number(value)) is not None and not _is_exact(
            number, is_exclusive=at.part in EXCLUSIVE
        ):
            raise ValueError(
                f"has the number {str(value)[:40]} at {at}, whose digits are too many to be "
                "followed exactly; integers below 2^53 can be"
            )


def _is_exact(value: float, *, is_exclusive: bool) -> bool:
    """Return whether llguidance computes exactly with a bound, and after an exclusive one."""
    if isinstance(value, int) or not math.isfinite(value):
        return abs(value) <= EXACT_MAX - is_exclusive
    written = Decimal(repr(value))
    places = _decimals(written)
    return places <= DECIMALS_MAX and abs(written.scaleb(places)) <= EXACT_MAX


def _check_multiples(nodes: _Nodes) -> None:
    """Refuse a `multipleOf` that is too large, or whose least common multiple with others is."""
    multiples: dict[Decimal, _Place] = {}
    for node, place in nodes:
        value = _number(node.get("multipleOf"))
        if value and (isinstance(value, int) or math.isfinite(value)):
            multiples[abs(Decimal(repr(value)))] = place / "multipleOf"
    places = max((_decimals(value) for value in multiples), default=0)
    is_large = any(value.scaleb(_decimals(value)) > MULTIPLE_MAX for value in multiples)
    if (
        not is_large
        and len(multiples) > 1
        and any(key in node for node, _ in nodes for key in COMBINING)
    ):
        whole, multiple = [int(value.scaleb(places)) for value in multiples], 1
        for number in whole:
            multiple = math.lcm(multiple, number)
            if is_large := multiple * max(whole) > PRODUCT_MAX:
                break
    if is_large:
        where = " and ".join(str(place) for place in [*multiples.values()][:3])
        raise ValueError(f"has a multipleOf with too many digits to be followed exactly: {where}")


def _decimals(value: Decimal) -> int:
    """Return the number of digits after the decimal point."""
    return max(0, -int(value.normalize().as_tuple().exponent))


def _make_inclusive(nodes: _Nodes) -> None:
    """Write an exclusive bound as an inclusive one where the opposite bound, which may come from
    another part of the schema, has the same integer part."""
    ends = [
        (node, side, key, up)
        for node, _ in nodes
        for side, key, up in (
            ("minimum", "exclusiveMinimum", 1),
            ("maximum", "exclusiveMaximum", -1),
        )
    ]
    near: dict[int, set[int]] = {
        1: set(),
        -1: set(),
    }  # for lower bounds (1), the integers just below fractional upper bounds; -1: the reverse
    for node, side, key, up in ends:
        for other in (_number(node.get(side)), _number(node.get(key))):
            if other is not None and other != int(other):
                near[-up].add(math.ceil(other) if up > 0 else math.floor(other))
    for node, side, key, up in ends:
        is_flag = node.get(key) is True  # the form of JSON Schema's draft 4
        end = _number(node.get(side if is_flag else key))
        if end is None or end != int(end) or end * up < 0:
            continue
        if int(end) not in near[up]:
            continue
        after = float(DIGITS.next_plus(Decimal(abs(end)))) if end else SMALLEST
        given = _number(node.get(side))
        del node[key]
        node[side] = up * after if given is None else up * max(up * given, after)


def _complete_format(node: dict[str, Any]) -> None:
    """Add the pattern without which a format would admit wrong texts."""
    name = node.get("format")
    pattern = FORMATS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return
    if "pattern" not in node:
        node["pattern"] = pattern
    elif isinstance(parts := node.setdefault("allOf", []), list):
        node["allOf"] = [*parts, {"pattern": pattern}]


def _separate_items(node: dict[str, Any]) -> None:
    """Drop an `additionalItems` without an effect; put any other directly after `items`."""
    if "additionalItems" not in node:
        return
    rest = node.pop("additionalItems")
    if isinstance(node.get("items"), list):
        parts = [*node.items()]
        node.clear()
        for key, value in parts:
            node[key] = value
            if key == "items":
                node["additionalItems"] = rest


def _check_names(node: dict[str, Any], place: _Place) -> None:
    """Refuse a `minProperties` that an answer could fulfil by writing one name twice."""
    least, listed = _number(node.get("minProperties")), node.get("required")
    names = (
        {*listed} if isinstance(listed, list) and all(isinstance(n, str) for n in listed) else ()
    )
    if least is not None and least - len(names) > 1:
        raise ValueError(
            f"has a minProperties of {least} at {place}, and names that are not required could be "
            "written twice; list names under required"
        )
