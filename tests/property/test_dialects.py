"""Calls in every dialect are read as they were written, however the answer is cut.

The turns are drawn and written by `tests.support.dialect_turns`, as the families' own chat
templates write them.
"""

import json
import random
import re
import time
from dataclasses import replace

import pytest

from engine.core.text.thought import Thought
from engine.requests.text.answers.argument_values import TYPES, argument_json, types_of
from engine.requests.text.answers.choice_parser import parser_of
from engine.requests.text.answers.dialects import DIALECTS, dialect_named, find_dialect
from engine.requests.text.answers.format import REASONING, AnswerFormat, detect_format
from engine.requests.text.answers.reasoning import reasoning_of
from engine.settings import TOOL_FORMATS
from tests.property.test_thought import Spelling
from tests.support.dialect_turns import (
    DIGESTS,
    FAMILIES,
    NUM_TURNS,
    PARSERS,
    RECORDED,
    Turn,
    digest_of,
    draw,
)

EVERY = range(0, NUM_TURNS, NUM_TURNS // 10)  # the ten turns that are cut everywhere


def form_of(family, functions, *, streams=False):
    """Return the format of a family's answers."""
    dialect = dialect_named(family.dialect)
    pair = next((one for one in REASONING if family.think == one[:2]), None)
    return AnswerFormat(
        dialect,
        functions,
        reasoning=pair,
        has_channels=dialect.has_channels,
        opened=family.think[0] if family.is_open else "",
        streams_arguments=streams,
    )


def parse(form, pieces):
    """Return an answer's text, reasoning, and calls with the parts of their arguments joined."""
    parser = parser_of(form)
    parts = [*(parser.feed(piece) for piece in pieces), parser.close()]
    calls = []
    for call in (call for part in parts for call in part.calls):
        if call.name:
            calls.append([call.name, ""])
        calls[-1][1] += call.arguments_json
    text = "".join(part.text for part in parts)
    return text, "".join(part.reasoning for part in parts), [tuple(call) for call in calls]


def cut(text, seed):
    """Return the text in drawn pieces."""
    rng, pieces = random.Random(seed), []
    while text:
        size = rng.choice([1, 1, 2, 3, 5, 8, 40])
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def said_of(turn):
    return turn.text, turn.reasoning


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "as generated"])
@pytest.mark.parametrize("name", FAMILIES)
def test_drawn_calls_are_read_as_they_were_written(name, streams):
    family = FAMILIES[name]
    for seed in range(NUM_TURNS):
        functions, turn = draw(family, seed)
        form = form_of(family, functions, streams=streams)
        written = family.write(turn)
        text, reasoning, calls = answer = parse(form, [written])
        assert (text, reasoning) == said_of(turn), (seed, written)
        found = [(called, json.loads(arguments)) for called, arguments in calls]
        assert found == turn.calls, (seed, written)
        assert parse(form, cut(written, seed)) == answer, seed
        if seed in EVERY:
            assert parse(form, written) == answer
            for at in range(len(written)):
                assert parse(form, [written[:at], written[at:]]) == answer, (seed, at)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "as generated"])
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_functions_that_were_not_offered_are_text_byte_for_byte(name, streams):
    family = FAMILIES[name]
    for seed in range(NUM_TURNS):
        _, turn = draw(family, seed)
        written = family.write(turn)
        form = form_of(family, {"other": {}}, streams=streams)
        text, reasoning, calls = answer = parse(form, [written])
        assert calls == []
        assert parse(form, cut(written, seed)) == answer
        if family.dialect == "channels":  # whose headers stay beside the calls
            text, reasoning, _ = parse(form, [written.removeprefix("<|start|>assistant")])
            assert json.dumps(turn.calls[0][1], ensure_ascii=False) in text
            continue
        assert reasoning == turn.reasoning
        if family.think and family.think[1] in written:
            written = written.partition(family.think[1])[2].lstrip()
        assert text == written, seed


