"""Schemas and regular expressions, drawn and bounded: what constraints are tested with.

Rule 1: every text that a form accepts is short, and `re` and `jsonschema` read it as llguidance
does (no `\\d`, whose Unicode versions differ). Rule 2: the same seed draws the same forms.
"""

import json
import re

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from engine.core.text.types import Constraint

# ---- regular expressions ---------------------------------------------------------------------

LETTERS = "abcxyzXYZ019 -_,.:é漢\"'{}[]()*+?|\\^$"
CLASSES = ["[a-z]", "[0-9]", "[^a-z\\n]", "[A-Fx-z]", ".", "[é漢]", "[ \\t]", "\\n"]
literals = st.text(st.sampled_from(LETTERS), min_size=1, max_size=4)
classes = st.sampled_from(CLASSES)
atoms = literals.map(re.escape) | classes


def _repeated(part):
    low = st.integers(0, 3)
    bounds = st.tuples(low, low).map(lambda pair: (min(pair), max(pair) + 1))
    return st.tuples(part, bounds).map(lambda x: f"(?:{x[0]}){{{x[1][0]},{x[1][1]}}}")


regexes = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, min_size=2, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})")
        | inner.map(lambda part: f"(?:{part})?")
        | _repeated(inner)
    ),
    max_leaves=5,
).filter(lambda pattern: not re.fullmatch(pattern, ""))

# ---- JSON schemas ----------------------------------------------------------------------------

names = st.sampled_from(["a", "b", "name", "größe", "x y", 'q"t', "n\\n"])


def _ranged(kind):
    ends = st.tuples(st.integers(-300, 300), st.integers(0, 400))
    return ends.map(lambda x: {"type": kind, "minimum": x[0], "maximum": x[0] + x[1]})


def _sized(low, more):
    return {"type": "string", "minLength": low, "maxLength": low + more}


scalars = (
    st.sampled_from([{"type": "boolean"}, {"type": "null"}])
    | _ranged("integer")
    | _ranged("number")
    | st.builds(_sized, st.integers(0, 3), st.integers(0, 6))
    | st.sampled_from(["^[a-c]{1,4}$", "^(?:yes|no)$", "^[0-9]{3}-[0-9]{2}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    )
    | st.lists(st.integers(-9, 99) | names | st.booleans() | st.none(), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    )
    | st.sampled_from([{"const": 7}, {"const": "seven"}, {"const": [1, {"a": None}]}])
)


@st.composite
def _objects(draw, inner):
    keys = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    return {
        "type": "object",
        "properties": {key: draw(inner) for key in keys},
        "required": [key for key in keys if draw(st.booleans())],
        "additionalProperties": False,
    }


def _arrays(inner):
    ends = st.tuples(st.integers(0, 2), st.integers(0, 2))
    return st.tuples(inner, ends).map(
        lambda x: {
            "type": "array",
            "items": x[0],
            "minItems": x[1][0],
            "maxItems": x[1][0] + x[1][1],
        }
    )


schemas = st.recursive(
    scalars,
    lambda inner: (
        _objects(inner)
        | _arrays(inner)
        | st.lists(inner, min_size=2, max_size=2).map(lambda two: {"anyOf": two})
    ),
    max_leaves=4,
)


def drawn(strategy, count, *, number=0, times=8):
    """Return ``count`` different values out of ``times`` as many drawn ones, always the same."""
    found = {}

    @seed(number)
    @settings(
        max_examples=times * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value):
        found.setdefault(json.dumps(value), value)

    collect()
    assert len(found) >= count
    every = list(found.values())
    return every[:: len(every) // count][:count]  # spread, as the first ones are the simplest


def schema_constraint(schema):
    """Return a constraint to this JSON schema."""
    return Constraint("json_schema", json.dumps(schema))
