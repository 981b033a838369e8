"""jsonschema accepts every answer that a schema's constraint allows, formats included.

Schemas are drawn from all supported keywords. Without a model, a random walk through the masks
draws answers, and prefers tokens that often reveal bugs (a 29 February, an escaped name, a number
at its bound).
"""

import contextlib
import json
import random
import re
import tracemalloc
from datetime import datetime, time
from decimal import Decimal, InvalidOperation
from time import process_time

import jsonschema
import pytest
from jsonschema.validators import validator_for
from tokenizers import AddedToken, Tokenizer

from engine.core.text.types import TOOLS_KIND, Constraint
from engine.errors import InvalidRequest
from engine.requests.text.values import MAX_CONSTRAINT_CHARS
from engine.worker.sampling.constraint_compiler import ConstraintCompiler
from engine.worker.sampling.json_schemas import exact_schema
from engine.worker.tokenizing.tokenizer import HfTokenizer
from tests.support import toy_tokenizers
from tests.support.forms import drawn, schema_constraint
from tests.support.schemas import every_schema

MAX_TOKENS = 150
ANSWERS_OF_ONE = 5
SERVED_SHARE_MIN = 0.4  # at least this share of the drawn schemas is served; the others are refused
ODD = [
    *("0000-", "1900-", "2023-", "02-29", "-12-31", "T23:59:", "T", "60", "59Z", "Z", "+00:00"),
    *("\\u0061", "\\u00e9", "\\u", "0062", '"a"', '"b"', '"x', "null", "true", "-0"),
    *("9007199254740993", "00000000", ".0", ".5", "0.", "e1", "00", "99", "1", "5", "-"),
    *("::", ":", "a.", "a@a", "P1", "Y", "M", "D", "00000000-0000-0000-0000-000000000000"),
]
CLOSING = ['"', "}", "]", ",", ":", "{", "["]


@pytest.fixture(scope="module")
def forms():
    """Yield a tokenizer with the texts of `ODD` as tokens, and its compiler of constraints."""
    backend = Tokenizer.from_str(toy_tokenizers.byte_level().to_str())
    backend.add_tokens([AddedToken(text, normalized=False) for text in {*ODD}])
    tokenizer = HfTokenizer(backend)
    end = backend.token_to_id("<|endoftext|>")
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size, frozenset({end}))
    yield tokenizer, compiler
    compiler.close()


def walk(tokenizer, matching, rng):
    """Return a random answer's text; None if it gets too long, or no token is allowed."""
    ids = tokenizer.backend.token_to_id
    odd, closing = {ids(text) for text in ODD}, {ids(text) for text in CLOSING}
    tokens = []
    while len(tokens) < MAX_TOKENS:
        mask = matching.new_mask()
        matching.fill(mask)
        if mask.trouble:
            return None
        allowed = {*mask.bits(32 * len(mask.words)).nonzero()[0].tolist()}
        ends = allowed.intersection(matching.ends)
        if ends and (ends == allowed or rng.random() < 0.5):
            return tokenizer.decode(tokens)
        chance = rng.random()
        liked = odd if chance < 0.45 else closing if chance < 0.8 else allowed
        some = sorted((liked & allowed or allowed) - ends)
        if not some:
            return None
        tokens.append(rng.choice(some))
        if matching.push(tokens[-1]):
            return tokenizer.decode(tokens)
    return None


def judge(schema, text):
    """Raise jsonschema's error for an answer, if any. Numbers are read as decimals, because as
    doubles 0.07 is no multiple of 0.01, and 0.99999999999999999 is not less than 1."""
    kind = validator_for(schema, jsonschema.Draft202012Validator)
    read = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = kind(read, format_checker=FORMATS)
    validator.validate(json.loads(text, parse_float=number))


FORMATS = jsonschema.FormatChecker()


@FORMATS.checks("date-time", raises=ValueError)
def is_date_time(text):
    """jsonschema would need the package rfc3339-validator, which gives the same results."""
    return not isinstance(text, str) or bool(datetime.fromisoformat(text.upper()))


@FORMATS.checks("time", raises=ValueError)
def is_time(text):
    return not isinstance(text, str) or time.fromisoformat(text.upper()) is not None


@FORMATS.checks("hostname")
def is_hostname(text):
    """jsonschema would need the package fqdn for this format."""
    if not isinstance(text, str):
        return True
    labels = text.split(".")
    return len(text) <= 253 and all(
        re.fullmatch(r"(?!-)[a-zA-Z0-9-]{1,63}(?<!-)", x) for x in labels
    )