@pytest.mark.parametrize("tail", ["<", "so <|", "[", "\n<tool", "{"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_follows_the_calls_is_the_same_if_their_arguments_are_streamed(name, tail):
    family = FAMILIES[name]
    for seed in range(40):
        functions, turn = draw(family, seed)
        written = family.write(turn) + tail
        form = form_of(family, functions)
        answer = parse(form, [written])
        assert answer[0].endswith(tail), seed
        assert parse(replace(form, streams_arguments=True), [written]) == answer, seed


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_come_as_they_are_generated(name):
    """With argument deltas the name comes before the arguments are whole, and the parts are those
    of the whole call; a call that is cut keeps what was generated."""
    family = FAMILIES[name]
    early = 0
    for seed in range(60):
        functions, turn = draw(family, seed)
        written = family.write(turn)
        form = form_of(family, functions, streams=True)
        _, _, whole = parse(form, [written])
        parser, sizes = parser_of(form), []
        for character in written:
            parts = parser.feed(character)
            sizes += [len(call.arguments_json) for call in parts.calls]
            early += any(call.name and len(call.arguments_json) < 2 for call in parts.calls)
        places = range(len(written)) if seed < 6 else [len(written) * 2 // 3]
        for at in places:
            _, _, cut_off = parse(form, [written[:at]])
            for (called, arguments), (expected, all_of_it) in zip(cut_off, whole, strict=False):
                assert called == expected
                assert all_of_it.startswith(arguments), (seed, arguments, all_of_it)
    assert early > 20


@pytest.mark.parametrize("value", ['("so (it) goes")', '[("so it goes")]', '((("so it goes")))'])
def test_a_text_in_parentheses_that_is_cut_is_kept(value):
    """Red if what is held back of it, until it is known to be no tuple, is lost."""
    form = AnswerFormat(dialect_named("pythonic"), {"f": {}}, streams_arguments=True)
    written = f"[f(a=1, b={value})]"
    _, _, [(_, whole)] = parse(form, [written])
    begin = written.index('"')
    for at in range(begin + 1, written.rindex('"')):
        _, _, [(_, arguments)] = parse(form, [written[:at]])
        assert whole.startswith(arguments)
        assert arguments.endswith(written[begin:at]), at


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.think])
def test_reasoning_may_follow_a_call(name):
    family = FAMILIES[name]
    if family.dialect == "cohere":
        opening, closing = family.think
        between = f"{opening}Then the other.{closing}"
    elif family.dialect == "channels":
        between = "<|start|>assistant<|channel|>analysis<|message|>Then the other.<|end|>"
    else:
        between = "\n{}Then the other.{}\n".format(*family.think)
    for seed in range(60):
        functions, turn = draw(family, seed)
        turn = Turn("Hm.", "", turn.calls)
        once = family.write(turn)
        again = family.write(Turn("", "", turn.calls))
        for marker in ("<think></think>", "<think>\n\n</think>\n\n", "</think>"):
            again = again.strip().removeprefix(marker)
        again = again.removeprefix("<|START_THINKING|><|END_THINKING|>")
        form, written = form_of(family, functions), once + between + again
        text, reasoning, calls = parse(form, written)
        assert (text.strip(), reasoning) == ("", "Hm.\n\nThen the other."), seed
        assert [(one, json.loads(own)) for one, own in calls] == turn.calls * 2
        assert count_reasoning(form, written) == num_inside(family, written), seed


def count_reasoning(form, written):
    """Return how many of an answer's characters, each of them a token, are counted as reasoning."""
    rules = reasoning_of(form, "", None, Spelling(), is_enforced=False)
    thought = Thought(rules, written.__getitem__)
    for index in range(len(written)):
        thought.push(index)
    return thought.num_tokens


def num_inside(family, written):
    """Return how many characters stand between the markers of reasoning."""
    opening, closing = family.think
    if family.dialect == "channels":
        opening, closing = "<|channel|>analysis<|message|>", "<|end|>"
    text = (opening if family.is_open else "") + written
    spans = re.findall(f"{re.escape(opening)}(.*?){re.escape(closing)}", text, re.DOTALL)
    return sum(map(len, spans))


MARKED = [
    name
    for name, family in FAMILIES.items()
    if family.think and family.dialect != "channels" and dialect_named(family.dialect).openings
]


@pytest.mark.parametrize("name", MARKED)
def test_what_ends_a_call_may_be_missing_before_reasoning(name):
    """Red if reasoning that the parser reads is not counted, and so not bounded."""
    family, num_seen = FAMILIES[name], 0
    opening, closing = family.think
    for seed in range(60):
        functions, turn = draw(family, seed)
        form = form_of(family, functions)
        written = family.write(Turn("Hm.", "", turn.calls[-1:])).rstrip()
        assert form.tools
        ends = {part.text.strip() for one in form.tools.read for part in one.call + one.closing}
        for end in (end for end in ends if len(end) > 1 and written.endswith(end)):
            cut_off = f"{written.removesuffix(end).rstrip()}{opening}Then the other.{closing}"
            _, reasoning, _ = parse(form, cut_off)
            if len(cut_off) < 600 and reasoning.endswith("Then the other."):
                assert count_reasoning(form, cut_off) == num_inside(family, cut_off), cut_off
                num_seen += 1
    assert num_seen > 5 or family.dialect == "glm", "whose only end must come"


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("code", ["if (a) {\n}", "f(x)", "a[0]", "```"])
def test_code_opens_no_reasoning(name, code):
    family = FAMILIES[name]
    opening, closing = family.think
    functions, _ = draw(family, 0)
    form = form_of(family, functions)
    written = f"So.{closing}{code}\n{opening}x = 1" if family.is_open else f"{code}\n{opening}x = 1"
    _, reasoning, calls = parse(form, written)
    assert not calls
    assert count_reasoning(form, written) == len(reasoning)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.think])
