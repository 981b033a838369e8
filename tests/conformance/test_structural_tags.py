"""A gateway's structural tag becomes a grammar of the same answers.

A random walk through the grammar stands for the model, as in tests/conformance/test_tool_choice.py.
"""

import json

import pytest

from engine.core.text.types import Constraint
from engine.errors import InvalidRequest, Unsupported
from engine.requests.text.answers.structural_tags import lark_of_tags

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
BEGIN, END = '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"
TAG = {"begin": BEGIN, "content": {"type": "json_schema", "json_schema": OBJECT}, "end": END}
OTHER = {**TAG, "begin": BEGIN.replace('"f"', '"g/h"')}
CALL = f'{BEGIN}{{"a": 1}}{END}'
CALL_G = CALL.replace('"f"', '"g/h"')
BAD = f'{BEGIN}{{"b": 1}}{END}'
TRIGGERED = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [TAG, OTHER]}
THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
LETTER = {"type": "regex", "pattern": "[x/]{2}"}


def word(text):
    return {"type": "const_string", "value": text}


CASES = {  # a part, the answers that it allows, and others
    "const_string": (word("a/b\n"), ["a/b\n"], ["a/c", "a/b"]),
    "const_string in brackets": (word("‹x›"), ["‹x›"], ["x"]),
    "regex with a backslash": (
        {"type": "regex", "pattern": r"[^\\/]{2}/\/"},
        ["ab//"],
        ["a/\\/", "a\\//"],
    ),
    "json_schema": (TAG["content"], ['{"a": 1}'], ['{"a": ""}', "1"]),
    "regex": (LETTER, ["x/", "//"], ["xy", "x"]),
    "any_text": ({"type": "any_text"}, ["so <b>"], []),
    "any_text without": ({"type": "any_text", "excludes": ["so"]}, ["s o"], ["it is so"]),
    "sequence": ({"type": "sequence", "elements": [LETTER, word("q")]}, ["x/q"], ["q", "x/"]),
    "or": ({"type": "or", "elements": [LETTER, word("q")]}, ["q", "xx"], ["xxq", "r"]),
    "optional": (
        {"type": "sequence", "elements": [{"type": "optional", "content": word("q")}, LETTER]},
        ["qxx", "xx"],
        ["qqxx"],
    ),
    "plus": ({"type": "plus", "content": LETTER}, ["xx", "xxx/"], ["x", "xxx"]),
    "star": ({"type": "star", "content": word("ab")}, ["abab", "ab"], ["aba"]),
    "tag": (THOUGHT, ["<think>a < b</think>", "<think></think>"], ["<think>a", "a"]),
    "tag of a form": (TAG, [CALL], [BAD, CALL_G]),
    "triggered_tags": (TRIGGERED, ["so", f"so {CALL}", f"{CALL}{CALL_G} so"], [BAD, f"so {BAD}"]),
    "at_least_one": (
        {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
        [CALL, f"so {CALL_G}"],
        ["so", CALL + CALL],
    ),
    "at_least_one of several": (
        {**TRIGGERED, "at_least_one": True},
        [CALL, f"so {CALL_G}{CALL}!"],
        ["so", BAD],
    ),
    "tags_with_separator": (
        {"type": "tags_with_separator", "tags": [TAG, OTHER], "separator": "\n"},
        [CALL, f"{CALL}\n{CALL_G}"],
        [CALL + CALL, f"{CALL}\n{BAD}"],
    ),
    "the older form": (
        {
            "structures": [{"begin": BEGIN, "schema": OBJECT, "end": END}],
            "triggers": ["<tool_call>"],
        },
        ["so", f"so {CALL}"],
        [BAD],
    ),
}


def is_allowed(matching, tokens):
    """Return whether the grammar allows these tokens, and the end behind them."""
    for index, token in enumerate(tokens):
        if not matching.allows(token):
            return False
        if matching.push(token):
            return index == len(tokens) - 1
    return matching.allows(matching.ends[0])


@pytest.mark.parametrize("name", CASES)
def test_a_structural_tag_allows_what_it_describes_and_nothing_else(marked, name):
    tokenizer, grammars = marked
    part, allowed, others = CASES[name]
    tag = {"type": "structural_tag", **(part if "structures" in part else {"format": part})}
    constraint = Constraint("lark", lark_of_tags(json.dumps(tag), tokenizer.added_id_of))
    grammars.compile(constraint)
    for text in (*allowed, *others):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert is_allowed(grammars.start(constraint), list(tokens)) == (text in allowed), text
    grammars.forget(constraint)


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "grammar", "grammar": "root ::= a"}, "'grammar'"),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "'qwen_xml_parameter'"),
        ({"type": "dispatch"}, "'dispatch'"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "'qwen_xml'"),
        ({**TRIGGERED, "max_tags": 2}, "'max_tags'"),
    ],
)
def test_an_unknown_part_is_refused_by_its_name(part, what):
    with pytest.raises(Unsupported, match=what) as caught:
        lark_of_tags(json.dumps({"type": "structural_tag", "format": part}), lambda _: None)
    assert caught.value.field == "constraint.structural_tag"


def nested(depth):
    part = word("a")
    for _ in range(depth):
        part = {"type": "optional", "content": part}
    return part


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{", "is not JSON"),
        ("[]", "no object"),
        ('{"type": "structural_tag"}', '"format"'),
        ('{"type": "structural_tag", "format": 3}', "no object"),
        ('{"type": "structural_tag", "format": {"type": "const_string"}}', "'value'"),
        ('{"type": "structural_tag", "format": {"type": "or", "elements": []}}', "'elements'"),
        (json.dumps({"type": "structural_tag", "format": nested(40)}), "inside each other"),
        (
            json.dumps({"type": "structural_tag", "format": {**TRIGGERED, "triggers": ["<a>"]}}),
            "no trigger begins",
        ),
        *(
            (json.dumps({"type": "structural_tag", "format": part}), what)
            for part, what in (
                ({"type": "any_text", "excludes": 5}, "no list of texts"),
                ({"type": "any_text", "excludes": [5]}, "no list of texts"),
                ({**TRIGGERED, "excludes": 5}, "no list of texts"),
                ({**TAG, "type": "tag", "content": None, "end": ["a", "b"]}, "no object"),
            )
        ),
    ],
)
def test_a_broken_tag_is_refused_with_its_reason(source, what):
    with pytest.raises(InvalidRequest, match=what) as caught:
        lark_of_tags(source, lambda _: None)
    [violation] = caught.value.violations
    assert violation.field == "constraint.structural_tag"