def number(text):
    """Return a number as a Decimal, or infinity if it is too large for one."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


# ---- what llguidance alone lets through, case by case

INTS = {"type": "integer"}
LISTED = {"properties": {"a": INTS}}
LONGEST = ".".join(["a" * 63] * 4)  # 255 characters; a host name has at most 253
# A schema, a wrong answer that llguidance alone allows, and a right answer.
LOOSE = {
    "a 29 February": ({"format": "date"}, '"2023-02-29"', '"2024-02-29"'),
    "a century": ({"format": "date"}, '"1900-02-29"', '"2000-02-29"'),
    "year 0": ({"format": "date"}, '"0000-01-01"', '"0001-12-31"'),
    "a format beside a pattern": (
        {"format": "date", "pattern": "29$"},
        '"2023-02-29"',
        '"2023-03-29"',
    ),
    "a date with a time": (
        {"format": "date-time"},
        '"2023-02-29T00:00:00Z"',
        '"2024-02-29T23:59:59.5+01:00"',
    ),
    "a leap second": ({"format": "date-time"}, '"2016-12-31T23:59:60Z"', '"2016-12-31t23:59:59z"'),
    "a leap second alone": ({"format": "time"}, '"23:59:60Z"', '"23:59:59Z"'),
    "a long host name": ({"format": "hostname"}, f'"{LONGEST}"', f'"{LONGEST[2:]}"'),
    "an escaped name": (LISTED, '{"\\u0061":"x"}', '{"a":1,"b":"x"}'),
    "a name twice": (LISTED, '{"a":1,"\\u0061":"x"}', '{"a":1}'),
    "a name with a pattern": ({"patternProperties": {"^a": INTS}}, '{"\\u0061":"x"}', '{"ab":1}'),
    "an open lower end": ({"exclusiveMinimum": 5, "maximum": 5.5}, "5", "5.25"),
    "an open lower end at 0": ({"exclusiveMinimum": 0, "maximum": 0.5}, "0", "0.25"),
    "an open upper end at 0": ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0", "-0.25"),
    "an open end of draft 4": (
        {
            "minimum": 5,
            "exclusiveMinimum": True,
            "maximum": 5.5,
            "$schema": "http://json-schema.org/draft-04/schema#",
        },
        "5",
        "5.25",
    ),
    "open ends of two parts": (
        {"allOf": [{"exclusiveMinimum": 5}, {"maximum": 5.5}]},
        "5",
        "5.000001",
    ),
    "a tuple": ({"prefixItems": [INTS], "additionalItems": False}, '["x"]', '[1,"x"]'),
    "a part elsewhere": (
        {"$ref": "#/components/D", "components": {"D": {"format": "date"}}},
        '"2023-02-29"',
        '"2024-02-29"',
    ),
    "a part of a list": (
        {"items": {"anyOf": [{"type": "null"}, {"format": "date", "type": "string"}]}},
        '["2023-02-29"]',
        '[null,"2024-02-29"]',
    ),
}
BIG, NAMED = 1234567890123456789, "components/x~1y"
# A schema that cannot be enforced exactly, and the place that its refusal names.
INEXACT = {
    "enum": ({"enum": [1, BIG]}, "#/enum/1"),
    "const": ({"const": {"a": [BIG]}}, "#/const/a/0"),
    "minimum": ({"type": "integer", "minimum": -BIG}, "#/minimum"),
    "maximum": ({"type": "integer", "maximum": 2**53 + 1}, "#/maximum"),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 2**53}, "#/exclusiveMinimum"),
    "exclusiveMaximum": ({"exclusiveMaximum": 1e22}, "#/exclusiveMaximum"),
    "a double of 17 digits": ({"const": 0.30000000000000004}, "#/const"),
    "an integer of 400 digits": ({"const": 10**400}, "#/const"),
    "in a list": ({"items": {"enum": [BIG]}}, "#/items/enum/0"),
    "in a tuple": ({"prefixItems": [{"const": BIG}]}, "#/prefixItems/0/const"),
    "in an object": ({"properties": {"a": {"const": BIG}}}, "#/properties/a/const"),
    "in other properties": (
        {"additionalProperties": {"const": BIG}},
        "#/additionalProperties/const",
    ),
    "in a choice": ({"anyOf": [{"const": BIG}, INTS]}, "#/anyOf/0/const"),
    "in a definition": (
        {"$ref": "#/$defs/n", "$defs": {"n": {"const": BIG}}},
        "#/$defs/n/const",
    ),
    "in an unknown keyword": (
        {"$ref": f"#/{NAMED}", "components": {"x/y": {"const": BIG}}},
        f"#/{NAMED}/const",
    ),
    "a large multiple": ({"multipleOf": 2**32 - 1}, "#/multipleOf"),
    "a multiple of 400 digits": ({"multipleOf": 10**400}, "#/multipleOf"),
    "multiples together": (
        {"allOf": [{"multipleOf": 100_000}, {"multipleOf": 99_999}]},
        "#/allOf/1/multipleOf",
    ),
    "names that are counted": ({"minProperties": 2, "required": []}, "#"),
    "a control character": ({"enum": ["a\x01"]}, "#/enum/0"),
}
PLACES = {  # the ways to give a schema: as such, in a grammar, and as a tool's parameters
    "json_schema": json.dumps,
    "lark": lambda schema: f'// %json "\nstart: "%json" /%json"/ %json\n {json.dumps(schema)} "."',
    TOOLS_KIND: lambda schema: f"start: %json {json.dumps(schema | {'x-guidance': {}})}",
}


def allows(forms, constraint, text):
    """Return whether a constraint allows an answer."""
    tokenizer, compiler = forms
    compiler.compile(constraint)
    matching = compiler.start(constraint)
    tokens = [*tokenizer.encode(text, add_special_tokens=False)]
    if matching.num_allowed(tokens) < len(tokens):
        return False
    if any(matching.push(token) for token in tokens):
        return True
    mask = matching.new_mask()
    matching.fill(mask)
    return any(mask.allows(end) for end in matching.ends)


@pytest.mark.parametrize("case", LOOSE)
def test_an_answer_that_llguidance_alone_would_allow_is_not_allowed(forms, case):
    schema, wrong, right = LOOSE[case]
    with pytest.raises(jsonschema.ValidationError):
        judge(schema, wrong)
    judge(schema, right)
    constraint = schema_constraint(schema)
    assert not allows(forms, constraint, wrong)
    assert allows(forms, constraint, right)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("case", INEXACT)
def test_what_cannot_be_followed_exactly_is_refused_with_its_place(forms, case, kind):
    schema, place = INEXACT[case]
    constraint = Constraint(kind, PLACES[kind](schema))
    with pytest.raises(InvalidRequest, match=re.escape(place)) as caught:
        forms[1].compile(constraint)
    assert [one.field for one in caught.value.violations] == [constraint.field]


def test_schemas_in_a_grammar_are_rewritten_where_they_are_keywords(forms):
    constraint = Constraint("lark", PLACES["lark"]({"format": "date", "type": "string"}))
    assert allows(forms, constraint, '%json%json""2024-02-29".')
    assert not allows(forms, constraint, '%json%json""2023-02-29".')


@pytest.mark.parametrize("number", [2**53, -(2**53), 0, 0.1, 1e-7, 3.141592653589793])
def test_exact_numbers_are_followed(forms, number):
    constraint = schema_constraint({"enum": [number]})
    assert allows(forms, constraint, format(Decimal(repr(number)), "f"))


# ---- whatever is drawn


LONG = "x" * 30_000
WORST = {  # the largest schemas of several kinds within the limit of a constraint
    "many values under a long name": {"properties": {LONG: {"enum": [1] * 11_000}}},
    "many names under a long one": {
        "properties": {LONG: {"properties": {str(number): True for number in range(2_400)}}}
    },
    "many exclusive bounds": {
        "properties": {str(number): {"exclusiveMinimum": number} for number in range(1_800)}
    },
    "many multiples": {
        "allOf": [{"multipleOf": number} for number in range(1, 3_000)],
    },
}


@pytest.mark.parametrize("name", WORST)
def test_no_schema_takes_much_memory_or_time_before_the_sandbox(name):
    """Red if `exact_schema`, which the server runs, keeps a JSON pointer for every value."""
    text = json.dumps(WORST[name])
    assert len(text) <= MAX_CONSTRAINT_CHARS
    tracemalloc.start()
    begun = process_time()
    try:
        with contextlib.suppress(ValueError):
            exact_schema(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    assert process_time() - begun < 2.0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_jsonschema_accepts_every_answer_that_a_schema_allows(forms, count, capsys):
    tokenizer, compiler = forms
    rng = random.Random(count)
    num_answers, num_served = 0, 0
    schemas = drawn(every_schema, count // 2, times=2)
    for schema in schemas:
        constraint = schema_constraint(schema)
        try:
            compiler.compile(constraint)
        except InvalidRequest:
            continue
        num_served += 1
        for _ in range(ANSWERS_OF_ONE):
            text = walk(tokenizer, compiler.start(constraint), rng)
            if text is None:
                continue
            num_answers += 1
            try:
                judge(schema, text)
            except Exception as error:
                raise AssertionError(f"{json.dumps(schema)} allows {text}") from error
        compiler.forget(constraint)
    with capsys.disabled():
        print(f"\n{num_answers} answers to {num_served} of {len(schemas)} schemas", end="")
    assert num_served >= SERVED_SHARE_MIN * len(schemas)
    assert num_answers >= count