def test_reasoning_behind_a_call_is_bounded_by_the_budget(name):
    family = FAMILIES[name]
    opening, closing = family.think
    if family.dialect == "channels":
        opening, closing = "<|start|>assistant<|channel|>analysis<|message|>", "<|end|>"
    for seed in range(60):
        functions, turn = draw(family, seed)
        first = family.write(Turn("Hm.", "", turn.calls)) + opening
        written = first + "x" * 60
        form = form_of(family, functions)
        rules = reasoning_of(form, "", 30, Spelling([closing]), is_enforced=False)
        thought, index = Thought(rules, written.__getitem__), 0
        while not thought.owed:
            thought.push(index)
            index += 1
        assert index >= len(first), seed
        assert thought.num_tokens == rules.tokens_max, seed
        assert thought.owed[0] == 0, seed


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        ("42", "string", '"42"'),
        ("42", "string integer", "42"),
        ('"hi"', "string integer", '"\\"hi\\""'),
        ("true", "string integer", '"true"'),
        ("True", "string boolean", "true"),
        ("None", "string null", "null"),
        ("5.0", "string integer", "5.0"),
        ("5.5", "string integer", '"5.5"'),
        ("five", "integer", '"five"'),
        (" [1] ", "array", "[1]"),
        ("{'a': [1, True, None], 'b': 'it\\'s'}", "object", '{"a": [1, true, null], "b": "it\'s"}'),
        ("9" * 5000, "integer", '"' + "9" * 5000 + '"'),
        ("02139", "string integer", '"02139"'),
        ("+4930123", "string integer", '"+4930123"'),
        ("1_000", "string integer", '"1_000"'),
        ("٣", "string integer", '"٣"'),
        ("+5", "integer", "5"),
        ("(5)", "integer", "5"),
        ("((True))", "boolean", "true"),
        ("(5,)", "array", "[5]"),
        ("(5, (6))", "array", "[5, 6]"),
        ("((5, 6), ())", "array", "[[5, 6], []]"),
        ("{'a': ('x' )}", "object", '{"a": "x"}'),
        ("(5", "array", '"(5"'),
        ("'a\\", "array", '"\'a\\\\"'),
    ],
)
def test_an_argument_without_a_type_has_that_of_its_schema(text, types, written):
    schema = {"type": types.split() if " " in types else types}
    assert argument_json(text, types_of(schema, schema)) == written


OF_ITSELF = {"anyOf": [{"$ref": "#/$defs/a"}] * 50}


@pytest.mark.parametrize(
    "own",
    [
        {"$ref": "#/$defs/a"},
        {"allOf": 3},
        {"anyOf": 3, "enum": 3, "type": 3},
        {"allOf": [OF_ITSELF]},
    ],
)
def test_any_schema_gives_types_in_little_time(own):
    """Red if a schema that refers to itself is followed along all of its ways, 50^8."""
    began = time.process_time()
    assert types_of(own, {"$defs": {"a": OF_ITSELF}}) == TYPES
    assert time.process_time() - began < 0.2


def test_the_rows_write_turns_as_the_published_templates():
    """Red if a row changes: compare it with the templates again, and write the digests anew."""
    assert {name: digest_of(family) for name, family in FAMILIES.items()} == json.loads(
        DIGESTS.read_text()
    )


def test_vllms_parsers_return_the_same_calls_of_most_turns():
    """The record has the turns that vLLM's parsers read otherwise: they take Python's None for a
    text, strip line breaks of values, refuse names that are no identifiers of Python (LFM2,
    pythonic), end a list at a bracket in a string (Phi-4) or know strings alone (FunctionGemma).
    `test_drawn_calls_are_read_as_they_were_written` reads those turns, too."""
    recorded = json.loads(RECORDED.read_text())
    assert recorded.keys() == PARSERS.keys()
    for name, record in recorded.items():
        assert record["turns"] == digest_of(FAMILIES[name]), "to be recorded again"
    assert sum(len(record["differs"]) for record in recorded.values()) < 0.2 * NUM_TURNS * len(
        recorded
    )


def test_every_dialect_has_a_family():
    assert {family.dialect for family in FAMILIES.values()} == {one.name for one in DIALECTS}


def test_a_dialect_is_found_by_any_of_its_signs():
    for dialect in DIALECTS:
        for signs in dialect.signs:
            found = find_dialect(" ".join(signs))
            assert found is dialect, (signs, found)
    assert find_dialect("{{ messages }}") is None


def test_a_setting_names_the_dialect_in_place_of_the_template():
    assert ("auto", *(dialect.name for dialect in DIALECTS)) == TOOL_FORMATS
    for name in TOOL_FORMATS[1:]:
        form = detect_format("<tool_call>", functions={"f": {}}, prompt="", tool_format=name)
        assert form.tools is dialect_named(name)
        assert form.has_channels == (name == "channels")
