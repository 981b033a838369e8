"""JSON schemas over every keyword that constraints support, with the values that break validators.

Unlike `tests.support.forms`, the values are those of reports about other systems: integers beyond
2^53, every format, bounds with equal integer parts, names that need escapes, references into
unknown keywords, tuples of old drafts. Many of these schemas are refused, and some allow nothing.

Rule: the same seed draws the same schemas, by `tests.support.forms.drawn`.
"""

from functools import cache

import jsonschema
from hypothesis import strategies as st

NAMES = ["a", "b", "é", 'q"t', "x y", "n\n"]
NUMBERS = [0, 1, -1, 2, 5, 10, -300, 0.5, -0.5, 5.5, 0.001, 123.456, 1e-7, 7.0]
LARGE = [2**53, 2**53 - 1, 2**53 + 1, -(2**53) - 1, 2**60, 1234567890123456789, 2**63 - 1, 1e22]
TEXTS = ["", "a", "é", "two words", 'q"t', "back\\slash", "line\nbreak", "\x01", "\x7f"]
FORMATS = [
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
]
PATTERNS = ["^[a-c]{1,4}$", "^(?:yes|no)$", "[0-9]{2}", "^a|b$", "^.{0,3}$", "29", "^[^a]*$"]
DRAFTS = ["draft-04/schema#", "draft-07/schema#", "2019-09/schema", "2020-12/schema"]

numbers = st.sampled_from(NUMBERS * 3 + LARGE)
scalars = numbers | st.sampled_from([None, True, False]) | st.sampled_from(TEXTS)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=4,
)


@st.composite
def some_of(draw, least=0, **parts):
    """Draw some keywords, in any order, each with a value of its strategy."""
    names = draw(st.lists(st.sampled_from(sorted(parts)), unique=True, min_size=least))
    return {name: draw(parts[name]) for name in names}


sizes = st.integers(0, 3)
types = st.sampled_from(["integer", "number", ["integer", "null"], ["number", "string"]])
numeric = some_of(
    type=types,
    minimum=numbers,
    maximum=numbers,
    exclusiveMinimum=numbers | st.booleans(),
    exclusiveMaximum=numbers | st.booleans(),
    multipleOf=st.sampled_from([1, 2, 3, 7, 0.5, 0.01, 0.1, 100_000, 99_999, 2**32 - 1]),
)
bounded = st.tuples(numbers, st.sampled_from([0, 0.4, 0.5, 1, 10, 1000]), st.booleans()).map(
    lambda x: {
        "type": "number",
        "exclusiveMinimum" if x[2] else "minimum": x[0],
        "maximum" if x[2] else "exclusiveMaximum": x[0] + x[1],
    }
)
texts = some_of(
    type=st.just("string"),
    minLength=sizes,
    maxLength=st.integers(1, 12),
    pattern=st.sampled_from(PATTERNS),
)
formats = st.tuples(
    st.sampled_from(FORMATS), some_of(pattern=st.sampled_from(PATTERNS), minLength=sizes)
).map(lambda x: {"type": "string", "format": x[0]} | x[1])
simple = (
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string"}, {}])
    | numeric
    | bounded
    | texts
    | formats
    | st.lists(values, min_size=1, max_size=3).map(lambda some: {"enum": some})
    | values.map(lambda one: {"const": one})
)


def arrays(inner):
    """Return a strategy of arrays' schemas."""
    return some_of(
        type=st.just("array"),
        prefixItems=st.lists(inner, min_size=1, max_size=2),
        items=inner | st.booleans() | st.lists(inner, min_size=1, max_size=2),
        additionalItems=inner | st.just(False),
        minItems=sizes,
        maxItems=sizes,
    ).map(without_both)


def without_both(schema):
    """Return a schema; drop `additionalItems` beside a boolean `items`: jsonschema fails on it."""
    if isinstance(schema.get("items"), bool):
        schema.pop("additionalItems", None)
    return schema


def objects(inner):
    """Return a strategy of objects' schemas."""
    names = st.sampled_from(NAMES)
    return some_of(
        least=2,
        type=st.just("object"),
        properties=st.dictionaries(names, inner, min_size=1, max_size=3),
        required=st.lists(names, unique=True, max_size=2),
        additionalProperties=inner | st.booleans(),
        patternProperties=st.dictionaries(st.sampled_from(["^x", "^a$", "b"]), inner, max_size=1),
        minProperties=sizes,
        maxProperties=sizes,
    )


def combined(inner):
    """Return a strategy of schemas that combine other schemas."""
    several = st.lists(inner, min_size=2, max_size=2)
    return st.tuples(
        inner, some_of(least=1, anyOf=several, oneOf=several, allOf=several), st.booleans()
    ).map(lambda x: (x[0] | x[1]) if x[2] else (x[1] | x[0]))


parts = st.recursive(
    simple, lambda inner: arrays(inner) | objects(inner) | combined(inner), max_leaves=4
)
PLACES = {
    "#/$defs/one": lambda part: {"$defs": {"one": part}},
    "#/$defs/a~1b": lambda part: {"$defs": {"a/b": part}},
    "#/definitions/x%20y": lambda part: {"definitions": {"x y": part}},
    "#/components/schemas/S": lambda part: {"components": {"schemas": {"S": part}}},
}


@st.composite
def whole_schemas(draw):
    """Draw a schema as clients send it: perhaps with ``$schema`` and with a reference."""
    schema = dict(draw(parts))
    if draw(st.integers(0, 3)) == 0:
        where = draw(st.sampled_from(sorted(PLACES)))
        referring = {"$ref": where}
        if draw(st.booleans()):
            referring = {"type": "array", "items": referring, "minItems": 1, "maxItems": 2}
        schema = (
            referring | PLACES[where](schema) | draw(simple if draw(st.booleans()) else st.just({}))
        )
    draft = draw(st.sampled_from([None] * 8 + DRAFTS))
    if draft is not None:
        scheme = "http" if draft.endswith("#") else "https"
        folder = "" if draft.endswith("#") else "draft/"
        schema["$schema"] = f"{scheme}://json-schema.org/{folder}{draft}"
    return schema


def is_valid(schema):
    """Return whether the schema is valid by its draft, also in parts that drafts skip."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    hidden = schema.get("components", {}).get("schemas", {})
    return all(judge_of(kind).is_valid(part) for part in (schema, *hidden.values()))


@cache
def judge_of(kind):
    """Return the validator of a draft's schemas."""
    return kind(kind.META_SCHEMA)


every_schema = whole_schemas().filter(is_valid)
